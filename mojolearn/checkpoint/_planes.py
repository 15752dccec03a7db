"""Byte planes: the first bytes of all elements, then all second bytes, and so on.

A float's last byte is its sign and most of its exponent, which takes few values in a trained model; the bytes of the
mantissa are noise. Apart, the one compresses to a third and the others cost no time; mixed, nothing compresses.
"""

import numpy as np

__all__ = ["join_planes", "split_planes"]

# Elements joined at once: small enough that the passes over them stay in the first level of cache.
_BLOCK = 1 << 13

_UNSIGNED = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def split_planes(data, itemsize):
    """Split little-endian elements into byte planes.

    Parameters
    ----------
    data : ndarray of uint8, shape (n * itemsize,)
    itemsize : int
        Bytes of an element.

    Returns
    -------
    ndarray of uint8, shape (itemsize, n), C-contiguous
        Row k holds byte k of every element, least significant first.
    """
    return np.ascontiguousarray(data.reshape(-1, itemsize).T)


def join_planes(planes, out):
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
    for start in range(0, len(words), _BLOCK):
        part = slice(start, start + _BLOCK)
        word = words[part]
        word[:] = planes[-1][part]
        for plane in reversed(planes[:-1]):
            np.left_shift(word, 8, out=word)
            np.bitwise_or(word, plane[part], out=word)
