"""Overlap reading, compressing, hashing and disk: work is handed to threads, results are taken in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice, starmap
from typing import Any, TypeVar

import numpy as np

from mojolearn.checkpoint._entries import Bytes

__all__ = ["Chain", "Pipeline", "Rooms"]

Result = TypeVar("Result")

# Threads that compress and decompress, and how many parts they may be ahead of the one that is taken.
_WORKERS = 2
_AHEAD = 4

# Calls that a chain may have to do yet.
_BACKLOG = 3


class Chain:
    """Calls made one after the other on a thread of their own: a digest, or a file that is written."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "mojolearn-checkpoint-chain")
        self._pending: deque[Future[Any]] = deque()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Make a call later; waits while there are many. An error of an earlier call may be raised here."""
        self._pending.append(self._thread.submit(function, *args))
        if len(self._pending) > _BACKLOG:
            self._pending.popleft().result()

    def wait(self) -> None:
        """Wait until all calls are done. The first error of any of them is raised."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drop the calls that have not begun and end the thread."""
        self._thread.shutdown(cancel_futures=True)


class Pipeline:
    """Threads for the parts of saving and loading that release the interpreter lock.

    The results never depend on the number of threads: each part is worked on alone and taken in order.
    """

    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(_WORKERS, "mojolearn-checkpoint")
        self._chains: list[Chain] = []

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Nothing touches a buffer or a file afterwards."""
        self._workers.shutdown(cancel_futures=True)
        for one in self._chains:
            one.close()

    def chain(self) -> Chain:
        """A new thread for calls that have an order."""
        self._chains.append(Chain())
        return self._chains[-1]

    def map(self, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> Iterator[Result]:
        """Results of ``function(*args)`` for each args of an iterable, in order, worked on a few at a time."""
        arguments = iter(arguments)
        first = list(islice(arguments, 2))
        if len(first) < 2:  # nothing to overlap
            yield from starmap(function, first)
            return
        pending: deque[Future[Result]] = deque()
        for args in chain(first, arguments):
            pending.append(self._workers.submit(function, *args))
            if len(pending) >= _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Rooms:
    """Buffers for the jobs of `Pipeline.map`, used in turn.

    One comes up again when the result of its last job has been taken and given to chains, and those have done with it.

    Parameters
    ----------
    nbytes : int
        Of each.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._rooms: list[Bytes] = []
        self._turn = 0

    def next(self, nbytes: int) -> Bytes:
        """The next buffer, cut to a size."""
        if len(self._rooms) <= self._turn:
            self._rooms.append(np.empty(self._nbytes, np.uint8))
        room = self._rooms[self._turn][:nbytes]
        self._turn = (self._turn + 1) % (_AHEAD + _BACKLOG + 1)
        return room
