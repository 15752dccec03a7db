"""Ranks that are threads of one process: for tests, and for trying out a division without MPI."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from mojolearn._arrays import as_index, as_real
from mojolearn.distributed._comm import Comm, Request
from mojolearn.errors import RankFailedError

__all__ = ["LocalComm", "run_ranks"]

_LOOK_EVERY = 0.05  # seconds between looks at whether another rank has failed


class _Group:
    """What the ranks of one group share: a mailbox for each pair, and the first failure."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, str], queue.Queue[Any]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()
        self.failure: str | None = None

    def box(self, source: int, dest: int, kind: str) -> queue.Queue[Any]:
        with self._lock:
            return self._boxes[source, dest, kind]


class LocalComm(Comm):
    """Ranks in the threads of one process.

    Make a whole group with `LocalComm.group`, or run a function on all ranks with `run_ranks`.

    Parameters
    ----------
    rank, size : int
    timeout : float, default 60
        Seconds to wait for a message before the sender is taken for lost.
    """

    def __init__(self, rank: int, size: int, timeout: float = 60.0, *, _group: _Group | None = None):
        super().__init__(rank, size, as_real(timeout, "timeout", 0.0))
        if size > 1 and _group is None:
            raise ValueError(f"a LocalComm of {size} ranks comes from LocalComm.group({size})")
        self._group = _group or _Group()

    @classmethod
    def group(cls, size: int, timeout: float = 60.0) -> list[LocalComm]:
        """The ranks of a new group, in order."""
        size = as_index(size, "size", 1)
        shared = _Group()
        return [cls(rank, size, timeout, _group=shared) for rank in range(size)]

    def _send(self, array: np.ndarray, dest: int) -> Request:
        self._group.box(self.rank, dest, "array").put(array.tobytes())
        return _Done()

    def _receive(self, out: np.ndarray, source: int) -> Request:
        return _Arrival(self, source, out)

    def _send_bytes(self, content: bytes, dest: int) -> None:
        self._group.box(self.rank, dest, "value").put(content)

    def _receive_bytes(self, source: int) -> bytes:
        return self._take(source, "value")

    def _take(self, source: int, kind: str) -> bytes:
        box = self._group.box(source, self.rank, kind)
        give_up = time.monotonic() + self.timeout
        while True:
            try:
                content: bytes = box.get(timeout=_LOOK_EVERY)
                return content
            except queue.Empty:
                if self._group.failure is not None:
                    raise RankFailedError(self._group.failure) from None
                if time.monotonic() > give_up:
                    raise RankFailedError(f"rank {source} has sent nothing for {self.timeout:g} s") from None

    def abort(self, message: str) -> None:
        if self._group.failure is None:
            self._group.failure = f"rank {self.rank} has failed: {message}"


class _Done(Request):
    def wait(self) -> None:
        pass


class _Arrival(Request):
    def __init__(self, comm: LocalComm, source: int, out: np.ndarray):
        self._comm, self._source, self._out = comm, source, out

    def wait(self) -> None:
        content = np.frombuffer(self._comm._take(self._source, "array"), self._out.dtype)
        self._out[...] = content.reshape(self._out.shape)


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``function(comm, *args)`` on each of `size` ranks, each in a thread.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : callable
        Gets the rank's `LocalComm`, then `args`.
    timeout : float, default 60
        Seconds that a rank waits for a message.

    Returns
    -------
    list
        What the calls have returned, in rank order. When one raises, the others are ended and its error is raised.
    """
    comms = LocalComm.group(size, timeout)
    results: list[Any] = [None] * len(comms)
    errors: list[tuple[bool, int, BaseException]] = []

    def work(comm: LocalComm) -> None:
        try:
            results[comm.rank] = function(comm, *args)
        except BaseException as error:
            errors.append((isinstance(error, RankFailedError), comm.rank, error))
            comm.abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(comm,), name=f"rank {comm.rank}") for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The cause comes before the ranks that only noticed it.
        raise min(errors, key=lambda entry: entry[:2])[2]
    return results
