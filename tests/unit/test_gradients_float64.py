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


def check_gradients(function, weights, grads, rng, tolerance=2e-4):
    """Compare each gradient with the slope along random directions, and along the gradient itself."""
    for name, gradient in grads.items():
        directions = [rng.standard_normal(gradient.shape), np.sign(gradient)]
        scale = np.sqrt(np.sum(np.square(gradient.astype(np.float64))))
        for direction in directions:
            direction = direction / np.sqrt(np.sum(np.square(direction)) + 1e-300)
            want = oracle.slope(function, weights, name, direction)
            got = np.sum(gradient * direction)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", BLOCKS)
def test_block(case, mode):
    rng = np.random.default_rng(3)
    config, options = BLOCKS[case]
    weights = random_weights(config.block_shapes(config.layers[0]), rng)
    if case == "mamba3":
        block, forward = Mamba3Block(weights, numeric_mode=mode), oracle.mamba3_block
    else:
        block = TransformerBlock(weights, numeric_mode=mode, **options)

        def forward(w, x):
            return oracle.attention_block(w, x, **options)

    x = rng.standard_normal((2, 70, config.d_model)).astype(np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    exact = {name: value.astype(np.float64) for name, value in weights.items()}
    close(block.forward(x), forward(exact, x.astype(np.float64)), 2e-5)
    exact["x"] = x.astype(np.float64)

    def objective(w):
        return np.sum(forward(w, w["x"]) * dy)

    check_gradients(objective, exact, block.backward(x, dy), rng)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False])
def test_stack(tied, mode):
    rng = np.random.default_rng(4)
    config = SambaConfig(
        vocab=31,
        d_model=64,
        layers=("mamba3", "attention", "mamba3"),
        n_heads=4,
        n_kv_heads=2,
        intermediate=48,
        tie_embeddings=tied,
    )
    stack = SambaStack(config, generator=Generator(1), numeric_mode=mode)
    ids, targets = rng.integers(0, 31, (2, 2, 40))
    targets[0, :7] = -100
    stack.parameters()["embed.weight"][...] *= 20.0  # the initial scale leaves the blocks next to linear
    weights = {name: value.astype(np.float64) for name, value in stack.parameters().items()}

    def objective(w):
        return oracle.cross_entropy(oracle.logits(config, w, ids), targets)

    close(stack.forward(ids), oracle.logits(config, weights, ids), 5e-5)
    loss, grads = stack.loss_and_grads(ids, targets)
    assert loss == pytest.approx(objective(weights), rel=1e-5)
    assert stack.loss(ids, targets) == pytest.approx(objective(weights), rel=1e-5)
    check_gradients(objective, weights, dict(zip(stack.names, grads)), rng)
