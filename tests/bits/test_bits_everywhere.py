"""Promise: instruction sets, threads, micro-batches, processes, a resume and the C library's math never move a bit.

Each run is a process of its own that prints digests of some training steps (20 in the full product, which is long) and
of the logits of the result.
"""

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

import mojolearn
from mojolearn import _core

SOURCE = pathlib.Path(mojolearn.__file__).resolve().parents[1]
PROGRAM = pathlib.Path(__file__).with_name("digest_run.py")
TUNED = "glibc.cpu.hwcaps=-FMA,-AVX2,-AVX512F"
RUNS_HERE = [name for name in _core.BUILT if name in _core.AVAILABLE]


@functools.cache
def digests(mode, steps, isa, threads, accumulation_steps, resume_at, tuned):
    environment = {**os.environ, "MOJOLEARN_ISA": isa, "MOJOLEARN_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment["OMP_NUM_THREADS"] = str(threads + 1)  # of no effect
    if tuned:
        environment["GLIBC_TUNABLES"] = TUNED
    done = subprocess.run(
        [sys.executable, PROGRAM, mode, str(steps), str(accumulation_steps), str(resume_at)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    trained, stack, served = json.loads(done.stdout)
    assert stack == served
    return trained, stack


# Every value of every choice occurs, each instruction set with several thread counts.
SAMPLE = [
    ("avx512", 1, 1, -1, False),
    ("avx512", 2, 2, 3, False),
    ("avx512", 8, 4, -1, True),
    ("avx2", 3, 4, 3, False),
    ("avx2", 2, 1, -1, True),
    ("baseline", 2, 2, -1, False),
    ("baseline", 3, 1, 3, True),
]


def reference(mode, steps=8):
    return digests(mode, steps, RUNS_HERE[-1], 1, 1, -1, False)


@pytest.mark.parametrize("mode", ["identical", "deterministic"])
@pytest.mark.parametrize("choice", SAMPLE, ids=str)
def test_sample(mode, choice):
    if choice[0] not in RUNS_HERE:
        pytest.skip(f"{choice[0]} is not built or this CPU lacks it")
    assert digests(mode, 8, *choice) == reference(mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["identical", "deterministic"])
@pytest.mark.parametrize(
    "choice", [*itertools.product(RUNS_HERE, (1, 2, 3, 8), (1, 2, 4), (-1, 7), (False, True))], ids=str
)
def test_all(mode, choice):
    assert digests(mode, 20, *choice) == reference(mode, 20)


def test_two_processes_agree():
    first = reference("identical")
    digests.cache_clear()
    assert reference("identical") == first


def test_digests_see_a_difference():
    """The modes have orders of their own, so their runs differ: the digest looks at the numbers."""
    assert reference("identical")[0] != reference("deterministic")[0]
