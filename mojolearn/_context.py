"""What a computation runs with: thread count, numeric mode and scratch memory."""

import math
import threading
from typing import NamedTuple

import numpy as np

from mojolearn._core._pool import HugeBuffer

_ALIGNMENT = 64
_SMALLEST_CHUNK = 1 << 21


def aligned_empty(shape):
    """An uninitialised float32 array of the caller's own that starts at a multiple of 64 bytes.

    Vectors of others are stored across two cache lines, which costs a matrix product some percent.
    """
    count = math.prod(shape)
    memory = np.empty(count + _ALIGNMENT // 4, np.float32)
    start = -memory.ctypes.data % _ALIGNMENT // 4
    return memory[start : start + count].reshape(shape)


class Workspace:
    """Scratch arrays from a few large buffers that are kept and reused.

    ``empty`` moves a mark forward through the buffers, ``release`` moves it back; nothing is freed in between. Fresh
    pages cost more than most kernels, so a training step that runs in the pages of the last one is much faster.
    """

    def __init__(self):
        self._chunks = []
        self._chunk = 0
        self._offset = 0

    @property
    def nbytes(self):
        """Bytes held."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def empty(self, shape, dtype=np.float32):
        """An uninitialised C-contiguous array that starts at a multiple of 64 bytes."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize * (shape if isinstance(shape, int) else math.prod(shape))
        padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        while self._chunk < len(self._chunks) and self._offset + padded > self._chunks[self._chunk].nbytes:
            self._chunk += 1
            self._offset = 0
        if self._chunk == len(self._chunks):
            size = max(padded, _SMALLEST_CHUNK, min(self.nbytes, 1 << 28))
            self._chunks.append(np.frombuffer(HugeBuffer(size), dtype=np.uint8))
            self._offset = 0
        start = self._offset
        self._offset = start + padded
        return np.ndarray(shape, dtype, self._chunks[self._chunk], start)

    def zeros(self, shape, dtype=np.float32):
        """Like :meth:`empty`, filled with zeros."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def mark(self):
        """The present position, for :meth:`release`."""
        return self._chunk, self._offset

    def release(self, mark):
        """Give back everything that was allocated after ``mark``."""
        self._chunk, self._offset = mark


class WorkspacePool:
    """Workspaces for calls that may run at the same time in several Python threads."""

    def __init__(self):
        self._free = []
        self._lock = threading.Lock()

    def acquire(self):
        """A workspace for one call; give it back with :meth:`give_back`."""
        with self._lock:
            return self._free.pop() if self._free else Workspace()

    def give_back(self, workspace):
        """Return a workspace; its arrays are free for the next call."""
        workspace.release((0, 0))
        with self._lock:
            self._free.append(workspace)

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()

    def __deepcopy__(self, memo):
        return WorkspacePool()


class Context(NamedTuple):
    """Passed down to blocks and kernels.

    Attributes
    ----------
    threads : int
        Number of threads that a kernel may use.
    mode : int
        0 identical, 1 deterministic, 2 fast.
    workspace : Workspace
        Scratch memory of this call.
    """

    threads: int
    mode: int
    workspace: Workspace
