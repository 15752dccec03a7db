"""Reported: the result of a row depends on the batch around it."""

import numpy as np
from report_model import model, same, tokens


def test_rows_of_batches():
    ids = tokens(9, 21)
    alone = np.concatenate([model().forward(ids[i : i + 1]) for i in range(9)])
    for batch in range(1, 10):
        assert same(model().forward(ids[:batch]), alone[:batch]), batch
        state = model().allocate_state(batch, 22)
        model().forward(ids[:batch], state)
        steps = model().step(ids[:batch, 0], state)
        for i in range(batch):
            state = model().allocate_state(1, 22)
            model().forward(ids[i : i + 1], state)
            assert same(steps[i : i + 1], model().step(ids[i : i + 1, 0], state)), (batch, i)
    order = np.random.default_rng(1).permutation(9)
    assert same(model().forward(ids[order]), alone[order])
