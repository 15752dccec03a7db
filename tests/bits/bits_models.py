"""Small models that the property tests share, and how results are compared."""

import functools

import numpy as np

from mojolearn.config import SambaConfig
from mojolearn.inference import SambaInference
from mojolearn.stack import SambaStack
from mojolearn.training import Generator

HYBRID = SambaConfig(97, 64, ("mamba3", "attention", "mamba3"), n_heads=2, intermediate=96)
MAMBA = SambaConfig(97, 32, ("mamba3", "mamba3"), tie_embeddings=False)
ATTENTION = SambaConfig(97, 32, ("attention", "attention"), n_heads=4, n_kv_heads=2, intermediate=48)
CONFIGS = {"hybrid": HYBRID, "mamba": MAMBA, "attention": ATTENTION}
MODES = ("identical", "deterministic")


@functools.cache
def weights(name):
    """Weights with blocks that matter: the usual initialization leaves the residual stream next to its embedding."""
    rng = np.random.default_rng(5)
    parameters = SambaStack(CONFIGS[name], generator=Generator(0)).parameters()
    return {
        key: (value * rng.uniform(1.0, 3.0, value.shape)).astype(np.float32) if value.ndim == 2 else value.copy()
        for key, value in parameters.items()
    }


@functools.cache
def inference(name, mode="identical"):
    return SambaInference(CONFIGS[name], weights(name), numeric_mode=mode)


def ids(rows, length, seed=0, vocab=97):
    return np.random.default_rng(seed).integers(0, vocab, (rows, length)).astype(np.int32)


def assert_same_bits(got, want, what=""):
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype, what
    assert got.tobytes() == want.tobytes(), f"{what}: largest difference {np.abs(got - want).max()}"


def assert_same_states(got, want):
    got, want = got.to_dict(), want.to_dict()
    assert got["tokens"] == want["tokens"]
    for i, (one, other) in enumerate(zip(got["layers"], want["layers"])):
        for name, value in other.items():
            if isinstance(value, np.ndarray) and other["kind"] == "attention":
                used = other["cached_tokens"]
                assert_same_bits(one[name][:, :, :used], value[:, :, :used], f"layer {i} {name}")
            elif isinstance(value, np.ndarray):
                # Rows of the open chunk's buffers that no token has filled may hold anything.
                used = other["buffered_tokens"] if name.startswith("buffer_") else None
                assert_same_bits(one[name][:, :used], value[:, :used], f"layer {i} {name}")
            elif name != "max_tokens":
                assert one[name] == value, name
