"""Files that keep their digest while they are written or read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from mojolearn._arrays import as_path
from mojolearn.checkpoint._entries import Path
from mojolearn.checkpoint._pipeline import Pipeline
from mojolearn.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HashingReader", "HashingWriter", "naming", "opened"]


# Bytes that take longer to hash than it takes to hand them to a thread.
_WORTH_A_THREAD = 1 << 17

# Bytes after which the disk is put to work, so that the wait at the end is short.
_WRITE_BACK = 32 << 20


class HashingWriter:
    """A file descriptor to write to, with the digest of what was written.

    Parameters
    ----------
    file : int
    pipeline : Pipeline

    Attributes
    ----------
    digest : hashlib object
    position : int
        Bytes written so far.
    """

    def __init__(self, file: int, pipeline: Pipeline) -> None:
        self._file = file
        self._pipeline = pipeline
        self._syncing: Future[None] | None = None
        self._next_sync = _WRITE_BACK
        self.digest = hashlib.sha256()
        self.position = 0

    def write(self, *pieces: Buffer) -> None:
        """Write and hash all of some bytes-like objects."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        if sum(map(len, views)) < _WORTH_A_THREAD:
            self._hash(views)
            self._write(views)
        else:
            hashing = self._pipeline.on_hash_thread(self._hash, views)
            self._write(views)
            hashing.result()
        self.position += sum(map(len, views))
        if self.position >= self._next_sync:
            self._next_sync = self.position + _WRITE_BACK
            self.settle()
            sync = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter
            self._syncing = self._pipeline.on_disk_thread(sync, self._file)

    def _hash(self, views: list[memoryview]) -> None:
        for view in views:
            self.digest.update(view)

    def _write(self, views: list[memoryview]) -> None:
        views = list(views)
        while views:
            written = os.writev(self._file, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def settle(self) -> None:
        """Wait for the disk. An error that it reports is raised here, and only here: the system tells it once."""
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            syncing.result()


class HashingReader:
    """A regular file to read once from front to back, with the digest of what was read.

    Parameters
    ----------
    file : int

    Attributes
    ----------
    digest : hashlib object
    position, size : int
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.position = 0
        self.size = os.fstat(file).st_size

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes; `what` they are is named in the error if the file ends before."""
        if count > self.size - self.position:  # before memory is taken
            self._ended(what)
        data = bytearray(count)
        self.fill(data, what)
        return bytes(data)

    def fill(self, buffer: Buffer, what: str) -> None:
        """Read the next bytes into a writable buffer."""
        view = memoryview(buffer).cast("B")
        if len(view) > self.size - self.position:
            self._ended(what)
        filled = 0
        while filled < len(view):
            count = os.preadv(self._file, [view[filled:]], self.position)
            if count == 0:
                self._ended(what)
            filled += count
            self.position += count
        self.digest.update(view)

    def peek(self, count: int, position: int, what: str) -> bytes:
        """`count` bytes from anywhere, without moving on."""
        data = os.pread(self._file, count, position)
        if len(data) < count:
            self._ended(what)
        return data

    def _ended(self, what: str) -> NoReturn:
        raise CheckpointError(f"the file ends within {what}")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[HashingReader]:
    """Open a checkpoint for reading.

    Parameters
    ----------
    path : str or path-like

    Yields
    ------
    HashingReader
    """
    name = as_path(path)
    # A pipe without a writer would block for ever.
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{name}: not a regular file")
        yield HashingReader(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{os.fsdecode(path)}: {error}") from error
