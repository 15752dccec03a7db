"""The memory estimate of a training run against what a process takes."""

import os
import subprocess
import sys

import pytest

import mojolearn
from mojolearn.cli.resources import available_memory, check_memory, training_memory

MEASURE = """
import numpy as np, mojolearn
from mojolearn.training import Generator
config = mojolearn.SambaConfig(**{config!r})
stack = mojolearn.SambaStack(config, generator=Generator(0), accumulation_steps={pieces})
ids = np.zeros(({batch}, {length} + 1), np.int32)
stack.train_step(ids[:, :-1], ids[:, 1:])
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.skipif("MOJOLEARN_SANITIZE" in os.environ, reason="the sanitizers' own memory is not in the estimate")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
    ("layers", "d_model", "batch", "length", "pieces"),
    [
        (["mamba3", "attention"], 128, 8, 256, 1),
        (["mamba3"] * 3, 192, 8, 256, 4),
        (["attention"] * 4, 256, 4, 512, 1),
    ],
)
def test_the_estimate_is_above_the_peak_and_near(layers, d_model, batch, length, pieces):
    config = {"vocab": 300, "d_model": d_model, "layers": layers, "n_heads": 4, "intermediate": 2 * d_model}
    code = MEASURE.format(config=config, batch=batch, length=length, pieces=pieces)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    peak = int(done.stdout)
    estimate = training_memory(mojolearn.SambaConfig(**config), batch, length, pieces)
    assert 0.97 * peak < estimate < 1.7 * peak


def test_shards_and_ranks_count():
    config = mojolearn.SambaConfig(vocab=300, d_model=512, layers=["mamba3"] * 2)
    flat = 4 * config.num_parameters

    def buffers(ranks, n_shards=1):
        """Beyond what the rows of one rank need."""
        alone = training_memory(config, 8 // ranks, 128)
        return (training_memory(config, 8, 128, 1, ranks, n_shards) - alone) / flat

    # A part of the two moments and a buffer for what comes in: 2 ranks -1 + 1, 8 ranks -1.75 + 1.
    assert buffers(2) == pytest.approx(0.0, abs=1e-3)
    assert buffers(8) == pytest.approx(-0.75, abs=1e-3)
    # Eight shards in one process wait on four levels.
    assert buffers(1, 8) == pytest.approx(4.0, abs=1e-3)


def test_what_is_free_is_less_than_the_machine_has():
    free = available_memory()
    if sys.platform.startswith("linux"):
        with open("/proc/meminfo") as file:
            total = int(file.readline().split()[1]) * 1024
        assert 0 < free <= total


def test_more_than_is_free_is_refused():
    config = mojolearn.SambaConfig(vocab=256, d_model=1 << 17, layers=["mamba3"] * 40)
    with pytest.raises(MemoryError, match=r"training needs about .* GiB and .* are free"):
        check_memory(config, 8, 256, 1)
