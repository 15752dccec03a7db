"""A training step divided among ranks.

Every rank has the whole batch and all parameters. It computes its own rows, sends to each rank that rank's block of the
sums over them, joins for its own block the sums of all ranks to the profile's tree, updates the block, and gets the
other blocks' parameters. See docs/distributed.md.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mojolearn._context import Workspace
from mojolearn._core import layers, linalg
from mojolearn._gradients import EmbeddingGradient, SubtreeCounter, step_loss
from mojolearn._numerics import get_num_threads
from mojolearn.distributed._agreement import agree, require_agreement
from mojolearn.distributed._comm import Comm, Request
from mojolearn.distributed._plan import Division, ParameterBlocks, divide_rows
from mojolearn.errors import NonFiniteError, RankMismatchError
from mojolearn.training import AdamW

__all__ = ["DataParallel"]


class DataParallel:
    """A rank's part of the training of a stack.

    Parameters
    ----------
    comm : Comm
    stack : SambaStack
        Its shape is read; the methods that compute get it again.
    """

    def __init__(self, comm: Comm, stack: Any):
        self.comm = comm
        self.n_shards = stack.n_shards
        self.blocks = ParameterBlocks(stack.config, comm.size, stack.n_shards)
        self.owned = self.blocks.blocks[comm.rank]
        self.checked = False
        self._received: list[list[np.ndarray]] = []
        self._workspace = Workspace()

    def make_optimizer(self, flat: np.ndarray, options: dict[str, Any]) -> AdamW:
        """The optimizer of this rank's block of the parameters."""
        return _BlockAdamW(self, flat[self.owned], options)

    # Agreement

    def check(self, stack: Any) -> None:
        """Raise RankMismatchError on all ranks unless they are about to train the same thing."""
        import mojolearn

        state = stack.optimizer
        facts = {
            "mojolearn version": mojolearn.__version__,
            "mojolearn code": _code_digest(),
            "number of ranks": self.comm.size,
            "numeric_mode": stack.numeric_mode,
            "n_shards": stack.n_shards,
            "accumulation_steps": stack.accumulation_steps,
            "config": stack.config.to_dict(),
            "weights": hashlib.sha256(stack.flat).hexdigest(),
            "optimizer step": state.t,
            "optimizer": [state.lr, state.betas, state.eps, state.weight_decay, stack.max_norm],
            "lr_schedule": None if state.lr_schedule is None else state.lr_schedule.config(),
            "random stream": stack.generator.state_dict(),
        }
        require_agreement(self.comm, facts)
        self.checked = True

    # A step

    def gradients(self, stack: Any, ctx: Any, step: Any, sink: Any) -> tuple[float, list[np.ndarray]]:
        """The step's loss, and the finished gradient of this rank's block of parameters as a list of one."""
        if not self.checked:
            self.check(stack)
        losses, cotangents, problem = None, None, None
        try:
            division = divide_rows(*step.ids.shape, self.comm.size, self.n_shards)
            losses, cotangents = self._run_own_rows(stack, ctx, step, sink, division)
        except (ValueError, MemoryError) as error:
            problem = error
        loss = self._agree_on_loss(problem, step, losses)
        gradient = self._join_sums(division, sink.flats, ctx.threads)
        if cotangents is not None:
            self._finish_embedding(division, step.ids, cotangents, gradient, ctx.threads)
        return loss, [gradient]

    def _run_own_rows(
        self, stack: Any, ctx: Any, step: Any, sink: Any, division: Division
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Losses of this rank's tokens, their sums in `sink`, and the cotangents that an embedding's chains need."""
        first, last = division.rows[self.comm.rank]
        length = step.ids.shape[1]
        losses = np.empty((last - first) * length, np.float32)
        if not self.blocks.chained:
            stack._run_shards(ctx, step, range(*division.parts[self.comm.rank]), losses, sink)
            return losses, None
        cotangents = _Cotangents(len(losses), self.blocks.d_model)
        sink.begin(step.ids.size, ctx.threads, ctx.mode, first=first * length)
        stack._run_rows(ctx, step, first, last, losses, sink, cotangents)
        return losses, cotangents.rows

    def _agree_on_loss(self, problem: Exception | None, step: Any, losses: np.ndarray | None) -> float:
        batch = step.ids.shape, zlib.crc32(step.targets, zlib.crc32(step.ids))

        def combine(parts: list[tuple[Any, np.ndarray]]) -> float:
            for rank, (other, _) in enumerate(parts):
                if other != parts[0][0]:
                    raise RankMismatchError(
                        f"all ranks must get the same batch, got another one on rank {rank} than on rank 0"
                    )
            losses = np.concatenate([part for _, part in parts])
            loss: float = step_loss(losses, step.ids.shape[1], self.n_shards, step.divisor)
            if not np.isfinite(loss):
                raise NonFiniteError(f"the loss must be finite, got {loss}")
            return loss

        loss: float = agree(self.comm, problem, (batch, losses), combine)
        return loss

    def _join_sums(self, division: Division, flats: list[np.ndarray], threads: int) -> np.ndarray:
        """Exchange the sums of all ranks and finish the tree over them, for this rank's block."""
        comm, me = self.comm, self.comm.rank
        mine = self.blocks.summed(me)
        requests: list[Request] = []
        arriving: list[list[tuple[np.ndarray, Request]]] = [[] for _ in range(comm.size)]
        for other in self._others():
            if mine.start < mine.stop:
                buffers = self._buffers(other, len(division.roots[other]), mine.stop - mine.start)
                arriving[other] = [(buffer, comm.receive(buffer, other)) for buffer in buffers]
        for other in self._others():
            block = self.blocks.summed(other)
            if block.start < block.stop:
                requests += [comm.send(flats[i][block], other) for i in range(len(division.roots[me]))]

        gradient = flats[0][self.owned]
        tree, sums = SubtreeCounter(division.leaves), []
        for source in range(comm.size):
            for i, root in enumerate(division.roots[source]):
                if source == me or mine.start == mine.stop:
                    sums.append(flats[i][mine] if source == me else np.empty(0, np.float32))
                else:
                    buffer, request = arriving[source][i]
                    request.wait()
                    sums.append(buffer)
                for _ in range(tree.push(*root)):
                    newer = sums.pop()
                    linalg.merge(sums[-1], newer, sums[-1], threads)
        np.copyto(gradient[len(gradient) - (mine.stop - mine.start) :], sums[0])
        for request in requests:
            request.wait()
        return gradient

    def _finish_embedding(
        self, division: Division, ids: np.ndarray, cotangents: np.ndarray, gradient: np.ndarray, threads: int
    ) -> None:
        """Send the cotangents of the embedding to the owners of their rows; finish the chains of the own rows."""
        comm, length = self.comm, ids.shape[1]
        tokens = ids.reshape(-1)
        parts = [tokens[first * length : last * length] for first, last in division.rows]
        requests = []
        own_table = self.blocks.table_rows(comm.rank)
        arriving: dict[int, tuple[np.ndarray, Request]] = {}
        for other in self._others():
            count = np.count_nonzero(_within(parts[other], own_table))
            if count:
                buffer = np.empty((count, self.blocks.d_model), np.float32)
                arriving[other] = buffer, comm.receive(buffer, other)
        for other in self._others():
            chosen = cotangents[_within(parts[comm.rank], self.blocks.table_rows(other))]
            if len(chosen):
                requests.append(comm.send(chosen, other))
        if own_table.start < own_table.stop:
            embedding = EmbeddingGradient(tokens[_within(tokens, own_table)], self.blocks.d_model)
            for source in range(comm.size):
                if source == comm.rank:
                    embedding.add(cotangents[_within(parts[source], own_table)], threads)
                elif source in arriving:
                    rows, request = arriving[source]
                    request.wait()
                    embedding.add(rows, threads)
            table = gradient[: max(min(self.owned.stop, self.blocks.table_size) - self.owned.start, 0)]
            embedding.finish(table, self.blocks.tied, threads, first=self.owned.start)
        for request in requests:
            request.wait()

    def agree_on_norm(self, problem: Exception | None, gradient: np.ndarray, max_norm: float | None) -> Any:
        """The norm of the whole gradient and the factor that clips it; the problem of any rank is raised on all."""
        leaves = np.empty(0, np.float32)
        if max_norm is not None:
            pieces = list(self.blocks.pieces(self.comm.rank))
            counts = [-(-(part.stop - part.start) // leaf) for leaf, part in pieces]
            leaves = np.empty(sum(counts), np.float32)
            layers.square_leaves(
                [gradient[part] for _, part in pieces], [leaf for leaf, _ in pieces], leaves, get_num_threads()
            )

        def combine(parts: list[np.ndarray]) -> tuple[float | None, float | None]:
            if max_norm is None:
                return None, None
            total = layers.norm_of_leaves(np.concatenate(parts), self.blocks.sizes)
            if not np.isfinite(total):
                raise NonFiniteError(f"the total norm of the gradients must be finite, got {total}")
            return total, layers.clip_coefficient(max_norm, total)

        return agree(self.comm, problem, leaves, combine)

    def share(self, flat: np.ndarray) -> None:
        """Send the own block of `flat` to all ranks and receive theirs."""
        requests = []
        for other in self._others():
            block = flat[self.blocks.blocks[other]]
            if block.size:
                requests.append(self.comm.receive(block, other))
        for other in self._others():
            if self.owned.start < self.owned.stop:
                requests.append(self.comm.send(flat[self.owned], other))
        for request in requests:
            request.wait()

    def gather(self, part: np.ndarray) -> np.ndarray | None:
        """Bring the ranks' parts of a flat buffer together on rank 0; None on the others."""
        if self.comm.rank:
            if part.size:
                self.comm.send(part, 0).wait()
            return None
        whole = np.empty(self.blocks.size, np.float32)
        whole[self.owned] = part
        requests = [
            self.comm.receive(whole[block], other)
            for other, block in enumerate(self.blocks.blocks)
            if other and block.start < block.stop
        ]
        for request in requests:
            request.wait()
        return whole

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to the same one at once."""
        return [(self.comm.rank + i) % self.comm.size for i in range(1, self.comm.size)]

    def _buffers(self, source: int, count: int, size: int) -> list[np.ndarray]:
        """Memory for what a rank sends, kept from step to step."""
        while len(self._received) <= source:
            self._received.append([])
        kept = self._received[source]
        while len(kept) < count:
            kept.append(self._workspace.empty(size))
        return kept[:count]


class _BlockAdamW(AdamW):
    """AdamW over a rank's block of the parameters, with the norm and the refusals of all ranks."""

    def __init__(self, team: DataParallel, block: np.ndarray, options: dict[str, Any]):
        super().__init__([block], **options)
        self._team = team

    def _examine(self, grads: list[np.ndarray], max_norm: float | None, threads: int) -> Any:
        problem = None
        try:
            if max_norm is None:
                self._check_finite({"grads": grads}, threads)
            self._check_state(threads)
        except NonFiniteError as error:
            problem = error
        return self._team.agree_on_norm(problem, grads[0], max_norm)


class _Cotangents:
    """Stands in for `EmbeddingGradient`: keeps the gradient of the embedding's output."""

    def __init__(self, tokens: int, d_model: int):
        self.rows = np.empty((tokens, d_model), np.float32)
        self._position = 0

    def add(self, dx: np.ndarray, threads: int) -> None:
        self.rows[self._position : self._position + len(dx)] = dx
        self._position += len(dx)


def _within(ids: np.ndarray, rows: slice) -> np.ndarray:
    return (ids >= rows.start) & (ids < rows.stop)


def _code_digest() -> str:
    """Of the library's Python files."""
    total = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for file in sorted(package.rglob("*.py")):
        total.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return total.hexdigest()
