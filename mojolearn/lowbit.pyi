from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mojolearn._typing import FloatArray, Weight, WeightFormat

__all__ = [
    "FORMATS",
    "BF16Weight",
    "Int8Weight",
    "format_of",
    "is_packed",
    "materialize",
    "materialize_one",
    "pack",
    "pack_one",
    "unpack",
    "widen_bf16",
]

FORMATS: tuple[str, ...]

class BF16Weight:
    format: str
    bits: NDArray[np.uint16]
    def __init__(self, bits: NDArray[np.uint16]) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...

class Int8Weight:
    format: str
    codes: NDArray[np.int8]
    exponents: NDArray[np.int32]
    def __init__(self, codes: NDArray[np.int8], exponents: NDArray[np.int32]) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...

def is_packed(value: object) -> bool: ...
def format_of(weights: Mapping[str, Weight]) -> WeightFormat: ...
def pack_one(value: FloatArray, fmt: WeightFormat, name: str = "weight") -> Any: ...
def pack(weights: Mapping[str, FloatArray], fmt: WeightFormat) -> dict[str, Weight]: ...
def materialize_one(value: Weight, name: str = "weight") -> FloatArray: ...
def unpack(weights: Mapping[str, Weight], what: str = "weights") -> tuple[dict[str, FloatArray], WeightFormat]: ...
def materialize(weights: Mapping[str, Weight], what: str = "weights") -> tuple[dict[str, FloatArray], WeightFormat]: ...
def widen_bf16(bits: NDArray[np.uint16]) -> FloatArray: ...
