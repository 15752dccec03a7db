"""The command line under ``mpiexec``: all ranks run the same command, and rank 0 speaks for them."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from typing import TypeVar

from mojolearn.distributed import Comm, MPIComm, agree, launched_ranks

Result = TypeVar("Result")

_connected: list[MPIComm] = []


def speaks() -> bool:
    """Whether this process prints and writes: rank 0, or the only process."""
    return launched_ranks()[0] == 0


def connect(threads: int | None) -> Comm | None:
    """The ranks that ``mpiexec`` has started; None when this process is alone.

    Parameters
    ----------
    threads : int or None
        What ``--threads`` says. None divides the CPUs among the ranks of this machine, unless ``mpiexec`` has done so.

    Raises
    ------
    ImportError
        There are ranks but no mpi4py; the message says what to install.
    """
    _, count, here = launched_ranks()
    if count == 1:
        return None
    if not _connected:
        _connected.append(MPIComm())
    if threads is None and not os.environ.get("MOJOLEARN_NUM_THREADS"):
        import mojolearn

        usable = mojolearn.get_num_threads()
        if usable >= (os.cpu_count() or 1):
            mojolearn.set_num_threads(max(1, usable // here))
    return _connected[0]


def in_turn(comm: Comm | None, build: Callable[[], Result]) -> Result:
    """Call `build` on rank 0, which may write files, and then on the others; an error of any is raised on all."""
    if comm is None:
        return build()
    built: list[Result] = []
    # Rank 0 may have to tokenize a library meanwhile.
    timeout, comm.timeout = comm.timeout, math.inf
    try:
        for turn in (comm.rank == 0, comm.rank > 0):
            problem = None
            if turn:
                try:
                    built.append(build())
                except Exception as error:
                    problem = error
            agree(comm, problem)
    finally:
        comm.timeout = timeout
    return built[0]


def processes(comm: Comm | None) -> list[str]:
    """Machine and process of each rank, on rank 0: some launchers name a process that has died, and not its rank."""
    if comm is None:
        return []
    return comm.gather(f"{socket.gethostname()}:{os.getpid()}") or []


def end_job(error: BaseException) -> None:
    """After an error of this rank alone: end the others too. Does not return when there are any."""
    if _connected and not getattr(error, "on_all_ranks", False):
        _connected[0].abort(f"{type(error).__name__}: {error}")


def is_told_by_rank_0(error: BaseException) -> bool:
    """Whether rank 0 reports this error, so that the other ranks need not."""
    from mojolearn.cli._common import UsageError

    return not speaks() and (getattr(error, "on_all_ranks", False) or isinstance(error, UsageError))
