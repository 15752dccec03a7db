"""Embedding, RMS norm and linear map as functions."""

import numpy as np
import pytest

from mojolearn import training
from mojolearn.errors import NonFiniteError


@pytest.fixture(scope="module")
def expected(golden):
    with np.load(golden / "training_units.npz") as file:
        return {key: file[key] for key in file.files}


def assert_bits(got, want):
    assert got.dtype == np.float32 and got.shape == want.shape
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all()


def test_embedding(expected, threads):
    weight, ids, dy, y, dweight = (expected[f"embedding.{k}"] for k in ("weight", "ids", "dy", "y", "dweight"))
    assert_bits(training.embedding_forward(weight, ids), y.reshape(4, 10, 21))
    assert_bits(training.embedding_forward(weight, ids.reshape(-1).tolist()), y)
    assert_bits(training.embedding_backward(dy.reshape(4, 10, 21), ids, 9), dweight)
    assert_bits(training.embedding_backward(dy, ids.astype(np.uint8), 9), dweight)


@pytest.mark.parametrize("case", "abcd")
def test_rms_norm(expected, threads, case):
    x, w, dy, y, dx, dw, eps = (expected[f"norm.{case}.{k}"] for k in ("x", "w", "dy", "y", "dx", "dw", "eps"))
    assert_bits(training.rms_norm_forward(x, w, float(eps)), y)
    got_dx, got_dw = training.rms_norm_backward(dy[None], x[None], w, float(eps))
    assert_bits(got_dx, dx[None])
    assert_bits(got_dw, dw)


def test_rms_norm_of_zeros():
    zeros, ones = np.zeros((1, 4), np.float32), np.ones(4, np.float32)
    assert np.isnan(training.rms_norm_forward(zeros, ones, 0.0)).all()
    assert not training.rms_norm_forward(zeros, ones, 1e-6).any()
    assert training.rms_norm_forward(ones, ones, 0.0).tolist() == [1.0] * 4


def test_linear(expected, threads):
    a, weight, dc, c, da, dweight = (expected[f"linear.{k}"] for k in ("a", "weight", "dc", "c", "da", "dweight"))
    assert_bits(training.linear_forward(a.reshape(3, 11, 140), weight), c.reshape(3, 11, 9))
    assert_bits(training.linear_forward(a[0], weight), c[0])
    got_da, got_dweight = training.linear_backward(dc.reshape(11, 3, 9), a.reshape(11, 3, 140), weight)
    assert_bits(got_da, da.reshape(11, 3, 140))
    assert_bits(got_dweight, dweight)
    # strided operands
    assert_bits(training.linear_forward(np.asfortranarray(a), np.repeat(weight, 2, 0)[::2]), c)


M, V = np.ones((2, 3), np.float32), np.ones(3, np.float32)
BAD = np.array([[1, 2, np.nan]], np.float32)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: training.embedding_forward(M, [0, 2]), ValueError),
        (lambda: training.embedding_forward(M, [-1]), ValueError),
        (lambda: training.embedding_forward(M, [0.0]), ValueError),
        (lambda: training.embedding_forward(M, []), ValueError),
        (lambda: training.embedding_forward(M, [True]), ValueError),
        (lambda: training.embedding_forward(V, [0]), ValueError),
        (lambda: training.embedding_forward(M.astype(float), [0]), TypeError),
        (lambda: training.embedding_forward(BAD, [0]), NonFiniteError),
        (lambda: training.embedding_backward(M, [0], 2), ValueError),
        (lambda: training.embedding_backward(M, [0, 2], 2), ValueError),
        (lambda: training.embedding_backward(M, [0, 1], 0), ValueError),
        (lambda: training.embedding_backward(M, [0, 1], 2.0), TypeError),
        (lambda: training.rms_norm_forward(M, V[:2], 1e-6), ValueError),
        (lambda: training.rms_norm_forward(M, M, 1e-6), ValueError),
        (lambda: training.rms_norm_forward(M, V, -1e-6), ValueError),
        (lambda: training.rms_norm_forward(M, V, "1"), TypeError),
        (lambda: training.rms_norm_forward(BAD, V, 1e-6), NonFiniteError),
        (lambda: training.rms_norm_forward(M.astype(int), V, 1e-6), TypeError),
        (lambda: training.rms_norm_backward(M[:1], M, V, 1e-6), ValueError),
        (lambda: training.linear_forward(M, M.T), ValueError),
        (lambda: training.linear_forward(np.float32(1), M), ValueError),
        (lambda: training.linear_forward(M.tolist(), M), ValueError),
        (lambda: training.linear_backward(M, M, M), ValueError),
        (lambda: training.linear_backward(np.ones((3, 2), np.float32), M, M), ValueError),
        (lambda: training.numeric_mode_used("exact"), ValueError),
    ],
)
def test_refusals(call, error):
    with pytest.raises(error):
        call()


def test_names():
    assert training.numeric_mode_used() == "identical"
    assert training.numeric_mode_used("fast") == "fast"
    assert training.vendor_used() == "cpu"
    assert sorted(training.__all__) == sorted(set(training.__all__))
    assert all(hasattr(training, name) for name in training.__all__)
