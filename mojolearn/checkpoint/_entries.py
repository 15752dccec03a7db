"""What every layout says about an array, and what a reader offers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mojolearn.errors import CheckpointError

__all__ = [
    "DTYPES",
    "TRAINING_ARRAYS",
    "ArrayEntry",
    "Bytes",
    "Path",
    "Reader",
    "Registry",
    "State",
    "as_bytes",
    "is_digest",
    "read_array",
]

Path: TypeAlias = str | bytes | os.PathLike[str]
State: TypeAlias = dict[str, Any]
Registry: TypeAlias = list[tuple[str, tuple[int, ...]]]
Bytes: TypeAlias = npt.NDArray[np.uint8]

# The four arrays of a training state, in the order of every layout.
TRAINING_ARRAYS = {"parameters": "<f4", "exp_avg": "<f4", "exp_avg_sq": "<f4", "buf_initialized": "<i4"}

# float32, int32, the upper halves of float32 (bfloat16), int8
DTYPES = ("<f4", "<i4", "<u2", "|i1")


class Reader(Protocol):
    """What the readers of all layouts offer: a file is read once, from front to back.

    Attributes
    ----------
    layout : {"archive", "v2", "json"}
    kind : {"training", "inference"}
    state : dict
        Everything about the model but its arrays, unchecked.
    entries : list of ArrayEntry
        The arrays, in the order in which they can be read.
    extra : dict or None
    """

    layout: str
    kind: str
    state: State
    entries: list[ArrayEntry]
    extra: State | None

    def parts(self, entry: ArrayEntry, target: Bytes | None = None) -> Iterator[Bytes]:
        """Read one array piece by piece, and check it."""

    def digests(self) -> dict[str, str]:
        """Digests of the arrays by name."""

    def stored(self) -> dict[str, int]:
        """Sizes of the arrays in the file by name."""

    def finish(self) -> str | None:
        """Check the rest of the file. Returns its digest, if that was wanted."""


@dataclass(frozen=True)
class ArrayEntry:
    """Name, type and size of one array of a file.

    Attributes
    ----------
    name : str
    dtype : str
        One of `DTYPES`, as NumPy writes it.
    shape : tuple of int
    nbytes : int
    sha256 : str or None
        Digest of the array's bytes, None where the layout states it after the array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize

    @classmethod
    def of(cls, name: str, dtype: str, shape: Iterable[int], sha256: str | None = None) -> ArrayEntry:
        """The entry of an array with these properties."""
        return cls(name, dtype, tuple(shape), math.prod(shape) * np.dtype(dtype).itemsize, sha256)

    @classmethod
    def parse(cls, found: Any, what: str, with_digest: bool) -> ArrayEntry:
        """The entry that a header's JSON object describes.

        Parameters
        ----------
        found : JSON value
        what : str
            Which entry, for the message.
        with_digest : bool
            Whether the layout states digests in its header.

        Raises
        ------
        CheckpointError
            Missing or unknown keys, values of the wrong kind, a size that is not the product of the shape.
        """
        keys = {"name", "dtype", "shape", "nbytes"} | ({"sha256"} if with_digest else set())
        if not isinstance(found, dict) or set(found) != keys:
            raise CheckpointError(f"{what} must be an object with the keys {', '.join(sorted(keys))}")
        name, dtype, shape, nbytes = found["name"], found["dtype"], found["shape"], found["nbytes"]
        if not isinstance(name, str):
            raise CheckpointError(f"{what} has no name")
        if dtype not in DTYPES:
            raise CheckpointError(f"{what} ({name}) has dtype {dtype!r}, not one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > 2 or not all(_is_size(size) for size in shape):
            raise CheckpointError(f"{what} ({name}) has shape {shape!r}, not a list of one or two sizes")
        entry = cls.of(name, dtype, shape, found["sha256"] if with_digest else None)
        if type(nbytes) is not int or nbytes != entry.nbytes:
            raise CheckpointError(f"{what} ({name}) has nbytes {nbytes!r}, but its shape makes {entry.nbytes}")
        if with_digest and not is_digest(entry.sha256):
            raise CheckpointError(f"{what} ({name}) has sha256 {entry.sha256!r}, not 64 hexadecimal digits")
        return entry


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_digest(value: Any) -> bool:
    """Whether a value is a SHA-256 digest in lower-case hexadecimal digits."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def as_bytes(array: np.ndarray) -> Bytes:
    """The bytes of a C-contiguous array, as a flat view."""
    return array.reshape(-1).view(np.uint8)


def read_array(reader: Reader, entry: ArrayEntry) -> np.ndarray:
    """Read one whole array into memory of its own.

    Parameters
    ----------
    reader : reader of a layout
    entry : ArrayEntry

    Returns
    -------
    ndarray
    """
    array = np.empty(entry.shape, entry.dtype)
    for _ in reader.parts(entry, as_bytes(array)):
        pass
    return array
