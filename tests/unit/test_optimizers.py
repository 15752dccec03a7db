"""Optimizers: exact trajectories, all-or-nothing steps and loads."""

import array
import itertools
import json

import numpy as np
import pytest

from mojolearn.errors import NonFiniteError
from mojolearn.training import SGD, Adam, AdamW, ConstantLR, WarmupCosineLR, accumulate_grads

KINDS = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW}
OFFSETS = (0, 5, 135, 186)  # of the three tensors in training_units.npz
CASES = [
    "sgd",
    "sgd_decay_max",
    "sgd_momentum",
    "sgd_nesterov",
    "adam",
    "adam_decay",
    "adamw",
    "adamw_max",
    "adamw_odd",
]


@pytest.fixture(scope="module")
def expected(golden):
    with np.load(golden / "training_units.npz") as file:
        return {key: file[key] for key in file.files}


def tensors(flat):
    parts = [flat[a:b].copy() for a, b in itertools.pairwise(OFFSETS)]
    return [parts[0], parts[1].reshape(13, 10), parts[2].reshape(3, 17)]


def joined(parts):
    return np.concatenate([part.ravel() for part in parts])


def build(expected, case, params):
    options = json.loads(str(expected["optim.cases"]))[case]
    return KINDS[options["kind"]](params, **options["kw"]), options["max_norm"]


@pytest.mark.parametrize("case", CASES)
def test_exact_trajectory(expected, threads, case):
    params = tensors(expected["optim.params"])
    optimizer, max_norm = build(expected, case, params)
    norms = []
    for gradient in expected["optim.grads"]:
        grads = tensors(gradient)
        norms.append(optimizer.step(grads, max_norm))
    assert joined(params).tobytes() == expected[f"optim.{case}.params"].tobytes()
    assert optimizer.exp_avg.tobytes() == expected[f"optim.{case}.exp_avg"].tobytes()
    assert optimizer.exp_avg_sq.tobytes() == expected[f"optim.{case}.exp_avg_sq"].tobytes()
    assert optimizer.buf_initialized.tolist() == expected[f"optim.{case}.init"].tolist()
    assert joined(grads).tobytes() == expected[f"optim.{case}.last_grad"].tobytes()
    assert optimizer.t == len(norms)
    if max_norm is None:
        assert norms == [None] * len(norms) and optimizer.clip_coef_ is None
    else:
        assert np.array(norms, np.float32).tobytes() == expected[f"optim.{case}.norms"].tobytes()
        assert optimizer.total_norm_ == norms[-1] and 0 < optimizer.clip_coef_ <= 1


@pytest.mark.parametrize("case", CASES)
def test_resumed_trajectory(expected, case):
    params = tensors(expected["optim.params"])
    optimizer, max_norm = build(expected, case, params)
    grads = expected["optim.grads"]
    for gradient in grads[:2]:
        optimizer.step(tensors(gradient), max_norm)
    state = optimizer.state_dict()
    params = tensors(joined(params))
    for gradient in grads[2:3]:  # the state is a copy: going on does not move it
        optimizer.step(tensors(gradient), max_norm)
    optimizer, _ = build(expected, case, params)
    optimizer.load_state_dict(state)
    for gradient in grads[2:]:
        optimizer.step(tensors(gradient), max_norm)
    assert joined(params).tobytes() == expected[f"optim.{case}.params"].tobytes()


def test_one_array_and_buffers():
    values = array.array("f", [1.0, 2.0])
    optimizer = SGD(values, lr=0.5)
    assert optimizer.step(np.ones(2, np.float32)) is None
    assert list(values) == [0.5, 1.5]
    assert optimizer.step([np.ones(2, np.float32)], max_norm=1e6) == pytest.approx(2**0.5)
    assert list(values) == [0.0, 1.0]
    strided = np.ones((2, 3), np.float32)
    optimizer = SGD(np.zeros((3, 2), np.float32), lr=1.0)
    optimizer.step(strided.T)  # a gradient that is not written to may be strided


def test_schedule_sets_the_rate():
    weight = np.ones(2, np.float32)
    schedule = WarmupCosineLR(0.1, 2, 5)
    optimizer = AdamW(weight, lr=7.0, lr_schedule=schedule)
    assert optimizer.lr == 7.0 and optimizer.lr_ is None
    rates = []
    for _ in range(6):
        optimizer.step(np.ones(2, np.float32))
        rates.append(optimizer.lr)
        assert optimizer.lr_ == optimizer.lr
    assert rates == list(schedule.lr_values(6))
    optimizer = SGD(weight, lr=1e-3)
    optimizer.step(np.ones(2, np.float32))
    assert optimizer.lr == 1e-3 and optimizer.lr_ == 0.0010000000474974513


def test_step_accumulated():
    rng = np.random.default_rng(0)
    pieces = [[rng.standard_normal((2, 3)).astype(np.float32)] for _ in range(4)]
    one, other = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    Adam([one], accumulation_steps=4).step_accumulated(pieces, 512)
    Adam([other]).step(accumulate_grads(pieces, 512))
    assert one.tobytes() == other.tobytes() and one[0, 0] != 1
    optimizer = Adam([one], accumulation_steps=4)
    before = one.tobytes()
    for bad, tokens, error in (
        (pieces[:2], 512, ValueError),
        (pieces, 500, ValueError),
        (pieces, 512.0, TypeError),
        (pieces[0][0], 512, TypeError),
    ):
        with pytest.raises(error):
            optimizer.step_accumulated(bad, tokens)
    assert optimizer.t == 0 and one.tobytes() == before


W = np.ones(4, np.float32)


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: SGD([]), ValueError),
        (lambda: SGD([[1.0]]), TypeError),
        (lambda: SGD([1.0, 2.0]), TypeError),
        (lambda: SGD(None), TypeError),
        (lambda: SGD(np.ones(3)), TypeError),
        (lambda: SGD(np.ones(3, np.float16)), TypeError),
        (lambda: SGD(W.astype(">f4")), TypeError),
        (lambda: SGD(np.ones(0, np.float32)), ValueError),
        (lambda: SGD(W[::2]), ValueError),
        (lambda: SGD(np.broadcast_to(np.float32(1), 3)), ValueError),
        (lambda: SGD([W, W]), ValueError),
        (lambda: SGD([W[:3], W[2:]]), ValueError),
        (lambda: SGD(W, lr=float("nan")), ValueError),
        (lambda: SGD(W, lr=float("inf")), ValueError),
        (lambda: SGD(W, lr=1e39), ValueError),
        (lambda: SGD(W, lr="0.1"), TypeError),
        (lambda: SGD(W, lr=None), TypeError),
        (lambda: SGD(W, momentum=-0.1), ValueError),
        (lambda: SGD(W, momentum=float("nan")), ValueError),
        (lambda: SGD(W, dampening=float("inf")), ValueError),
        (lambda: SGD(W, weight_decay=float("nan")), ValueError),
        (lambda: SGD(W, nesterov=True), ValueError),
        (lambda: SGD(W, momentum=0.9, dampening=0.1, nesterov=True), ValueError),
        (lambda: SGD(W, nesterov=1), TypeError),
        (lambda: SGD(W, maximize="yes"), TypeError),
        (lambda: SGD(W, foreach=True), TypeError),
        (lambda: SGD(W, accumulation_steps=3), ValueError),
        (lambda: SGD(W, accumulation_steps=0), ValueError),
        (lambda: SGD(W, accumulation_steps=2.0), TypeError),
        (lambda: SGD(W, lr_schedule=lambda t: 0.1), TypeError),
        (lambda: SGD(W, numeric_mode="exact"), ValueError),
        (lambda: Adam(W, betas=(0.9, 1.0)), ValueError),
        (lambda: Adam(W, betas=(-0.1, 0.9)), ValueError),
        (lambda: Adam(W, betas=(0.9, 1 - 1e-9)), ValueError),
        (lambda: Adam(W, betas=(0.9,)), ValueError),
        (lambda: Adam(W, betas=0.9), TypeError),
        (lambda: Adam(W, betas=("0.9", 0.9)), TypeError),
        (lambda: Adam(W, eps=-1e-8), ValueError),
        (lambda: Adam(W, eps=float("nan")), ValueError),
        (lambda: Adam(W, amsgrad=True), TypeError),
        (lambda: AdamW(W, weight_decay=float("inf")), ValueError),
    ],
)
def test_construction_refusals(make, error):
    with pytest.raises(error):
        make()


def snapshot(optimizer, *arrays):
    return (
        optimizer.t,
        optimizer.lr,
        *(a.tobytes() for a in (optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.buf_initialized, *arrays)),
    )


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize(
    "grads, max_norm, error",
    [
        (lambda g: g[:1], None, ValueError),
        (lambda g: [g[0], g[1].T], None, ValueError),
        (lambda g: [g[0], g[1].astype(float)], None, TypeError),
        (lambda g: g[0], None, TypeError),
        (lambda g: [g[0], [1.0, 2.0]], None, ValueError),
        (lambda g: g, 0.0, ValueError),
        (lambda g: g, float("nan"), ValueError),
        (lambda g: g, "1", TypeError),
        (lambda g: [g[0], g[1] * np.float32(np.inf)], None, NonFiniteError),
        (lambda g: [g[0] * np.float32(np.nan), g[1]], 1.0, NonFiniteError),
        (lambda g: [g[0], g[1] * np.float32(1e36)], 1.0, NonFiniteError),
        (lambda g: [g[0], np.asfortranarray(g[1])], 1.0, ValueError),
        (lambda g: [g[1].reshape(-1)[:3], g[1]], 1.0, ValueError),
    ],
)
def test_refused_steps_change_nothing(kind, grads, max_norm, error):
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(3).astype(np.float32), rng.standard_normal((2, 3)).astype(np.float32)]
    gradient = [np.full(3, 5, np.float32), np.full((2, 3), 1e2, np.float32)]
    options = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(params, lr_schedule=ConstantLR(0.1, 10), **options)
    optimizer.step(gradient)
    before = snapshot(optimizer, *params, *gradient)
    with pytest.raises(error):
        optimizer.step(grads(gradient), max_norm)
    assert snapshot(optimizer, *params, *gradient) == before


@pytest.mark.parametrize("where", ["params", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_values_that_are_not_finite_stop_a_step(where, max_norm):
    weight, gradient = np.ones(3, np.float32), np.ones(3, np.float32)
    optimizer = Adam([weight])
    target = weight if where == "params" else getattr(optimizer, where)
    target[1] = np.nan
    before = snapshot(optimizer, weight, gradient)
    with pytest.raises(NonFiniteError, match=where):
        optimizer.step([gradient], max_norm)
    assert snapshot(optimizer, weight, gradient) == before


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda s: s.pop("t"), ValueError),
        (lambda s: s.pop("exp_avg_sq"), ValueError),
        (lambda s: s.update(t=-1), ValueError),
        (lambda s: s.update(t=1.5), TypeError),
        (lambda s: s.update(exp_avg=s["exp_avg"][:-1]), ValueError),
        (lambda s: s.update(exp_avg_sq=s["exp_avg_sq"].astype(float)), TypeError),
        (lambda s: s.update(buf_initialized=s["buf_initialized"].astype(float)), TypeError),
        (lambda s: s.update(buf_initialized=np.full(1, 2, np.int32)), ValueError),
        (lambda s: s.update(buf_initialized=np.zeros(2, np.int32)), ValueError),
    ],
)
def test_refused_loads_change_nothing(change, error):
    weight = np.ones(3, np.float32)
    optimizer = Adam(weight)
    optimizer.step(weight.copy())
    state = optimizer.state_dict()
    state["exp_avg"] = state["exp_avg"] + 1
    change(state)
    before = snapshot(optimizer)
    with pytest.raises(error):
        optimizer.load_state_dict(state)
    with pytest.raises(TypeError):
        optimizer.load_state_dict(None)
    assert snapshot(optimizer) == before


def test_rates_can_be_set_and_are_checked():
    optimizer = AdamW(np.ones(3, np.float32), lr=0.0, weight_decay=-0.1, eps=0.0)
    for name, value in (("lr", -0.5), ("weight_decay", 0.0), ("betas", [0.0, 0.5]), ("eps", 1e-50)):
        setattr(optimizer, name, value)
    assert optimizer.betas == (0.0, 0.5) and optimizer.lr == -0.5
    for name, value in (("lr", float("nan")), ("betas", (1, 1)), ("eps", -1), ("weight_decay", float("inf"))):
        with pytest.raises(ValueError, match=name):
            setattr(optimizer, name, value)
    assert "AdamW" in repr(optimizer)


def test_adam_against_float64():
    rng = np.random.default_rng(3)
    start = rng.standard_normal(50).astype(np.float32)
    weight = start.copy()
    optimizer = AdamW(weight, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    p, m, v = start.astype(float), np.zeros(50), np.zeros(50)
    for t in range(1, 30):
        g = rng.standard_normal(50).astype(np.float32)
        optimizer.step(g)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g.astype(float) ** 2
        p = p * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6)
    np.testing.assert_allclose(weight, p, rtol=1e-4, atol=1e-5)
