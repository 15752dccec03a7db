from collections.abc import Callable, Sequence
from typing import Any

from mojolearn._typing import PathLike, WeightFormat
from mojolearn.inference import SambaInference
from mojolearn.stack import SambaStack

__all__ = ["export"]

def export(
    source: PathLike | SambaStack | SambaInference,
    out: PathLike,
    *,
    format: WeightFormat = "int8",
    keep: Sequence[str] = (),
    progress: Callable[[int], Any] | None = None,
) -> dict[str, Any]: ...
