"""Reported of a Mamba-3 layer: `step` differs from `forward` and from itself, since its state was not initialized."""

import numpy as np
import pytest
from report_model import model, run, same, tokens


@pytest.mark.parametrize("length", [1, 2, 10, 31, 257])
def test_step_loop_twice(length):
    ids = tokens(1, length)
    loops = []
    for _ in range(2):
        state = model().allocate_state(1, length)
        loops.append(np.stack([model().step(ids[:, t], state) for t in range(length)], axis=1))
    assert same(loops[0], loops[1])
    assert same(loops[0], model().forward(ids))


def test_with_memory_that_was_not_zero():
    program = """
import hashlib
from report_model import model, tokens
ids, state = tokens(1, 31), model().allocate_state(1, 31)
print(hashlib.sha256(b"".join(model().step(ids[:, t], state).tobytes() for t in range(31))).hexdigest())
"""
    assert len({run(program, MALLOC_PERTURB_=value) for value in ("0", "165")}) == 1
