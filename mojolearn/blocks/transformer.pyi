from collections.abc import Mapping

from mojolearn._typing import FloatArray, NumericMode, Weight
from mojolearn.blocks._block import Block

__all__ = ["TransformerBlock", "TransformerState"]

class TransformerState:
    batch_size: int
    n_kv_heads: int
    head_dim: int
    max_tokens: int
    window: int
    k_cache: FloatArray
    v_cache: FloatArray
    cached_tokens: int
    def __init__(
        self,
        batch_size: int,
        n_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        k_cache: FloatArray,
        v_cache: FloatArray,
        cached_tokens: int = 0,
        window: int = 0,
    ) -> None: ...
    @property
    def capacity(self) -> int: ...
    def keys(self) -> FloatArray: ...
    def values(self) -> FloatArray: ...

class TransformerBlock(Block):
    d_model: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    max_positions: int
    norm_eps: float
    def __init__(
        self,
        weights: Mapping[str, Weight],
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int = 0,
        rope_theta: float = 10000.0,
        max_positions: int = 8192,
        norm_eps: float = 1e-06,
        numeric_mode: NumericMode | None = None,
    ) -> None: ...
    def allocate_state(self, batch_size: int, max_tokens: int) -> TransformerState: ...
