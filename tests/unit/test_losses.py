"""Cross-entropy and clipping: exact bits, meaning, refusals."""

import json

import numpy as np
import pytest

from mojolearn.errors import NonFiniteError
from mojolearn.training import clip_grad_norm_, cross_entropy


@pytest.fixture(scope="module")
def expected(golden):
    with np.load(golden / "training_units.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize("case", range(8))
def test_exact_values(expected, threads, case):
    logits, targets, loss, rows, grad = (
        expected[f"loss.{case}.{k}"] for k in ("logits", "targets", "loss", "rows", "grad")
    )
    options = json.loads(str(expected[f"loss.{case}.options"]))
    before = logits.copy()
    got, got_grad = cross_entropy(logits, targets, **options, return_grad=True)
    assert isinstance(got, float) and np.float32(got).tobytes() == loss.tobytes()
    assert got_grad.tobytes() == grad.tobytes()
    assert cross_entropy(logits, targets.astype(np.int64), **options) == got
    assert cross_entropy(logits, targets.tolist(), **{**options, "reduction": "none"}).tobytes() == rows.tobytes()
    assert logits.tobytes() == before.tobytes()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_against_float64(smoothing, reduction):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((7, 11)).astype(np.float32) * 4
    targets = np.array([0, 10, -100, 3, 3, 5, -100])

    def loss(x):
        shifted = x - x.max(1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        kept = targets != -100
        hot = -log_p[np.arange(7), np.where(kept, targets, 0)]
        rows = (1 - smoothing) * hot - smoothing * log_p.mean(1)
        return rows[kept].sum() / (kept.sum() if reduction == "mean" else 1)

    x = logits.astype(float)
    got, grad = cross_entropy(logits, targets, reduction=reduction, label_smoothing=smoothing, return_grad=True)
    np.testing.assert_allclose(got, loss(x), rtol=1e-5)
    step = 1e-5
    for index in np.ndindex(7, 11):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        np.testing.assert_allclose(grad[index], (loss(up) - loss(down)) / (2 * step), rtol=1e-4, atol=1e-6)


def test_num_items_divides_the_sum_only():
    logits = np.eye(3, 4, dtype=np.float32)
    total = cross_entropy(logits, [0, 1, 2], reduction="sum")
    assert cross_entropy(logits, [0, 1, 2], reduction="sum", num_items=4) == total / 4
    assert cross_entropy(logits, [0, 1, 2], reduction="sum", num_items=0) == total
    mean = cross_entropy(logits, [0, 1, 2])
    assert cross_entropy(logits, [0, 1, 2], num_items=4) == mean


def test_all_rows_ignored():
    logits = np.ones((2, 3), np.float32)
    loss, grad = cross_entropy(logits, [-100, -100], reduction="sum", return_grad=True)
    assert loss == 0.0 and not grad.any() and not np.signbit(grad).any()
    with pytest.raises(ValueError, match="targets"):
        cross_entropy(logits, [-100, -100])


def test_one_class():
    loss, grad = cross_entropy(np.array([[-0.0], [5.0]], np.float32), [0, 0], return_grad=True)
    assert loss == 0.0 and not grad.any()


LOGITS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    "arguments, options, error",
    [
        ((LOGITS, [0, 3]), {}, ValueError),
        ((LOGITS, [0, -1]), {}, ValueError),
        ((LOGITS, [0, 2**40]), {}, ValueError),
        ((LOGITS, [0, 2**70]), {}, ValueError),
        ((LOGITS, [0.0, 1.0]), {}, ValueError),
        ((LOGITS, [0]), {}, ValueError),
        ((LOGITS, [[0, 1]]), {}, ValueError),
        ((LOGITS, None), {}, ValueError),
        ((LOGITS[0], [0, 1]), {}, ValueError),
        ((LOGITS[:0], []), {}, ValueError),
        ((LOGITS.astype(float), [0, 1]), {}, TypeError),
        ((LOGITS.tolist(), [0, 1]), {}, ValueError),
        ((LOGITS + np.float32(np.inf), [0, 1]), {}, NonFiniteError),
        ((LOGITS * np.float32(np.nan), [0, 1]), {}, NonFiniteError),
        ((LOGITS, [0, 1]), {"reduction": "max"}, ValueError),
        ((LOGITS, [0, 1]), {"reduction": None}, TypeError),
        ((LOGITS, [0, 1]), {"label_smoothing": 1.0}, ValueError),
        ((LOGITS, [0, 1]), {"label_smoothing": 1 - 1e-9}, ValueError),
        ((LOGITS, [0, 1]), {"label_smoothing": -0.1}, ValueError),
        ((LOGITS, [0, 1]), {"label_smoothing": "0"}, TypeError),
        ((LOGITS, [0, 1]), {"num_items": -1}, ValueError),
        ((LOGITS, [0, 1]), {"num_items": 2**24 + 1}, ValueError),
        ((LOGITS, [0, 1]), {"num_items": 2.5}, TypeError),
        ((LOGITS, [0, 1]), {"ignore_index": 2**31}, ValueError),
        ((LOGITS, [0, 1]), {"ignore_index": 0.5}, TypeError),
        ((LOGITS, [0, 1]), {"return_grad": 1.5}, TypeError),
        ((LOGITS, [0, 1]), {"reduction": "none", "return_grad": True}, NotImplementedError),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_refusals(arguments, options, error):
    with pytest.raises(error):
        cross_entropy(*arguments, **options)


def test_clip_exact_values(expected, threads):
    a, b = expected["clip.a"].copy(), expected["clip.b"].copy()
    total = clip_grad_norm_([a, b], 3.0)
    assert np.float32(total).tobytes() == expected["clip.total"].tobytes()
    assert np.concatenate([a.ravel(), b.ravel()]).tobytes() == expected["clip.flat"].tobytes()


def test_clip():
    gradient = np.array([3.0, 4.0, 1e-45], np.float32)
    assert clip_grad_norm_(gradient, 10.0) == 5.0
    assert gradient.tolist() == [3.0, 4.0, 0.0]  # a factor of 1 still flushes
    assert clip_grad_norm_([gradient[:2].reshape(1, 2)], 1.0) == 5.0
    np.testing.assert_allclose(gradient, [0.6, 0.8, 0.0], rtol=1e-6)


G = np.ones(3, np.float32)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda g: clip_grad_norm_([], 1.0), ValueError),
        (lambda g: clip_grad_norm_(g, 0.0), ValueError),
        (lambda g: clip_grad_norm_(g, -1.0), ValueError),
        (lambda g: clip_grad_norm_(g, float("nan")), ValueError),
        (lambda g: clip_grad_norm_(g, float("inf")), ValueError),
        (lambda g: clip_grad_norm_(g, 1e-50), ValueError),
        (lambda g: clip_grad_norm_(g, "1"), TypeError),
        (lambda g: clip_grad_norm_(g, 1.0, norm_type=1.0), NotImplementedError),
        (lambda g: clip_grad_norm_(g, 1.0, error_if_nonfinite=False), NotImplementedError),
        (lambda g: clip_grad_norm_(g.tolist(), 1.0), TypeError),
        (lambda g: clip_grad_norm_([g, g.astype(float)], 1.0), TypeError),
        (lambda g: clip_grad_norm_([g, g[1:]], 1.0), ValueError),
        (lambda g: clip_grad_norm_(g[::2], 1.0), ValueError),
        (lambda g: clip_grad_norm_([g, np.array([np.nan], np.float32)], 1.0), NonFiniteError),
        (lambda g: clip_grad_norm_([g, np.array([3e38], np.float32)], 1.0), NonFiniteError),
    ],
)
def test_clip_refusals_leave_the_gradients(call, error):
    gradient = np.array([3.0, 1e-45, 4.0], np.float32)
    before = gradient.tobytes()
    with pytest.raises(error):
        call(gradient)
    assert gradient.tobytes() == before


def test_clip_refuses_read_only_gradients():
    gradient = np.ones(3, np.float32)
    gradient.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        clip_grad_norm_(gradient, 1.0)
