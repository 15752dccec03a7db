"""Reported: a prefill in pieces restarts from a zero state, or uses only the first token of a piece."""

import numpy as np
import pytest
from report_model import HYBRID, model, same, state_bytes, tokens

CUTS = [(a, 37 - a) for a in range(1, 37)] + [(16, 16, 5), (1,) * 37]


@pytest.mark.parametrize("layers", [HYBRID, ("mamba3",), ("attention",)], ids="-".join)
def test_pieces(layers):
    served, ids = model(layers), tokens(2, 37)
    whole = served.allocate_state(2, 37)
    want = served.forward(ids, whole)
    for pieces in CUTS:
        state, first, outputs = served.allocate_state(2, 37), 0, []
        for piece in pieces:
            outputs.append(served.forward(ids[:, first : first + piece], state))
            first += piece
        assert same(np.concatenate(outputs, axis=1), want), pieces
        assert state_bytes(state) == state_bytes(whole), pieces
