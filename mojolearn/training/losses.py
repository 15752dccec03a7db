"""Cross-entropy and the clipping of gradients."""

import numpy as np

from mojolearn._arrays import as_flag, as_float32, as_ids, as_index, as_real, describe
from mojolearn._core import layers
from mojolearn._numerics import default_environment, get_num_threads
from mojolearn.errors import NonFiniteError
from mojolearn.training._inplace import as_writable_list

__all__ = ["as_max_norm", "clip_grad_norm_", "cross_entropy", "measure_clip"]

_REDUCTIONS = ("mean", "sum", "none")
_MAX_ITEMS = 2**24  # the largest count up to which every integer is a float32
_INT32 = np.iinfo(np.int32)


@default_environment
def cross_entropy(
    logits,
    targets,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    num_items=None,
    return_grad=False,
):
    """Cross-entropy of rows of logits against target ids.

    Parameters
    ----------
    logits : float32 array, shape (N, V)
    targets : integer array or list, shape (N,)
        In [0, V), or `ignore_index`.
    ignore_index : int, default -100
        Rows with this target have loss 0 and gradient 0.
    reduction : {"mean", "sum", "none"}
        "mean" divides by the number of rows that count. "sum" divides by `num_items` when that is given and not 0.
        "none" returns the rows' losses.
    label_smoothing : float, default 0
        Share of the target that is spread evenly over the vocabulary, in [0, 1).
    num_items : int, optional
        At most 2**24; only "sum" looks at it.
    return_grad : bool, default False
        Return the gradient with respect to the logits too.

    Returns
    -------
    float, or ndarray of float32 with shape (N,) for "none"
    grad : ndarray of float32, shape (N, V)
        With `return_grad`.

    Raises
    ------
    TypeError
        `logits` is not float32, or a number is of the wrong type.
    ValueError
        A wrong shape, target or number, logits that are not finite, or "mean" with every row ignored.
    NotImplementedError
        `return_grad` with "none".

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn.training import cross_entropy
    >>> round(cross_entropy(np.zeros((3, 4), np.float32), [0, 3, -100]), 6)
    1.386294
    """
    if not isinstance(reduction, str):
        raise TypeError(f"reduction must be one of {_REDUCTIONS}, got {describe(reduction)}")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}")
    if as_flag(return_grad, "return_grad") and reduction == "none":
        raise NotImplementedError("return_grad needs a reduction, 'mean' or 'sum'")
    logits = as_float32(logits, "logits", ndim=2)
    rows, vocab = logits.shape
    ignore_index = as_index(ignore_index, "ignore_index", int(_INT32.min), int(_INT32.max))
    if isinstance(targets, (list, tuple)):
        targets = np.asarray(targets)
    targets = as_ids(targets, "targets", vocab, 1, ignore=ignore_index)
    if len(targets) != rows:
        raise ValueError(f"targets must have one entry per row of logits ({rows}), got {len(targets)}")
    smoothing = as_real(label_smoothing, "label_smoothing", 0.0, 1.0, high_open=True)
    if np.float32(smoothing) >= 1:
        raise ValueError(f"label_smoothing must be less than 1 as float32, got {smoothing}")
    if num_items is not None:
        num_items = as_index(num_items, "num_items", 0, _MAX_ITEMS)
    divisor = _divisor(targets, ignore_index, reduction, num_items)

    losses = np.empty(rows, np.float32)
    grad = np.empty_like(logits) if return_grad else None
    if not layers.loss_rows(logits, targets, ignore_index, smoothing, divisor, losses, grad, get_num_threads()):
        raise NonFiniteError("logits must be finite, got NaN or infinity in them")
    if reduction == "none":
        return losses
    total = layers.FoldSum(rows)
    total.add(losses)
    loss = total.result(divisor)
    return (loss, grad) if return_grad else loss


def _divisor(targets, ignore_index, reduction, num_items):
    if reduction == "mean":
        count = int(np.count_nonzero(targets != ignore_index))
        if count == 0:
            raise ValueError(f"targets must hold a target that is not ignored for the mean, got only {ignore_index}")
        return float(count)
    if reduction == "sum" and num_items:
        return float(num_items)
    return 1.0


def as_max_norm(value, name="max_norm"):
    """`max_norm` as a float that is positive and finite as float32 too."""
    number = as_real(value, name, 0.0, low_open=True)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(number)
    if not 0 < rounded < np.inf:
        raise ValueError(f"{name} must be positive and within the range of float32, got {number}")
    return number


def measure_clip(arrays, max_norm, threads):
    """Total L2 norm of float32 arrays and the factor that clips it to `max_norm`.

    Raises
    ------
    NonFiniteError
        The total is not finite: an array is not, or its square overflows.
    """
    total = layers.gradient_norm(arrays, threads)
    if not np.isfinite(total):
        raise NonFiniteError(f"the total norm of the gradients must be finite, got {total}")
    return total, layers.clip_coefficient(max_norm, total)


@default_environment
def clip_grad_norm_(grads, max_norm, norm_type=2.0, error_if_nonfinite=True):
    """Scale gradients in place so that their total L2 norm is at most `max_norm`.

    Parameters
    ----------
    grads : float32 array or list of them
        Written to, contiguous. Multiplied by ``min(1, max_norm / (total + 1e-6))``, which flushes subnormals even
        when the factor is 1.
    max_norm : float
        Greater than 0.
    norm_type : float, default 2
        Only 2.
    error_if_nonfinite : bool, default True
        Only True.

    Returns
    -------
    float
        The total norm before.

    Raises
    ------
    TypeError
        A gradient is not a float32 array.
    ValueError
        No gradient, `max_norm` out of range, or a total that is not finite. The gradients are then as they were.
    NotImplementedError
        Another `norm_type`, or `error_if_nonfinite` False.
    """
    if as_real(norm_type, "norm_type") != 2.0:
        raise NotImplementedError(f"norm_type must be 2, got {norm_type}")
    if not as_flag(error_if_nonfinite, "error_if_nonfinite"):
        raise NotImplementedError("error_if_nonfinite must be True: gradients that are not finite are refused")
    max_norm = as_max_norm(max_norm)
    arrays = as_writable_list(grads, "grads")
    threads = get_num_threads()
    total, coefficient = measure_clip(arrays, max_norm, threads)
    layers.scale(arrays, coefficient, threads)
    return total
