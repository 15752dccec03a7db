"""Files that keep their digest while they are written or read."""

import contextlib
import errno
import hashlib
import os
import stat

from mojolearn.errors import CheckpointError

__all__ = ["HashingReader", "HashingWriter", "naming", "opened"]


class HashingWriter:
    """A file descriptor to write to, with the digest of what was written.

    Parameters
    ----------
    file : int

    Attributes
    ----------
    digest : hashlib object
    position : int
        Bytes written so far.
    """

    def __init__(self, file):
        self._file = file
        self.digest = hashlib.sha256()
        self.position = 0

    def write(self, data):
        """Write and hash all of a bytes-like object."""
        view = memoryview(data).cast("B")
        self.digest.update(view)
        while view:
            written = os.write(self._file, view)
            self.position += written
            view = view[written:]


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

    def __init__(self, file):
        self._file = file
        self.digest = hashlib.sha256()
        self.position = 0
        self.size = os.fstat(file).st_size

    def take(self, count, what):
        """The next `count` bytes; `what` they are is named in the error if the file ends before."""
        if count > self.size - self.position:
            self._ended(what)
        data = bytearray(count)
        self.fill(data, what)
        return bytes(data) if count < 1 << 16 else data

    def fill(self, buffer, what):
        """Read the next bytes into a writable buffer."""
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            count = os.preadv(self._file, [view[filled:]], self.position)
            if count == 0:
                self._ended(what)
            filled += count
            self.position += count
        self.digest.update(view)

    def peek(self, count, position, what):
        """`count` bytes from anywhere, without moving on."""
        data = os.pread(self._file, count, position)
        if len(data) < count:
            self._ended(what)
        return data

    def _ended(self, what):
        raise CheckpointError(f"the file ends within {what}")


@contextlib.contextmanager
def opened(path):
    """Open a checkpoint for reading.

    Parameters
    ----------
    path : str or path-like

    Yields
    ------
    HashingReader
    """
    name = os.fsdecode(path)
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
def naming(path):
    """Put the file's name before the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{os.fsdecode(path)}: {error}") from error
