"""One digest of a training run, for any number of ranks: ``mpiexec -n 4 python -m mojolearn.distributed.digest``.

The run has what a division could get wrong: a hybrid model, dropout, ignored targets, clipping of the gradient's norm,
accumulation, a schedule. The digest is over its losses and everything that it leaves.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import mojolearn
from mojolearn._typing import NumericMode
from mojolearn.distributed._comm import Comm
from mojolearn.distributed._mpi import INSTALL, MPIComm, launched_ranks
from mojolearn.errors import RankFailedError
from mojolearn.training import Generator, WarmupCosineLR

__all__ = ["digest_of_processes", "run_digest"]

MODES: dict[NumericMode, int] = {"identical": 1, "deterministic": 4}  # and their shards
ROWS, LENGTH, STEPS = 8, 64, 10


def run_digest(comm: Comm | None, mode: NumericMode, accumulation_steps: int = 2) -> str | None:
    """Train ten steps and return the digest, on rank 0; None on the other ranks."""
    layers = ("mamba3", "attention", "mamba3")
    stack = mojolearn.SambaStack(
        mojolearn.SambaConfig(101, 64, layers, n_heads=4, n_kv_heads=2, intermediate=96, dropout=0.1),
        generator=Generator(2025),
        lr_schedule=WarmupCosineLR(3e-3, 2, STEPS, 1e-4),
        max_norm=0.5,
        accumulation_steps=accumulation_steps,
        numeric_mode=mode,
        comm=comm,
        n_shards=MODES[mode],
    )
    total = hashlib.sha256()
    for step in range(STEPS):
        words = np.random.Philox(key=step).random_raw(ROWS * (LENGTH + 1))
        ids = (words % np.uint64(stack.config.vocab)).astype(np.int32).reshape(ROWS, LENGTH + 1)
        targets = ids[:, 1:].copy()
        targets[:, ::7] = -100
        out = stack.train_step(ids[:, :-1], targets)
        total.update(np.array([out["loss"], out["lr"], out["total_norm"]], "<f8").tobytes())
    state = stack.state_dict()
    if state is None:
        return None
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        total.update(state[name].astype("<f4").tobytes())
    total.update(np.array([state["t"], state["rng"]["counter"]], "<i8").tobytes())
    return total.hexdigest()


def digest_of_processes(ranks: int) -> dict[str, str]:
    """The digest of each mode, computed by so many MPI processes on this machine.

    Parameters
    ----------
    ranks : int

    Raises
    ------
    ImportError
        There is no ``mpiexec`` or no mpi4py.
    RankFailedError
        The job has failed; the message ends with its last line.
    """
    launcher = find_mpiexec()
    if launcher is None:
        raise ImportError(f"ranks need mpiexec, which was not found: {INSTALL}")
    folders = [str(Path(mojolearn.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**launch_environment(), "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [launcher, "-n", str(ranks), sys.executable, "-m", "mojolearn.distributed.digest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    digests = {line[1]: line[2] for line in lines if len(line) == 3 and line[0] == "digest"}
    if done.returncode or len(digests) != len(MODES):
        if "ImportError" in done.stderr:
            raise ImportError(f"ranks need mpi4py and an MPI library: {INSTALL}")
        said = [line for line in done.stderr.splitlines() if line.startswith("mojolearn:")] or [done.stderr[-500:]]
        raise RankFailedError(f"{ranks} ranks ended with status {done.returncode}: {said[0]}")
    return digests


def find_mpiexec() -> str | None:
    """The ``mpiexec`` beside this Python, else that of the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def launch_environment() -> dict[str, str]:
    """The environment for more ranks than cores, and for a container in which one is root. Open MPI asks for both."""
    return {
        **os.environ,
        "MOJOLEARN_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # version 4
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # from version 5 on
    }


def main() -> None:
    comm = MPIComm() if launched_ranks()[1] > 1 else None
    for mode in MODES:
        result = run_digest(comm, mode)
        if result is not None:
            print("digest", mode, result, flush=True)


if __name__ == "__main__":
    main()
