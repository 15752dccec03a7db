"""What `load_state_dict` finds good is what the optimizer's setters accept: it once stopped half-way through."""

import numpy as np
import pytest

import mojolearn
from mojolearn.training import Generator

CONFIG = mojolearn.SambaConfig(vocab=20, d_model=32, layers=("mamba3",))
IDS = np.arange(12).reshape(2, 6)

BEYOND_FLOAT32 = [
    ("lr", 1e39),
    ("weight_decay", -1e39),
    ("eps", 1e39),
    ("beta1", 1 - 1e-12),
    ("beta2", 1 - 1e-12),
    ("max_norm", 1e39),
    ("max_norm", 1e-60),
]


def flatten(state):
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in state.values()]


@pytest.mark.parametrize("name, value", BEYOND_FLOAT32)
def test_a_value_beyond_float32_changes_nothing(name, value):
    trained = mojolearn.SambaStack(CONFIG, generator=Generator(1))
    trained.train_step(IDS, IDS)
    state = trained.state_dict()
    state["optimizer"][name] = value
    stack = mojolearn.SambaStack(CONFIG, generator=Generator(2))
    before = flatten(stack.state_dict())
    with pytest.raises(ValueError, match=rf"state\.optimizer\.{name}"):
        stack.load_state_dict(state)
    assert flatten(stack.state_dict()) == before


@pytest.mark.parametrize("value", [1e39, 1e-60])
def test_max_norm_beyond_float32_is_refused_at_construction(value):
    with pytest.raises(ValueError, match="max_norm"):
        mojolearn.SambaStack(CONFIG, generator=Generator(1), max_norm=value)
