from collections.abc import Mapping

from mojolearn._typing import FloatArray, NumericMode, Weight
from mojolearn.blocks._block import Block

__all__ = ["Mamba3Block", "Mamba3State"]

class Mamba3State:
    theta: FloatArray
    h: FloatArray
    buffer_qrot: FloatArray
    buffer_krot: FloatArray
    buffer_v: FloatArray
    buffer_dt: FloatArray
    buffer_sig: FloatArray
    buffer_adt: FloatArray
    pending_k: FloatArray
    pending_v: FloatArray
    buffered_tokens: int
    pending: bool
    def __init__(
        self,
        theta: FloatArray,
        h: FloatArray,
        buffer_qrot: FloatArray,
        buffer_krot: FloatArray,
        buffer_v: FloatArray,
        buffer_dt: FloatArray,
        buffer_sig: FloatArray,
        buffer_adt: FloatArray,
        pending_k: FloatArray,
        pending_v: FloatArray,
        buffered_tokens: int = 0,
        pending: bool = False,
    ) -> None: ...
    def set_input_states(self, theta: FloatArray, h: FloatArray, k: FloatArray, v: FloatArray) -> None: ...

class Mamba3Block(Block):
    h_last_: FloatArray | None
    k_last_: FloatArray | None
    v_last_: FloatArray | None
    theta_last_: FloatArray | None
    def __init__(self, weights: Mapping[str, Weight], *, numeric_mode: NumericMode | None = None) -> None: ...
    @property
    def d_model(self) -> int: ...
    def allocate_state(self, batch_size: int) -> Mamba3State: ...
