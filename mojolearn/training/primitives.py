"""The model's layers as functions: embedding, RMS norm and linear map, each with its backward pass.

They refuse NaN and infinity at the door and compute with the kernels of the model, so the results have its bits.
"""

import numpy as np

from mojolearn._arrays import as_float32, as_ids, as_index, as_real
from mojolearn._core import layers, linalg
from mojolearn._numerics import default_environment, get_num_threads, mode_index
from mojolearn.errors import NonFiniteError

__all__ = [
    "embedding_backward",
    "embedding_forward",
    "linear_backward",
    "linear_forward",
    "rms_norm_backward",
    "rms_norm_forward",
]

_MAX_IDS = 2**31
_MAX_EPS = float(np.finfo(np.float32).max)


def _finite(value, name, ndim=None):
    array = as_float32(value, name, ndim=ndim)
    if not layers.all_finite(array, get_num_threads()):
        raise NonFiniteError(f"{name} must be finite, got NaN or infinity in it")
    return array


def _rows(value, name, width, of):
    """`value` (..., width) as (rows, width)."""
    array = _finite(value, name)
    if array.ndim < 1 or array.shape[-1] != width:
        raise ValueError(f"{name} must have shape (..., {width}) to fit {of}, got {array.shape}")
    return array, array.reshape(-1, width)


def _flat_ids(ids, vocab):
    if isinstance(ids, (list, tuple)):
        ids = np.asarray(ids)
    array = as_ids(ids, "ids", vocab, tuple(range(1, 9)))
    return array, array.reshape(-1)


def embedding_forward(weight, ids):
    """Rows of `weight` at `ids`.

    Parameters
    ----------
    weight : float32 array, shape (V, D)
    ids : integer array, shape (...)
        In [0, V).

    Returns
    -------
    ndarray of float32, shape (..., D)
        Subnormals are flushed to zero.

    Raises
    ------
    TypeError
        `weight` is not float32.
    ValueError
        A wrong shape or id, or a weight that is not finite.
    """
    weight = _finite(weight, "weight", ndim=2)
    ids, flat = _flat_ids(ids, weight.shape[0])
    out = np.empty((flat.size, weight.shape[1]), np.float32)
    layers.embedding_forward(weight, flat, out, get_num_threads())
    return out.reshape(*ids.shape, weight.shape[1])


def embedding_backward(dy, ids, vocab):
    """Gradient of `embedding_forward` with respect to the weight.

    Parameters
    ----------
    dy : float32 array, shape (..., D)
    ids : integer array, shape (...)
    vocab : int
        Rows of the weight.

    Returns
    -------
    ndarray of float32, shape (vocab, D)
        Row i is the sum of dy where ids is i, added in the order of the positions.
    """
    vocab = as_index(vocab, "vocab", 1, _MAX_IDS)
    ids, flat = _flat_ids(ids, vocab)
    dy = _finite(dy, "dy")
    # (ids.size, D) is accepted beside ids.shape + (D,)
    if dy.ndim < 2 or (dy.shape[:-1] != ids.shape and dy.shape[:-1] != flat.shape):
        raise ValueError(f"dy must have shape {(*ids.shape, 'D')} for ids of shape {ids.shape}, got {dy.shape}")
    dweight = np.zeros((vocab, dy.shape[-1]), np.float32)
    layers.embedding_backward(dy.reshape(flat.size, -1), flat, dweight, get_num_threads())
    return dweight


@default_environment
def rms_norm_forward(x, weight, eps):
    """``weight * x / sqrt(mean(x**2) + eps)`` along the last axis.

    Parameters
    ----------
    x : float32 array, shape (..., D)
    weight : float32 array, shape (D,)
    eps : float
        At least 0, rounded to float32. With 0 a row of zeros gives NaN.

    Returns
    -------
    ndarray of float32, the shape of `x`
    """
    weight = _finite(weight, "weight", ndim=1)
    x, rows = _rows(x, "x", weight.size, "weight")
    eps = as_real(eps, "eps", 0.0, _MAX_EPS)
    y = np.empty_like(rows)
    layers.rms_norm_forward(rows, weight, eps, y, None, False, get_num_threads())
    return y.reshape(x.shape)


@default_environment
def rms_norm_backward(dy, x, weight, eps):
    """Gradients of `rms_norm_forward`.

    Parameters
    ----------
    dy, x : float32 arrays, shape (..., D)
    weight : float32 array, shape (D,)
    eps : float

    Returns
    -------
    dx : ndarray of float32, the shape of `x`
    dweight : ndarray of float32, shape (D,)
    """
    weight = _finite(weight, "weight", ndim=1)
    x, rows = _rows(x, "x", weight.size, "weight")
    dy, dy_rows = _rows(dy, "dy", weight.size, "weight")
    if dy.shape != x.shape:
        raise ValueError(f"dy must have the shape of x, {x.shape}, got {dy.shape}")
    eps = as_real(eps, "eps", 0.0, _MAX_EPS)
    threads = get_num_threads()
    dx, terms, dweight = np.empty_like(rows), np.empty_like(rows), np.empty_like(weight)
    layers.rms_norm_backward(dy_rows, rows, weight, None, eps, None, dx, terms, threads)
    linalg.colsum(terms, dweight, threads, mode_index(None))
    return dx.reshape(x.shape), dweight


def linear_forward(a, weight):
    """``a @ weight.T``.

    Parameters
    ----------
    a : float32 array, shape (..., K)
    weight : float32 array, shape (N, K)

    Returns
    -------
    ndarray of float32, shape (..., N)
    """
    weight = _finite(weight, "weight", ndim=2)
    a, rows = _rows(a, "a", weight.shape[1], f"weight of shape {weight.shape}")
    out = np.empty((len(rows), weight.shape[0]), np.float32)
    linalg.gemm_nt(rows, weight, out, get_num_threads(), mode_index(None))
    return out.reshape(*a.shape[:-1], weight.shape[0])


def linear_backward(dc, a, weight):
    """Gradients of `linear_forward`.

    Parameters
    ----------
    dc : float32 array, shape (..., N)
    a : float32 array, shape (..., K)
    weight : float32 array, shape (N, K)

    Returns
    -------
    da : ndarray of float32, the shape of `a`
    dweight : ndarray of float32, shape (N, K)
    """
    weight = _finite(weight, "weight", ndim=2)
    a, rows = _rows(a, "a", weight.shape[1], f"weight of shape {weight.shape}")
    dc, dc_rows = _rows(dc, "dc", weight.shape[0], f"weight of shape {weight.shape}")
    if dc.shape[:-1] != a.shape[:-1]:
        raise ValueError(f"dc must have the leading shape of a, {a.shape[:-1]}, got {dc.shape[:-1]}")
    threads, mode = get_num_threads(), mode_index(None)
    da, dweight = np.empty_like(rows), np.empty_like(weight)
    linalg.gemm_nn(dc_rows, weight, da, threads, mode)
    linalg.gemm_tn(dc_rows, rows, dweight, threads, mode)
    return da.reshape(a.shape), dweight
