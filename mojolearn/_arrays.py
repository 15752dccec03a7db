"""The one door for arrays, token ids and numbers that users hand in.

Every public function passes its arguments through here before it changes anything, so that a
wrong type is a ``TypeError``, a wrong value a ``ValueError``, and the message always says which
argument, what came and what was wanted.
"""

import math
import operator
import os

import numpy as np

from mojolearn._core import layers

__all__ = [
    "as_choice",
    "as_flag",
    "as_float32",
    "as_ids",
    "as_index",
    "as_lengths",
    "as_path",
    "as_ragged_ids",
    "as_real",
    "describe",
]


def describe(value):
    """Short description of a value for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    try:
        text = repr(value)
    except Exception:  # a broken object, or an int with more digits than Python prints
        return f"a value of type {type(value).__name__}"
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def as_index(value, name, low=None, high=None):
    """`value` as an int, taken with ``operator.index``.

    Parameters
    ----------
    value : object
        Anything with ``__index__`` except booleans.
    name : str
        The argument's name, for the message.
    low, high : int or None
        Inclusive bounds.

    Raises
    ------
    TypeError
        Not an integer: floats, strings, booleans and None are refused.
    ValueError
        Outside the bounds.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {describe(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe(value)}") from None
    _check_range(number, name, low, high)
    return number


def as_real(value, name, low=None, high=None, low_open=False, high_open=False):
    """`value` as a finite float within bounds.

    Parameters
    ----------
    value : object
        A real number: int, float or a NumPy scalar.
    name : str
        The argument's name, for the message.
    low, high : float or None
        Bounds, inclusive unless `low_open` or `high_open`.

    Raises
    ------
    TypeError
        Not a real number (strings, booleans and None included).
    ValueError
        NaN, infinite, or outside the bounds.
    """
    if isinstance(value, (bool, np.bool_, str, bytes, bytearray)) or value is None:
        raise TypeError(f"{name} must be a real number, got {describe(value)}")
    if isinstance(value, (np.ndarray, np.generic)) and (value.ndim or value.dtype.kind not in "iuf"):
        raise TypeError(f"{name} must be a single real number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer too large for a float") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real number, got {describe(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    _check_range(number, name, low, high, low_open, high_open)
    return number


def as_flag(value, name):
    """`value` as a bool; only booleans will do."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool, got {describe(value)}")
    return bool(value)


def as_choice(value, name, choices):
    """`value` if it is one of the strings `choices`; anything else is a ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {describe(value)}")
    return value


def as_path(value, name="path"):
    """`value` (str, bytes or path-like) as a str that names a file to the system."""
    try:
        path = os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{name} must be a str, bytes or path-like object, got {describe(value)}") from None
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be a path that the system can encode, got {describe(path)}") from None
    if "\0" in path:
        raise ValueError(f"{name} must hold no NUL character, got {describe(path)}")
    return path


def _check_range(number, name, low, high, low_open=False, high_open=False):
    if low is not None and (number < low or (low_open and number == low)):
        relation = "greater than" if low_open else "at least"
        raise ValueError(f"{name} must be {relation} {low}, got {_number_text(number)}")
    if high is not None and (number > high or (high_open and number == high)):
        relation = "less than" if high_open else "at most"
        raise ValueError(f"{name} must be {relation} {high}, got {_number_text(number)}")


def _number_text(number):
    huge = isinstance(number, int) and number.bit_length() > 256
    return f"an integer of {number.bit_length()} bits" if huge else str(number)


def _from_buffer(value, name, wanted):
    """`value` as an ndarray if it exposes its memory; lists, None and strings do not."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if value is None or isinstance(value, (str, bytes, bytearray, list, tuple, dict)):
        raise ValueError(f"{name} must be {wanted}, got {describe(value)}")
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError):
        pass
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        return np.asarray(value)
    raise ValueError(f"{name} must be {wanted}, got {describe(value)}")


def _shape_text(shape):
    inner = ", ".join("any" if n is None else str(n) for n in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def as_float32(value, name, shape=None, ndim=None, finite=False):
    """`value` as a C-contiguous native float32 array; not copied when it is one already.

    Parameters
    ----------
    value : array_like with a buffer
        Lists are refused: their element type is a guess.
    name : str
        The argument's name, for the message.
    shape : tuple of int or None, optional
        Wanted shape; None as an entry means any extent.
    ndim : int, optional
        Wanted rank.
    finite : bool, default False
        Refuse NaN and infinity.

    Raises
    ------
    TypeError
        Another dtype than native float32.
    ValueError
        No buffer, wrong rank or shape, empty, or not finite.
    """
    array = _from_buffer(value, name, "a float32 array")
    if array.dtype != np.float32 or not array.dtype.isnative:
        raise TypeError(f"{name} must be native float32, got dtype {array.dtype.str} with shape {array.shape}")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {array.shape}")
    if shape is not None and (
        array.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, array.shape))
    ):
        raise ValueError(f"{name} must have shape {_shape_text(shape)}, got {array.shape}")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    if not array.flags.c_contiguous or not array.flags.aligned:
        array = np.array(array, dtype=np.float32, order="C")
    if finite and not np.isfinite(array).all():
        where = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        position = tuple(int(i) for i in where)
        raise ValueError(f"{name} must be finite, got {array[where]} at {position}")
    return array


def as_ids(value, name, vocab, ndim, ignore=None):
    """`value` as a C-contiguous int32 array of ids in [0, vocab).

    Parameters
    ----------
    value : array of any native integer dtype
        Strided views are fine; lists, floats and booleans are not.
    name : str
        The argument's name, for the message.
    vocab : int
        Number of ids.
    ndim : int or tuple of int
        Wanted rank, or the ranks that are allowed.
    ignore : int, optional
        A value outside [0, vocab) that is allowed as well.

    Raises
    ------
    ValueError
        Whatever is wrong; the message names the first bad id and its index.
    """
    array = _integer_array(value, name, ndim)
    _check_ids(array, name, vocab, ignore)
    return np.ascontiguousarray(array, dtype=np.int32)


def as_ragged_ids(value, name, vocab, lengths):
    """Ids of a batch whose row i is real at positions [0, lengths[i]) only.

    Parameters
    ----------
    value : array of any native integer dtype, shape (B, L)
        What lies in the padding is ignored.
    name : str
        The argument's name, for the message.
    vocab : int
        Number of ids.
    lengths : sequence of int
        One entry per row, each in [1, L].

    Returns
    -------
    ids : ndarray of int32, shape (B, L)
        Zero in the padding.
    lengths : ndarray of int64, shape (B,)
    """
    array = _integer_array(value, name, 2)
    lengths = as_lengths(lengths, *array.shape)
    array = np.where(np.arange(array.shape[1]) < lengths[:, None], array, array.dtype.type(0))
    _check_ids(array, name, vocab, None)
    return np.ascontiguousarray(array, dtype=np.int32), lengths


def _integer_array(value, name, ndim):
    array = _from_buffer(value, name, "an integer array")
    if array.dtype.kind not in "iu" or not array.dtype.isnative:
        raise ValueError(f"{name} must have a native integer dtype, got {array.dtype.str} with shape {array.shape}")
    ranks = (ndim,) if isinstance(ndim, int) else tuple(ndim)
    if array.ndim not in ranks:
        wanted = " or ".join(str(n) for n in ranks)
        raise ValueError(f"{name} must have {wanted} dimensions, got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    return array


def _check_ids(array, name, vocab, ignore):
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype not in (np.int32, np.int64):
        if flat.dtype.kind == "u" and flat.dtype.itemsize == 8:
            flat = np.minimum(flat, np.iinfo(np.int64).max)
        flat = flat.astype(np.int64)
    bad = layers.first_bad_id(flat, vocab, 0 if ignore is None else ignore)
    if bad >= 0:
        where = tuple(int(i) for i in np.unravel_index(bad, array.shape))
        also = f" or {ignore}" if ignore is not None else ""
        raise ValueError(f"{name} must be in [0, {vocab}){also}, got {int(array[where])} at index {where}")


def as_lengths(value, batch, length):
    """`lengths` of a ragged batch as an int64 array of shape (batch,).

    Parameters
    ----------
    value : sequence or array of int
        One entry per row, each in [1, length].
    batch, length : int
        The shape of the batch.

    Raises
    ------
    TypeError
        An entry that is not an integer.
    ValueError
        Not a sequence, the wrong count, or an entry out of range.
    """
    if isinstance(value, (str, bytes, bytearray)) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise ValueError(f"lengths must be a sequence of {batch} integers, got {describe(value)}")
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise ValueError(f"lengths must have 1 dimension, got shape {value.shape}")
    if isinstance(value, dict):
        raise ValueError(f"lengths must be a sequence of {batch} integers, got a dict")
    if len(value) != batch:
        raise ValueError(f"lengths must have one entry per row ({batch}), got {len(value)}")
    return np.array([as_index(value[i], f"lengths[{i}]", 1, length) for i in range(batch)], dtype=np.int64)
