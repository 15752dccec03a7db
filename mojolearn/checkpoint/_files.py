"""Files that keep their digest while they are written or read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from mojolearn._arrays import as_path
from mojolearn._progress import reading_observer
from mojolearn.checkpoint._entries import Path
from mojolearn.checkpoint._pipeline import Pipeline, Rooms
from mojolearn.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PART", "HashingReader", "HashingWriter", "naming", "opened"]

# Bytes that are read, hashed or written at once where nothing else says how many.
PART = 1 << 20

# RWF_DONTCACHE of Linux 6.14. Writing: begin to write to the disk at once and forget the pages then. A checkpoint is
# rarely read soon, new pages for all of it cost more than the copying, and the wait for the disk at the end becomes
# short. Reading: forget the pages that were not in the cache before, for the same reason.
_UNCACHED = 0x80 if sys.platform == "linux" else 0
_NOT_KNOWN = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

# Files at least so large are read like that; smaller ones may well be read again, and do no harm to the cache.
_LARGE = 256 << 20

# Without that, bytes after which the disk is put to work.
_WRITE_BACK = 32 << 20


def _flag_unknown(error: Exception) -> bool:
    """Whether a flag of `preadv` or `pwritev` is not known: to the kernel, the file system or this Python."""
    return isinstance(error, NotImplementedError) or (isinstance(error, OSError) and error.errno in _NOT_KNOWN)


class HashingWriter:
    """A file descriptor to write to, with the digest of what was written. Hashing and writing have a thread each.

    Parameters
    ----------
    file : int
        Empty.
    pipeline : Pipeline

    Attributes
    ----------
    position : int
        Bytes given to it so far.
    """

    def __init__(self, file: int, pipeline: Pipeline) -> None:
        self._file = file
        self._hashing = pipeline.chain()
        self._writing = pipeline.chain()
        self._syncing = pipeline.chain()
        self._digest = hashlib.sha256()
        self._flags = _UNCACHED
        self._written = 0
        self._next_sync = _WRITE_BACK
        self.position = 0

    def write(self, *pieces: Buffer) -> None:
        """Write and hash all of some bytes-like objects, which must stay as they are for some more calls of this."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        self.position += sum(map(len, views))
        self._hashing.call(self._hash, views)
        self._writing.call(self._write, views)
        if not self._flags and self.position >= self._next_sync:
            self._next_sync = self.position + _WRITE_BACK
            self._syncing.wait()
            self._syncing.call(getattr(os, "fdatasync", os.fsync), self._file)  # macOS has only the latter

    def _hash(self, views: list[memoryview]) -> None:
        for view in views:
            self._digest.update(view)

    def _write(self, views: list[memoryview]) -> None:
        views = list(views)
        while views:
            try:
                written = os.pwritev(self._file, views, self._written, self._flags)
            except (OSError, NotImplementedError) as error:
                if not self._flags or not _flag_unknown(error):
                    raise
                self._flags = 0
                continue
            self._written += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def digest(self) -> bytes:
        """SHA-256 of all that was given so far."""
        self._hashing.wait()
        return self._digest.digest()

    def settle(self) -> None:
        """Wait for the disk. An error that it reports is raised here, and only here: the system tells it once."""
        self._writing.wait()
        self._syncing.wait()


class HashingReader:
    """A regular file to read once from front to back, with the digest of what was read.

    Parameters
    ----------
    file : int
    pipeline : Pipeline
    hashing : bool
        Whether the digest is wanted.

    Attributes
    ----------
    position, size : int
    """

    def __init__(self, file: int, pipeline: Pipeline, hashing: bool) -> None:
        self._file = file
        self._hashing = pipeline.chain() if hashing else None
        self._digest = hashlib.sha256()
        self._observer = reading_observer()
        self.position = 0
        self.size = os.fstat(file).st_size
        self._flags = _UNCACHED if self.size >= _LARGE else 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes; `what` they are is named in the error if the file ends before."""
        if count > self.size - self.position:  # before memory is taken
            self._ended(what)
        data = bytearray(count)
        self.read_at(self.position, data, what)
        self.passed(data)
        return bytes(data)

    def read_at(self, position: int, buffer: Buffer, what: str) -> None:
        """Read into a writable buffer from anywhere, in any thread, without moving on."""
        view = memoryview(buffer).cast("B")
        while view:
            try:
                count = os.preadv(self._file, [view], position, self._flags)
            except (OSError, NotImplementedError) as error:
                if not self._flags or not _flag_unknown(error):
                    raise
                self._flags = 0
                continue
            if count == 0:
                self._ended(what)
            view, position = view[count:], position + count

    def passed(self, data: Buffer) -> None:
        """Move on past bytes that were read with `read_at`; they must stay as they are for some more calls of this."""
        if self._hashing is not None:
            self._hashing.call(self._digest.update, data)
        self.position += memoryview(data).nbytes
        self._observer(self.position)

    def pass_over(self, position: int, what: str) -> None:
        """Read on up to a position."""
        rooms = Rooms(min(PART, position - self.position))
        while self.position < position:
            room = rooms.next(min(PART, position - self.position))
            self.read_at(self.position, room, what)
            self.passed(room)

    def digest(self) -> str | None:
        """Hexadecimal SHA-256 of all that was passed, if it was wanted."""
        if self._hashing is None:
            return None
        self._hashing.wait()
        return self._digest.hexdigest()

    def peek(self, count: int, position: int, what: str) -> bytes:
        """`count` bytes from anywhere, without moving on."""
        data = os.pread(self._file, count, position)
        if len(data) < count:
            self._ended(what)
        return data

    def _ended(self, what: str) -> NoReturn:
        raise CheckpointError(f"the file ends within {what}")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a checkpoint for reading.

    Parameters
    ----------
    path : str or path-like

    Yields
    ------
    int
        Descriptor of a regular file.
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
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{os.fsdecode(path)}: {error}") from error
