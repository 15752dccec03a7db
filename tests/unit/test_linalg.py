"""Matrix products, column sums and merges: bits against a float64 model of the profile's order, in every build."""

import importlib

import exact_sums as exact
import numpy as np
import pytest

from mojolearn import _core

INSTRUCTION_SETS = [name for name in _core.BUILT if name in _core.AVAILABLE]
KINDS = ("normal", "tiny", "vanishing", "subnormal", "wide", "border")
THREADS = (1, 2, 3, 8)
IDENTICAL, FAST = 0, 2


@pytest.fixture(params=INSTRUCTION_SETS)
def linalg(request):
    """The kernels of each instruction set that this machine runs."""
    return importlib.import_module(f"mojolearn._core.{request.param}.linalg")


def product(linalg, op, a, b, threads, mode=IDENTICAL, **options):
    """`a` (m, k) times the transpose of `b` (n, k) by one of the three forms, into the middle of a wider array."""
    forms = {"nt": (a, b), "nn": (a, b.T), "tn": (a.T, b.T)}
    operands = [np.ascontiguousarray(x) for x in forms[op]]
    wide = np.full((len(a), len(b) + 5), np.nan, np.float32)
    getattr(linalg, f"gemm_{op}")(*operands, wide[:, 2:-3], threads, mode, **options)
    assert np.isnan(wide[:, :2]).all()
    assert np.isnan(wide[:, -3:]).all()
    return wide[:, 2:-3]


# One row or column; tiles that are full, one short and one over; leaves likewise; several leaves; steps that leave a
# remainder when packed 16 at a time.
SHAPES = [(1, 1, 1), (3, 5, 7), (14, 32, 128), (15, 33, 129), (13, 64, 150), (29, 70, 300), (70, 29, 515)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ("nt", "nn", "tn"))
def test_products_have_the_bits_of_the_model(linalg, op, kind):
    for i, (m, n, k) in enumerate(SHAPES):
        a, b, expected = exact.case(m, n, k, kind)
        for threads in THREADS if i % 3 == 0 else (2,):
            assert exact.same_bits(product(linalg, op, a, b, threads), expected), (m, n, k, threads)


@pytest.mark.parametrize("kind", ("normal", "tiny", "border"))
@pytest.mark.parametrize("k", (2048, 2049, 6200, 10300))
def test_sums_of_several_blocks_have_the_bits_of_the_model(linalg, kind, k):
    """The second counter, together with underflow in every block: a tile that is done again must find its inputs."""
    for m, n in ((3, 40), (33, 2)):
        a, b, expected = exact.case(m, n, k, kind)
        for op in ("nt", "nn", "tn"):
            assert exact.same_bits(product(linalg, op, a, b, 2), expected), (op, m, n)


@pytest.mark.parametrize("k", (131072, 131073))
def test_the_longest_leaf_rule(linalg, k):
    """Beyond 1024 leaves of 128 the leaf grows instead of the number of leaves."""
    a, b, expected = exact.case(1, 2, k, "normal")
    assert exact.leaf_of(k) == (128 if k == 131072 else 129)
    assert exact.same_bits(product(linalg, "nt", a, b, 2), expected)
    weight = linalg.PackedWeight.from_float32(b)
    out = np.empty((1, 2), np.float32)
    linalg.linear(a, weight, out, 1)
    assert exact.same_bits(out, expected)


def test_reference_values(linalg, golden):
    """Against the slow reference, at shapes where the float64 model would take long."""
    stored = np.load(golden / "matrix_products.npz")
    for name in stored.files:
        kind, op, m, n, k = name.split("-")
        m, n, k = int(m), int(n), int(k)
        draw = np.random.RandomState(m + n + k)
        scale = np.float32({"normal": 1, "tiny": 1.1e-19}[kind])
        a, b = (draw.standard_normal(shape).astype(np.float32) * scale for shape in ((m, k), (n, k)))
        assert exact.same_bits(product(linalg, op, a, b, 2)[::7, ::5], stored[name]), name


def test_signed_zeros_and_infinities(linalg):
    """A chain begins at +0; one leaf of negative products that all underflow is -0 and stays so."""
    a, b = np.full((1, 2), 1e-30, np.float32), np.full((3, 2), -1e-30, np.float32)
    b[1] = [3e38, 3e38]
    b[2] = [np.inf, -np.inf]
    out = product(linalg, "nt", np.float32([[1e-30, 1e-30]]), b[:1], 1)
    assert np.signbit(out[0, 0])
    assert out[0, 0] == 0
    a[:] = 3e38
    out = product(linalg, "nt", a, b, 1)[0]
    assert out[1] == np.inf
    assert np.isnan(out[2])


def test_rounding_up_to_the_smallest_normal_number(linalg):
    """Where the hardware's flushing and F part: an exact result in [2^-126 - 2^-150, 2^-126 - 2^-151)."""
    # (1 - 2^-12)(1 + 2^-12) = 1 - 2^-24, times 2^-126
    a = np.float32([[(1 - 2.0**-12) * 2.0**-60]])
    b = np.float32([[(1 + 2.0**-12) * 2.0**-66]])
    for op in ("nt", "nn", "tn"):
        assert product(linalg, op, a, b, 1)[0, 0].view(np.uint32) == 0x00800000
        assert product(linalg, op, a, -b, 1)[0, 0].view(np.uint32) == 0x80800000
    weight = linalg.PackedWeight.from_float32(b)
    out = np.empty((1, 1), np.float32)
    linalg.linear(a, weight, out, 1)
    assert out[0, 0].view(np.uint32) == 0x00800000


@pytest.mark.parametrize("steps", (3, 130))
def test_a_zero_that_ends_a_vanished_sum_keeps_its_sign(linalg, steps):
    """-0 stays through products that are -0, though other rows of the tile do not vanish."""
    a, b = np.zeros((16, steps), np.float32), np.full((40, steps), -1.5 * 2.0**-65, np.float32)
    a[:, steps - 3] = 2.0**-63
    a[5:, steps - 3] = 2.0**-61
    out = product(linalg, "nt", a, b, 1)
    assert (np.signbit(out[:5]) == (steps <= 128)).all()  # a second leaf, of zeros alone, is +0
    assert (out[:5] == 0).all()
    assert (out[5:] == np.float32(-1.5 * 2.0**-126)).all()


def test_fast_mode_differs_only_by_underflow(linalg):
    draw = np.random.default_rng(3)
    a, b = exact.numbers(draw, (40, 300), "normal"), exact.numbers(draw, (50, 300), "normal")
    assert exact.same_bits(product(linalg, "nt", a, b, 2, FAST), product(linalg, "nt", a, b, 2))
    a, b = exact.numbers(draw, (40, 300), "border"), exact.numbers(draw, (50, 300), "border")
    difference = np.abs(product(linalg, "nt", a, b, 2, FAST).astype(np.float64) - product(linalg, "nt", a, b, 2))
    assert difference.max() < 2.0**-120


@pytest.mark.parametrize("kind", ("normal", "tiny", "border"))
def test_pieces_of_a_sum_over_tokens(linalg, kind):
    """A leaf that is cut goes on from the output; whole leaves are merged by the caller."""
    draw = np.random.default_rng(4)
    a, b = exact.numbers(draw, (300, 20), kind), exact.numbers(draw, (300, 37), kind)
    expected = exact.matmul(np.ascontiguousarray(a.T), np.ascontiguousarray(b.T))
    leaves = []
    for first in (0, 128, 256):
        last = min(first + 128, 300)
        out, total = np.empty((20, 37), np.float32), np.empty(37, np.float32)
        cut = first + 30
        linalg.gemm_tn(a[first:cut], b[first:cut], out, 2, leaf=128)
        linalg.colsum(b[first:cut], total, 2, leaf=128)
        linalg.gemm_tn(a[cut:last], b[cut:last], out, 2, leaf=128, seed=True)
        linalg.colsum(b[cut:last], total, 2, leaf=128, seed=True)
        leaves.append((out, total))
    for whole, (first, second, third) in zip((expected, exact.colsum(b)), zip(*leaves, strict=True), strict=True):
        first, second, third = first.reshape(-1), second.reshape(-1), third.reshape(-1)
        linalg.merge(first, second, second, 2)
        linalg.merge(second, third, second, 2)
        assert exact.same_bits(second, whole.reshape(-1))


def test_explicit_leaf(linalg):
    draw = np.random.default_rng(5)
    a, b = exact.numbers(draw, (260, 17), "normal"), exact.numbers(draw, (260, 33), "normal")
    for leaf in (1, 50, 200, 1000):
        out, total = np.empty((17, 33), np.float32), np.empty(33, np.float32)
        linalg.gemm_tn(a, b, out, 2, leaf=leaf)
        linalg.colsum(b, total, 2, leaf=leaf)
        assert exact.same_bits(out, exact.matmul(np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), leaf)), leaf
        assert exact.same_bits(total, exact.colsum(b, leaf)), leaf


@pytest.mark.parametrize("kind", KINDS)
def test_column_sums(linalg, kind):
    draw = np.random.default_rng(6)
    for t, d in ((1, 1), (5, 3), (128, 64), (129, 70), (700, 131)):
        rows = exact.numbers(draw, (t, d + 3), kind)[:, 1:-2]
        if kind == "border":
            rows = rows * np.float32(2.0**-62)
        expected = exact.colsum(np.ascontiguousarray(rows))
        for threads in THREADS:
            out = np.full(d, np.nan, np.float32)
            linalg.colsum(rows, out, threads)
            assert exact.same_bits(out, expected), (t, d, threads)


def test_merge_flushes_and_may_overwrite_an_input(linalg):
    older = np.float32([1, 1e-40, -1e-40, 1.5e-38, np.inf] * 20)
    newer = np.float32([2, 1, -1e-40, -1.4e-38, 1] * 20)
    expected = exact.flush(exact.flush(older) + exact.flush(newer))
    linalg.merge(older, newer, older, 2)
    assert exact.same_bits(older, expected)


def test_operands_may_be_read_only_and_row_strided(linalg):
    draw = np.random.default_rng(7)
    a, b = exact.numbers(draw, (20, 90), "normal")[:, 10:50], exact.numbers(draw, (40, 40), "normal")[::2]
    for x in (a, b):
        x.flags.writeable = False
    out = np.empty((20, 20), np.float32)
    linalg.gemm_nt(a, b, out, 2)
    assert exact.same_bits(out, exact.matmul(np.ascontiguousarray(a), np.ascontiguousarray(b)))
    with pytest.raises(ValueError, match="rows of a must be contiguous"):
        linalg.gemm_nt(exact.numbers(draw, (20, 80), "normal")[:, ::2], b, out, 2)


def test_wrong_shapes_are_refused(linalg):
    a, b = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        linalg.gemm_nt(a, b, np.empty((5, 3), np.float32), 1)
    with pytest.raises(ValueError, match="not empty"):
        linalg.gemm_nt(a[:, :0], b[:, :0], np.empty((3, 5), np.float32), 1)
    with pytest.raises(ValueError, match="threads"):
        linalg.gemm_nt(a, b, np.empty((3, 5), np.float32), 0)
    with pytest.raises(ValueError, match="read-only"):
        out = np.empty((3, 5), np.float32)
        out.flags.writeable = False
        linalg.gemm_nt(a, b, out, 1)


def test_large_shared_operands_are_done_in_slices(linalg):
    """More than 32 MiB of packed operand: bits as for a small slice of it."""
    draw = np.random.default_rng(8)
    k = 70000
    a, b = exact.numbers(draw, (140, k), "normal"), exact.numbers(draw, (150, k), "normal")
    rows, columns = [0, 63, 64, 139], [0, 31, 96, 149]
    out = np.empty((140, 150), np.float32)
    linalg.gemm_nt(a, b, out, 2)
    small = np.empty((4, 4), np.float32)
    linalg.gemm_nt(a[rows], b[columns], small, 1)
    assert exact.same_bits(out[np.ix_(rows, columns)], small)
