from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mojolearn._typing import FloatArray, IdArray, NumericMode, PathLike
from mojolearn.config import SambaConfig
from mojolearn.distributed import Comm
from mojolearn.model import SambaModel, SambaState
from mojolearn.training import AdamW, Generator
from mojolearn.training.schedules import LRSchedule

__all__ = ["SambaStack"]

STATE_SCHEMA: str
STATE_PROFILE: str

class SambaStack(SambaModel):
    names: list[str]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    n_total: int
    flat: FloatArray
    optimizer: AdamW
    generator: Generator
    max_norm: float | None
    accumulation_steps: int
    extra: dict[str, Any] | None
    last_: dict[str, Any] | None
    def __init__(
        self,
        config: SambaConfig,
        weights: Mapping[str, FloatArray] | None = None,
        generator: Generator | None = None,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        lr_schedule: LRSchedule | None = None,
        max_norm: float | None = None,
        accumulation_steps: int = 1,
        numeric_mode: NumericMode | None = None,
        comm: Comm | None = None,
        n_shards: int = 1,
    ) -> None: ...
    def check_ranks(self) -> None: ...
    def __call__(
        self,
        inputs: IdArray,
        state: SambaState | None = None,
        *,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> FloatArray: ...
    def parameters(self) -> dict[str, FloatArray]: ...
    def load_weights(self, weights: Mapping[str, FloatArray]) -> None: ...
    def loss(self, inputs: IdArray, targets: IdArray) -> float: ...
    def loss_and_grads(
        self,
        inputs: IdArray,
        targets: IdArray,
        num_items: int | None = None,
        dropout_stream: int | None = None,
        token_offset: int = 0,
    ) -> tuple[float, list[FloatArray]]: ...
    def train_step(self, inputs: IdArray, targets: IdArray) -> dict[str, Any]: ...
    def state_dict(self, *, _copy_arrays: bool = True) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> SambaStack: ...
    def save_checkpoint(
        self,
        path: PathLike,
        *,
        compression: Literal["zstd"] | None = "zstd",
        level: int | None = None,
        extra: dict[str, Any] | None = None,
    ) -> str: ...
    @classmethod
    def from_checkpoint(
        cls, path: PathLike, numeric_mode: NumericMode | None = None, comm: Comm | None = None
    ) -> SambaStack: ...
    @classmethod
    def from_safetensors(cls, path: PathLike, config: SambaConfig | None = None, **options: Any) -> SambaStack: ...
