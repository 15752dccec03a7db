from collections.abc import Iterable, Sequence
from typing import Any

from mojolearn._typing import FloatArray, IdArray, NumericMode
from mojolearn.blocks import Mamba3State, TransformerState
from mojolearn.config import SambaConfig

__all__ = ["IGNORE_INDEX", "MAX_POSITIONS", "SambaModel", "SambaState"]

IGNORE_INDEX: int
MAX_POSITIONS: int

class SambaState:
    batch_size: int
    max_tokens: int
    tokens: int
    layers: list[Mamba3State | TransformerState]
    def __init__(
        self, batch_size: int, max_tokens: int, layers: Iterable[Mamba3State | TransformerState], tokens: int = 0
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def copy(self) -> SambaState: ...
    def select(self, rows: Iterable[int]) -> SambaState: ...
    def to_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> SambaState: ...

class SambaModel:
    config: SambaConfig
    @property
    def numeric_mode(self) -> NumericMode: ...
    def forward(
        self,
        inputs: IdArray,
        state: SambaState | None = None,
        *,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> FloatArray: ...
    def allocate_state(self, batch_size: int, max_tokens: int) -> SambaState: ...
    def step(self, inputs: IdArray, state: SambaState) -> FloatArray: ...
    def hidden_states(self, inputs: IdArray, *, lengths: Sequence[int] | None = None) -> list[FloatArray]: ...
    def token_logprobs(self, inputs: IdArray, *, lengths: Sequence[int] | None = None) -> FloatArray: ...
