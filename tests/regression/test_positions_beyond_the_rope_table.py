"""Reported: a position outside the table of rotations is read all the same, or positions restart at zero."""

import numpy as np
import pytest
from report_model import HYBRID, model, new_stack, same, tokens

from mojolearn import TransformerBlock, TransformerState


def block(max_positions):
    stack = new_stack(("attention",))
    names = [name for name in stack.names if name.startswith("layers.")]
    weights = {name.removeprefix("layers.0."): stack.parameters()[name] for name in names}
    return TransformerBlock(weights, n_heads=2, max_positions=max_positions)


def test_positions_are_bounded():
    x = np.ones((1, 9, 64), np.float32)
    with pytest.raises(ValueError, match="8"):
        block(8).forward(x)
    small = block(8)
    state = small.allocate_state(1, 8)
    small.forward(x[:, :8], state)
    with pytest.raises(ValueError, match="8"):
        small.step(x[:, 8], state)
    with pytest.raises(ValueError, match="cached_tokens"):
        TransformerState(1, 2, 32, 8, np.zeros(512, np.float32), np.zeros(512, np.float32), cached_tokens=-1)


@pytest.mark.parametrize("layers", [("attention",), HYBRID], ids="-".join)
def test_pieces_at_an_offset(layers):
    served, ids = model(layers), tokens(1, 130)
    state = served.allocate_state(1, 130)
    served.forward(ids[:, :100], state)
    assert same(served.forward(ids[:, 100:], state), served.forward(ids)[:, 100:])
