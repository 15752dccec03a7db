"""Who does what: rows of the batch, parts of the trees and parameters of each rank, by arithmetic alone."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from mojolearn._gradients import SubtreeCounter, leaf_size, shard_rows

__all__ = ["Division", "ParameterBlocks", "divide_rows"]

_EXAMPLES = 3  # sizes that a refusal names


class Division(NamedTuple):
    """The rows of a batch, divided among ranks.

    Attributes
    ----------
    rows : tuple of (int, int)
        Batch rows [first, last) of each rank.
    parts : tuple of (int, int)
        The same as leaves, or as shards, of the tree over the step.
    leaves : int
        Leaves (or shards) of the whole tree.
    roots : tuple of tuple of (int, int)
        For each rank the largest subtrees of the whole tree that lie in its part: their sums are what it sends.
    """

    rows: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int], ...]
    leaves: int
    roots: tuple[tuple[tuple[int, int], ...], ...]


@lru_cache(maxsize=64)
def divide_rows(rows: int, length: int, ranks: int, n_shards: int = 1) -> Division:
    """Divide a batch among ranks so that no leaf of the sums over tokens, or no shard, is cut.

    Parameters
    ----------
    rows, length : int
        Shape of the batch.
    ranks : int
    n_shards : int, default 1
        More than 1: whole shards go to the ranks. 1: whole leaves of the sum over all tokens.

    Raises
    ------
    ValueError
        There are fewer leaves or shards to hand out than ranks. The message lists sizes that work.
    """
    if n_shards > 1:
        if n_shards < ranks:
            raise ValueError(f"n_shards must be at least the number of ranks, got {n_shards} for {ranks} ranks")
        parts = tuple(_share(n_shards, ranks))
        divided = tuple(
            (shard_rows(rows, n_shards, first)[0], shard_rows(rows, n_shards, last - 1)[1]) for first, last in parts
        )
        leaves = n_shards
    else:
        unit = _unit(rows, length)
        units = -(-rows // unit)
        if units < ranks:
            raise ValueError(_refusal(rows, length, ranks, units))
        divided = tuple((first * unit, min(last * unit, rows)) for first, last in _share(units, ranks))
        leaf = leaf_size(rows * length)
        leaves = -(-rows * length // leaf)
        parts = tuple((first * length // leaf, -(-last * length // leaf)) for first, last in divided)
    return Division(divided, parts, leaves, tuple(_roots(first, last, leaves) for first, last in parts))


def _share(count: int, ranks: int) -> Iterator[tuple[int, int]]:
    return (shard_rows(count, ranks, rank) for rank in range(ranks))


def _unit(rows: int, length: int) -> int:
    """Fewest rows that are whole leaves."""
    leaf = leaf_size(rows * length)
    return leaf // math.gcd(leaf, length)


def _works(rows: int, length: int, ranks: int) -> bool:
    return -(-rows // _unit(rows, length)) >= ranks


def _roots(first: int, last: int, leaves: int) -> tuple[tuple[int, int], ...]:
    counter = SubtreeCounter(leaves)
    for leaf in range(first, last):
        counter.push(leaf, leaf + 1)
    return tuple(counter.blocks)


def _refusal(rows: int, length: int, ranks: int, units: int) -> str:
    whole = range(ranks, 512 * ranks + rows, ranks)  # the same number of rows for each rank, in whole leaves
    more_rows = [other for other in whole if other > rows and other // ranks % _unit(other, length) == 0][:_EXAMPLES]
    lengths = [other for other in range(1, 2 * length + 256) if _works(rows, other, ranks)]
    nearest = sorted(sorted(lengths, key=lambda other: abs(other - length))[:_EXAMPLES])
    choices = ["1 rank" if units == 1 else f"up to {units} ranks"]
    if more_rows:
        choices.append(f"batches of {_listed(more_rows)} rows")
    if nearest:
        choices.append(f"rows of {_listed(nearest)} tokens")
    if rows >= ranks:
        choices.append(f'numeric_mode "deterministic" with n_shards from {ranks} up to {rows}')
    return (
        f"a batch of {rows} rows of {length} tokens cannot be divided among {ranks} ranks in whole leaves of "
        f"{leaf_size(rows * length)} tokens; one of these would work: " + "; ".join(choices)
    )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


class ParameterBlocks:
    """The flat buffer of parameters, cut into a block for each rank.

    Blocks are as equal as they can be with cuts at the leaves of the tensors' sums of squares, so that the gradient's
    norm is made of whole leaves.

    Parameters
    ----------
    config : SambaConfig
    ranks : int
    n_shards : int, default 1

    Attributes
    ----------
    sizes : list of int
        Elements of each tensor, in the order of the buffer.
    blocks : list of slice
        The block of each rank; it may be empty.
    chained : bool
        Whether the embedding's gradient is one chain over all tokens of a step, so that its rows' owners need the
        cotangents of the embedding; with shards it is summed like the others.
    """

    def __init__(self, config: Any, ranks: int, n_shards: int = 1):
        self.d_model = config.d_model
        self.tied = config.tie_embeddings
        self.chained = n_shards == 1
        self.sizes = [math.prod(shape) for _, shape in config.registry()]
        self.table_size = self.sizes[0]  # the embedding comes first
        self._offsets = [0, *itertools.accumulate(self.sizes)]
        cuts = [self._nearest_leaf(rank * self.size // ranks) for rank in range(ranks)]
        self.blocks = [slice(first, last) for first, last in itertools.pairwise([*cuts, self.size])]

    @property
    def size(self) -> int:
        """Elements of the whole buffer."""
        return self._offsets[-1]

    def _nearest_leaf(self, element: int) -> int:
        tensor = bisect.bisect_right(self._offsets, element) - 1
        offset, size = self._offsets[tensor], self.sizes[tensor]
        leaf = leaf_size(size)
        return offset + min((element - offset + leaf // 2) // leaf * leaf, size)

    def pieces(self, rank: int) -> Iterator[tuple[int, slice]]:
        """The tensors' parts in a rank's block: leaf size of the tensor, and the part of the block."""
        block = self.blocks[rank]
        for (offset, end), size in zip(itertools.pairwise(self._offsets), self.sizes):
            first, last = max(offset, block.start), min(end, block.stop)
            if first < last:
                yield leaf_size(size), slice(first - block.start, last - block.start)

    def summed(self, rank: int) -> slice:
        """The part of a rank's block that is summed over leaves or shards: all but a chained embedding without head."""
        block = self.blocks[rank]
        if self.tied or not self.chained:
            return block
        return slice(min(max(block.start, self.table_size), block.stop), block.stop)

    def table_rows(self, rank: int) -> slice:
        """Rows of a chained embedding that lie in a rank's block, even in part."""
        block = self.blocks[rank]
        last = min(block.stop, self.table_size)
        if not self.chained or block.start >= last:
            return slice(0, 0)
        return slice(block.start // self.d_model, -(-last // self.d_model))
