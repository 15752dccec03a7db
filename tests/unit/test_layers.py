"""Kernels of norms, embedding, loss, draws and optimizers: exact bits on every instruction set and thread count.

The expected values in ``training_units.npz`` come from a slow scalar model of the numerics page.
"""

import importlib
import itertools
import json

import numpy as np
import pytest

from mojolearn import _core

ISAS = [isa for isa in _core.BUILT if isa in _core.AVAILABLE]
THREADS = (1, 2, 3, 8)


@pytest.fixture(scope="module")
def expected(golden):
    with np.load(golden / "training_units.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.fixture(params=ISAS)
def layers(request):
    return importlib.import_module(f"mojolearn._core.{request.param}.layers")


@pytest.fixture(params=THREADS)
def threads(request):
    return request.param


def assert_bits(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    # the payload and sign of a NaN are not part of the profile
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{(~same).sum()} of {got.size} differ: {got[~same][:3]} != {want[~same][:3]}"


@pytest.mark.parametrize("case", "abcd")
def test_rms_norm(layers, threads, expected, case):
    x, w, dy, y, want_dx, want_dw, eps = (
        expected[f"norm.{case}.{k}"] for k in ("x", "w", "dy", "y", "dx", "dw", "eps")
    )
    out, sumsq = np.empty_like(x), np.empty(len(x), np.float32)
    layers.rms_norm_forward(x, w, eps, out, sumsq, False, threads)
    assert_bits(out, y)
    for saved in (sumsq, None):
        dx, rows = np.empty_like(x), np.empty_like(x)
        layers.rms_norm_backward(dy, x, w, saved, eps, None, dx, rows, threads)
        assert_bits(dx, want_dx)
        if len(x) <= 128:  # one leaf: the weight gradient is one chain down the rows
            total = np.zeros_like(w)
            for row in rows:
                layers.add(row, total, total, threads)
            assert_bits(total, want_dw)
    inplace = x.copy()
    layers.rms_norm_forward(inplace, w, eps, inplace, None, False, threads)
    assert_bits(inplace, y)
    # the residual is added last, and dx may lie over dy
    residual = dy[::-1].copy()
    layers.add(want_dx, residual, out, threads)
    over = dy.copy()
    layers.rms_norm_backward(over, x, w, sumsq, eps, residual, over, rows, threads)
    assert_bits(over, out)


@pytest.mark.parametrize("case", "ab")
def test_block_norm(layers, threads, expected, case):
    x, w, dn, residual, sumsq, dx, rows = (
        expected[f"block_norm.{case}.{k}"] for k in ("x", "w", "dn", "residual", "sumsq", "dx", "rows")
    )
    out, got_sumsq = np.empty_like(x), np.empty(len(x), np.float32)
    layers.rms_norm_forward(x, w, 1e-5, out, got_sumsq, True, threads)
    assert_bits(got_sumsq, sumsq)
    got_dx, got_rows = np.empty_like(x), np.empty_like(x)
    layers.rms_norm_backward_collapsed(dn, x, w, sumsq, 1e-5, residual, got_dx, got_rows, threads)
    assert_bits(got_dx, dx)
    assert_bits(got_rows, rows)


@pytest.mark.parametrize("rows, width", [(1, 1), (2, 31), (17, 64), (33, 257)])
def test_norms_against_float64(layers, rows, width):
    rng = np.random.default_rng(rows)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), width, (rows, width)))
    y, dx, terms, sumsq = np.empty_like(x), np.empty_like(x), np.empty_like(x), np.empty(rows, np.float32)
    x64, w64, dy64 = x.astype(float), w.astype(float), dy.astype(float)
    scale = 1 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-5)
    dh = dy64 * w64
    want = scale * dh - scale**3 * x64 * (dh * x64).mean(1, keepdims=True)
    for lanes, backward in ((False, layers.rms_norm_backward), (True, layers.rms_norm_backward_collapsed)):
        layers.rms_norm_forward(x, w, 1e-5, y, sumsq, lanes, 2)
        np.testing.assert_allclose(y, w64 * x64 * scale, rtol=1e-5, atol=1e-6)
        backward(dy, x, w, sumsq, 1e-5, None, dx, terms, 2)
        np.testing.assert_allclose(dx, want, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(terms, dy64 * x64 * scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", range(8))
def test_loss_rows(layers, threads, expected, case):
    logits, targets, loss, rows, grad = (
        expected[f"loss.{case}.{k}"] for k in ("logits", "targets", "loss", "rows", "grad")
    )
    options = json.loads(str(expected[f"loss.{case}.options"]))
    ignore, smoothing = options["ignore_index"], options["label_smoothing"]
    divisor = float((targets != ignore).sum()) if options["reduction"] == "mean" else float(options["num_items"] or 1)
    got_rows, got_grad = np.empty_like(rows), np.empty_like(grad)
    over = logits.copy()
    for source, out in ((logits, None), (logits, got_grad), (over, over)):
        assert layers.loss_rows(source, targets, ignore, smoothing, divisor, got_rows, out, threads)
        assert_bits(got_rows, rows)
        if out is not None:
            assert_bits(out, grad)
    for pieces in (1, 2, len(rows)):
        total = layers.FoldSum(len(rows))
        for piece in np.array_split(rows, pieces):
            total.add(piece)
        assert_bits(total.result(divisor), loss)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 40, 44])
def test_loss_rows_reports_logits_that_are_not_finite(layers, bad, place):
    logits = np.zeros((3, 45), np.float32)
    logits[1, place] = bad
    targets = np.array([0, -100, 1], np.int32)
    assert not layers.loss_rows(logits, targets, -100, 0.0, 1.0, np.empty(3, np.float32), None, 2)


def test_fold_sum_does_not_depend_on_the_pieces(layers):
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    want = layers.FoldSum(1000)
    want.add(values)
    for cuts in ([1], [127, 128, 129], [128, 256, 999], list(range(1, 1000, 7))):
        total = layers.FoldSum(1000)
        for piece in np.split(values, cuts):
            total.add(piece)
        assert total.result(3.0) == want.result(3.0)
    leaves = [np.float32(0)] * 8
    for i, value in enumerate(values):
        leaves[i // 128] += value
    while len(leaves) > 1:
        leaves = [a + b for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
    assert want.result() == float(leaves[0])
    assert layers.FoldSum(0).result() == 0.0


def test_embedding(layers, threads, expected):
    weight, ids, dy, y, dweight = (expected[f"embedding.{k}"] for k in ("weight", "ids", "dy", "y", "dweight"))
    ids = ids.reshape(-1)
    out, table = np.empty_like(y), np.zeros_like(weight)
    layers.embedding_forward(weight, ids, out, threads)
    assert_bits(out, y)
    for start, stop in ((0, 13), (13, 14), (14, 40)):  # the chains continue from piece to piece
        layers.embedding_backward(dy[start:stop], ids[start:stop], table, threads)
    assert_bits(table, dweight)
    wide = np.tile(weight, 7)
    table = np.zeros_like(wide)
    layers.embedding_backward(np.tile(dy, 7), ids, table, threads)
    assert_bits(table, np.tile(dweight, 7))


def test_draws(layers, threads, golden):
    with np.load(golden / "rng.npz") as file:
        for seed in (0, 7, 123456789, 2**63 - 1):
            normal, uniform = file[f"{seed}.normal"], file[f"{seed}.uniform"]
            out = np.empty_like(normal)
            layers.normal(out, 0.0, 0.02, seed, 0, 0, threads)
            assert_bits(out, normal)
            out = np.empty_like(uniform)
            layers.uniform(out, -4.0, 2.0, seed, 1, 0, threads)
            assert_bits(out, uniform)
    # element i is a function of its position alone: any cut gives the same values
    whole = np.empty(50000, np.float32)
    for draw, first, second in ((layers.uniform, -1.0, 3.0), (layers.normal, 0.5, 2.0)):
        draw(whole, first, second, 77, 5, 3, threads)
        for start, stop in ((0, 1), (1, 2), (2, 131), (131, 20001), (49999, 50000)):
            piece = np.empty(stop - start, np.float32)
            draw(piece, first, second, 77, 5, 3 + start, threads)
            assert_bits(piece, whole[start:stop])


def test_draws_are_distributed_as_they_say(layers):
    values = np.empty(200_000, np.float32)
    layers.uniform(values, 2.0, 3.0, 1, 0, 0, 2)
    assert values.min() >= 2 and values.max() < 5
    assert abs(values.mean() - 3.5) < 0.01 and abs(values.std() - 3 / np.sqrt(12)) < 0.01
    layers.normal(values, 2.0, 3.0, 1, 1, 0, 2)
    z = (values - 2) / 3
    assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01 and abs((z**3).mean()) < 0.03
    assert abs((z**4).mean() - 3) < 0.1


@pytest.mark.parametrize("case, p, offset", [(0, 0.0, 0), (1, 0.3, 5), (2, 0.9, 2**33 - 1), (3, 0.25, 2**40 + 2)])
def test_dropout(layers, threads, expected, case, p, offset):
    x = expected["dropout.x"].copy()
    scale = 1 / (1 - float(np.float32(p)))
    layers.dropout(x, x, p, scale, 2**63 + 12345, 2**32 - 1, offset, threads)
    assert_bits(x, expected[f"dropout.{case}"])


@pytest.mark.parametrize("place", [0, 15, 16, 16383, 16384, 40000, 49999])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_finite(layers, bad, place):
    x = np.full(50000, -3.4e38, np.float32)
    x[1::3] = 1e-45
    assert layers.all_finite(x, 2)
    x[place] = bad
    assert not layers.all_finite(x.reshape(50, 1000), 2)
    assert layers.first_nonfinite([np.ones(3, np.float32), x, x], 2) == 1


def test_sum_of_squares_at_awkward_sizes(layers, threads, expected):
    n = 300001
    ramp = (np.arange(n) * 2654435761 % 1000003).astype(np.float32) - np.float32(500000)
    ramp *= np.float32(2.0**-30)
    assert_bits(layers.gradient_norm([ramp], threads), expected["clip.ramp_total"])
    many = [ramp[i : i + 1] for i in range(300)]  # more arrays than a leaf has terms
    want = np.sqrt(np.sum(ramp[:300].astype(float) ** 2))
    np.testing.assert_allclose(layers.gradient_norm(many, threads), want, rtol=1e-6)
    assert not np.isfinite(layers.gradient_norm([np.full(5, 1e30, np.float32)], threads))
    assert np.isnan(layers.gradient_norm([np.array([np.nan], np.float32)], threads))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 16384, 40003])
def test_updates_by_blocks_equal_updates_by_element(layers, threads, size):
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal(size).astype(np.float32) for _ in range(4)]
    arrays[3] **= 2

    def update(pieces):
        p, g, m, v = (array.copy() for array in arrays)
        at = np.linspace(0, size, min(size, pieces) + 1).astype(int)
        params = [p[a:b] for a, b in itertools.pairwise(at)]
        grads = [g[a:b] for a, b in itertools.pairwise(at)]
        layers.adam_step(params, grads, m, v, 3, 1e-3, 0.9, 0.99, 1e-8, 0.1, True, False, 0.7, True, threads)
        started = np.zeros(len(params), np.int32)
        layers.sgd_step(params, grads, m, started, 1e-3, 0.9, 0.0, 0.1, True, False, None, False, threads)
        assert started.all()
        return p, g, m, v

    for got, want in zip(update(1), update(7), strict=True):
        assert_bits(got, want)
