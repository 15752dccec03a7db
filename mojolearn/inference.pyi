from collections.abc import Mapping, Sequence
from typing import NoReturn

from mojolearn._typing import FloatArray, IdArray, NumericMode, PathLike, Weight, WeightFormat
from mojolearn.config import SambaConfig
from mojolearn.model import SambaModel, SambaState

__all__ = ["SambaInference"]

class SambaInference(SambaModel):
    weight_format: WeightFormat
    def __init__(
        self, config: SambaConfig, weights: Mapping[str, Weight], *, numeric_mode: NumericMode | None = None
    ) -> None: ...
    @classmethod
    def from_checkpoint(cls, path: PathLike, *, numeric_mode: NumericMode | None = None) -> SambaInference: ...
    @classmethod
    def from_safetensors(
        cls, path: PathLike, config: SambaConfig | None = None, *, numeric_mode: NumericMode | None = None
    ) -> SambaInference: ...
    def __call__(
        self,
        inputs: IdArray,
        state: SambaState | None = None,
        *,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> FloatArray: ...
    def logits(
        self,
        inputs: IdArray,
        state: SambaState | None = None,
        *,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> FloatArray: ...
    def parameters(self) -> dict[str, FloatArray]: ...
    def loss(self, inputs: object, targets: object) -> NoReturn: ...
    def train_step(self, inputs: object, targets: object) -> NoReturn: ...
