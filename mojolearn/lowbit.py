"""Weights as bfloat16 or int8: half or a quarter of the bytes, on disk and in memory.

`pack` turns the matrices of a weight dictionary into `BF16Weight` or `Int8Weight` objects, `unpack` turns them back. A
model made from packed weights computes exactly what the float32 model with the unpacked weights computes: the codes
are widened, without a rounding, on their way into each product.

* **bfloat16** keeps the upper half of a float32, rounded to nearest, ties to even.
* **int8** keeps, for each row, a power of two and integers from -127 to 127. The power of two is chosen so that the
  row's largest magnitude gets a code between 64 and 127; values that would round to 128 become 127.

Subnormal numbers count as zeros. NaN becomes a quiet NaN in bfloat16 and code 0 in int8.
"""

import numpy as np

from mojolearn._arrays import as_choice, as_float32, describe
from mojolearn._core import linalg
from mojolearn._numerics import get_num_threads

__all__ = [
    "FORMATS",
    "BF16Weight",
    "Int8Weight",
    "format_of",
    "is_packed",
    "materialize",
    "materialize_one",
    "pack",
    "pack_one",
    "unpack",
    "widen_bf16",
]

FORMATS = ("float32", "bfloat16", "int8")


def _codes(value, name, dtype, ndim, shape=None):
    """`value` as a C-contiguous array of codes; not copied when it is one already."""
    wanted = f"a {np.dtype(dtype).name} array with {ndim} dimension{'s' if ndim > 1 else ''}"
    if not isinstance(value, np.ndarray) or value.dtype != dtype or not value.dtype.isnative or value.ndim != ndim:
        raise TypeError(f"{name} must be {wanted}, got {describe(value)}")
    if shape is not None and value.shape != shape:
        raise TypeError(f"{name} must have shape {shape}, got {value.shape}")
    if value.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {value.shape}")
    return np.ascontiguousarray(value)


class BF16Weight:
    """A matrix of bfloat16 values.

    Parameters
    ----------
    bits : ndarray of uint16, shape (n, k)
        Bit patterns: the upper halves of float32 values.

    Attributes
    ----------
    bits : ndarray of uint16, shape (n, k)
    shape : tuple of int
    format : str
        ``"bfloat16"``.
    nbytes : int
        Bytes of the codes.

    Raises
    ------
    TypeError
        Not a two-dimensional uint16 array.
    ValueError
        Empty.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn import lowbit
    >>> weight = lowbit.pack_one(np.array([[0.1, -2.0]], dtype=np.float32), "bfloat16")
    >>> [hex(bits) for bits in weight.bits[0].tolist()]
    ['0x3dcd', '0xc000']
    """

    format = "bfloat16"

    def __init__(self, bits):
        self.bits = _codes(bits, "bits", np.uint16, 2)

    @property
    def shape(self):
        """(n, k)"""
        return self.bits.shape

    @property
    def nbytes(self):
        """Bytes of the codes."""
        return self.bits.nbytes

    def __repr__(self):
        return f"BF16Weight(shape={self.shape})"


class Int8Weight:
    """A matrix of int8 codes with one power of two for each row: the values are ``codes * 2.0**exponents[:, None]``.

    Parameters
    ----------
    codes : ndarray of int8, shape (n, k)
    exponents : ndarray of int32, shape (n,)

    Attributes
    ----------
    codes : ndarray of int8, shape (n, k)
    exponents : ndarray of int32, shape (n,)
    shape : tuple of int
    format : str
        ``"int8"``.
    nbytes : int
        Bytes of codes and exponents.

    Raises
    ------
    TypeError
        Wrong dtypes, ranks, or as many exponents as there are not rows.
    ValueError
        Empty.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn import lowbit
    >>> weight = lowbit.pack_one(np.array([[0.5, -1.0, 0.3]], dtype=np.float32), "int8")
    >>> weight.codes.tolist(), weight.exponents.tolist()
    ([[32, -64, 19]], [-6])
    """

    format = "int8"

    def __init__(self, codes, exponents):
        self.codes = _codes(codes, "codes", np.int8, 2)
        self.exponents = _codes(exponents, "exponents", np.int32, 1, self.codes.shape[:1])

    @property
    def shape(self):
        """(n, k)"""
        return self.codes.shape

    @property
    def nbytes(self):
        """Bytes of codes and exponents."""
        return self.codes.nbytes + self.exponents.nbytes

    def __repr__(self):
        return f"Int8Weight(shape={self.shape})"


def is_packed(value):
    """Whether `value` is a `BF16Weight` or an `Int8Weight`."""
    return isinstance(value, (BF16Weight, Int8Weight))


def format_of(weights):
    """Name of the format of a weight dictionary.

    Parameters
    ----------
    weights : dict
        Names to float32 arrays or packed weights. Float32 tensors may stand beside one packed format.

    Returns
    -------
    str
        ``"float32"``, ``"bfloat16"`` or ``"int8"``.

    Raises
    ------
    TypeError
        Not a dictionary.
    ValueError
        Both packed formats in one dictionary.
    """
    _require_dict(weights, "weights")
    found = {}
    for name, value in weights.items():
        if is_packed(value):
            found.setdefault(value.format, name)
    if len(found) > 1:
        raise ValueError(
            f"weights mix two packed formats: {found['bfloat16']} is bfloat16, {found['int8']} is int8; "
            "pack all tensors alike (float32 tensors may stay beside either)"
        )
    return next(iter(found), "float32")


def pack_one(value, fmt, name="weight"):
    """One matrix in another format.

    Parameters
    ----------
    value : array of float32, shape (n, k)
        Any strides.
    fmt : {"float32", "bfloat16", "int8"}
    name : str, optional
        The tensor's name, for messages.

    Returns
    -------
    ndarray, BF16Weight or Int8Weight

    Raises
    ------
    TypeError
        Not float32, or packed already.
    ValueError
        An unknown format, not two-dimensional, or empty.
    """
    _require_format(fmt)
    if is_packed(value):
        raise TypeError(f"{name} is packed already, as {value.format}; unpack it first")
    values = as_float32(value, name, ndim=2)
    if fmt == "float32":
        return values
    if fmt == "bfloat16":
        bits = np.empty(values.shape, np.uint16)
        linalg.to_bfloat16(values, bits, get_num_threads())
        return BF16Weight(bits)
    codes = np.empty(values.shape, np.int8)
    exponents = np.empty(values.shape[0], np.int32)
    linalg.to_int8(values, codes, exponents, get_num_threads())
    return Int8Weight(codes, exponents)


def pack(weights, fmt):
    """Pack every matrix of a weight dictionary.

    Parameters
    ----------
    weights : dict
        Names to arrays. Two-dimensional arrays are packed, everything else is passed on as it is.
    fmt : {"float32", "bfloat16", "int8"}
        ``"float32"`` packs nothing.

    Returns
    -------
    dict
        A new dictionary.

    Raises
    ------
    TypeError
        Not a dictionary; a matrix that is not float32, or packed already.
    ValueError
        An unknown format; an empty matrix.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn import lowbit
    >>> packed = lowbit.pack({"proj.weight": np.eye(3, dtype=np.float32), "bias": np.zeros(3, np.float32)}, "int8")
    >>> packed["proj.weight"], lowbit.format_of(packed)
    (Int8Weight(shape=(3, 3)), 'int8')
    >>> weights, fmt = lowbit.unpack(packed)
    >>> bool((weights["proj.weight"] == np.eye(3)).all())
    True
    """
    _require_dict(weights, "weights")
    _require_format(fmt)
    if fmt == "float32":
        return dict(weights)
    return {
        name: pack_one(value, fmt, name) if is_packed(value) or getattr(value, "ndim", None) == 2 else value
        for name, value in weights.items()
    }


def materialize_one(value, name="weight"):
    """The float32 array that a packed weight stands for; anything else is returned as it is.

    Parameters
    ----------
    value : BF16Weight, Int8Weight or object
    name : str, optional
        The tensor's name, for messages.

    Returns
    -------
    ndarray of float32, or `value`
    """
    if isinstance(value, BF16Weight):
        return widen_bf16(value.bits)
    if isinstance(value, Int8Weight):
        values = np.empty(value.shape, np.float32)
        linalg.from_int8(value.codes, value.exponents, values, get_num_threads())
        return values
    return value


def unpack(weights, what="weights"):
    """The float32 form of a weight dictionary, and the name of the format it had.

    Parameters
    ----------
    weights : dict
        Names to arrays or packed weights.
    what : str, optional
        What the dictionary is, for messages.

    Returns
    -------
    weights : dict
        A new dictionary; arrays that were not packed are the same objects.
    format : str

    Raises
    ------
    TypeError
        Not a dictionary.
    ValueError
        Both packed formats in one dictionary.
    """
    _require_dict(weights, what)
    fmt = format_of(weights)
    return {name: materialize_one(value, name) for name, value in weights.items()}, fmt


materialize = unpack


def widen_bf16(bits):
    """The float32 values of bfloat16 bit patterns, exactly.

    Parameters
    ----------
    bits : ndarray of uint16
        Any shape.

    Returns
    -------
    ndarray of float32

    Raises
    ------
    TypeError
        Not uint16.
    """
    if not isinstance(bits, np.ndarray) or bits.dtype != np.uint16 or not bits.dtype.isnative:
        raise TypeError(f"bits must be a native uint16 array, got {describe(bits)}")
    values = np.empty(bits.shape, np.float32)
    if bits.size:
        flat = np.ascontiguousarray(bits).reshape(-1, bits.shape[-1] if bits.ndim else 1)
        linalg.from_bfloat16(flat, values.reshape(flat.shape), get_num_threads())
    return values


def _require_dict(weights, name):
    if not isinstance(weights, dict):
        raise TypeError(f"{name} must be a dict of names to arrays, got {describe(weights)}")


def _require_format(fmt):
    as_choice(fmt, "format", FORMATS)
