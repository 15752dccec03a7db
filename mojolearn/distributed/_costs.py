"""What a divided step costs on the network: messages and bytes, and the time that they take by a simple model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mojolearn.distributed._plan import ParameterBlocks, divide_rows

__all__ = ["Network", "RankCost", "predicted_seconds", "step_costs"]

_FLOAT = 4
_AGREEMENTS = 2  # of a step: on the loss, and on the gradient's norm
_MERGE_BYTES = 12  # of memory traffic to add a received float: two are read and one is written


@dataclass
class RankCost:
    """What one rank sends and receives in a step.

    Attributes
    ----------
    messages_sent, bytes_sent, messages_received, bytes_received : int
        Arrays: sums of gradients, cotangents of the embedding, parameters.
    control_messages : int
        Sent by the two agreements of a step, on trees of log2(ranks) levels.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    control_messages: int = 0


def step_costs(
    config: Any, rows: int, length: int, ranks: int, n_shards: int = 1, ids: np.ndarray | None = None
) -> list[RankCost]:
    """The cost of a training step for each rank.

    Parameters
    ----------
    config : SambaConfig
    rows, length : int
        Shape of the whole batch.
    ranks : int
    n_shards : int, default 1
    ids : ndarray of int or None, default None
        The batch: its ids decide where the embedding's cotangents go. None spreads them evenly over the vocabulary.

    Returns
    -------
    list of RankCost
    """
    division = divide_rows(rows, length, ranks, n_shards)
    blocks = ParameterBlocks(config, ranks, n_shards)
    costs = [RankCost(control_messages=_AGREEMENTS * _tree_messages(rank, ranks)) for rank in range(ranks)]

    def send(source: int, dest: int, messages: int, elements: int) -> None:
        if elements:
            costs[source].messages_sent += messages
            costs[source].bytes_sent += _FLOAT * elements
            costs[dest].messages_received += messages
            costs[dest].bytes_received += _FLOAT * elements

    for dest in range(ranks):
        summed, table, block = blocks.summed(dest), blocks.table_rows(dest), blocks.blocks[dest]
        for source in range(ranks):
            if source == dest:
                continue
            roots = len(division.roots[source])
            send(source, dest, roots, roots * (summed.stop - summed.start))
            first, last = division.rows[source]
            if ids is None:
                tokens = (last - first) * length * (table.stop - table.start) // config.vocab
            else:
                part = ids[first:last]
                tokens = int(np.count_nonzero((part >= table.start) & (part < table.stop)))
            send(source, dest, 1, tokens * config.d_model)
            send(dest, source, 1, block.stop - block.start)
    return costs


def _tree_messages(rank: int, ranks: int) -> int:
    """Messages that a rank sends when something is gathered and the answer is broadcast, on a binomial tree."""
    children, step = 0, 1
    while step < ranks and not rank & step:
        children += rank + step < ranks
        step *= 2
    return children + (rank > 0)


@dataclass
class Network:
    """A network as the model of `predicted_seconds` sees it.

    Attributes
    ----------
    bits_per_second : float
        Of a rank's link, in each direction.
    latency : float
        Seconds that a message costs beside its bytes.
    """

    bits_per_second: float
    latency: float


def predicted_seconds(
    config: Any,
    rows: int,
    length: int,
    ranks: int,
    network: Network,
    tokens_per_second: float,
    memory_bytes_per_second: float = 1e10,
) -> tuple[float, float]:
    """Seconds that a step computes and that it communicates, one after the other, on the slowest rank.

    Parameters
    ----------
    config : SambaConfig
    rows, length, ranks : int
    network : Network
    tokens_per_second : float
        Of training on one rank.
    memory_bytes_per_second : float
        For adding what has been received.
    """
    division = divide_rows(rows, length, ranks)
    blocks = ParameterBlocks(config, ranks)
    computing = max(last - first for first, last in division.rows) * length / tokens_per_second
    waiting = 2 * _AGREEMENTS * (ranks - 1).bit_length()  # messages one after the other, up and down the tree
    slowest = 0.0
    for rank, cost in enumerate(step_costs(config, rows, length, ranks)):
        summed = blocks.summed(rank)
        received = sum(len(roots) for other, roots in enumerate(division.roots) if other != rank)
        merging = received * (summed.stop - summed.start) * _MERGE_BYTES / memory_bytes_per_second
        wire = 8 * max(cost.bytes_sent, cost.bytes_received) / network.bits_per_second
        messages = max(cost.messages_sent, cost.messages_received) + waiting
        slowest = max(slowest, wire + messages * network.latency + merging)
    return computing, slowest
