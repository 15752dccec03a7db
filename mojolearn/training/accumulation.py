"""Gradients of micro-batches that the caller split: their sum, and which splits keep the bits."""

import numpy as np

from mojolearn._arrays import as_float32, as_index, describe
from mojolearn._core import layers
from mojolearn._gradients import leaf_size
from mojolearn._numerics import get_num_threads
from mojolearn.errors import NonFiniteError

__all__ = ["accumulate_grads", "accumulation_is_aligned", "is_power_of_two"]


def is_power_of_two(number):
    """Whether a positive integer is a power of two."""
    return number & (number - 1) == 0


def accumulation_is_aligned(tokens, accumulation_steps):
    """Whether equal micro-batches of a step cut the sums over its tokens at the edges of subtrees.

    Then the weight gradients of the micro-batches, added by `accumulate_grads`, have the bits of the unsplit step. (The
    embedding gradient has not: it is one serial sum. `SambaStack` needs none of this, it continues its sums.)

    Parameters
    ----------
    tokens : int
        Tokens of the whole step.
    accumulation_steps : int
        Number of micro-batches.

    Returns
    -------
    bool
        Never raises for numbers that are not positive: they give False.
    """
    tokens = as_index(tokens, "tokens")
    steps = as_index(accumulation_steps, "accumulation_steps")
    if tokens <= 0 or steps <= 0 or tokens % steps or not is_power_of_two(steps):
        return False
    leaf = leaf_size(tokens)
    return leaf == leaf_size(tokens // steps) and tokens % leaf == 0 and (tokens // leaf) % steps == 0


def accumulate_grads(microbatch_grads, tokens=None):
    """Sum of the micro-batches' gradients by adjacent pairs, element by element.

    Parameters
    ----------
    microbatch_grads : list
        One entry per micro-batch, in order: a float32 array, or a list of them (one per parameter).
        Their number must be a power of two.
    tokens : int, optional
        Tokens of the whole step. When given, a split that would not keep the bits of the unsplit step is refused.

    Returns
    -------
    ndarray or list of ndarray
        As one entry of the argument.

    Raises
    ------
    TypeError
        An entry is not float32, or the argument is not a list.
    ValueError
        No entry, a number of entries that is not a power of two, entries that differ in count or shape, a value
        that is not finite, or a split that is not aligned.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn.training import accumulate_grads
    >>> accumulate_grads([np.ones(2, np.float32), np.ones(2, np.float32)], tokens=256)
    array([2., 2.], dtype=float32)
    """
    if not isinstance(microbatch_grads, (list, tuple)):
        raise TypeError(f"microbatch_grads must be a list, got {describe(microbatch_grads)}")
    steps = len(microbatch_grads)
    if steps == 0:
        raise ValueError("microbatch_grads must not be empty")
    if not is_power_of_two(steps):
        raise ValueError(f"microbatch_grads must have a power of two of entries, got {steps}")
    single = not isinstance(microbatch_grads[0], (list, tuple))
    pieces = [_as_arrays(entry, f"microbatch_grads[{i}]", single) for i, entry in enumerate(microbatch_grads)]
    shapes = [array.shape for array in pieces[0]]
    for i, piece in enumerate(pieces):
        if [array.shape for array in piece] != shapes:
            got = [array.shape for array in piece]
            raise ValueError(f"microbatch_grads[{i}] must have the shapes of the first entry, {shapes}, got {got}")
    if tokens is not None and not accumulation_is_aligned(as_index(tokens, "tokens", 1), steps):
        raise ValueError(f"tokens must allow an aligned split in {steps} micro-batches, got {tokens}")
    threads = get_num_threads()
    for i, piece in enumerate(pieces):
        if layers.first_nonfinite(piece, threads) >= 0:
            raise NonFiniteError(f"microbatch_grads[{i}] must be finite, got NaN or infinity in it")
    total = _pair_sum(pieces, threads)
    return total[0] if single else total


def _as_arrays(entry, name, single):
    if single:
        return [as_float32(entry, name)]
    if not isinstance(entry, (list, tuple)) or len(entry) == 0:
        raise ValueError(f"{name} must be a list of arrays like the first entry, got {describe(entry)}")
    return [as_float32(array, f"{name}[{j}]") for j, array in enumerate(entry)]


def _pair_sum(pieces, threads):
    """New arrays; pairs are joined as soon as both halves are there, so few partial sums are held."""
    if len(pieces) == 1:
        copies = [array.copy() for array in pieces[0]]
        layers.scale(copies, 1.0, threads)  # flushes subnormals, as every sum does
        return copies
    half = len(pieces) // 2
    if half == 1:
        left, right = pieces
        total = [np.empty_like(array) for array in left]
    else:
        left, right = _pair_sum(pieces[:half], threads), _pair_sum(pieces[half:], threads)
        total = left
    for a, b, out in zip(left, right, total, strict=True):
        layers.add(a, b, out, threads)
    return total
