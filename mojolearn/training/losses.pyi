from collections.abc import Sequence
from typing import Literal, overload

from mojolearn._typing import Arrays, FloatArray, IdArray

__all__ = ["as_max_norm", "clip_grad_norm_", "cross_entropy", "measure_clip"]

@overload
def cross_entropy(
    logits: FloatArray,
    targets: IdArray,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    num_items: int | None = None,
    return_grad: Literal[False] = False,
) -> float: ...
@overload
def cross_entropy(
    logits: FloatArray,
    targets: IdArray,
    ignore_index: int = -100,
    *,
    reduction: Literal["none"],
    label_smoothing: float = 0.0,
    num_items: int | None = None,
    return_grad: Literal[False] = False,
) -> FloatArray: ...
@overload
def cross_entropy(
    logits: FloatArray,
    targets: IdArray,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    num_items: int | None = None,
    *,
    return_grad: Literal[True],
) -> tuple[float, FloatArray]: ...
def clip_grad_norm_(
    grads: Arrays, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
) -> float: ...
def as_max_norm(value: object, name: str = "max_norm") -> float: ...
def measure_clip(arrays: Sequence[FloatArray], max_norm: float, threads: int) -> tuple[float, float]: ...
