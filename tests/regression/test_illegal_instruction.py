"""Reported: a wheel dies by an illegal instruction on a processor older than that of the build."""

import os
import shutil
import subprocess
import sys

import pytest
from report_model import SOURCE, run

from mojolearn import _core

PROGRAM = """
import sys, hashlib
try:
    import numpy as np
except Exception as error:
    print("numpy", error); sys.exit(77)
import mojolearn
from mojolearn.training import Generator
config = mojolearn.SambaConfig(40, 32, ("mamba3", "attention"), n_heads=2, intermediate=48, dropout=0.1)
stack = mojolearn.SambaStack(config, generator=Generator(3), max_norm=0.5)
ids = np.arange(40).reshape(2, 20)
log = stack.train_step(ids, ids)
served = mojolearn.SambaInference(config, mojolearn.lowbit.pack(stack.parameters(), "int8"))
state = served.allocate_state(2, 21)
total = hashlib.sha256(repr(log).encode() + stack.flat.tobytes() + served.forward(ids, state).tobytes())
total.update(served.step(ids[:, 0], state).tobytes())
print(mojolearn.show_config(quiet=True)["isa"], total.hexdigest())
"""


@pytest.mark.skipif("MOJOLEARN_SANITIZE" in os.environ, reason="the address sanitizer does not run in the emulator")
@pytest.mark.parametrize(("cpu", "name"), [("Nehalem", "baseline"), ("Haswell", "avx2")])
def test_on_an_emulated_processor(cpu, name):
    """A processor that refuses what it lacks: the library imports, picks a set and gives this machine's bits."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or "avx2" not in _core.BUILT:
        pytest.skip("needs qemu-x86_64 (Debian: qemu-user) and a build for x86-64")
    here = run(PROGRAM)
    environment = {**os.environ, "MOJOLEARN_ISA": "", "MOJOLEARN_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), environment.get("PYTHONPATH", "")])
    environment.pop("OPENBLAS_CORETYPE", None)
    done = subprocess.run(
        [emulator, "-cpu", cpu, sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77:
        pytest.skip(f"this NumPy does not run on {cpu}: {done.stdout}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [name, here.split()[1]]
