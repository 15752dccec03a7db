"""Names for the types in signatures. They have no meaning at run time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mojolearn.lowbit import BF16Weight, Int8Weight

FloatArray: TypeAlias = NDArray[np.float32]
IdArray: TypeAlias = NDArray[np.integer[Any]]
PathLike: TypeAlias = str | os.PathLike[str]
NumericMode: TypeAlias = Literal["identical", "deterministic", "fast"]
Arrays: TypeAlias = FloatArray | Sequence[FloatArray]
Shape: TypeAlias = int | Sequence[int]
WeightFormat: TypeAlias = Literal["float32", "bfloat16", "int8"]
Weight: TypeAlias = Union[FloatArray, "BF16Weight", "Int8Weight"]
