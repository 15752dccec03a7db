"""The door for arrays, ids and numbers."""

import array
import decimal
import fractions

import numpy as np
import pytest

from mojolearn._arrays import as_float32, as_ids, as_index, as_lengths, as_ragged_ids, as_real


class Seven:
    def __index__(self):
        return 7


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), Seven(), np.array(7)])
def test_index_accepts(value):
    got = as_index(value, "n", 1, 7)
    assert got == 7 and type(got) is int


@pytest.mark.parametrize("value", [7.0, "7", None, True, np.bool_(True), np.float32(7), np.array([7.0]), 7j])
def test_index_refuses_types(value):
    with pytest.raises(TypeError, match="n must be an integer, got"):
        as_index(value, "n")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "at least 1, got 0"), (8, "at most 7, got 8"), (-(2**70), "at least 1")]
)
def test_index_range(value, text):
    with pytest.raises(ValueError, match=f"n must be {text}"):
        as_index(value, "n", 1, 7)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1), fractions.Fraction(1), decimal.Decimal(1)])
def test_real_accepts(value):
    got = as_real(value, "x", 0.0, 1.0)
    assert got == 1.0 and type(got) is float


@pytest.mark.parametrize("value", ["1", b"1", None, True, np.bool_(False), [1.0], np.ones(1), 1j])
def test_real_refuses_types(value):
    with pytest.raises(TypeError, match="x must be a"):
        as_real(value, "x")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 10**400, np.float32(np.nan)])
def test_real_refuses_non_finite(value):
    with pytest.raises(ValueError, match="x must be finite"):
        as_real(value, "x")


def test_real_bounds():
    assert as_real(0.0, "x", 0.0) == 0.0
    with pytest.raises(ValueError, match="greater than 0"):
        as_real(0.0, "x", 0.0, low_open=True)
    with pytest.raises(ValueError, match="less than 1"):
        as_real(1.0, "x", 0.0, 1.0, high_open=True)


def test_float32_is_not_copied():
    x = np.zeros((2, 3), np.float32)
    assert as_float32(x, "x") is x
    x.flags.writeable = False
    assert as_float32(x, "x", shape=(2, None)) is x


@pytest.mark.parametrize(
    "value",
    [np.arange(12, dtype=np.float32).reshape(3, 4).T, np.arange(24, dtype=np.float32)[::2], array.array("f", [1, 2])],
)
def test_float32_layout(value):
    got = as_float32(value, "x")
    assert got.flags.c_contiguous and got.flags.aligned
    assert np.array_equal(got, np.asarray(value))


def test_float32_unaligned():
    raw = np.zeros(9, np.uint8)
    value = raw[1:].view(np.float32)
    assert as_float32(value, "x").flags.aligned


@pytest.mark.parametrize("dtype", ["f8", "f2", "i4", "?", ">f4", "c8"])
def test_float32_refuses_dtypes(dtype):
    with pytest.raises(TypeError, match="x must be native float32"):
        as_float32(np.zeros(2, dtype), "x")


@pytest.mark.parametrize("value", [[1.0], None, "abc", 3, {"a": 1}, object(), np.zeros((0, 3), np.float32)])
def test_float32_refuses_values(value):
    with pytest.raises((ValueError, TypeError), match="x must"):
        as_float32(value, "x")


def test_float32_shape_and_finiteness():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"x must have shape \(any, 4\), got \(2, 3\)"):
        as_float32(x, "x", shape=(None, 4))
    with pytest.raises(ValueError, match="x must have 1 dimensions"):
        as_float32(x, "x", ndim=1)
    x[1, 2] = np.inf
    with pytest.raises(ValueError, match=r"x must be finite, got inf at \(1, 2\)"):
        as_float32(x, "x", finite=True)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_ids_accept_all_integers(dtype):
    value = np.array([[0, 5, 96]], dtype)
    got = as_ids(value, "ids", 97, 2)
    assert got.dtype == np.int32 and got.flags.c_contiguous and got.tolist() == [[0, 5, 96]]
    wide = np.zeros((4, 6), dtype)
    assert as_ids(wide[::2, ::3], "ids", 97, 2).shape == (2, 2)


@pytest.mark.parametrize("value", [-1, 97, 2**32, 2**40 + 5, np.iinfo(np.int64).min])
def test_ids_range(value):
    with pytest.raises(ValueError, match=rf"ids must be in \[0, 97\), got {value} at index \(0, 1\)"):
        as_ids(np.array([[3, value]], np.int64), "ids", 97, 2)


def test_ids_small_types_and_large_vocabularies():
    assert as_ids(np.array([127], np.int8), "ids", 50_000, 1).tolist() == [127]
    with pytest.raises(ValueError, match="got -1"):
        as_ids(np.array([-1], np.int8), "ids", 50_000, 1)
    with pytest.raises(ValueError, match=r"got 255 at index \(0,\)"):
        as_ids(np.array([255], np.uint8), "ids", 255, 1)


def test_ids_ignore():
    assert as_ids(np.array([-100, 3], np.int16), "targets", 9, 1, ignore=-100).tolist() == [-100, 3]
    with pytest.raises(ValueError, match="or -100, got -99"):
        as_ids(np.array([-100, -99], np.int16), "targets", 9, 1, ignore=-100)


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2]],
        None,
        "12",
        3,
        np.ones((1, 2)),
        np.ones((1, 2), bool),
        np.ones(2, int),
        np.ones((0, 2), int),
        np.ones((1, 2), ">i4"),
    ],
)
def test_ids_refuse(value):
    with pytest.raises(ValueError, match="ids must"):
        as_ids(value, "ids", 97, 2)


def test_ragged_ids_ignore_padding():
    value = np.array([[1, -5, 999], [2, 3, 4]], np.int64)
    ids, lengths = as_ragged_ids(value, "ids", 97, [1, 3])
    assert ids.tolist() == [[1, 0, 0], [2, 3, 4]] and lengths.tolist() == [1, 3]
    assert value[0, 1] == -5
    with pytest.raises(ValueError, match=r"got -5 at index \(0, 1\)"):
        as_ragged_ids(value, "ids", 97, (2, 3))


@pytest.mark.parametrize("value", [[1, 3], (1, 3), np.array([1, 3], np.int32), array.array("i", [1, 3])])
def test_lengths_accept(value):
    assert as_lengths(value, 2, 3).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (3, ValueError),
        ("13", ValueError),
        (None, ValueError),
        ({0: 1, 1: 3}, ValueError),
        ([1], ValueError),
        ([1, 2, 3], ValueError),
        ([0, 3], ValueError),
        ([1, 4], ValueError),
        ([1, 2**70], ValueError),
        (np.ones((2, 1), int), ValueError),
        ([1, 2.0], TypeError),
        ([1, True], TypeError),
        ([1, None], TypeError),
    ],
)
def test_lengths_refuse(value, error):
    with pytest.raises(error, match="lengths"):
        as_lengths(value, 2, 3)
