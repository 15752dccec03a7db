"""Sums of micro-batch gradients and the rule of aligned splits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mojolearn.errors import NonFiniteError
from mojolearn.training import accumulate_grads, accumulation_is_aligned


def test_exact_values(golden, threads):
    with np.load(golden / "training_units.npz") as file:
        parts, total = file["accumulate.parts"], file["accumulate.sum"]
    pieces = list(parts)
    before = parts.tobytes()
    assert accumulate_grads(pieces, 512).tobytes() == total.tobytes()
    got = accumulate_grads([[piece, piece[:1]] for piece in pieces])
    assert isinstance(got, list) and got[0].tobytes() == total.tobytes() and got[1].tobytes() == total[:1].tobytes()
    assert np.stack(pieces).tobytes() == before


def test_one_piece_is_copied_and_flushed():
    piece = np.array([1.0, -1e-45, 1e-45], np.float32)
    total = accumulate_grads([piece])
    assert total.tobytes() == np.array([1.0, -0.0, 0.0], np.float32).tobytes()
    assert piece[2] != 0


def tree(values):
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@given(st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_pairs_are_adjacent(levels, seed):
    pieces = list(np.random.default_rng(seed).standard_normal((2**levels, 3)).astype(np.float32))
    assert accumulate_grads(pieces).tobytes() == tree(pieces).tobytes()


@pytest.mark.parametrize(
    "tokens, steps, aligned",
    [
        (128, 1, True),
        (1, 1, True),
        (127, 1, True),
        (129, 1, False),
        (256, 1, True),
        (256, 2, True),
        (128, 2, False),
        (384, 2, False),
        (384, 3, False),
        (512, 4, True),
        (1024, 4, True),
        (1000, 4, False),
        (131072, 64, True),
        (131073, 1, False),
        (262144, 2, False),
        (262144, 1, True),
        (0, 1, False),
        (-128, 1, False),
        (128, 0, False),
        (128, -1, False),
    ],
)
def test_alignment(tokens, steps, aligned):
    assert accumulation_is_aligned(tokens, steps) is aligned


A = np.ones(3, np.float32)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: accumulate_grads([], 128), ValueError),
        (lambda: accumulate_grads(A, 128), TypeError),
        (lambda: accumulate_grads([A, A, A]), ValueError),
        (lambda: accumulate_grads([A, A[:2]]), ValueError),
        (lambda: accumulate_grads([[A], [A, A]]), ValueError),
        (lambda: accumulate_grads([[A], A]), ValueError),
        (lambda: accumulate_grads([A, [A]]), ValueError),
        (lambda: accumulate_grads([[], []]), ValueError),
        (lambda: accumulate_grads([A, A.astype(float)]), TypeError),
        (lambda: accumulate_grads([A, A], 128), ValueError),
        (lambda: accumulate_grads([A, A], 0), ValueError),
        (lambda: accumulate_grads([A, A], 256.0), TypeError),
        (lambda: accumulate_grads([A, np.array([1, 2, np.inf], np.float32)]), NonFiniteError),
        (lambda: accumulation_is_aligned(128.0, 1), TypeError),
        (lambda: accumulation_is_aligned(128, True), TypeError),
    ],
)
def test_refusals(call, error):
    with pytest.raises(error):
        call()
