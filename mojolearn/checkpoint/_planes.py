"""Byte planes: the first bytes of all elements, then all second bytes, and so on.

A float's last byte is its sign and most of its exponent, which takes few values in a trained model; the bytes of the
mantissa are noise. Apart, the one compresses to a third and the others cost no time; mixed, nothing compresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mojolearn.checkpoint._entries import Bytes

__all__ = ["join_planes", "split_planes"]

_UNSIGNED = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def split_planes(data: Bytes, planes: Bytes) -> None:
    """Split little-endian elements into byte planes.

    Parameters
    ----------
    data : ndarray of uint8, shape (n * itemsize,)
    planes : ndarray of uint8, shape (itemsize, n)
        Written: row k holds byte k of every element, least significant first.
    """
    planes[:] = data.reshape(-1, len(planes)).T


def join_planes(planes: Sequence[Bytes], out: Bytes) -> None:
    """Inverse of `split_planes`.

    Parameters
    ----------
    planes : sequence of ndarray of uint8, shape (n,)
        One per byte of an element, least significant first.
    out : ndarray of uint8, shape (n * len(planes),)
        Written.
    """
    if len(planes) == 1:
        out[:] = planes[0]
        return
    words = out.view(_UNSIGNED[len(planes)])
    words[:] = planes[-1]
    for plane in reversed(planes[:-1]):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
