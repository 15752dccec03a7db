"""Reported: a full cache loops for ever, or shifts its contents without a word."""

import pytest
from report_model import model, state_bytes, tokens

import mojolearn


@pytest.mark.parametrize("layers", [("attention",), ("mamba3", "attention", "mamba3")], ids="-".join)
def test_the_token_too_many(layers):
    served, ids = model(layers), tokens(2, 9)
    state = served.allocate_state(2, 8)
    before = state_bytes(state)
    with pytest.raises(mojolearn.CapacityError, match=r"\b9\b.*\b8\b|\b8\b.*\b9\b"):
        served.forward(ids, state)
    assert state_bytes(state) == before
    served.forward(ids[:, :8], state)
    before = state_bytes(state)
    for _ in range(2):
        with pytest.raises(mojolearn.CapacityError, match=r"\b9\b.*\b8\b|\b8\b.*\b9\b"):
            served.step(ids[:, 8], state)
        assert state_bytes(state) == before
