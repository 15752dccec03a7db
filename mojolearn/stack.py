"""`SambaStack`: a model that trains."""

import contextlib
import itertools
import math
import threading
from typing import NamedTuple

import numpy as np

from mojolearn import checkpoint, lowbit
from mojolearn._arrays import as_float32, as_ids, as_index, describe
from mojolearn._context import Context, Workspace
from mojolearn._core import layers as kernels
from mojolearn._core import linalg
from mojolearn._core._pool import FloatEnvironment
from mojolearn._gradients import EmbeddingGradient, GradientSink, SubtreeCounter, mean_loss, shard_rows, step_loss
from mojolearn._interrupt import deferred_interrupts
from mojolearn._numerics import DETERMINISTIC_PROFILES, MODE_NAMES, get_num_threads, mode_index
from mojolearn.config import SambaConfig
from mojolearn.distributed import Comm, DataParallel, on_root
from mojolearn.errors import CheckpointError, NonFiniteError, RandomStreamError
from mojolearn.inference import check_names
from mojolearn.interop import load_safetensors
from mojolearn.model import IGNORE_INDEX, SambaModel
from mojolearn.training import AdamW, ConstantLR, Generator, WarmupCosineLR, WarmupLinearLR
from mojolearn.training.losses import as_max_norm
from mojolearn.training.optimizers import as_betas, as_float32_real

__all__ = ["SambaStack"]

STATE_SCHEMA = "mojolearn.samba-stack-state.v1"
STATE_PROFILE = "mojolearn.samba-stack.fp32.v1"

_SCHEDULES = {"constant": ConstantLR, "linear": WarmupLinearLR, "cosine": WarmupCosineLR}
_MAX_ITEMS = 2**24  # larger counts are not exact as float32
_MAX_STREAMS = 2**32


class SambaStack(SambaModel):
    """A Samba language model with its own training loop.

    Embedding, then a stack of `Mamba3Block` and `TransformerBlock` layers (each with its own pre-norm and residual), a
    final RMSNorm, a tied or untied output head and the cross-entropy loss, with a full backward pass. Training uses
    AdamW over the parameter registry (`SambaConfig.registry`), optional clipping of the gradient norm, an optional
    learning-rate schedule and gradient accumulation. All parameters live in one flat float32 buffer. Attention layers
    use full causal attention.

    Pass exactly one of `weights` and `generator`.

    Parameters
    ----------
    config : SambaConfig
        Model shape.
    weights : dict of str to float32 array or None, default None
        Initial parameters by registry name, with exact names and shapes. They are copied.
    generator : Generator or None, default None
        Seeded `mojolearn.training.Generator` that initializes the parameters and then draws the dropout masks. It is
        kept, not copied. With `weights` the stack gets a Generator(0) of its own.
    lr : float, default 1e-3
        Learning rate, used when `lr_schedule` is None.
    betas : tuple of float, default (0.9, 0.999)
        AdamW moment decays.
    eps : float, default 1e-8
        AdamW denominator term.
    weight_decay : float, default 0.01
        AdamW decoupled weight decay.
    lr_schedule : ConstantLR, WarmupLinearLR, WarmupCosineLR or None, default None
        Learning rate of each step.
    max_norm : float or None, default None
        Clip the global L2 norm of the gradient to this value; None turns clipping off.
    accumulation_steps : int, default 1
        Number of micro-batches of an optimizer step; must divide the batch rows. It changes memory and speed but no
        bit. Beside the gradient it keeps at most ``log2(tokens / 128) + 2`` buffers of the same size.
    numeric_mode : {"identical", "deterministic", "fast"} or None, default None
        None uses the library default.
    comm : LocalComm, MPIComm or None, default None
        The ranks that train this model together (`mojolearn.distributed`): each gets the same batches and computes
        its own rows. None trains in this process alone.
    n_shards : int, default 1
        Only with mode "deterministic": the gradient of a step is a tree over this many shards of the batch rows. It is
        part of what is computed, so it stays the same when the number of ranks changes, and bounds it.

    Attributes
    ----------
    config : SambaConfig
    names, shapes, offsets : list
        The registry: names, shapes, and where each parameter starts in `flat`.
    n_total : int
        Number of parameters.
    flat : ndarray of float32, shape (n_total,)
        All parameters, live.
    optimizer : AdamW
    generator : Generator
    max_norm : float or None
    accumulation_steps, n_shards : int
    comm : LocalComm, MPIComm or None
    extra : dict or None
        A JSON object of the caller's that travels in checkpoints (data position, notes).
    last_ : dict or None
        What the last `train_step` returned.

    Notes
    -----
    A training step that fails, by a refusal, a non-finite value or Ctrl-C, leaves parameters, moments, step count,
    learning rate and random stream as they were. Two Python threads may call `forward` at once; `train_step`,
    `loss_and_grads`, `loss`, loading and saving wait for one another.

    With `comm`, `train_step`, `state_dict`, `save_checkpoint` and `check_ranks` have to be called by all ranks; every
    other method works on its rank alone. `optimizer` then holds the moments of this rank's own parameters.

    Examples
    --------
    >>> import numpy as np, mojolearn
    >>> from mojolearn.training import Generator, WarmupCosineLR
    >>> cfg = mojolearn.SambaConfig(vocab=256, d_model=64, layers=("mamba3", "mamba3"))
    >>> stack = mojolearn.SambaStack(cfg, generator=Generator(7), lr=1e-3,
    ...                              lr_schedule=WarmupCosineLR(1e-3, 8, 64),
    ...                              max_norm=1.0, accumulation_steps=2)
    >>> ids = np.random.default_rng(0).integers(0, 256, (4, 32)).astype(np.int32)
    >>> out = stack.train_step(ids[:, :-1], ids[:, 1:])
    >>> sorted(out), out["step"]
    (['loss', 'lr', 'step', 'total_norm'], 1)
    """

    _FIXED = ("config", "names", "shapes", "offsets", "n_total", "optimizer")

    def __setattr__(self, name, value):
        if name == "generator":
            _check_generator(value)
        super().__setattr__(name, value)

    def __init__(
        self,
        config,
        weights=None,
        generator=None,
        lr=0.001,
        betas=(0.9, 0.999),
        eps=1e-08,
        weight_decay=0.01,
        lr_schedule=None,
        max_norm=None,
        accumulation_steps=1,
        numeric_mode=None,
        comm=None,
        n_shards=1,
    ):
        if not isinstance(config, SambaConfig):
            raise TypeError(f"config must be a SambaConfig, got {describe(config)}")
        if (weights is None) == (generator is None):
            given = "neither" if weights is None else "both"
            raise ValueError(f"exactly one of weights and generator must be given, got {given}")
        if generator is not None:
            _check_generator(generator)
        if lr_schedule is not None and not isinstance(lr_schedule, tuple(_SCHEDULES.values())):
            raise TypeError(
                f"lr_schedule must be a ConstantLR, WarmupLinearLR, WarmupCosineLR or None, got {describe(lr_schedule)}"
            )
        if max_norm is not None:
            max_norm = as_max_norm(max_norm)
        accumulation_steps = as_index(accumulation_steps, "accumulation_steps", 1, _MAX_ITEMS)
        mode = mode_index(numeric_mode)
        n_shards = as_index(n_shards, "n_shards", 1)
        if n_shards > 1 and mode != MODE_NAMES.index("deterministic"):
            raise ValueError(f'n_shards must be 1 unless numeric_mode is "deterministic", got {n_shards}')
        if weights is not None:
            weights = _check_weights(config, weights)

        self._allocate(config, mode, Workspace().empty(config.num_parameters), comm, n_shards)
        # The optimizer checks its hyperparameters; it comes before anything is drawn.
        self.optimizer = self._make_optimizer(lr, betas, eps, weight_decay, lr_schedule)
        self.max_norm = max_norm
        self.accumulation_steps = accumulation_steps
        if weights is None:
            self.generator = generator
            _initialize(self._parameters, generator)
        else:
            self.generator = Generator(0)
            for name, array in weights.items():
                self._parameters[name][...] = array

    def _allocate(self, config, mode, flat, comm, n_shards):
        """Lay the registry out over `flat` and bind the blocks to it."""
        registry = config.registry()
        self.names = [name for name, _ in registry]
        self.shapes = [shape for _, shape in registry]
        sizes = [math.prod(shape) for shape in self.shapes]
        self.offsets = [0, *itertools.accumulate(sizes)][:-1]
        self.n_total = sum(sizes)
        self.flat = flat
        self._parameters = {
            name: flat[offset : offset + size].reshape(shape)
            for name, shape, offset, size in zip(self.names, self.shapes, self.offsets, sizes)
        }
        self._bind(config, mode, self._parameters)
        self.extra = None
        self.last_ = None
        self._lock = threading.RLock()
        self._workspace = Workspace()
        self._sink = None
        if comm is not None and not isinstance(comm, Comm):
            raise TypeError(f"comm must be a LocalComm, an MPIComm or None, got {describe(comm)}")
        self.comm = comm
        if comm is not None and self.numeric_mode == "fast":
            n_shards = comm.size  # no order is promised, so any split of the rows will do
        self.n_shards = n_shards
        self._team = None if comm is None else DataParallel(comm, self)

    def _make_optimizer(self, lr, betas, eps, weight_decay, lr_schedule):
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "lr_schedule": lr_schedule,
            "numeric_mode": self.numeric_mode,
        }
        if self._team is not None:
            return self._team.make_optimizer(self.flat, options)
        return AdamW(list(self._parameters.values()), **options)

    @property
    def _owned(self):
        """The part of the flat buffer that this process updates."""
        return slice(0, self.n_total) if self._team is None else self._team.owned

    def __repr__(self):
        return (
            f"<SambaStack: {self.n_total:,} parameters in {len(self.config.layers)} layers, "
            f"step {self.optimizer.t}, mode {self.numeric_mode}>"
        )

    def __call__(self, inputs, state=None, *, lengths=None, last_only=False):
        """The same as `forward`."""
        return self.forward(inputs, state, lengths=lengths, last_only=last_only)

    # Parameters

    def parameters(self):
        """The parameters as {name: array}, views of the flat buffer in registry order."""
        return dict(self._parameters)

    def load_weights(self, weights):
        """Copy parameters in from a dict keyed by registry name.

        Parameters
        ----------
        weights : dict of str to float32 array
            The key set and every shape must match exactly.
        """
        weights = _check_weights(self.config, weights)
        staged = {
            name: array.copy() if np.may_share_memory(array, self.flat) else array for name, array in weights.items()
        }
        with self._lock, deferred_interrupts():
            for name, array in staged.items():
                self._parameters[name][...] = array
            self._distrust_ranks()

    # Loss and gradients

    def loss(self, inputs, targets):
        """Mean cross-entropy of `targets` given `inputs`; no dropout, no gradient.

        Parameters
        ----------
        inputs, targets : array of int, shape (B, L)
            Token ids, and next-token targets of which -100 are ignored.

        Returns
        -------
        float
        """
        ids, targets = self._check_batch(inputs, targets)
        count = int(np.count_nonzero(targets != IGNORE_INDEX))
        if count == 0:
            raise ValueError(f"targets must hold at least one target other than {IGNORE_INDEX}, got none")
        # In the memory of the training step: its (tokens, vocab) buffer is there already.
        with self._training_context() as ctx:
            x, _ = self._run_blocks(ctx, ids)
            losses = self._row_losses(ctx, x.reshape(-1, self.config.d_model), targets.reshape(-1))
            return mean_loss(losses, count)

    def loss_and_grads(self, inputs, targets, num_items=None, dropout_stream=None, token_offset=0):
        """Run one forward and the full backward pass.

        Parameters
        ----------
        inputs, targets : array of int, shape (B, L)
            Token ids and next-token targets. Shapes must match.
        num_items : int or None, default None
            Divisor of the summed loss and gradients. None uses this call's own number of targets; pass the whole step's
            count to make a micro-batch's gradient its slice of the unsplit one.
        dropout_stream : int or None, default None
            Generator stream for the dropout mask; None applies no dropout.
        token_offset : int, default 0
            Position offset of this batch in the dropout stream.

        Returns
        -------
        loss : float
        grads : list of ndarray of float32
            One gradient per parameter, in registry order; they are the caller's.
        """
        ids, targets = self._check_batch(inputs, targets)
        if num_items is not None:
            num_items = as_index(num_items, "num_items", 1, _MAX_ITEMS)
        if dropout_stream is not None:
            dropout_stream = as_index(dropout_stream, "dropout_stream", 0, _MAX_STREAMS - 1)
        token_offset = as_index(token_offset, "token_offset", 0, 2**63 // self.config.d_model - 1)
        divisor = num_items or _count_targets(targets)
        self._check_shards(ids)
        sink = self._new_sink(np.empty(self.n_total, np.float32))
        with self._training_context() as ctx:
            loss = self._accumulate(ctx, Step(ids, targets, divisor, dropout_stream, token_offset, 1), sink)
        return loss, [sink.view(name) for name in self.names]

    def train_step(self, inputs, targets):
        """Run one optimizer step on a batch.

        The batch rows are split into `accumulation_steps` micro-batches; the pieces continue the sums of the unsplit
        step, so its loss, gradients and update come out in every bit.

        Parameters
        ----------
        inputs, targets : array of int, shape (B, L)
            Token ids, and next-token targets of which -100 are ignored. `accumulation_steps` must divide B.

        Returns
        -------
        dict
            ``loss``; ``lr``, the learning rate that was used; ``step``, the number of this step from 1;
            ``total_norm``, the gradient norm before clipping, or None without `max_norm`.

        Raises
        ------
        NonFiniteError
            An activation, the loss or a gradient is NaN or infinite.
        RandomStreamError
            The generator has no stream left for the dropout mask.
        ValueError
            Bad ids, targets or shapes, or, with `comm`, rows that cannot be divided among the ranks. After any failure
            the stack is as it was, on all ranks.
        """
        ids, targets = self._check_batch(inputs, targets)
        self.accumulation_steps = as_index(self.accumulation_steps, "accumulation_steps", 1, _MAX_ITEMS)
        if len(ids) % self.accumulation_steps:
            raise ValueError(
                f"accumulation_steps must divide the batch rows, got {self.accumulation_steps} for {len(ids)} rows"
            )
        self._check_shards(ids)
        with self._training_context() as ctx:
            stream = self._peek_stream() if self.config.dropout > 0 else None
            if self._sink is None:
                self._sink = self._new_sink(Workspace().empty(self.n_total))
            step = Step(ids, targets, _count_targets(targets), stream, 0, self.accumulation_steps)
            if self._team is None:
                loss = self._accumulate(ctx, step, self._sink)
                gradients = [self._sink.view(name) for name in self.names]
            else:
                loss, gradients = self._team.gradients(self, ctx, step, self._sink)
            if not np.isfinite(loss):
                raise NonFiniteError(f"the loss must be finite, got {loss}")
            with deferred_interrupts():
                total_norm = self.optimizer.step(gradients, self.max_norm)
                if self._team is not None:
                    self._team.share(self.flat)
                if stream is not None:
                    self.generator.next_stream()
                self.last_ = {
                    "loss": loss,
                    "lr": float(np.float32(self.optimizer.lr)),
                    "step": self.optimizer.t,
                    "total_norm": total_norm,
                }
            return dict(self.last_)

    def check_ranks(self):
        """Compare what the ranks are about to train; with `comm`, all of them have to call it.

        The library's version and code, configuration, weights, step, optimizer, schedule, random stream, mode and
        shards must be the same. The first `train_step` does it too, and again after `load_weights` or
        `load_state_dict`.

        Raises
        ------
        RankMismatchError
            A rank differs; the message says which and in what. It is raised on all ranks.
        """
        if self._team is not None:
            self._team.check(self)

    def _distrust_ranks(self):
        if self._team is not None:
            self._team.checked = False

    def _check_shards(self, ids):
        self.n_shards = as_index(self.n_shards, "n_shards", 1)
        if len(ids) < self.n_shards:
            raise ValueError(f"inputs must have a row for each of the {self.n_shards} shards, got {len(ids)} rows")

    def _check_batch(self, inputs, targets):
        ids = as_ids(inputs, "inputs", self.config.vocab, 2)
        targets = as_ids(targets, "targets", self.config.vocab, 2, ignore=IGNORE_INDEX)
        if targets.shape != ids.shape:
            raise ValueError(f"targets must have the inputs' shape {ids.shape}, got {targets.shape}")
        self._check_positions(ids.shape[1])
        return ids, targets

    def _peek_stream(self):
        stream = self.generator.counter
        if stream >= _MAX_STREAMS:
            raise RandomStreamError("the generator has no stream left for the dropout mask (2**32 were drawn)")
        return stream

    def _new_sink(self, flat):
        return GradientSink(flat, self.names, self.shapes, self.offsets)

    @contextlib.contextmanager
    def _training_context(self):
        """The stack's own workspace, kept from step to step, and the lock that goes with it."""
        with self._lock:
            self._workspace.release((0, 0))
            with FloatEnvironment():
                yield Context(get_num_threads(), self._mode, self._workspace)

    def _accumulate(self, ctx, step, sink):
        """Loss and gradients (into `sink`) of a whole step."""
        losses = np.empty(step.ids.size, np.float32)
        self._run_shards(ctx, step, range(self.n_shards), losses, sink)
        return step_loss(losses, step.ids.shape[1], self.n_shards, step.divisor)

    def _run_shards(self, ctx, step, shards, losses, sink):
        """Forward and backward of consecutive shards, each to its complete gradient, and their tree.

        Fills `losses` (tokens of these shards). The buffers of `sink` end with the roots of the largest aligned
        subtrees of the shards, whose ranges are returned.
        """
        rows, length = step.ids.shape
        tree, at = SubtreeCounter(self.n_shards), 0
        for shard in shards:
            first, last = shard_rows(rows, self.n_shards, shard)
            depth = len(tree.blocks)
            sink.begin((last - first) * length, ctx.threads, ctx.mode, base=depth)
            embedding = EmbeddingGradient(step.ids[first:last], self.config.d_model)
            self._run_rows(ctx, step, first, last, losses[at : at + (last - first) * length], sink, embedding)
            table = sink.view("embed.weight", depth).reshape(-1)
            embedding.finish(table, self.config.tie_embeddings, ctx.threads)
            for newer in range(depth, depth - tree.push(shard, shard + 1), -1):
                sink.join(newer)
            at += (last - first) * length
        return tree.blocks

    def _run_rows(self, ctx, step, first, last, losses, sink, embedding):
        """Forward and backward of rows [first, last), a micro-batch at a time."""
        length = step.ids.shape[1]
        size = -(-(last - first) // step.pieces)
        for row in range(first, last, size):
            stop = min(row + size, last)
            sink.piece((stop - row) * length)
            mark = ctx.workspace.mark()
            self._piece(
                ctx,
                step.ids[row:stop],
                step.targets[row:stop].reshape(-1),
                float(step.divisor),
                step.stream,
                (step.token_offset + row * length) * self.config.d_model,
                losses[(row - first) * length : (stop - first) * length],
                sink,
                embedding,
            )
            ctx.workspace.release(mark)

    def _piece(self, ctx, ids, targets, divisor, stream, element_offset, losses, sink, embedding):
        """Forward and backward of one micro-batch; fills `losses`, adds to `sink` and `embedding`."""
        empty = ctx.workspace.empty
        shape = (*ids.shape, self.config.d_model)
        x = empty(shape)
        self._embed_forward(ctx, ids.reshape(-1), _tokens(x))
        self._dropout(ctx, x, stream, element_offset)
        inputs, tapes = [], []
        for i, block in enumerate(self._blocks):
            self._check_finite(ctx, x, i - 1)
            y, tape = empty(shape), {}
            block._run(ctx, x, y, tape=tape)
            inputs.append(x)
            tapes.append(tape)
            x = y
        self._check_finite(ctx, x, len(self._blocks) - 1)
        dy, dx = empty(shape), empty(shape)
        self._head_backward(ctx, _tokens(x), targets, divisor, losses, _tokens(dy), sink)
        for i in reversed(range(len(self._blocks))):
            self._blocks[i]._backward(ctx, tapes[i], inputs[i], dy, dx, _LayerSink(sink, f"layers.{i}."))
            dy, dx = dx, dy
        self._dropout(ctx, dy, stream, element_offset)
        embedding.add(_tokens(dy), ctx.threads)

    def _dropout(self, ctx, x, stream, element_offset):
        """Drop elements of `x` in place; the same call serves the forward and the backward pass."""
        if stream is None or self.config.dropout == 0:
            return
        rate = self.config.dropout
        scale = float(np.float32(1.0 / (1.0 - rate)))
        kernels.dropout(x, x, rate, scale, self.generator.seed, stream, element_offset, ctx.threads)

    def _head_backward(self, ctx, x, targets, divisor, losses, dx, sink):
        """Final norm, head and loss of `x` (T, D) and their backward passes into `dx` (T, D).

        The (tokens, vocab) buffer holds the logits and then their gradient; when it would be larger than `HEAD_BYTES`
        the tokens come in tiles, and the head's weight gradient continues from tile to tile.
        """
        workspace = ctx.workspace
        tokens, eps = len(x), self.config.norm_eps
        head = "embed.weight" if self.config.tie_embeddings else "lm_head.weight"
        mark = workspace.mark()
        normed, dnormed, sumsq = workspace.empty(x.shape), workspace.empty(x.shape), workspace.empty(tokens)
        kernels.rms_norm_forward(x, self._norm_f, eps, normed, sumsq, False, ctx.threads)
        tile = self._head_tile(tokens)
        buffer = workspace.empty((tile, self.config.vocab))
        for first in range(0, tokens, tile):
            last = min(first + tile, tokens)
            logits = buffer[: last - first]
            linalg.linear(normed[first:last], self._head, logits, ctx.threads, ctx.mode)
            kernels.loss_rows(
                logits, targets[first:last], IGNORE_INDEX, 0.0, divisor, losses[first:last], logits, ctx.threads
            )
            linalg.gemm_nn(logits, self._head, dnormed[first:last], ctx.threads, ctx.mode)
            sink.head_piece(last - first)
            sink.head(head, logits, normed[first:last])
        # The normed rows have done their work; their memory takes the terms of the norm's weight gradient.
        kernels.rms_norm_backward(dnormed, x, self._norm_f, sumsq, eps, None, dx, normed, ctx.threads)
        sink.colsum("norm_f.weight", normed)
        workspace.release(mark)

    # State and checkpoints

    def state_dict(self, *, _copy_arrays=True):
        """The complete training state as a dict.

        Returns
        -------
        dict
            Configuration, registry, parameters, optimizer moments and step, schedule, generator state and numeric mode:
            all that `load_state_dict` needs to continue to the same bits. The arrays are copies. With `comm` the state
            is that of one process; rank 0 gets it, the others None.
        """
        with self._lock:
            optimizer = self.optimizer
            arrays = {
                "parameters": self.flat,
                "exp_avg": optimizer.exp_avg,
                "exp_avg_sq": optimizer.exp_avg_sq,
                "buf_initialized": np.zeros(len(self.names), np.int32),
            }
            if self._team is not None:
                for name in ("exp_avg", "exp_avg_sq"):
                    arrays[name] = self._team.gather(arrays[name])
                if self.comm.rank:
                    return None
            if _copy_arrays:
                arrays = {name: array.copy() for name, array in arrays.items()}
            state = {
                "schema": STATE_SCHEMA,
                "profile": STATE_PROFILE,
                "experiment_profile": "baseline",
                "numeric_mode": self.numeric_mode,
                "config": self.config.to_dict(),
                "registry": _registry_entries(self.config),
                **arrays,
                "t": optimizer.t,
                "optimizer": {
                    "kind": "adamw",
                    "lr": optimizer.lr,
                    "beta1": optimizer.betas[0],
                    "beta2": optimizer.betas[1],
                    "eps": optimizer.eps,
                    "weight_decay": optimizer.weight_decay,
                    "max_norm": self.max_norm,
                    "accumulation_steps": self.accumulation_steps,
                },
                "schedule": None if optimizer.lr_schedule is None else optimizer.lr_schedule.config(),
                "rng": self.generator.state_dict(),
            }
            if self.numeric_mode == "deterministic":
                state["deterministic_profile"] = _deterministic_profile(self.n_shards)
            return state

    def save_checkpoint(self, path, *, compression="zstd", level=None, extra=None):
        """Write the training state to `path`, atomically.

        Parameters
        ----------
        path : str or path-like
            The file; an existing one is replaced when the new one is complete.
        compression : {"zstd", None}, default "zstd"
            None writes the plain archive of the public library, which carries no `extra`.
        level : int or None, default None
            Compression level; None is the format's default.
        extra : dict or None, default None
            A JSON object to store; None stores the attribute `extra`.

        Returns
        -------
        str
            SHA-256 of the file, hexadecimal.

        Notes
        -----
        Saving reads the live parameters under the stack's lock: a `train_step` in another thread waits until the file
        is written. Writing to `parameters()` while it saves is not guarded against. With `comm`, rank 0 writes the
        file, and the file does not depend on the number of ranks; an error of it is raised on all ranks.
        """
        extra = self.extra if extra is None else extra
        with self._lock:
            state = self.state_dict(_copy_arrays=False)

            def save():
                return checkpoint.save(path, state, compression=compression, level=level, extra=extra)

            return save() if self.comm is None else on_root(self.comm, save)

    @classmethod
    def from_checkpoint(cls, path, numeric_mode=None, comm=None):
        """Build a stack from a checkpoint written by `save_checkpoint`.

        Parameters
        ----------
        path : str or path-like
            A file in any of the layouts that the library reads.
        numeric_mode : {"identical", "deterministic", "fast"} or None, default None
            None uses the mode stored in the checkpoint.
        comm : LocalComm, MPIComm or None, default None
            The ranks that go on together, each of which reads the file. Their number need not be that of the ranks
            that made it.

        Raises
        ------
        CheckpointError
            The file is damaged, or it does not hold a training state that fits together.
        """
        if numeric_mode is not None:
            mode_index(numeric_mode)
        get_num_threads()  # a wrong environment variable is no fault of the file
        state, extra, _ = checkpoint.load(path)
        try:
            stack = cls._from_state(state, numeric_mode, comm)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        stack.extra = extra
        return stack

    @classmethod
    def from_safetensors(cls, path, config=None, **options):
        """A fresh training start from a safetensors file of float32 or bfloat16 weights.

        Parameters
        ----------
        path : str or path-like
            The file; see `mojolearn.interop` for the names and metadata it must have.
        config : SambaConfig or None, default None
            For files whose metadata has no configuration. One that differs from the file's is refused.
        **options
            As for the constructor: `lr`, `lr_schedule`, `max_norm` and so on.

        Returns
        -------
        SambaStack
        """
        config, weights = load_safetensors(path, config)
        weights, _ = lowbit.unpack(weights)
        return cls(config, weights, **options)

    @classmethod
    def _from_state(cls, state, numeric_mode=None, comm=None):
        """A stack on the arrays of a state, which it takes over where it can."""
        if not isinstance(state, dict) or "config" not in state:
            raise ValueError("the state has no config")
        mode = state.get("numeric_mode") if numeric_mode is None else numeric_mode
        if mode not in MODE_NAMES:
            raise ValueError(f"numeric_mode must be one of {MODE_NAMES}, got {describe(mode)}")
        if numeric_mode is not None:
            profile = state.get("deterministic_profile") or _deterministic_profile(1)
            state = {**state, "numeric_mode": mode, "deterministic_profile": profile}
        config = SambaConfig.from_dict(state["config"])
        checked = _check_state_dict(config, mode, state)
        for name in ("parameters", "exp_avg", "exp_avg_sq"):
            if not checked[name].flags.carray:
                checked[name] = checked[name].copy()
        stack = cls.__new__(cls)
        stack._allocate(config, MODE_NAMES.index(mode), checked["parameters"], comm, checked["n_shards"])
        stack.optimizer = stack._make_optimizer(
            *(checked[name] for name in ("lr", "betas", "eps", "weight_decay", "lr_schedule"))
        )
        for name in ("exp_avg", "exp_avg_sq"):
            # A rank keeps its own part and lets the whole go.
            setattr(stack.optimizer, name, checked[name] if comm is None else checked[name][stack._owned].copy())
        stack.optimizer.t = checked["t"]
        stack.max_norm = checked["max_norm"]
        stack.accumulation_steps = checked["accumulation_steps"]
        stack.generator = Generator(0)
        stack.generator.load_state_dict(checked["rng"])
        return stack

    def load_state_dict(self, state):
        """Restore a state made by `state_dict`.

        Parameters
        ----------
        state : dict
            Of a stack with the same configuration, numeric mode and shards. Its `accumulation_steps` is not taken
            over. With `comm`, every rank passes the whole state.

        Returns
        -------
        SambaStack
            This stack.

        Raises
        ------
        TypeError
            An array of another dtype.
        ValueError
            The schema, profile, mode, configuration, registry or a size does not match, or a value is out of range. The
            stack is then as it was.
        """
        checked = _check_state_dict(self.config, self.numeric_mode, state)
        if self.numeric_mode == "deterministic" and checked["n_shards"] != self.n_shards:
            raise ValueError(f"state.deterministic_profile.n_shards must be {self.n_shards}, got {checked['n_shards']}")
        with self._lock, deferred_interrupts():
            np.copyto(self.flat, checked["parameters"])
            optimizer = self.optimizer
            np.copyto(optimizer.exp_avg, checked["exp_avg"][self._owned])
            np.copyto(optimizer.exp_avg_sq, checked["exp_avg_sq"][self._owned])
            optimizer.t = checked["t"]
            for name in ("lr", "betas", "eps", "weight_decay", "lr_schedule"):
                setattr(optimizer, name, checked[name])
            self.max_norm = checked["max_norm"]
            self.generator.load_state_dict(checked["rng"])
            self.last_ = None
            self._distrust_ranks()
        return self

    def __reduce__(self):
        self._refuse_copy()
        return _rebuild, (type(self), self.state_dict(), self.extra, self.last_)

    def __deepcopy__(self, memo):
        self._refuse_copy()
        return _rebuild(type(self), self.state_dict(), self.extra, self.last_)

    def _refuse_copy(self):
        if self.comm is not None:
            raise TypeError(
                "a stack with comm cannot be copied or pickled: it holds a rank's part of the training state"
            )


class Step(NamedTuple):
    """A batch and what all its pieces share.

    Attributes
    ----------
    ids, targets : ndarray of int32, shape (B, L)
    divisor : int
        Of the summed loss.
    stream : int or None
        Random stream of the dropout mask.
    token_offset : int
        Position of the first token in that stream.
    pieces : int
        Micro-batches.
    """

    ids: np.ndarray
    targets: np.ndarray
    divisor: int
    stream: int | None
    token_offset: int
    pieces: int


class _LayerSink:
    """A gradient sink that puts a layer's prefix before the names."""

    def __init__(self, sink, prefix):
        self._sink = sink
        self._prefix = prefix

    def linear(self, name, dc, a):
        self._sink.linear(self._prefix + name, dc, a)

    def colsum(self, name, rows):
        self._sink.colsum(self._prefix + name, rows)


def _rebuild(cls, state, extra, last):
    stack = cls._from_state(state)
    stack.extra = extra
    stack.last_ = last
    return stack


def _tokens(x):
    """(B, L, D) as (T, D)."""
    return x.reshape(-1, x.shape[-1])


def _count_targets(targets):
    """Divisor of a step: the targets that count, or 1 when none does."""
    count = int(np.count_nonzero(targets != IGNORE_INDEX))
    if count > _MAX_ITEMS:
        raise ValueError(f"targets must be at most {_MAX_ITEMS} in one step, got {count}")
    return max(count, 1)


def _check_weights(config, weights):
    if not isinstance(weights, dict):
        raise ValueError(f"weights must be a dict of float32 arrays, got {describe(weights)}")
    check_names(config, weights)
    return {
        name: as_float32(weights[name], f"weights[{name!r}]", shape, finite=True) for name, shape in config.registry()
    }


def _check_generator(value):
    if not isinstance(value, Generator):
        raise TypeError(f"generator must be a mojolearn.training.Generator, got {describe(value)}")


def _initialize(parameters, generator):
    """Draw initial values in registry order, one stream per tensor that draws; on a failure none is consumed."""
    before = generator.state_dict()
    try:
        for name, array in parameters.items():
            if name in ("embed.weight", "lm_head.weight"):
                array[...] = generator.normal(array.shape, 0.0, 0.02)
            elif array.ndim == 2 and name.endswith(".weight"):
                array[...] = generator.kaiming_uniform(array.shape, fan_in=array.shape[1])
            elif name.endswith(".dt_bias"):
                array[...] = generator.uniform(array.shape, -4.0, -2.0)
            else:
                array[...] = 1.0
    except BaseException:
        generator.load_state_dict(before)
        raise


_STATE_KEYS = (
    "schema",
    "profile",
    "numeric_mode",
    "config",
    "registry",
    "parameters",
    "exp_avg",
    "exp_avg_sq",
    "buf_initialized",
    "t",
    "optimizer",
    "schedule",
    "rng",
)


def _check_state_dict(config, mode, state):
    """Everything that is taken over from a state, checked against a configuration and a mode."""
    if not isinstance(state, dict):
        raise ValueError(f"state must be a dict, got {describe(state)}")
    missing = [name for name in _STATE_KEYS if name not in state]
    if missing:
        raise ValueError(f"state lacks {', '.join(missing)}")
    _check_equal(state["schema"], STATE_SCHEMA, "schema")
    _check_equal(state["profile"], STATE_PROFILE, "profile")
    _check_equal(state.get("experiment_profile", "baseline"), "baseline", "experiment_profile")
    _check_equal(state["numeric_mode"], mode, "numeric_mode")
    n_shards = 1
    if mode == "deterministic":
        n_shards = _check_deterministic_profile(state.get("deterministic_profile"))
    if SambaConfig.from_dict(state["config"]) != config:
        raise ValueError(f"state.config must equal this stack's, got {state['config']}")
    registry = _registry_entries(config)
    _check_registry(state["registry"], registry)
    arrays = {
        name: _check_array(state[name], name, np.float32, config.num_parameters)
        for name in ("parameters", "exp_avg", "exp_avg_sq")
    }
    _check_array(state["buf_initialized"], "buf_initialized", np.int32, len(registry))
    rng = _check_section(state["rng"], "rng", ("seed", "counter"))
    return {
        **arrays,
        **_check_optimizer(state["optimizer"]),
        "n_shards": n_shards,
        "t": as_index(state["t"], "state.t", 0, 2**63 - 1),
        "lr_schedule": _check_schedule(state["schedule"]),
        "rng": {
            "seed": as_index(rng["seed"], "state.rng.seed", 0, 2**64 - 1),
            "counter": as_index(rng["counter"], "state.rng.counter", 0, _MAX_STREAMS),
        },
    }


def _check_optimizer(optimizer):
    fields = _check_section(optimizer, "optimizer", ("kind", "lr", "beta1", "beta2", "eps", "weight_decay"))
    _check_equal(fields["kind"], "adamw", "optimizer.kind")
    max_norm = fields.get("max_norm")
    if max_norm is not None:
        max_norm = as_max_norm(max_norm, "state.optimizer.max_norm")
    betas = [fields[name] for name in ("beta1", "beta2")]
    return {
        # By the optimizer's own rules: its setters must not refuse what has been found good here.
        "lr": as_float32_real(fields["lr"], "state.optimizer.lr"),
        "betas": as_betas(betas, ("state.optimizer.beta1", "state.optimizer.beta2")),
        "eps": as_float32_real(fields["eps"], "state.optimizer.eps", 0.0),
        "weight_decay": as_float32_real(fields["weight_decay"], "state.optimizer.weight_decay"),
        "max_norm": max_norm,
        "accumulation_steps": as_index(
            fields.get("accumulation_steps", 1), "state.optimizer.accumulation_steps", 1, _MAX_ITEMS
        ),
    }


def _registry_entries(config):
    """The registry as a state describes it."""
    entries, offset = [], 0
    for name, shape in config.registry():
        size = math.prod(shape)
        entries.append({"name": name, "shape": list(shape), "offset": offset, "size": size})
        offset += size
    return entries


def _deterministic_profile(n_shards):
    return {"name": DETERMINISTIC_PROFILES[-1], "n_shards": n_shards}


def _check_equal(value, wanted, name):
    if not isinstance(value, str) or value != wanted:
        raise ValueError(f"state.{name} must be {wanted!r}, got {describe(value)}")


def _check_section(section, name, keys):
    if not isinstance(section, dict):
        raise ValueError(f"state.{name} must be a dict, got {describe(section)}")
    missing = [key for key in keys if key not in section]
    if missing:
        raise ValueError(f"state.{name} lacks {', '.join(missing)}")
    return section


def _check_deterministic_profile(profile):
    profile = _check_section(profile, "deterministic_profile", ("name", "n_shards"))
    if profile["name"] not in DETERMINISTIC_PROFILES:
        raise ValueError(
            f"state.deterministic_profile is {describe(profile['name'])}, whose summation orders this library does not "
            f"have; it has {', '.join(DETERMINISTIC_PROFILES)}"
        )
    return as_index(profile["n_shards"], "state.deterministic_profile.n_shards", 1)


def _check_registry(registry, wanted):
    if not isinstance(registry, (list, tuple)) or len(registry) != len(wanted):
        raise ValueError(f"state.registry must list the {len(wanted)} tensors of this stack, got {describe(registry)}")
    for i, (entry, expected) in enumerate(zip(registry, wanted)):
        if not isinstance(entry, dict) or {**entry, "shape": list(entry.get("shape") or ())} != expected:
            raise ValueError(f"state.registry[{i}] must be {expected}, got {describe(entry)}")


def _check_array(value, name, dtype, size):
    array = np.asarray(value)
    if array.dtype != dtype:
        raise TypeError(f"state.{name} must be {np.dtype(dtype).name}, got dtype {array.dtype}")
    if array.shape != (size,):
        raise ValueError(f"state.{name} must have shape ({size},), got {array.shape}")
    return array


def _check_schedule(schedule):
    if schedule is None:
        return None
    schedule = _check_section(schedule, "schedule", ("kind",))
    kind = schedule["kind"]
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        raise ValueError(f"state.schedule.kind must be one of {tuple(_SCHEDULES)}, got {describe(kind)}")
    return _SCHEDULES[kind].from_config(schedule)
