"""Token files to reproducible, resumable batches.

A :class:`TokenDataset` joins files end to end into one long row of tokens, cuts off its last part for validation and
deals out windows of ``seq_len`` tokens in an order that depends on the seed and the epoch alone. Files are
memory-mapped, and the order is computed window by window, so memory does not grow with the data.
"""

from __future__ import annotations

import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mojolearn._arrays import as_choice, as_index, as_real, describe

__all__ = ["TokenDataset", "find_files", "shuffled_index"]

STATE_SCHEMA = "mojolearn.token-dataset.v1"
SPLITS = ("train", "valid")
BIN_DTYPES = ("uint8", "uint16", "uint32")
TEXT_SAMPLE = 1 << 16  # bytes at the head of a file that are searched for a NUL, which no text holds
OPEN_FILES = 512  # files that stay mapped: well below the 1,024 descriptors and 65,530 maps that Linux grants
FILE_ORDER_KEY = 0x6D6F6A6F  # the split must not move with the seed, so the order of files has a key of its own

MASK64 = (1 << 64) - 1


# ---------------------------------------------------------------------------------------------------------------------
# A shuffled order without a table


def _mix64(x: Any) -> Any:
    """The finalizer of SplitMix64 on uint64: every bit of the result depends on every bit of the argument."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled_index(positions: Any, size: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Where a seeded shuffle of ``range(size)`` puts each of `positions`.

    The shuffle is a six-round Feistel network over the smallest even number of bits that holds ``size``, walked until
    the value falls below ``size``. It needs no table, and integer arithmetic gives the same order on every machine.

    Parameters
    ----------
    positions : array_like of int
        Places in the shuffled order, each in ``[0, size)``.
    size : int
        Number of shuffled items.
    seed, epoch : int
        Each pair gives an order of its own.

    Returns
    -------
    numpy.ndarray of int64
        Distinct positions give distinct values; all of ``range(size)`` gives a permutation.

    Examples
    --------
    >>> sorted(shuffled_index(range(5), 5, seed=1).tolist())
    [0, 1, 2, 3, 4]
    """
    values = np.array(positions, dtype=np.uint64)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = _mix64(
        np.array(
            [
                (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + turn * 0x8CB92BA72F3D8DD7 + 1) & MASK64
                for turn in range(6)
            ],
            dtype=np.uint64,
        )
    )

    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & low
        for key in keys:
            left, right = right, left ^ (_mix64(right ^ key) & low)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def find_files(paths: Any) -> tuple[list[Path], list[Path]]:
    """The files that files, folders and glob patterns stand for.

    A folder stands for every file below it in the order of the names, without hidden files and folders and
    ``__pycache__``. A pattern may hold ``**``. A file that is named twice counts once.

    Parameters
    ----------
    paths : str, path-like or sequence of them

    Returns
    -------
    named, found : lists of pathlib.Path
        Files that were named themselves (or by a pattern), and those found in folders.

    Raises
    ------
    FileNotFoundError
        A path that does not exist, a pattern that matches nothing.
    ValueError
        No path at all, or a folder without files.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not isinstance(paths, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise TypeError(f"paths must be a path or a sequence of paths, got {describe(paths)}")
    if not paths:
        raise ValueError("paths must name a file, a folder or a pattern, got an empty sequence")

    named: dict[Path, None] = {}
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name)
        if not os.fspath(name):
            raise ValueError("paths must name files, folders or patterns, got an empty path")
        if path.is_dir():
            below = _files_below(path)
            if not below:
                raise ValueError(f"paths: a folder with files is wanted, got the empty folder {path}")
            found.update(dict.fromkeys(below))
        elif path.is_file():
            named[path] = None
        elif path.exists():
            raise ValueError(f"paths: a file or folder is wanted, got {path}, which is a pipe or a device")
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            matches = [match for match in matches if match.is_file()]
            if not matches:
                raise FileNotFoundError(f"paths: {path} is neither a file nor a folder, and no file matches it")
            named.update(dict.fromkeys(matches))
    return list(named), [path for path in found if path not in named]


def _files_below(folder: Path) -> list[Path]:
    files = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        files += [Path(where, name) for name in names if not name.startswith(".")]
    return sorted((path for path in files if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def _first_nul(path: Path) -> int:
    """Offset of the first NUL byte in the head of a file, or -1: a file with one is no text."""
    with open(path, "rb") as file:
        return file.read(TEXT_SAMPLE).find(0)


class _TokenFile:
    """One file of the row of tokens: what is needed to map it again at any time."""

    __slots__ = ("dtype", "offset", "path", "size")

    def __init__(self, path: Path, dtype: np.dtype, offset: int, size: int):
        self.path, self.dtype, self.offset, self.size = path, dtype, offset, size

    @classmethod
    def bytes(cls, path: Path) -> _TokenFile:
        return cls(path, np.dtype(np.uint8), 0, path.stat().st_size)

    @classmethod
    def bin(cls, path: Path, dtype: np.dtype) -> _TokenFile:
        nbytes = path.stat().st_size
        if nbytes % dtype.itemsize:
            raise ValueError(f"paths: {path} must hold {dtype.itemsize}-byte tokens ({dtype}), got {nbytes} bytes")
        return cls(path, dtype, 0, nbytes // dtype.itemsize)

    @classmethod
    def npy(cls, path: Path) -> _TokenFile:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"paths: {path} cannot be read as a .npy file: {error}") from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"paths: {path} holds {array.dtype} of shape {array.shape}; token files hold integers of one dimension"
            )
        return cls(path, array.dtype, array.offset if array.size else 0, array.size)

    def map(self) -> np.ndarray:
        if not self.size:  # nothing can be mapped of an empty file
            return np.empty(0, dtype=self.dtype)
        try:
            return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.size,))
        except (OSError, ValueError) as error:
            raise OSError(f"{self.path} is no longer what it was when the data set was opened: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------


class TokenDataset:
    """Batches of ``(inputs, targets)`` from text or token files.

    The files are joined end to end, in an order that depends on their names alone, and the last `valid_fraction` of
    the tokens is set apart for validation: the two splits share no token, whatever the seed. A split is cut into
    windows of `seq_len` inputs, where the targets are the inputs moved by one; every token but the first of the split
    and fewer than `seq_len` at its end is a target once an epoch.

    ``split="train"`` deals the windows out for ever, in another order each epoch; ``split="valid"`` deals them out
    once, in order, and the last batch may have fewer rows.

    Parameters
    ----------
    paths : str, path-like or sequence of them
        Files, folders or glob patterns. ``.npy`` files hold token ids (one dimension, any integer type); ``.bin`` files
        hold them without a header and need `dtype`; everything else is read as bytes, each byte one token below 256.
        Binary files are refused when named and passed over in a folder (see `skipped`).
    batch_size : int
        Rows of a batch, B.
    seq_len : int
        Tokens of a row, L.
    seed : int, default 0
        Seed of the order of windows, in ``[0, 2**64)``.
    split : {"train", "valid"}, default "train"
    valid_fraction : float, default 0.1
        Part of the tokens for validation, in ``[0, 1)``.
    dtype : {"uint8", "uint16", "uint32"} or None, default None
        Type of the little-endian tokens in ``.bin`` files.

    Attributes
    ----------
    files : list of pathlib.Path
        The files in the order in which they are joined.
    skipped : list of pathlib.Path
        Binary files that a folder held.
    n_tokens : int
        Tokens of the split.
    n_windows : int
        Windows of the split, that is of an epoch.
    epoch, window : int
        Position: windows of this epoch that were dealt out already.

    Raises
    ------
    FileNotFoundError
        A path that does not exist, a pattern that matches nothing.
    ValueError
        An empty folder, a binary file given as text, a file of the wrong kind or with fewer tokens than a window, or
        fewer windows than rows of a training batch.

    Examples
    --------
    >>> from mojolearn.data import TokenDataset
    >>> data = TokenDataset("corpus/", batch_size=8, seq_len=256)      # doctest: +SKIP
    >>> inputs, targets = next(data)                                   # doctest: +SKIP
    """

    def __init__(
        self,
        paths: Any,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        split: str = "train",
        valid_fraction: float = 0.1,
        *,
        dtype: str | None = None,
    ):
        self.batch_size = as_index(batch_size, "batch_size", low=1)
        self.seq_len = as_index(seq_len, "seq_len", low=1)
        self.seed = as_index(seed, "seed", low=0, high=MASK64)
        self.split = as_choice(split, "split", SPLITS)
        self.valid_fraction = as_real(valid_fraction, "valid_fraction", low=0.0, high=1.0, high_open=True)
        if dtype is not None:
            as_choice(dtype, "dtype", BIN_DTYPES)

        token_files, self.skipped = _open_files(paths, dtype)
        order = shuffled_index(range(len(token_files)), len(token_files), FILE_ORDER_KEY)
        self._files = [token_files[i] for i in order]
        self.files = [file.path for file in self._files]
        self._ends = np.cumsum([file.size for file in self._files], dtype=np.int64).tolist()
        self._map = lru_cache(maxsize=OPEN_FILES)(lambda i: self._files[i].map())
        self._digest: str | None = None

        total: int = self._ends[-1]
        cut = total - int(total * self.valid_fraction)
        self._start, stop = (0, cut) if split == "train" else (cut, total)
        self.n_tokens = stop - self._start
        self.n_windows = max(0, (self.n_tokens - 1) // self.seq_len)
        self._check_size(total)
        self.epoch = 0
        self.window = 0

    def _check_size(self, total: int) -> None:
        wanted = self.seq_len + 1
        where = str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files"
        if total < wanted:
            raise ValueError(f"paths: {where}: {total} tokens are fewer than a window of seq_len + 1 = {wanted}")
        if self.n_windows < 1:
            raise ValueError(
                f"paths: {where}: the {self.split} split has {self.n_tokens} of {total} tokens "
                f"(valid_fraction {self.valid_fraction:g}), fewer than a window of seq_len + 1 = {wanted}"
            )
        if self.split == "train" and self.n_windows < self.batch_size:
            raise ValueError(
                f"batch_size must be at most {self.n_windows}, the windows of {self.seq_len} tokens in the train split "
                f"of {where}, got {self.batch_size}"
            )

    def __repr__(self) -> str:
        return (
            f"TokenDataset({len(self.files)} files, split={self.split!r}, {self.n_tokens:,} tokens, "
            f"{self.n_windows:,} windows of {self.seq_len}, batch_size={self.batch_size}, seed={self.seed})"
        )

    def __len__(self) -> int:
        """Batches of an epoch, a last smaller one counted too."""
        return int(-(-self.n_windows // self.batch_size))

    # -- tokens --------------------------------------------------------------------------------------------------------

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)`` of the split as int32, across the borders of files.

        Parameters
        ----------
        start, stop : int
            ``0 <= start <= stop <= n_tokens``.
        """
        stop = as_index(stop, "stop", 0, self.n_tokens)
        start = as_index(start, "start", 0, stop)
        out = np.empty(stop - start, dtype=np.int32)
        first, done = start + self._start, 0
        i = bisect_right(self._ends, first)
        while done < out.size:
            begin = first + done - (self._ends[i] - self._files[i].size)
            part = self._map(i)[begin : begin + out.size - done]
            if part.dtype.itemsize >= 4 and part.size and not 0 <= int(part.min()) <= int(part.max()) < 1 << 31:
                raise ValueError(f"{self.files[i]}: a token id outside [0, 2**31)")
            out[done : done + part.size] = part
            done += part.size
            i += 1
        return out

    def _windows(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self.tokens(index * self.seq_len, (index + 1) * self.seq_len + 1)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    # -- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The data set itself; a validation split starts from its beginning."""
        if self.split == "valid":
            self.window = 0
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        """The next ``(inputs, targets)``, int32 of shape (B, L) each."""
        if self.split == "valid":
            if self.window >= self.n_windows:
                raise StopIteration
            indices = range(self.window, min(self.window + self.batch_size, self.n_windows))
            batch = self._windows(indices)
            self.window += len(indices)
            return batch

        batch, self.epoch, self.window = self._upcoming()
        return batch

    def _upcoming(self) -> tuple[tuple[np.ndarray, np.ndarray], int, int]:
        """The next training batch, and the position after it."""
        # A batch may take the last windows of one epoch and the first of the next, so that none is left out.
        epoch, window = self.epoch, self.window
        indices: list[int] = []
        while len(indices) < self.batch_size:
            if window == self.n_windows:
                epoch, window = epoch + 1, 0
            upto = min(window + self.batch_size - len(indices), self.n_windows)
            indices += shuffled_index(range(window, upto), self.n_windows, self.seed, epoch).tolist()
            window = upto
        return self._windows(indices), epoch, window

    def peek(self) -> tuple[np.ndarray, np.ndarray]:
        """The training batch that comes next; the position stays."""
        return self._upcoming()[0]

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The same as ``next(dataset)``."""
        return next(self)

    # -- position ------------------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """SHA-256 over type, length and content of the files in their order; their places do not enter it."""
        if self._digest is None:
            whole = hashlib.sha256()
            for file in self._files:
                whole.update(f"{file.dtype.newbyteorder('<').str} {file.size}\n".encode())
                tokens = file.map()
                for at in range(0, file.size, 1 << 20):
                    part = tokens[at : at + (1 << 20)]
                    whole.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")))
            self._digest = whole.hexdigest()
        return self._digest

    @property
    def max_id(self) -> int:
        """The greatest token id of all files, both splits; a vocabulary must be larger. Reads all token files."""
        largest = 0
        for file in self._files:
            if file.dtype == np.uint8 or not file.size:
                continue
            tokens = file.map()
            largest = max(largest, *(int(tokens[at : at + (1 << 20)].max()) for at in range(0, file.size, 1 << 20)))
        return max(largest, 255) if any(file.dtype == np.uint8 for file in self._files) else largest

    def state_dict(self) -> dict[str, Any]:
        """The position and what it depends on, as plain JSON values."""
        return {
            "schema": STATE_SCHEMA,
            "digest": self.digest,
            "split": self.split,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "valid_fraction": self.valid_fraction,
            "epoch": self.epoch,
            "window": self.window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken: the next batch is the one that came next there.

        Raises
        ------
        ValueError
            The state was made with other data or settings, or is no such state. The position stays as it was.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict made by state_dict, got {describe(state)}")
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise ValueError(f"state must be a dict made by state_dict, got one without {', '.join(missing)}")
        for name in ("schema", "split", "seed", "seq_len", "valid_fraction", "digest"):
            if type(state[name]) is not type(own[name]) or state[name] != own[name]:
                what = "the data differ: " if name == "digest" else ""
                raise ValueError(f"state: {what}{name} must be {own[name]!r}, got {describe(state[name])}")
        epoch = as_index(state["epoch"], "state['epoch']", low=0, high=MASK64)
        window = as_index(state["window"], "state['window']", low=0, high=self.n_windows)
        self.epoch, self.window = epoch, window


def _open_files(paths: Any, dtype: str | None) -> tuple[list[_TokenFile], list[Path]]:
    """All files of a data set, and the binary ones of folders that were passed over."""
    named, found = find_files(paths)
    token_files, skipped = [], []
    for path in named + found:
        if path.suffix == ".npy":
            token_files.append(_TokenFile.npy(path))
        elif path.suffix == ".bin":
            if dtype is None:
                raise ValueError(f"dtype must be one of {', '.join(BIN_DTYPES)} to read {path}, got None")
            token_files.append(_TokenFile.bin(path, np.dtype(dtype).newbyteorder("<")))
        elif (nul := _first_nul(path)) < 0:
            token_files.append(_TokenFile.bytes(path))
        elif path in named:
            raise ValueError(f"paths: text is wanted, got the binary file {path} (its byte {nul} is NUL)")
        else:
            skipped.append(path)
    if not token_files:
        raise ValueError(f"paths: text is wanted, got {len(skipped)} binary files ({skipped[0]} for one)")
    if len({file.path.suffix in (".npy", ".bin") for file in token_files}) > 1:
        raise ValueError("paths must be all token files (.npy, .bin) or all text files, got both")
    return token_files, skipped
