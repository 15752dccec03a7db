from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from mojolearn._typing import PathLike, Weight, WeightFormat
from mojolearn.config import SambaConfig

__all__ = ["SafetensorsReader", "load_safetensors", "save_safetensors"]

class SafetensorsReader:
    config: SambaConfig
    format: WeightFormat
    extra: dict[str, Any] | None
    def __init__(self, path: PathLike, config: SambaConfig | None = None) -> None: ...
    def __enter__(self) -> SafetensorsReader: ...
    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None: ...
    def close(self) -> None: ...
    def __iter__(self) -> Iterator[tuple[str, Weight]]: ...

def load_safetensors(path: PathLike, config: SambaConfig | None = None) -> tuple[SambaConfig, dict[str, Weight]]: ...
def save_safetensors(
    path: PathLike,
    config: SambaConfig,
    tensors: Iterable[tuple[str, Weight]],
    format: WeightFormat = "float32",
    *,
    packed: Iterable[str] = (),
    extra: dict[str, Any] | None = None,
) -> str: ...
