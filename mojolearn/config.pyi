from collections.abc import Sequence
from typing import Any

__all__ = ["LAYER_KINDS", "SambaConfig"]

LAYER_KINDS: tuple[str, ...]

class SambaConfig:
    vocab: int
    d_model: int
    layers: tuple[str, ...]
    n_heads: int | None
    n_kv_heads: int | None
    head_dim: int | None
    intermediate: int | None
    tie_embeddings: bool
    norm_eps: float
    dropout: float
    def __init__(
        self,
        vocab: int,
        d_model: int,
        layers: Sequence[str],
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        intermediate: int | None = None,
        tie_embeddings: bool = True,
        norm_eps: float = 1e-05,
        dropout: float = 0.0,
    ) -> None: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...
    def to_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SambaConfig: ...
    def block_shapes(self, kind: str) -> list[tuple[str, tuple[int, ...]]]: ...
    def registry(self) -> list[tuple[str, tuple[int, ...]]]: ...
