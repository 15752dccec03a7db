from collections.abc import Sequence
from typing import Any

from mojolearn._typing import Arrays

__all__ = ["accumulate_grads", "accumulation_is_aligned", "is_power_of_two"]

def is_power_of_two(number: int) -> bool: ...
def accumulation_is_aligned(tokens: int, accumulation_steps: int) -> bool: ...
def accumulate_grads(microbatch_grads: Sequence[Arrays], tokens: int | None = None) -> Any: ...
