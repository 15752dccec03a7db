from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mojolearn._typing import FloatArray

__all__ = [
    "as_choice",
    "as_flag",
    "as_float32",
    "as_ids",
    "as_index",
    "as_lengths",
    "as_path",
    "as_ragged_ids",
    "as_real",
    "describe",
]

def describe(value: object) -> str: ...
def as_index(value: object, name: str, low: int | None = None, high: int | None = None) -> int: ...
def as_real(
    value: object,
    name: str,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
    high_open: bool = False,
) -> float: ...
def as_path(value: object, name: str = "path") -> str: ...
def as_flag(value: object, name: str) -> bool: ...
def as_choice(value: object, name: str, choices: Sequence[str]) -> str: ...
def as_float32(
    value: object,
    name: str,
    shape: tuple[int | None, ...] | None = None,
    ndim: int | None = None,
    finite: bool = False,
) -> FloatArray: ...
def as_ids(
    value: object, name: str, vocab: int, ndim: int | tuple[int, ...], ignore: int | None = None
) -> NDArray[np.int32]: ...
def as_lengths(value: object, batch: int, length: int) -> NDArray[np.int64]: ...
def as_ragged_ids(
    value: object, name: str, vocab: int, lengths: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
