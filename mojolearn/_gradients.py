"""Sums over tokens that continue across micro-batches and divide among ranks.

A weight gradient is a sum over all T tokens of a step in a fixed shape (docs/numerics, training 0.2): leaves of
``leaf_size(T)`` consecutive tokens, each one serial chain, joined by a tree that a binary counter walks. When the
step is done in pieces, each piece adds its tokens to that same shape: it continues the leaf that the boundary cut,
adds whole leaves as the largest aligned subtrees, and leaves its last leaf open. Hence any split gives the bits of
the unsplit step. The counter's digits are gradient buffers: at most log2(T / leaf) + 2 of them, and exactly one
when the step comes in one piece.

A process that has only a range of the leaves ends with several digits: the roots of the largest aligned subtrees of
its range, which another process joins with those of the other ranges (`mojolearn.distributed`).

`SubtreeCounter` is the counter, `TokenFold` decides which rows go where; `GradientSink` owns the buffers and calls the
kernels.
"""

import math
from typing import NamedTuple

import numpy as np

from mojolearn._core import layers, linalg

__all__ = [
    "EmbeddingGradient",
    "GradientSink",
    "SubtreeCounter",
    "TokenFold",
    "leaf_size",
    "mean_loss",
    "shard_rows",
    "step_loss",
]

_LEAF = 128
_MAX_LEAVES = 1024


def leaf_size(count):
    """Leaf of the profile's sums over `count` terms: 128, or what keeps the leaves at 1024."""
    if count <= _LEAF:
        return max(count, 1)
    if -(-count // _LEAF) <= _MAX_LEAVES:
        return _LEAF
    return -(-count // _MAX_LEAVES)


def shard_rows(rows, n_shards, shard):
    """The range of batch rows that a shard has."""
    return shard * rows // n_shards, (shard + 1) * rows // n_shards


class SubtreeCounter:
    """Which subtrees of the pair tree join, as they become complete from left to right.

    Parameters
    ----------
    leaves : int
        Number of leaves of the whole tree. Level by level, neighbours join in pairs and an odd last node moves up.

    Attributes
    ----------
    blocks : list of (int, int)
        The subtrees that wait, each a range of leaves [first, last).
    """

    def __init__(self, leaves):
        self.leaves = leaves
        self.blocks = []

    def push(self, first, last):
        """Add the next subtree; returns how many joins follow, each of the newest two blocks."""
        self.blocks.append((first, last))
        joins = 0
        while len(self.blocks) > 1 and self._are_siblings(*self.blocks[-2:]):
            _, end = self.blocks.pop()
            self.blocks[-1] = (self.blocks[-1][0], end)
            joins += 1
        return joins

    def _are_siblings(self, older, newer):
        # A left child is a whole power of two of leaves; its right sibling may be cut short by the end of the tree.
        first, last = older
        size = last - first
        return first % (2 * size) == 0 and newer[1] == min(first + 2 * size, self.leaves)


class Part(NamedTuple):
    """Rows [start, stop) of a piece go to the buffer of counter digit `depth`."""

    start: int
    stop: int
    depth: int
    seed: bool  # the rows continue the chains that already lie in the buffer
    merges: int  # number of carries afterwards: each joins digit depth into depth - 1

    def of(self, rows):
        """These rows of a piece."""
        return rows if self.stop - self.start == len(rows) else rows[self.start : self.stop]


class TokenFold:
    """The leaves of a sum, or of a range of it, that arrive in pieces.

    Parameters
    ----------
    total : int
        Number of terms of the whole sum.
    first, last : int, optional
        The range of terms that will come, all by default. It starts at a leaf and ends at one or at `total`.
    """

    def __init__(self, total, first=0, last=None):
        self.total = total
        self.leaf = leaf_size(total)
        self._position = first
        self._counter = SubtreeCounter(-(-total // self.leaf))

    @property
    def blocks(self):
        """Ranges of leaves of the digits, largest aligned subtrees; one for the whole sum when all has come."""
        return self._counter.blocks

    def advance(self, rows):
        """Parts that the next `rows` terms fall into, in order.

        Returns
        -------
        list of Part
        """
        if rows == self.total:
            self._counter.push(0, self._counter.leaves)
            return [Part(0, rows, 0, False, 0)]
        parts = []
        first, last = self._position, self._position + rows
        at = first
        while at < last:
            depth = len(self.blocks)
            index, filled = divmod(at, self.leaf)
            if filled or last - at < self.leaf:
                stop = min(at - filled + self.leaf, last)
                leaves = 1
            else:
                leaves = _aligned_block(index, last // self.leaf - index)
                stop = at + leaves * self.leaf
            closed = stop % self.leaf == 0 or stop == self.total
            merges = self._counter.push(index, index + leaves) if closed else 0
            parts.append(Part(at - first, stop - first, depth, filled > 0, merges))
            at = stop
        self._position = last
        return parts


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
        self._places = {
            name: (offset, offset + math.prod(shape), shape) for name, shape, offset in zip(names, shapes, offsets)
        }
        self.flats = []
        self._views = []
        self._add_digit(flat)
        self._threads = self._mode = self._base = 0
        self._fold = self._head_fold = None
        self._parts = self._head_parts = ()

    def view(self, name, depth=0):
        """The finished gradient of one tensor; with `depth`, that in a later buffer of `flats`."""
        return self._views[depth][name]

    @property
    def roots(self):
        """Ranges of leaves whose sums lie in the buffers `flats`, in this order; one for a whole sum."""
        return list(self._fold.blocks)

    @property
    def extra_bytes(self):
        """Bytes of counter buffers beside the flat gradient."""
        return sum(flat.nbytes for flat in self.flats[1:])

    def begin(self, total, threads, mode, first=0, base=0):
        """Start a sum of `total` tokens, or the part of it that starts at token `first`.

        The buffers of `flats` before number `base` keep what they hold, and the sum ends in buffer `base`.
        """
        self._fold, self._head_fold = TokenFold(total, first), TokenFold(total, first)
        self._threads, self._mode, self._base = threads, mode, base

    def piece(self, rows):
        """The next calls carry the next `rows` tokens."""
        self._parts = self._fold.advance(rows)

    def head_piece(self, rows):
        """The next call of `head` carries the next `rows` tokens."""
        self._head_parts = self._head_fold.advance(rows)

    def linear(self, name, dc, a):
        """Add a piece of ``dW = dc^T a``; `dc` (T, n), `a` (T, k)."""
        self._linear(name, dc, a, self._parts)

    def head(self, name, dc, a):
        """The same as `linear` for the output head's own pieces."""
        self._linear(name, dc, a, self._head_parts)

    def colsum(self, name, rows):
        """Add a piece of a vector's gradient: the sum of `rows` (T, size) over tokens."""
        for part in self._parts:
            out = self._digit(name, part.depth).reshape(-1)
            linalg.colsum(part.of(rows), out, self._threads, self._mode, leaf=self._fold.leaf, seed=part.seed)
            self._carry(name, part)

    def join(self, depth):
        """Add the whole buffer `depth` to the one before: two subtrees of a tree over complete gradients join."""
        older, newer = self.flats[depth - 1], self.flats[depth]
        linalg.merge(older, newer, older, self._threads)

    def _linear(self, name, dc, a, parts):
        for part in parts:
            out = self._digit(name, part.depth)
            linalg.gemm_tn(
                part.of(dc), part.of(a), out, self._threads, self._mode, leaf=self._fold.leaf, seed=part.seed
            )
            self._carry(name, part)

    def _digit(self, name, depth):
        while len(self.flats) <= self._base + depth:
            self._add_digit(np.empty_like(self.flats[0]))
        return self._views[self._base + depth][name]

    def _add_digit(self, flat):
        self.flats.append(flat)
        self._views.append({name: flat[i:j].reshape(shape) for name, (i, j, shape) in self._places.items()})

    def _carry(self, name, part):
        for depth in range(part.depth, part.depth - part.merges, -1):
            older, newer = self._digit(name, depth - 1).reshape(-1), self._digit(name, depth).reshape(-1)
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
        ids = ids.reshape(-1)
        occurrences = np.bincount(ids)
        self._rows = np.flatnonzero(occurrences)
        local = np.empty(len(occurrences), np.int32)
        local[self._rows] = np.arange(len(self._rows))
        self._local = local[ids]
        self._chains = np.zeros((len(self._rows), d_model), np.float32)
        self._position = 0

    def add(self, dx, threads):
        """Continue the chains with the next rows of the embedding output's gradient, `dx` (T, D)."""
        stop = self._position + len(dx)
        if len(dx):
            layers.embedding_backward(dx, self._local[self._position : stop], self._chains, threads)
        self._position = stop

    def finish(self, gradient, tied, threads, first=0):
        """Write the chains into `gradient`, +0.0 where no id occurred; with `tied` add them to what lies there.

        Parameters
        ----------
        gradient : ndarray of float32, one-dimensional
            A piece of the flattened table (V, D), the head's gradient in it when the matrix is tied.
        tied : bool
        threads : int
        first : int, default 0
            Element of the table where the piece starts.
        """
        d_model = self._chains.shape[1]
        last = first + len(gradient)
        step = max(1, (1 << 18) // d_model)  # 1 MiB of dense rows at a time
        stop = -(-last // d_model)
        for row in range(first // d_model, stop, step):
            row_end = min(row + step, stop)
            low, high = np.searchsorted(self._rows, (row, row_end))
            dense = np.zeros((row_end - row, d_model), np.float32)
            dense[self._rows[low:high] - row] = self._chains[low:high]
            begin, end = max(first, row * d_model), min(last, row_end * d_model)
            chains = dense.reshape(-1)[begin - row * d_model : end - row * d_model]
            target = gradient[begin - first : end - first]
            if tied:
                layers.add(chains, target, target, threads)
            else:
                target[...] = chains


def mean_loss(losses, divisor):
    """The profile's sum of tokens' losses, divided."""
    fold = layers.FoldSum(len(losses))
    fold.add(losses)
    return fold.result(float(divisor))


def step_loss(losses, length, n_shards, divisor):
    """The loss of a step from its tokens' losses (rows * length,): a fold for each shard, their tree, divided."""
    rows = len(losses) // length
    tree, sums = SubtreeCounter(n_shards), []
    for shard in range(n_shards):
        first, last = shard_rows(rows, n_shards, shard)
        sums.append(np.array([mean_loss(losses[first * length : last * length], 1)], np.float32))
        for _ in range(tree.push(shard, shard + 1)):
            newer = sums.pop()
            linalg.merge(sums[-1], newer, sums[-1], 1)
    return mean_loss(sums[0], divisor)
