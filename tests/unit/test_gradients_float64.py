"""Outputs and gradients against an independent float64 model and its finite differences."""

import float64_model as oracle
import numpy as np
import pytest

from mojolearn.blocks import Mamba3Block, TransformerBlock
from mojolearn.config import SambaConfig
from mojolearn.stack import SambaStack
from mojolearn.training import Generator

MODES = ["identical", "deterministic", "fast"]


def close(got, want, tolerance):
    scale = np.sqrt(np.mean(np.square(want))) + 1e-12
    error = np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - want))) / scale
    assert error < tolerance, f"relative error {error:.2e}"


def measured_slopes(function, weights, rng):
    """(name, direction, slope) of a scalar function along two random directions of each tensor."""
    slopes = []
    for name, value in weights.items():
        for density in (1.0, 0.1):
            direction = rng.standard_normal(value.shape) * (rng.random(value.shape) < density)
            direction.reshape(-1)[rng.integers(value.size)] += 1.0
            direction /= np.sqrt(np.sum(np.square(direction)))
            slopes.append((name, direction, oracle.slope(function, weights, name, direction)))
    return slopes


def check_gradients(grads, slopes, tolerance=2e-4):
    for name, direction, want in slopes:
        gradient = grads[name].astype(np.float64)
        got = np.sum(gradient * direction)
        scale = np.sqrt(np.sum(np.square(gradient)))
        assert abs(got - want) < tolerance * scale + 1e-7, f"{name}: {got} against {want}"


def random_weights(shapes, rng):
    weights = {}
    for name, shape in shapes:
        if name.endswith("norm.weight") or name in ("D", "B_bias", "C_bias"):
            value = 1.0 + 0.2 * rng.standard_normal(shape)
        elif name == "dt_bias":
            value = rng.uniform(-3.0, -1.0, shape)
        else:
            value = rng.standard_normal(shape) / np.sqrt(shape[-1])
        weights[name] = value.astype(np.float32)
    return weights


BLOCKS = {
    "mamba3": (SambaConfig(vocab=2, d_model=64, layers=("mamba3",)), {}),
    "attention": (
        SambaConfig(vocab=2, d_model=48, layers=("attention",), n_heads=6, n_kv_heads=2, intermediate=40),
        {"n_heads": 6, "n_kv_heads": 2},
    ),
    "window": (
        SambaConfig(vocab=2, d_model=32, layers=("attention",), n_heads=2, intermediate=40),
        {"n_heads": 2, "n_kv_heads": 2, "window": 5},
    ),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_block(case):
    rng = np.random.default_rng(3)
    config, options = BLOCKS[case]
    weights = random_weights(config.block_shapes(config.layers[0]), rng)
    if case == "mamba3":
        kind, forward = Mamba3Block, oracle.mamba3_block
    else:
        kind = TransformerBlock

        def forward(w, x):
            return oracle.attention_block(w, x, **options)

    x = rng.standard_normal((1, 70, config.d_model)).astype(np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    exact["x"] = x.astype(np.float64)
    y = forward(exact, exact["x"])
    slopes = measured_slopes(lambda w: np.sum(forward(w, w["x"]) * dy), exact, rng)
    for mode in MODES:
        block = kind(weights, numeric_mode=mode, **options)
        close(block.forward(x), y, 2e-5)
        check_gradients(block.backward(x, dy), slopes)


@pytest.mark.parametrize("tied", [True, False])
def test_stack(tied):
    rng = np.random.default_rng(4)
    config = SambaConfig(
        vocab=31,
        d_model=32,
        layers=("mamba3", "attention", "mamba3"),
        n_heads=4,
        n_kv_heads=2,
        intermediate=48,
        tie_embeddings=tied,
    )
    start = SambaStack(config, generator=Generator(1)).parameters()
    start["embed.weight"][...] *= 20.0  # the initial scale leaves the blocks next to linear
    ids, targets = rng.integers(0, 31, (2, 2, 20))
    targets[0, :7] = -100
    exact = {name: value.astype(np.float64) for name, value in start.items()}

    def objective(w):
        return oracle.cross_entropy(oracle.logits(config, w, ids), targets)

    logits, want = oracle.logits(config, exact, ids), objective(exact)
    slopes = measured_slopes(objective, exact, rng)
    for mode in MODES:
        stack = SambaStack(config, weights=start, numeric_mode=mode)
        close(stack.forward(ids), logits, 5e-5)
        loss, grads = stack.loss_and_grads(ids, targets)
        assert loss == stack.loss(ids, targets) == pytest.approx(want, rel=1e-5)
        check_gradients(dict(zip(stack.names, grads)), slopes)
