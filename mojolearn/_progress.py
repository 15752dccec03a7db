"""How far the reading of a file has come, for those who show it.

The readers of all formats report to the observer of the context that they are made in, so that no function between a
progress bar and a file has to know of bars.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["observed_reading", "reading_observer"]

Observer = Callable[[int], object]

_observer: ContextVar[Observer | None] = ContextVar("reading_observer", default=None)


@contextlib.contextmanager
def observed_reading(observer: Observer) -> Iterator[None]:
    """Within this, `observer` is called with the number of bytes of a file that have been read so far."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def reading_observer() -> Observer:
    """What a reader is to call; does nothing where nobody observes."""
    return _observer.get() or _ignore


def _ignore(done: int) -> None:
    pass
