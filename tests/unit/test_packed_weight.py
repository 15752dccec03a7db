"""Packed weights: what was packed comes back, and products have the bits of the unpacked float32 weight."""

import copy
import importlib
import pickle

import exact_sums as exact
import numpy as np
import pytest

from mojolearn import _core

INSTRUCTION_SETS = [name for name in _core.BUILT if name in _core.AVAILABLE]
FORMATS = ("float32", "bfloat16", "int8")
# Panels that are full, short and one column; an odd number of steps; several leaves.
SHAPES = ((1, 1), (31, 7), (33, 129), (100, 300), (70, 2101))


@pytest.fixture(params=INSTRUCTION_SETS)
def linalg(request):
    """The kernels of each instruction set that this machine runs."""
    return importlib.import_module(f"mojolearn._core.{request.param}.linalg")


def make(linalg, fmt, shape, exponents=(-12, -4)):
    """A packed weight, what went in, and the float32 array that it stands for."""
    draw = np.random.default_rng(shape[0] + shape[1])
    if fmt == "float32":
        values = exact.numbers(draw, shape, "normal")
        return linalg.PackedWeight.from_float32(values), values, values
    if fmt == "bfloat16":
        bits = (exact.numbers(draw, shape, "normal").view(np.uint32) >> 16).astype(np.uint16)
        return linalg.PackedWeight.from_bfloat16(bits), bits, (bits.astype(np.uint32) << 16).view(np.float32)
    codes = draw.integers(-127, 128, shape).astype(np.int8)
    scales = draw.integers(*exponents, shape[0]).astype(np.int32)
    with np.errstate(all="ignore"):
        powers = np.where(scales > 127, np.inf, np.where(scales < -126, 0.0, np.exp2(scales.astype(np.float64))))
        values = (codes * powers[:, None]).astype(np.float32)
    return linalg.PackedWeight.from_int8(codes, scales), (codes, scales), values


def check_raw(found, expected):
    if isinstance(expected, tuple):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
    else:
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("threads", (1, 2, 5))
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_tells_whether_all_is_finite(linalg, shape, threads):
    values = exact.numbers(np.random.default_rng(shape[1]), shape, "normal")
    weight = linalg.PackedWeight.from_float32(values, threads)
    assert weight.finite
    check_raw(weight.raw(), values)
    for place in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 0), (0, shape[1] // 2)}:
        for found in (np.nan, np.inf, -np.inf):
            bad = values.copy()
            bad[place] = found
            weight = linalg.PackedWeight.from_float32(bad, threads)
            assert not weight.finite
            check_raw(weight.raw(), bad)


def test_packing_refuses_a_wrong_number_of_threads(linalg):
    with pytest.raises(ValueError, match="threads"):
        linalg.PackedWeight.from_float32(np.ones((2, 2), np.float32), 0)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_packed_comes_back(linalg, fmt, shape):
    weight, raw, values = make(linalg, fmt, shape)
    assert weight.shape == shape
    assert weight.format == fmt
    for one in (weight, copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        check_raw(one.raw(), raw)
        assert exact.same_bits(one.unpack(), values)
    ids = np.random.default_rng(0).integers(0, shape[0], 9).astype(np.int32)
    out = np.empty((9, shape[1]), np.float32)
    weight.rows(ids, out, 2)
    assert exact.same_bits(out, values[ids])


def test_packing_keeps_every_bit_and_rows_are_flushed(linalg):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(64, 1024)
    weight = linalg.PackedWeight.from_bfloat16(bits)
    check_raw(weight.raw(), bits)
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    assert weight.unpack().tobytes() == widened.tobytes()
    again = linalg.PackedWeight.from_float32(widened)
    assert again.unpack().tobytes() == widened.tobytes()
    out = np.empty((64, 1024), np.float32)
    weight.rows(np.arange(64, dtype=np.int32), out, 1)
    assert out.tobytes() == exact.flush(widened).tobytes()


def test_size_in_memory(linalg):
    sizes = {fmt: make(linalg, fmt, (512, 1024))[0].nbytes for fmt in FORMATS}
    assert sizes["float32"] == 4 * 512 * 1024
    assert sizes["bfloat16"] == 0.5 * sizes["float32"]
    assert sizes["int8"] < 0.26 * sizes["float32"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_have_the_bits_of_the_unpacked_weight(linalg, fmt, shape):
    weight, _, values = make(linalg, fmt, shape)
    n, k = shape
    draw = np.random.default_rng(k)
    x = exact.numbers(draw, (41, k + 3), "normal")[:, 1:-2]
    expected = exact.matmul(np.ascontiguousarray(x), values)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 41):
        for threads in (1, 2, 3, 8) if rows in (1, 9) else (2,):
            wide = np.full((rows, n + 2), 7, np.float32)
            linalg.linear(x[:rows], weight, wide[:, 1:-1], threads)
            assert exact.same_bits(wide[:, 1:-1], expected[:rows]), (rows, threads)
            assert (wide[:, [0, -1]] == 7).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ("tiny", "vanishing", "wide"))
def test_underflow_in_products_with_packed_weights(linalg, fmt, kind):
    shape = (40, 700)
    weight, _, values = make(linalg, fmt, shape, exponents=(-126, -60))
    x = exact.numbers(np.random.default_rng(3), (11, shape[1]), kind)
    if fmt != "int8":
        x = x * np.float32(2.0**-62)
    expected = exact.matmul(x, values)
    for rows in (1, 3, 8, 11):
        out = np.empty((rows, shape[0]), np.float32)
        linalg.linear(x[:rows], weight, out, 2)
        assert exact.same_bits(out, expected[:rows]), rows


def test_int8_scales_at_the_limits(linalg):
    """Exponents with which a code times its scale is subnormal, the scale itself infinite, or neither."""
    shape = (300, 33)
    weight, _, values = make(linalg, "int8", shape, exponents=(-140, 122))
    assert (values == 0).any(axis=1).any()
    assert exact.same_bits(weight.unpack(), values)
    x = exact.numbers(np.random.default_rng(4), (9, shape[1]), "normal") * np.float32(2.0**-9)
    expected = exact.matmul(x, values)
    for rows in (1, 8, 9):
        out = np.empty((rows, shape[0]), np.float32)
        linalg.linear(x[:rows], weight, out, 2)
        assert exact.same_bits(out, expected[:rows]), rows


def test_refusals(linalg):
    weight, _, _ = make(linalg, "float32", (33, 129))
    with pytest.raises(ValueError, match="do not fit"):
        linalg.linear(np.ones((1, 128), np.float32), weight, np.empty((1, 33), np.float32), 1)
    with pytest.raises(ValueError, match=r"\[0, 33\)"):
        weight.rows(np.int32([0, 33]), np.empty((2, 129), np.float32), 1)
    with pytest.raises(ValueError, match="exponents"):
        linalg.PackedWeight.from_int8(np.ones((3, 2), np.int8), np.ones(2, np.int32))
    with pytest.raises(ValueError, match="empty"):
        linalg.PackedWeight.from_float32(np.ones((0, 2), np.float32))
