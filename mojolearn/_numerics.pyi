from collections.abc import Callable
from typing import Any, TypeVar

from mojolearn._typing import NumericMode

__all__ = [
    "DETERMINISTIC_PROFILES",
    "MAX_THREADS",
    "MODE_NAMES",
    "default_environment",
    "get_num_threads",
    "get_numeric_mode",
    "mode_index",
    "mode_name",
    "numeric_mode",
    "set_num_threads",
    "set_numeric_mode",
    "show_config",
]

DETERMINISTIC_PROFILES: tuple[str, ...]
MAX_THREADS: int
MODE_NAMES: tuple[str, ...]

_Function = TypeVar("_Function", bound=Callable[..., Any])

def default_environment(function: _Function) -> _Function: ...
def mode_index(mode: NumericMode | None, name: str = "numeric_mode") -> int: ...
def mode_name(index: int) -> str: ...
def set_numeric_mode(mode: NumericMode) -> None: ...
def get_numeric_mode() -> NumericMode: ...
def numeric_mode() -> NumericMode: ...
def set_num_threads(n: int) -> None: ...
def get_num_threads() -> int: ...
def show_config(quiet: bool = False) -> dict[str, Any]: ...
