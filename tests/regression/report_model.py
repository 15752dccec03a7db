"""The model of the reports, and how a program is run in a process of its own."""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np

import mojolearn
from mojolearn.training import Generator

SOURCE = pathlib.Path(mojolearn.__file__).resolve().parents[1]
VOCAB = 97
HYBRID = ("mamba3", "attention", "mamba3")


def new_stack(layers=HYBRID, seed=0, **options):
    config = mojolearn.SambaConfig(VOCAB, 64, layers, n_heads=2, intermediate=128, dropout=options.pop("dropout", 0.0))
    return mojolearn.SambaStack(config, generator=Generator(seed), **options)


@functools.cache
def model(layers=HYBRID):
    """With weights large enough for every layer to matter."""
    stack = new_stack(layers)
    weights = {name: value * np.float32(2 if value.ndim == 2 else 1) for name, value in stack.parameters().items()}
    return mojolearn.SambaInference(stack.config, weights)


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def same(a, b):
    """Equal in shape, type and every byte."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def state_bytes(state):
    """Everything that a state says, as bytes."""
    layers = state.to_dict()["layers"]
    return [
        value.tobytes() if isinstance(value, np.ndarray) else value
        for layer in layers
        for _, value in sorted(layer.items())
    ]


def run(program, *, timeout=60, arguments=(), **environment):
    """Standard output of a Python program, in which warnings are errors."""
    environment = {**os.environ, **environment}
    folders = [str(SOURCE), str(pathlib.Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
