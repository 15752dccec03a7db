"""Decisions that all ranks take alike: go on together, or fail together with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mojolearn._arrays import describe
from mojolearn.distributed._comm import Comm
from mojolearn.errors import RankMismatchError

__all__ = ["agree", "on_root", "require_agreement"]


def agree(
    comm: Comm,
    problem: Exception | None = None,
    value: Any = None,
    combine: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Bring values of all ranks together, or let all ranks raise the problem that one of them has.

    Parameters
    ----------
    comm : Comm
    problem : Exception or None
        What keeps this rank from going on.
    value : object
        This rank's part.
    combine : callable or None
        Makes the result from the list of all values, on rank 0; an error of it is raised on all ranks.

    Returns
    -------
    object
        The result, on all ranks.

    Notes
    -----
    The errors raised have an attribute ``on_all_ranks``, so that one of them can speak for all.
    """
    reports = comm.gather((None if problem is None else (type(problem), str(problem)), value))
    answer: tuple[Any, Any] | None = None
    if reports is not None:
        failures = [(rank, *failure) for rank, (failure, _) in enumerate(reports) if failure is not None]
        if failures:
            # Rank 0 speaks for all, so only another one has to be named.
            rank, kind, text = failures[0]
            answer = (kind, f"rank {rank}: {text}" if rank else text), None
        else:
            try:
                answer = None, None if combine is None else combine([report[1] for report in reports])
            except Exception as error:
                answer = (type(error), str(error)), None
    failure, result = comm.broadcast(answer)
    if failure is not None:
        raise _rebuilt(*failure)
    return result


def _rebuilt(kind: type, text: str) -> BaseException:
    try:
        error: BaseException = kind(text)
    except TypeError:  # an error that is not made from a text alone
        error = RuntimeError(text)
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error


def on_root(comm: Comm, function: Callable[[], Any]) -> Any:
    """Call a function on rank 0; its result, or its error, is that of all ranks."""
    answer: tuple[Any, Any] | None = None
    if comm.rank == 0:
        try:
            answer = None, function()
        except Exception as error:
            answer = (type(error), str(error)), None
    failure, result = comm.broadcast(answer)
    if failure is not None:
        raise _rebuilt(*failure)
    return result


def require_agreement(comm: Comm, facts: dict[str, Any]) -> None:
    """Compare facts of all ranks.

    Parameters
    ----------
    comm : Comm
    facts : dict
        Name and value of what has to be the same everywhere.

    Raises
    ------
    RankMismatchError
        On all ranks; the message names a rank that differs from rank 0, and the first fact in which it does.
    """

    def compare(all_facts: list[dict[str, Any]]) -> None:
        first = all_facts[0]
        for rank, other in enumerate(all_facts):
            for name in {**first, **other}:
                if name not in first or name not in other or first[name] != other[name]:
                    raise RankMismatchError(
                        f"all ranks must have the same {name}, got {describe(other.get(name))} on rank {rank} "
                        f"and {describe(first.get(name))} on rank 0"
                    )

    agree(comm, None, facts, compare)
