"""Overlap hashing, compressing and disk: work handed to threads, results taken in order, little held at once."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice, starmap
from typing import Any, TypeVar

from mojolearn.checkpoint._entries import Bytes

__all__ = ["Pipeline"]

Result = TypeVar("Result")

# Compressing and joining planes; hashing and the disk have a thread each because a digest is one chain and the disk
# makes one wait.
_WORKERS = 2
_AHEAD = 4


class Pipeline:
    """Threads for the parts of saving and loading that release the interpreter lock.

    The results never depend on the number of threads: each part is worked on alone and taken in order.

    Attributes
    ----------
    slots : int
        How many buffers to use in turn for the jobs of `map`: one comes up again only when the result of its last
        job has been taken and the next one asked for.
    """

    slots = _AHEAD + 2

    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(_WORKERS, "mojolearn-checkpoint")
        self._hasher = ThreadPoolExecutor(1, "mojolearn-digest")
        self._disk = ThreadPoolExecutor(1, "mojolearn-disk")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)
        self._disk.shutdown(cancel_futures=True)

    def on_hash_thread(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Start a call that adds to a digest; returns its future."""
        return self._hasher.submit(function, *args)

    def on_disk_thread(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Start a call that waits for the disk; returns its future."""
        return self._disk.submit(function, *args)

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

    def hashed(self, digest: hashlib._Hash, parts: Iterable[Bytes]) -> Iterator[Bytes]:
        """Pass byte arrays through while a thread adds them to a digest.

        Parameters
        ----------
        digest : hashlib object
        parts : iterable of ndarray of uint8

        Yields
        ------
        ndarray of uint8
            Must not be changed before the next one is asked for. At the end the digest holds all parts.
        """
        adding = None
        for part in parts:
            if adding is not None:
                adding.result()
            adding = self.on_hash_thread(digest.update, part)
            yield part
        if adding is not None:
            adding.result()
