"""Codes of bfloat16 and int8 weights."""

import warnings

import numpy as np
import pytest

from mojolearn import lowbit

F32_MAX = np.float32(3.4028235e38)


def codes_of(value, fmt):
    packed = lowbit.pack_one(np.float32([[value]]), fmt)
    return int(packed.bits[0, 0]) if fmt == "bfloat16" else (int(packed.codes[0, 0]), int(packed.exponents[0]))


def from_bits(*bits):
    return np.array(bits, np.uint32).view(np.float32)


def test_codes_of_the_public_library(golden, threads):
    stored = np.load(golden / "lowbit.npz")
    half = lowbit.pack_one(stored["w"], "bfloat16")
    assert half.bits.tobytes() == stored["bf16_bits"].tobytes()
    assert lowbit.materialize_one(half).tobytes() == stored["bf16_back"].tobytes()
    byte = lowbit.pack_one(stored["w"], "int8")
    assert byte.codes.tobytes() == stored["int8_codes"].tobytes()
    assert byte.exponents.tobytes() == stored["int8_exponents"].tobytes()
    assert lowbit.materialize_one(byte).tobytes() == stored["int8_back"].tobytes()


def test_every_bfloat16_value_survives():
    """But for the payload of NaN, whose quiet bit is set, and subnormals, which become zeros."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(256, 256)
    widened = lowbit.widen_bf16(bits)
    assert widened.tobytes() == (bits.astype(np.uint32) << 16).tobytes()
    expected = bits.copy()
    exponent, mantissa = bits & 0x7F80, bits & 0x7F
    expected[(exponent == 0x7F80) & (mantissa != 0)] |= 0x40
    expected[exponent == 0] &= 0x8000
    assert np.array_equal(lowbit.pack_one(widened, "bfloat16").bits, expected)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.2691408770292272, 0x3E8A),  # nearest, 0.26953125
        (from_bits(0x3F808000)[0], 0x3F80),  # a tie goes to even: down
        (from_bits(0x3F818000)[0], 0x3F82),  # and up
        (from_bits(0x7F800001)[0], 0x7FC0),  # a signalling NaN stays a NaN
        (from_bits(0xFFC00001)[0], 0xFFC0),
        (F32_MAX, 0x7F80),  # rounds to infinity
        (-0.0, 0x8000),
        (1e-40, 0x0000),
        (-1e-40, 0x8000),
    ],
)
def test_bfloat16_rounding(value, bits):
    assert codes_of(value, "bfloat16") == bits


@pytest.mark.parametrize(
    ("value", "code", "exponent"),
    [
        (0.0, 0, 0),
        (1.4e-45, 0, 0),
        (1.0, 64, -6),
        (-127.0, -127, 0),
        (1.9999999, 127, -6),  # would round to 128
        (3e38, 113, 121),
        (np.inf, 127, 122),
        (np.nan, 0, 0),
        (2.0**-126, 127, -132),  # its scale is below the normal numbers; stands for 0
    ],
)
def test_int8_special_rows(value, code, exponent):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codes_of(value, "int8") == (code, exponent)


def test_int8_errors_stay_within_half_a_step():
    draw = np.random.default_rng(0)
    values = (draw.standard_normal((200, 301)) * 2.0 ** draw.integers(-100, 100, (200, 1))).astype(np.float32)
    packed = lowbit.pack_one(values, "int8")
    step = np.exp2(packed.exponents.astype(np.float64))[:, None]
    error = np.abs(lowbit.materialize_one(packed) - values.astype(np.float64))
    clamped = np.abs(values) > 127.5 * step
    assert (error[~clamped] <= 0.5 * step.repeat(301, 1)[~clamped]).all()
    assert (error < step).all()
    largest = np.abs(packed.codes.astype(int)).max(axis=1)
    assert ((largest >= 64) & (largest <= 127)).all()


def test_ties_go_to_even():
    row = np.float32([[64, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert lowbit.pack_one(row, "int8").codes.tolist() == [[64, 0, 2, 2, 0, -2]]


def test_nan_has_code_zero_and_does_not_move_the_scale():
    row = np.float32([[np.nan, 1, -np.nan, -0.25]])
    packed = lowbit.pack_one(row, "int8")
    assert packed.codes.tolist() == [[0, 64, 0, -16]]
    assert packed.exponents.tolist() == [-6]


@pytest.mark.parametrize("fmt", ("bfloat16", "int8"))
@pytest.mark.parametrize("columns", (1, 7, 15, 16, 17, 33))
def test_strided_transposed_and_read_only_arrays(fmt, columns):
    base = np.random.default_rng(1).standard_normal((2 * columns, 40)).astype(np.float32)
    base.flags.writeable = False
    for view in (base[::2], base.T[:, ::2], base[:columns, ::-1], np.asfortranarray(base)):
        found, expected = lowbit.pack_one(view, fmt), lowbit.pack_one(np.array(view, order="C"), fmt)
        assert lowbit.materialize_one(found).tobytes() == lowbit.materialize_one(expected).tobytes()


def test_pack_takes_matrices_and_leaves_the_rest():
    draw = np.random.default_rng(2)
    weights = {
        "matrix": draw.standard_normal((3, 5)).astype(np.float32),
        "vector": draw.standard_normal(5).astype(np.float32),
        "double": np.zeros(3),
        "note": "text",
    }
    for fmt, kind in (("bfloat16", lowbit.BF16Weight), ("int8", lowbit.Int8Weight)):
        packed = lowbit.pack(weights, fmt)
        assert isinstance(packed["matrix"], kind)
        assert packed["matrix"].shape == (3, 5)
        assert packed["matrix"].format == fmt == lowbit.format_of(packed)
        assert all(packed[name] is weights[name] for name in ("vector", "double", "note"))
        back, found = lowbit.unpack(packed)
        assert found == fmt
        assert back["matrix"].dtype == np.float32
        assert np.abs(back["matrix"] - weights["matrix"]).max() < 0.02
        assert back["vector"] is weights["vector"]
    same = lowbit.pack(weights, "float32")
    assert same == weights
    assert same is not weights
    assert lowbit.format_of(same) == "float32"
    assert lowbit.materialize is lowbit.unpack


def test_is_packed():
    assert lowbit.is_packed(lowbit.BF16Weight(np.zeros((2, 2), np.uint16)))
    assert lowbit.is_packed(lowbit.Int8Weight(np.zeros((2, 2), np.int8), np.zeros(2, np.int32)))
    assert not lowbit.is_packed(np.zeros((2, 2), np.float32))


MATRIX = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: lowbit.pack({}, "fp8"), ValueError, "format must be one of"),
        (lambda: lowbit.pack_one(MATRIX, "int4"), ValueError, "int4"),
        (lambda: lowbit.pack([MATRIX], "int8"), TypeError, "dict"),
        (lambda: lowbit.unpack([MATRIX]), TypeError, "weights must be a dict"),
        (lambda: lowbit.unpack(None, "the file"), TypeError, "the file must be a dict"),
        (lambda: lowbit.pack_one(MATRIX[0], "int8"), ValueError, "2 dimensions"),
        (lambda: lowbit.pack_one(MATRIX[:0], "int8"), ValueError, "empty"),
        (lambda: lowbit.pack_one(MATRIX.astype(np.float64), "bfloat16", "w"), TypeError, "w must be native float32"),
        (lambda: lowbit.pack_one(MATRIX.astype(">f4"), "bfloat16"), TypeError, "native"),
        (lambda: lowbit.pack({"w": MATRIX.astype(np.float64)}, "int8"), TypeError, "w must be native float32"),
        (lambda: lowbit.pack_one(lowbit.pack_one(MATRIX, "int8"), "int8"), TypeError, "packed already"),
        (
            lambda: lowbit.format_of({"a": lowbit.pack_one(MATRIX, "int8"), "b": lowbit.pack_one(MATRIX, "bfloat16")}),
            ValueError,
            "b is bfloat16, a is int8",
        ),
        (lambda: lowbit.BF16Weight(np.zeros((2, 2), np.int16)), TypeError, "uint16"),
        (lambda: lowbit.BF16Weight(np.zeros(2, np.uint16)), TypeError, "2 dimensions"),
        (lambda: lowbit.BF16Weight([[1]]), TypeError, "uint16"),
        (lambda: lowbit.BF16Weight(np.zeros((0, 2), np.uint16)), ValueError, "empty"),
        (lambda: lowbit.Int8Weight(np.zeros((2, 2), np.uint8), np.zeros(2, np.int32)), TypeError, "int8"),
        (lambda: lowbit.Int8Weight(np.zeros((2, 2), np.int8), np.zeros(2, np.int64)), TypeError, "int32"),
        (lambda: lowbit.Int8Weight(np.zeros((2, 2), np.int8), np.zeros(3, np.int32)), TypeError, "shape"),
        (lambda: lowbit.widen_bf16(np.zeros(2)), TypeError, "uint16"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_codes_are_not_copied_and_may_be_read_only():
    bits = np.zeros((2, 2), np.uint16)
    bits.flags.writeable = False
    assert lowbit.BF16Weight(bits).bits is bits
    strided = np.zeros((4, 4), np.uint16)[::2, ::2]
    assert lowbit.BF16Weight(strided).bits.flags.c_contiguous


@pytest.mark.parametrize("shape", ((0,), (5,), (2, 3, 4), ()))
def test_widening_of_any_shape(shape):
    bits = np.full(shape, 0x3F80, np.uint16)
    widened = lowbit.widen_bf16(bits)
    assert widened.shape == shape
    assert (widened == 1).all()
