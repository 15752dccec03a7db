"""Attributes of an optimizer and a stack that were set to something else; wrong sizes once wrote outside of memory."""

import numpy as np
import pytest

import mojolearn
from mojolearn.training import SGD, Adam, AdamW, Generator

CONFIG = mojolearn.SambaConfig(vocab=20, d_model=32, layers=("mamba3",))
IDS = np.arange(12).reshape(2, 6)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize(
    "name, value",
    [
        ("exp_avg", np.zeros(3, np.float32)),
        ("exp_avg", np.zeros(40_000)),
        ("exp_avg_sq", np.zeros(80_000, np.float32)[::2]),
        ("exp_avg_sq", None),
        ("buf_initialized", np.zeros(0, np.int32)),
        ("params", [np.zeros((2000, 2000), np.float32)]),
        ("params", []),
        ("t", -1),
        ("t", "3"),
    ],
)
def test_optimizer(kind, name, value):
    param = np.ones((200, 200), np.float32)
    optimizer = kind([param], **({"momentum": 0.9} if kind is SGD else {}))
    setattr(optimizer, name, value)
    gradient = np.ones_like(value[0] if name == "params" and value else param)
    with pytest.raises((TypeError, ValueError), match=name):
        optimizer.step([gradient])
    assert (param == 1).all()


@pytest.mark.parametrize("name", ["accumulation_steps", "n_shards"])
@pytest.mark.parametrize("value", [0, -1, 1.0, None, "1", True])
def test_stack(name, value):
    stack = mojolearn.SambaStack(CONFIG, generator=Generator(1))
    setattr(stack, name, value)
    before = stack.flat.copy()
    with pytest.raises((TypeError, ValueError), match=name):
        stack.train_step(IDS, IDS)
    assert np.array_equal(stack.flat, before) and stack.optimizer.t == 0
