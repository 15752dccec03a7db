"""Random draws: exact values, streams, and refusals that take no stream."""

import copy
import pickle

import numpy as np
import pytest

from mojolearn.errors import NonFiniteError, RandomStreamError
from mojolearn.training import Generator


def assert_bits(got, want):
    assert got.dtype == np.float32 and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.fixture(scope="module")
def expected(golden):
    with np.load(golden / "training_units.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize("seed", [0, 7, 123456789, 2**63 - 1])
def test_values_of_the_public_library(golden, threads, seed):
    with np.load(golden / "rng.npz") as file:
        generator = Generator(seed)
        assert_bits(generator.normal((37, 5), 0.0, 0.02), file[f"{seed}.normal"])
        assert_bits(generator.uniform((41,), -4.0, -2.0), file[f"{seed}.uniform"])
        assert_bits(generator.kaiming_uniform((16, 24), fan_in=24), file[f"{seed}.kaiming"])
        x = file[f"{seed}.dropout_x"]
        y, key = generator.dropout(x, 0.25, offset=100, stream=3)
        assert_bits(y, file[f"{seed}.dropout_y"])
        assert key == {"seed": seed, "stream": 3, "p": 0.25, "scale": float(np.float32(4 / 3)), "offset": 100}
        assert generator.state_dict() == {"seed": seed, "counter": 3}


def test_initializers(expected):
    generator = Generator(2**63 + 12345)
    assert_bits(generator.kaiming_normal((5, 7), 9), expected["draw.kaiming_normal"])
    assert_bits(generator.xavier_uniform((4, 9), 9, 4, 1.5), expected["draw.xavier_uniform"])
    assert_bits(generator.xavier_normal(33, 3, 11), expected["draw.xavier_normal"])
    assert_bits(generator.kaiming_uniform((3, 5), 6, a=0.2), expected["draw.kaiming_uniform_a"])
    assert_bits(generator.uniform([70], 1e-39, 3e-38), expected["draw.uniform"])
    assert_bits(generator.normal((7, 11), 1e-38, 1e-38), expected["draw.normal"])
    assert generator.counter == 6


def test_shapes():
    generator = Generator(np.int64(1))
    assert generator.uniform(()).shape == ()
    assert generator.uniform(np.int32(3)).shape == (3,)
    assert generator.normal([2, np.int8(3)]).shape == (2, 3)
    assert generator.uniform(4, 1.5, 1.5).tolist() == [1.5] * 4
    assert generator.normal(4, -2.0, 0.0).tolist() == [-2.0] * 4


def test_dropout_and_its_backward_share_the_mask():
    generator = Generator(5)
    x = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32) + 10
    y, key = generator.dropout(x, 0.3)
    kept = y != 0
    assert 0.62 < kept.mean() < 0.78
    dx = Generator(99).dropout_backward(np.ones_like(x), key)
    np.testing.assert_array_equal(dx != 0, kept)
    np.testing.assert_array_equal(dx[kept], np.float32(1 / (1 - float(np.float32(0.3)))))
    # rows one by one, at their offsets, are masked as the whole
    for i in range(40):
        row, _ = generator.dropout(x[i], 0.3, offset=50 * i, stream=key["stream"])
        assert_bits(row, y[i])
    assert generator.counter == 1
    same, _ = generator.dropout(x.T, 0.0)  # a strided input
    assert_bits(same, np.ascontiguousarray(x.T))


def test_streams_run_out():
    generator = Generator(3)
    generator.load_state_dict({"seed": 4, "counter": 2**32 - 1})
    assert generator.next_stream() == 2**32 - 1
    x = np.ones(3, np.float32)
    for call in (
        generator.next_stream,
        lambda: generator.uniform(3),
        lambda: generator.normal(3),
        lambda: generator.dropout(x, 0.5),
    ):
        with pytest.raises(RandomStreamError, match="no stream left"):
            call()
    assert generator.state_dict() == {"seed": 4, "counter": 2**32}
    generator.dropout(x, 0.5, stream=0)  # needs none


X = np.ones((2, 3), np.float32)
BAD = np.array([1.0, np.inf], np.float32)
KEY = {"seed": 1, "stream": 0, "p": 0.5, "scale": 2.0, "offset": 0}


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda g: g.uniform((2, 0)), ValueError),
        (lambda g: g.uniform(-1), ValueError),
        (lambda g: g.uniform(2.0), TypeError),
        (lambda g: g.uniform("3"), TypeError),
        (lambda g: g.uniform((2, True)), TypeError),
        (lambda g: g.uniform(3, 1.0, 0.5), ValueError),
        (lambda g: g.uniform(3, 0.0, float("nan")), ValueError),
        (lambda g: g.uniform(3, 0.0, 1e39), ValueError),
        (lambda g: g.uniform(3, -3e38, 3e38), ValueError),
        (lambda g: g.uniform(3, "0", 1), TypeError),
        (lambda g: g.normal(3, 0.0, -1.0), ValueError),
        (lambda g: g.normal(3, 1e300), ValueError),
        (lambda g: g.kaiming_uniform(3, 0), ValueError),
        (lambda g: g.kaiming_uniform(3, -1), ValueError),
        (lambda g: g.kaiming_uniform(3, 2.5), TypeError),
        (lambda g: g.kaiming_uniform(3, 2, a=float("inf")), ValueError),
        (lambda g: g.kaiming_normal(3, 0), ValueError),
        (lambda g: g.xavier_uniform(3, 0, 5), ValueError),
        (lambda g: g.xavier_normal(3, 5, 5, gain=-1.0), ValueError),
        (lambda g: g.dropout(X, 1.0), ValueError),
        (lambda g: g.dropout(X, 0.999999999), ValueError),
        (lambda g: g.dropout(X, -0.1), ValueError),
        (lambda g: g.dropout(X, "0.5"), TypeError),
        (lambda g: g.dropout(X.astype(float), 0.5), TypeError),
        (lambda g: g.dropout(X[:0], 0.5), ValueError),
        (lambda g: g.dropout(BAD, 0.5), NonFiniteError),
        (lambda g: g.dropout(X, 0.5, offset=-1), ValueError),
        (lambda g: g.dropout(X, 0.5, offset=1.0), TypeError),
        (lambda g: g.dropout(X, 0.5, stream=2**32), ValueError),
        (lambda g: g.dropout_backward(X, {k: v for k, v in KEY.items() if k != "p"}), ValueError),
        (lambda g: g.dropout_backward(X, {**KEY, "p": 1.0}), ValueError),
        (lambda g: g.dropout_backward(X, None), TypeError),
        (lambda g: g.dropout_backward(BAD, KEY), NonFiniteError),
        (lambda g: g.load_state_dict({"seed": 1}), ValueError),
        (lambda g: g.load_state_dict({"seed": 1, "counter": 2**32 + 1}), ValueError),
        (lambda g: g.load_state_dict({"seed": -1, "counter": 0}), ValueError),
        (lambda g: g.load_state_dict({"seed": 1, "counter": 1.0}), TypeError),
        (lambda g: g.load_state_dict([1, 2]), TypeError),
    ],
)
def test_refusals_change_nothing(call, error):
    generator = Generator(1)
    generator.next_stream()
    with pytest.raises(error):
        call(generator)
    assert generator.state_dict() == {"seed": 1, "counter": 1}


@pytest.mark.parametrize(
    "seed, error", [(-1, ValueError), (2**64, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)]
)
def test_seed(seed, error):
    with pytest.raises(error, match="seed"):
        Generator(seed)


def test_copies_go_on_alike():
    generator = Generator(8)
    generator.uniform(3)
    for other in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert_bits(other.uniform(5), copy.copy(generator).uniform(5))
