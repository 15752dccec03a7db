"""JSON text that can be trusted: canonical on the way out, strict and bounded on the way in."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

import numpy as np

from mojolearn.errors import CheckpointError

__all__ = ["MAX_DEPTH", "canonical", "check_plain", "nesting", "parse", "structure"]

Number = TypeVar("Number", int, float)

# Deeper than any header, far below the depth at which a parser's recursion could fail.
MAX_DEPTH = 64

# CPython refuses longer integers in decimal by default; converting them takes quadratic time.
_MAX_DIGITS = 4300

_STRUCTURE = b"[]{},"
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))


def canonical(value: Any) -> bytes:
    """The one text of a JSON value: keys sorted, no spaces, ASCII, no NaN.

    Parameters
    ----------
    value : JSON value
        Dicts, lists, strings, numbers, booleans and None.

    Returns
    -------
    bytes
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def check_plain(value: Any, name: str, depth: int = 0) -> None:
    """Refuse what JSON would change or could not hold.

    Parameters
    ----------
    value : object
    name : str
        What the value is, for the message.

    Raises
    ------
    TypeError
        Another type than dict, list, str, int, float, bool or None; a key that is not a string.
    ValueError
        NaN or infinity, or nesting deeper than `MAX_DEPTH`.
    """
    if depth >= MAX_DEPTH:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if kind is str:
        # Half a surrogate pair has no UTF-8 form, and two halves would come back as one character.
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{name} holds text with a lone surrogate, {value!r}")
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"keys of {name} must be strings, got {key!r}")
            check_plain(key, name, depth + 1)
            check_plain(item, name, depth + 1)
    elif kind is list:
        for item in value:
            check_plain(item, name, depth + 1)
    elif kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{name} must hold finite numbers, got {value}")
    elif kind not in (int, bool) and value is not None:
        raise TypeError(f"{name} must hold dicts, lists, strings, numbers, booleans and None, got {kind.__name__}")


def structure(text: bytes) -> bytes:
    """The brackets and commas of a JSON text that stand outside of strings.

    Parameters
    ----------
    text : bytes

    Returns
    -------
    bytes
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Outside of strings are the pieces before an odd number of quotation marks.
    return b"".join(piece.translate(None, _NOT_STRUCTURE) for piece in text.split(b'"')[::2])


def nesting(marks: bytes) -> int:
    """How deep the brackets of a `structure` nest."""
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")] = 1
    steps[list(b"]}")] = -1
    return int(np.cumsum(steps[np.frombuffer(marks, np.uint8)], dtype=np.int32).max(initial=0))


def parse(text: bytes, what: str, max_marks: int, exact_numbers: bool = False) -> Any:
    """Parse a JSON text of unknown origin.

    Parameters
    ----------
    text : bytes
    what : str
        What the text is, for the message.
    max_marks : int
        Most brackets and commas outside of strings: what bounds the memory that the values take.
    exact_numbers : bool, default False
        Refuse numbers in another form than `canonical` writes.

    Returns
    -------
    JSON value

    Raises
    ------
    CheckpointError
        Not JSON, not ASCII, nested too deep, too many values, a key twice in one object, a number that is
        not finite or has thousands of digits.
    """
    if not text.isascii():
        raise CheckpointError(f"{what} is not ASCII text")
    marks = structure(text)
    if len(marks) > max_marks:
        raise CheckpointError(f"{what} holds {len(marks)} brackets and commas, more than {max_marks}")
    depth = nesting(marks)
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{what} is nested {depth} levels deep, more than {MAX_DEPTH}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{what} has the key {twice!r} twice in one object")
        return found

    def refuse(name: str) -> NoReturn:
        raise CheckpointError(f"{what} holds {name}, which is not JSON")

    def finite(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise CheckpointError(f"{what} holds the number {digits}, which is too large")
        return exact(value, digits)

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise CheckpointError(f"{what} holds an integer of {len(digits)} digits")
        return exact(int(digits), digits)

    def exact(value: Number, digits: str) -> Number:
        if exact_numbers and repr(value) != digits:
            raise CheckpointError(f"{what} holds the number {digits}, which should be written {value!r}")
        return value

    # Given bytes, json.loads would guess another encoding where there are zeros.
    characters = text.decode("ascii")
    del text
    try:
        return json.loads(
            characters, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite, parse_int=integer
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None
