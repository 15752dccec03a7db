"""Sums over tokens that continue across micro-batches.

A weight gradient is a sum over all T tokens of a step in a fixed shape (docs/numerics, training 0.2): leaves of
``leaf_size(T)`` consecutive tokens, each one serial chain, joined by a tree that a binary counter walks. When the
step is done in pieces, each piece adds its tokens to that same shape: it continues the leaf that the boundary cut,
adds whole leaves as the largest aligned subtrees, and leaves its last leaf open. Hence any split gives the bits of
the unsplit step. The counter's digits are gradient buffers: at most log2(T / leaf) + 2 of them, and exactly one
when the step comes in one piece.

`TokenFold` decides which rows go where; `GradientSink` owns the buffers and calls the kernels.
"""

from typing import NamedTuple

import numpy as np

from mojolearn._core import layers, linalg

__all__ = ["GradientSink", "TokenFold", "leaf_size"]

_LEAF = 128
_MAX_LEAVES = 1024


def leaf_size(count):
    """Leaf of the profile's sums over `count` terms: 128, or what keeps the leaves at 1024."""
    if count <= _LEAF:
        return max(count, 1)
    if -(-count // _LEAF) <= _MAX_LEAVES:
        return _LEAF
    return -(-count // _MAX_LEAVES)


class Part(NamedTuple):
    """Rows [start, stop) of a piece go to the buffer of counter digit `depth`."""

    start: int
    stop: int
    depth: int
    seed: bool  # the rows continue the chains that already lie in the buffer
    merges: int  # number of carries afterwards: each joins digit depth into depth - 1


class TokenFold:
    """The binary counter over the leaves of a sum that arrives in pieces.

    Parameters
    ----------
    total : int
        Number of terms of the whole sum.
    """

    def __init__(self, total):
        self.total = total
        self.leaf = leaf_size(total)
        self._position = 0
        self._counts = []  # leaves in each closed digit, largest first

    def advance(self, rows):
        """Parts that the next `rows` terms fall into, in order.

        Returns
        -------
        list of Part
        """
        if rows == self.total:
            return [Part(0, rows, 0, False, 0)]
        parts = []
        first, last = self._position, self._position + rows
        at = first
        while at < last:
            depth = len(self._counts)
            filled = at % self.leaf
            if filled or last - at < self.leaf:
                stop = min(at - filled + self.leaf, last)
                leaves = 1
            else:
                index = at // self.leaf
                leaves = _aligned_block(index, last // self.leaf - index)
                stop = at + leaves * self.leaf
            closed = stop % self.leaf == 0 or stop == self.total
            merges = self._push(leaves) if closed else 0
            parts.append(Part(at - first, stop - first, depth, filled > 0, merges))
            at = stop
        self._position = last
        if last == self.total and self._counts:
            # What is left over joins from the newest to the oldest.
            parts[-1] = parts[-1]._replace(merges=parts[-1].merges + len(self._counts) - 1)
            self._counts = []
        return parts

    def _push(self, leaves):
        self._counts.append(leaves)
        merges = 0
        while len(self._counts) > 1 and self._counts[-1] == self._counts[-2]:
            self._counts.pop()
            self._counts[-1] *= 2
            merges += 1
        return merges


def _aligned_block(index, available):
    """Largest power of two that divides `index` and does not exceed `available`."""
    size = 1
    while size * 2 <= available and index % (size * 2) == 0:
        size *= 2
    return size


class GradientSink:
    """Receives the operands of weight gradients and leaves the finished gradients in one flat buffer.

    Parameters
    ----------
    flat : ndarray of float32
        The flat gradient buffer.
    names, shapes, offsets : sequences
        The parameters' places in it.

    Notes
    -----
    A step calls `begin`, then for every piece `piece` and any number of `linear` and `colsum` calls. Every tensor must
    see every token exactly once. The output head may arrive in smaller pieces than the blocks: it has a
    counter of its own, moved by `head_piece`.
    """

    def __init__(self, flat, names, shapes, offsets):
        self.flat = flat
        self._digits = {}
        for name, shape, offset in zip(names, shapes, offsets):
            size = int(np.prod(shape))
            self._digits[name] = [flat[offset : offset + size].reshape(shape)]
        self._threads = self._mode = 0
        self._fold = self._head_fold = None
        self._parts = self._head_parts = ()

    def view(self, name):
        """The finished gradient of one tensor."""
        return self._digits[name][0]

    @property
    def extra_bytes(self):
        """Bytes of counter buffers beside the flat gradient."""
        return sum(digit.nbytes for digits in self._digits.values() for digit in digits[1:])

    def begin(self, total, threads, mode):
        """Start the sums of a step of `total` tokens."""
        self._fold, self._head_fold = TokenFold(total), TokenFold(total)
        self._threads, self._mode = threads, mode

    def piece(self, rows):
        """The next calls carry the next `rows` tokens."""
        self._parts = self._fold.advance(rows)

    def head_piece(self, rows):
        """The next call of `head` carries the next `rows` tokens."""
        self._head_parts = self._head_fold.advance(rows)

    def linear(self, name, dc, a):
        """Add a piece of ``dW = dc^T a``; `dc` (T, n), `a` (T, k)."""
        self._linear(self._digits[name], dc, a, self._parts, self._fold.leaf)

    def head(self, name, dc, a):
        """The same as `linear` for the output head's own pieces."""
        self._linear(self._digits[name], dc, a, self._head_parts, self._head_fold.leaf)

    def colsum(self, name, rows):
        """Add a piece of a vector's gradient: the sum of `rows` (T, size) over tokens."""
        digits = self._digits[name]
        for part in self._parts:
            out = self._digit(digits, part.depth).reshape(-1)
            linalg.colsum(
                rows[part.start : part.stop], out, self._threads, self._mode, leaf=self._fold.leaf, seed=part.seed
            )
            self._carry(digits, part)

    def _linear(self, digits, dc, a, parts, leaf):
        for part in parts:
            out = self._digit(digits, part.depth)
            linalg.gemm_tn(
                dc[part.start : part.stop],
                a[part.start : part.stop],
                out,
                self._threads,
                self._mode,
                leaf=leaf,
                seed=part.seed,
            )
            self._carry(digits, part)

    def _digit(self, digits, depth):
        while len(digits) <= depth:
            digits.append(np.empty_like(digits[0]))
        return digits[depth]

    def _carry(self, digits, part):
        for depth in range(part.depth, part.depth - part.merges, -1):
            older, newer = digits[depth - 1].reshape(-1), digits[depth].reshape(-1)
            linalg.merge(older, newer, older, self._threads)


class EmbeddingGradient:
    """The embedding's gradient: one serial chain per row and column over all positions of a step.

    The chains of the rows that occur are kept apart from the head's gradient, which has the tree's shape, and added to
    it once at the end, so a tied matrix gets the same bits for every split of the step.

    Parameters
    ----------
    ids : ndarray of int32
        All ids of the step.
    d_model : int
    """

    def __init__(self, ids, d_model):
        self._rows, local = np.unique(ids, return_inverse=True)
        self._local = np.ascontiguousarray(local.reshape(-1), dtype=np.int32)
        self._chains = np.zeros((len(self._rows), d_model), np.float32)
        self._position = 0

    def add(self, dx, threads):
        """Continue the chains with the next rows of the embedding output's gradient, `dx` (T, D)."""
        stop = self._position + len(dx)
        layers.embedding_backward(dx, self._local[self._position : stop], self._chains, threads)
        self._position = stop

    def write(self, dweight):
        """Set `dweight` (V, D) to the chains, +0.0 where no id occurred."""
        dweight[...] = 0.0
        dweight[self._rows] = self._chains

    def add_to(self, dweight, threads):
        """Add the head's gradient that lies in `dweight` (V, D) to the chains, in place."""
        vocab, d_model = dweight.shape
        step = max(1, (1 << 18) // d_model)  # 1 MiB of dense rows at a time
        block = np.empty((min(step, vocab), d_model), np.float32)
        for first in range(0, vocab, step):
            last = min(first + step, vocab)
            dense = block[: last - first]
            dense[...] = 0.0
            low, high = np.searchsorted(self._rows, (first, last))
            dense[self._rows[low:high] - first] = self._chains[low:high]
            target = dweight[first:last]
            layers.add(dense.reshape(-1), target.reshape(-1), target.reshape(-1), threads)
