"""Mode deterministic is as accurate as mode identical, whose orders it replaces in the Mamba-3 backward."""

import numpy as np
import pytest
from mamba3_gradients import mamba3_gradients

from mojolearn import Mamba3Block, SambaConfig

WIDTH, LENGTH, SEEDS = 64, 150, 10
SHAPES = SambaConfig(2, WIDTH, ("mamba3",)).block_shapes("mamba3")


def layer(draw):
    """Weights as training leaves them: norms about one, biases about one, steps from slow to fast."""
    weights = {}
    for name, shape in SHAPES:
        if name == "dt_bias":
            value = draw.uniform(-4.0, -0.5, shape)
        elif name.endswith("_proj.weight"):
            value = draw.standard_normal(shape) / np.sqrt(shape[1])
        else:
            value = 1.0 + 0.3 * draw.standard_normal(shape)
        weights[name] = value.astype(np.float32)
    return weights


def gradients(mode, layers, x, dy):
    """Of two layers one after the other, by (layer, name)."""
    blocks = [Mamba3Block(weights, numeric_mode=mode) for weights in layers]
    hidden = blocks[0].forward(x)
    second = blocks[1].backward(hidden, dy)
    first = blocks[0].backward(x, second["x"])
    return {(i, name): value for i, grads in enumerate((first, second)) for name, value in grads.items()}


def exact_gradients(layers, x, dy):
    hidden, _ = mamba3_gradients(layers[0], x, np.zeros_like(dy))
    _, second = mamba3_gradients(layers[1], hidden, dy)
    _, first = mamba3_gradients(layers[0], x, second["x"])
    return {(i, name): value for i, grads in enumerate((first, second)) for name, value in grads.items()}


def error_ratios(seeds):
    """Root-mean-square relative error over the seeds of each tensor: deterministic to identical, and of identical."""
    squares = {"identical": {}, "deterministic": {}}
    for seed in range(seeds):
        draw = np.random.default_rng(seed)
        layers = [layer(draw), layer(draw)]
        x, dy = (draw.standard_normal((1, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
        exact = exact_gradients(layers, x, dy)
        for mode, sums in squares.items():
            for key, got in gradients(mode, layers, x, dy).items():
                error = np.mean((got - exact[key]) ** 2) / np.mean(exact[key] ** 2)
                sums[key] = sums.get(key, 0.0) + error / seeds
    identical = {key: np.sqrt(value) for key, value in squares["identical"].items()}
    return {key: np.sqrt(squares["deterministic"][key]) / value for key, value in identical.items()}, identical


@pytest.mark.long
def test_ten_seeds():
    ratios, identical = error_ratios(SEEDS)
    assert max(identical.values()) < 1e-4
    worse = {key: round(ratio, 3) for key, ratio in ratios.items() if ratio > 1.05}
    assert not worse
