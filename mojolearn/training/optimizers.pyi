from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mojolearn._typing import Arrays, FloatArray, NumericMode
from mojolearn.training.schedules import LRSchedule

__all__ = ["SGD", "Adam", "AdamW", "as_betas", "as_float32_real"]

def as_float32_real(value: object, name: str, low: float | None = None) -> float: ...
def as_betas(value: object, names: tuple[str, str] = ("betas[0]", "betas[1]")) -> tuple[float, float]: ...

class _Optimizer:
    lr: float
    weight_decay: float
    lr_schedule: LRSchedule | None
    accumulation_steps: int
    maximize: bool
    numeric_mode: NumericMode
    params: list[FloatArray]
    t: int
    lr_: float | None
    total_norm_: float | None
    clip_coef_: float | None
    exp_avg: FloatArray
    exp_avg_sq: FloatArray
    buf_initialized: NDArray[np.int32]
    def __init__(
        self,
        params: Arrays,
        lr: float,
        weight_decay: float,
        lr_schedule: LRSchedule | None,
        accumulation_steps: int,
        maximize: bool,
        numeric_mode: NumericMode | None,
    ) -> None: ...
    def step(self, grads: Arrays, max_norm: float | None = None) -> float | None: ...
    def step_accumulated(self, microbatch_grads: Sequence[Arrays], tokens: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

class SGD(_Optimizer):
    momentum: float
    dampening: float
    nesterov: bool
    def __init__(
        self,
        params: Arrays,
        lr: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        lr_schedule: LRSchedule | None = None,
        accumulation_steps: int = 1,
        maximize: bool = False,
        *,
        numeric_mode: NumericMode | None = None,
    ) -> None: ...

class Adam(_Optimizer):
    betas: tuple[float, float]
    eps: float
    def __init__(
        self,
        params: Arrays,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        lr_schedule: LRSchedule | None = None,
        accumulation_steps: int = 1,
        maximize: bool = False,
        *,
        numeric_mode: NumericMode | None = None,
    ) -> None: ...

class AdamW(Adam):
    def __init__(
        self,
        params: Arrays,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        lr_schedule: LRSchedule | None = None,
        accumulation_steps: int = 1,
        maximize: bool = False,
        *,
        numeric_mode: NumericMode | None = None,
    ) -> None: ...
