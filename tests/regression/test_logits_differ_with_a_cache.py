"""Reported: logits with a key-value cache differ from those without."""

import pytest
from report_model import HYBRID, model, same, tokens


@pytest.mark.parametrize("layers", [("attention", "attention"), HYBRID], ids="-".join)
@pytest.mark.parametrize("length", [1, 15, 64, 100])
def test_prefill_and_a_step(layers, length):
    served, ids = model(layers), tokens(2, length + 1)
    state = served.allocate_state(2, length + 1)
    served.forward(ids[:, :-1], state)
    assert same(served.step(ids[:, -1], state), served.forward(ids)[:, -1])
