"""Promise: save, load and resume, in the same process or a new one, give the bits of an unbroken run."""

import json
import subprocess
import sys

import numpy as np
import pytest
from bits_models import MODES, ids

from mojolearn.config import SambaConfig
from mojolearn.stack import SambaStack
from mojolearn.training import Generator, WarmupLinearLR

CONFIG = SambaConfig(97, 32, ("mamba3", "attention"), n_heads=2, intermediate=48, dropout=0.1)


def new(mode="identical", **options):
    settings = {"lr_schedule": WarmupLinearLR(3e-3, 2, 12), "max_norm": 0.5, "accumulation_steps": 2, **options}
    return SambaStack(CONFIG, generator=Generator(9), numeric_mode=mode, **settings)


def train(stack, first, last):
    return [stack.train_step(ids(4, 20, seed=i), ids(4, 20, seed=100 + i)) for i in range(first, last)]


def snapshot(stack):
    state = stack.state_dict()
    return {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in state.items()}


@pytest.mark.parametrize("mode", [*MODES, "fast"])
@pytest.mark.parametrize("compression", ["zstd", None])
def test_checkpoint(tmp_path, mode, compression):
    unbroken = new(mode)
    logs = train(unbroken, 0, 10)
    half = new(mode)
    head = train(half, 0, 5)
    path = tmp_path / "half"
    half.save_checkpoint(path, compression=compression)
    resumed = SambaStack.from_checkpoint(path)
    assert resumed.numeric_mode == mode and resumed.accumulation_steps == 2
    assert head + train(resumed, 5, 10) == logs
    assert snapshot(resumed) == snapshot(unbroken)


def test_new_process(tmp_path):
    unbroken = new()
    logs = train(unbroken, 0, 8)
    half = new()
    train(half, 0, 5)
    half.extra = {"position": [3, 1]}
    half.save_checkpoint(tmp_path / "half")
    program = f"""
import json, sys
sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
from test_bits_resume import train
from mojolearn.stack import SambaStack
stack = SambaStack.from_checkpoint({str(tmp_path / "half")!r})
logs = train(stack, 5, 8)
stack.save_checkpoint({str(tmp_path / "end")!r})
print(json.dumps([logs, stack.extra]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [logs[5:], {"position": [3, 1]}]
    assert snapshot(SambaStack.from_checkpoint(tmp_path / "end")) == snapshot(unbroken)


def test_state_dict():
    unbroken = new()
    train(unbroken, 0, 6)
    half = new()
    train(half, 0, 3)
    other = new(accumulation_steps=4, lr_schedule=None, max_norm=None)
    train(other, 50, 51)
    assert other.load_state_dict(half.state_dict()) is other
    assert other.accumulation_steps == 4 and other.max_norm == 0.5 and other.last_ is None
    train(other, 3, 6)
    got, want = snapshot(other), snapshot(unbroken)
    assert got["optimizer"].pop("accumulation_steps") == 4 and want["optimizer"].pop("accumulation_steps") == 2
    assert got == want


def test_mode_is_overridden(tmp_path):
    stack = new("identical")
    train(stack, 0, 1)
    stack.save_checkpoint(tmp_path / "a")
    other = SambaStack.from_checkpoint(tmp_path / "a", numeric_mode="deterministic")
    assert other.numeric_mode == "deterministic"
    other.save_checkpoint(tmp_path / "b")
    again = SambaStack.from_checkpoint(tmp_path / "b")
    assert again.numeric_mode == "deterministic" and again.flat.tobytes() == stack.flat.tobytes()
    assert SambaStack.from_checkpoint(tmp_path / "b", numeric_mode="identical").numeric_mode == "identical"
