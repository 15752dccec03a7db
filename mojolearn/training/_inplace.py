"""The door for arrays that are updated in place: no copy may be made of them."""

import itertools

import numpy as np

from mojolearn._arrays import describe

__all__ = ["as_writable_list"]


def as_writable_list(value, name):
    """One array or a list of them as a list of the caller's own arrays.

    Parameters
    ----------
    value : float32 array, or list or tuple of them
        Contiguous, writable, apart from each other in memory.
    name : str
        The argument's name, for the message.

    Returns
    -------
    list of ndarray

    Raises
    ------
    TypeError
        Not float32 arrays.
    ValueError
        None at all, or one that is empty, strided or read-only, or that shares memory with another.
    """
    if not isinstance(value, (list, tuple)):
        return [_as_writable(value, name)]
    if len(value) == 0:
        raise ValueError(f"{name} must not be empty")
    arrays = [_as_writable(entry, f"{name}[{i}]") for i, entry in enumerate(value)]
    spans = sorted((array.__array_interface__["data"][0], array.nbytes, i) for i, array in enumerate(arrays))
    for (start, nbytes, i), (following, _, j) in itertools.pairwise(spans):
        if start + nbytes > following:
            raise ValueError(f"{name} must not share memory, got {name}[{min(i, j)}] and {name}[{max(i, j)}] that do")
    return arrays


def _as_writable(value, name):
    wanted = f"{name} must be a writable float32 array"
    if value is None or isinstance(value, (str, bytes, list, tuple, dict)):
        raise TypeError(f"{wanted}, got {describe(value)}")
    if not isinstance(value, np.ndarray):
        try:
            value = np.asarray(memoryview(value))
        except TypeError:
            raise TypeError(f"{wanted}, got {describe(value)}") from None
    if value.dtype != np.float32 or not value.dtype.isnative:
        raise TypeError(f"{name} must be native float32, got dtype {value.dtype.str} with shape {value.shape}")
    if value.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {value.shape}")
    if not (value.flags.c_contiguous and value.flags.aligned):
        raise ValueError(f"{name} is updated in place and must be contiguous, got strides {value.strides}")
    if not value.flags.writeable:
        raise ValueError(f"{name} is updated in place and must be writable, got a read-only array")
    return value
