"""What both model classes share: embedding, blocks, final norm and head, with and without a carried state."""

import contextlib
import threading
from collections.abc import Sequence

import numpy as np

from mojolearn._arrays import as_flag, as_ids, as_index, as_ragged_ids, describe
from mojolearn._context import Context, WorkspacePool, aligned_empty
from mojolearn._core import layers as kernels
from mojolearn._core import linalg
from mojolearn._core._pool import FloatEnvironment
from mojolearn._interrupt import deferred_interrupts
from mojolearn._numerics import get_num_threads, mode_name
from mojolearn.blocks import Mamba3Block, Mamba3State, TransformerBlock, TransformerState
from mojolearn.config import SambaConfig
from mojolearn.errors import CapacityError, NonFiniteError

__all__ = ["IGNORE_INDEX", "MAX_POSITIONS", "SambaModel", "SambaState"]

# Rotary positions of the attention layers.
MAX_POSITIONS = 8192

# Targets with this value take no part in the loss.
IGNORE_INDEX = -100

# The head works on as many tokens at a time as fit into one (tokens, vocab) buffer of this size.
HEAD_BYTES = 256 << 20

# A batch of more than twice this many tokens is done in segments of about this size with a carried state, which gives
# the same bits: the activations then take little memory, and more of them stay in cache. Without attention layers the
# segments are twice as long: handing the states on costs as much as the cache saves.
SEGMENT_TOKENS = 512

_CHUNK = 64  # tokens of a Mamba-3 chunk; segments of whole chunks do no chunk twice

_STATE_KINDS = {"mamba3": Mamba3State, "attention": TransformerState}
_MAMBA_ARRAYS = (
    "theta",
    "h",
    "buffer_qrot",
    "buffer_krot",
    "buffer_v",
    "buffer_dt",
    "buffer_sig",
    "buffer_adt",
    "pending_k",
    "pending_v",
)


class SambaState:
    """The decode state of a model: one block state per layer, owned by the caller.

    Parameters
    ----------
    batch_size : int
        Number of sequences.
    max_tokens : int
        Maximum total positions per sequence.
    layers : list of Mamba3State or TransformerState
        The block states in stack order.
    tokens : int, default 0
        Positions that the sequences have had so far.

    Notes
    -----
    A state is plain arrays: look at it, copy it, store it. `forward` and `step` of a model read and update it in place;
    a call that is refused leaves it as it was. Calls of several threads on one state wait for one another.
    """

    def __init__(self, batch_size, max_tokens, layers, tokens=0):
        self.batch_size = as_index(batch_size, "batch_size", 1)
        self.max_tokens = as_index(max_tokens, "max_tokens", 1)
        self.tokens = as_index(tokens, "tokens", 0, self.max_tokens)
        self.layers = _as_layers(layers)
        self._lock = threading.RLock()
        self._check()

    # What compiled decoding keeps beside the documented arrays; made on demand, never copied or stored.
    _session = None

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("_session", "_lock")}

    def __setstate__(self, fields):
        self.__dict__.update(fields)
        self._lock = threading.RLock()

    def _check(self):
        """Refuse counts and layers that fit neither together nor anything; users may have set them."""
        self.batch_size = as_index(self.batch_size, "batch_size", 1)
        self.max_tokens = as_index(self.max_tokens, "max_tokens", 1)
        self.tokens = as_index(self.tokens, "tokens", 0, self.max_tokens)
        if not isinstance(self.layers, list):
            self.layers = _as_layers(self.layers)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, tuple(_STATE_KINDS.values())):
                raise TypeError(f"layers[{i}] must be a Mamba3State or TransformerState, got {describe(layer)}")

    def _check_rows(self):
        for i, layer in enumerate(self.layers):
            for name, array in _layer_to_dict(layer).items():
                if _is_array(array) and array.shape[:1] != (self.batch_size,):
                    raise ValueError(
                        f"layers[{i}].{name} must have batch_size {self.batch_size} rows, got shape {array.shape}"
                    )

    def __repr__(self):
        return (
            f"SambaState(batch_size={self.batch_size}, max_tokens={self.max_tokens}, "
            f"layers=<{len(self.layers)} block states>, tokens={self.tokens})"
        )

    @property
    def nbytes(self):
        """Bytes of the block states' arrays."""
        return sum(
            array.nbytes for layer in self.layers for array in _layer_to_dict(layer).values() if _is_array(array)
        )

    def copy(self):
        """An independent copy: decoding on one does not touch the other."""
        return self.select(range(self.batch_size))

    def select(self, rows):
        """A new state of the chosen rows; a row may be chosen several times.

        Parameters
        ----------
        rows : sequence of int
            Row numbers in [0, batch_size).

        Returns
        -------
        SambaState
            Shares no memory with this one.
        """
        if not isinstance(rows, (Sequence, np.ndarray)) or isinstance(rows, (str, bytes)) or np.ndim(rows) != 1:
            raise TypeError(f"rows must be a sequence of row numbers, got {describe(rows)}")
        with self._lock:
            return self._select(rows)

    def _select(self, rows):
        self._check()
        self._check_rows()
        rows = [as_index(row, f"rows[{i}]", 0, self.batch_size - 1) for i, row in enumerate(rows)]
        if not rows:
            raise ValueError("rows must choose at least one row, got none")
        chosen = []
        for layer in self.layers:
            fields = _layer_to_dict(layer)
            if isinstance(layer, TransformerState):
                fields["batch_size"] = len(rows)
            picked = {name: value[rows] if _is_array(value) else value for name, value in fields.items()}
            chosen.append(_layer_from_dict(picked))
        return SambaState(len(rows), self.max_tokens, chosen, self.tokens)

    def to_dict(self):
        """All of the state as a dict of ints and independent arrays; `from_dict` rebuilds it.

        Returns
        -------
        dict
            ``batch_size``, ``max_tokens``, ``tokens`` and ``layers``, a list of one dict per layer whose ``kind`` is
            ``"mamba3"`` or ``"attention"`` and whose other keys are the fields of the block state.
        """
        with self._lock:
            layers = [
                {name: value.copy() if _is_array(value) else value for name, value in _layer_to_dict(layer).items()}
                for layer in self.layers
            ]
            return {
                "batch_size": self.batch_size,
                "max_tokens": self.max_tokens,
                "tokens": self.tokens,
                "layers": layers,
            }

    @classmethod
    def from_dict(cls, fields):
        """Rebuild a state from `to_dict`; the arrays are copied.

        Raises
        ------
        ValueError
            A missing key, an unknown layer kind, or arrays that do not fit.
        """
        if not isinstance(fields, dict):
            raise TypeError(f"state must be a dict, got {describe(fields)}")
        missing = [name for name in ("batch_size", "max_tokens", "tokens", "layers") if name not in fields]
        if missing:
            raise ValueError(f"state lacks {', '.join(missing)}")
        layers = []
        for i, layer in enumerate(_as_sequence(fields["layers"])):
            kind = layer.get("kind") if isinstance(layer, dict) else None
            if not isinstance(kind, str) or kind not in _STATE_KINDS:
                raise ValueError(f"layers[{i}] must be a dict whose kind is one of {tuple(_STATE_KINDS)}")
            copied = {name: np.array(value) if _is_array(value) else value for name, value in layer.items()}
            try:
                layers.append(_layer_from_dict(copied))
            except KeyError as error:
                raise ValueError(f"layers[{i}] lacks {error.args[0]}") from None
        return cls(fields["batch_size"], fields["max_tokens"], layers, fields["tokens"])


def _as_layers(value):
    return list(_as_sequence(value))


def _as_sequence(value):
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"layers must be a list of block states, got {describe(value)}")
    return value


def _is_array(value):
    return isinstance(value, np.ndarray)


def _layer_to_dict(layer):
    """The documented fields of a block state, arrays not copied."""
    if isinstance(layer, Mamba3State):
        fields = {name: getattr(layer, name) for name in _MAMBA_ARRAYS}
        return {
            "kind": "mamba3",
            **fields,
            "buffered_tokens": int(layer.buffered_tokens),
            "pending": bool(layer.pending),
        }
    return {
        "kind": "attention",
        "batch_size": layer.batch_size,
        "n_kv_heads": layer.n_kv_heads,
        "head_dim": layer.head_dim,
        "max_tokens": layer.max_tokens,
        "k_cache": layer.k_cache,
        "v_cache": layer.v_cache,
        "cached_tokens": int(layer.cached_tokens),
        "window": layer.window,
    }


def _layer_from_dict(fields):
    """A block state on the given arrays."""
    if fields["kind"] == "mamba3":
        arrays = [fields[name] for name in _MAMBA_ARRAYS]
        return Mamba3State(*arrays, buffered_tokens=fields["buffered_tokens"], pending=fields["pending"])
    names = ("batch_size", "n_kv_heads", "head_dim", "max_tokens", "k_cache", "v_cache", "cached_tokens", "window")
    return TransformerState(**{name: fields[name] for name in names})


class SambaModel:
    """Forward passes and decode states, over weights that a subclass provides.

    A subclass calls `_bind` with the weights by registry name: float32 arrays, or packed panels for matrices.
    """

    config: SambaConfig

    # Attributes that say what the object is made of; others would not fit it.
    _FIXED = ("config",)

    def __setattr__(self, name, value):
        if name in self._FIXED and name in self.__dict__:
            raise AttributeError(
                f"{name} is fixed when a {type(self).__name__} is made, got {describe(value)} for it later"
            )
        super().__setattr__(name, value)

    def _bind(self, config, mode, weights):
        self.config = config
        self._mode = mode
        self._embed = weights["embed.weight"]
        self._norm_f = weights["norm_f.weight"]
        self._head = weights["embed.weight" if config.tie_embeddings else "lm_head.weight"]
        self._blocks = []
        for i, kind in enumerate(config.layers):
            views = {name: weights[f"layers.{i}.{name}"] for name, _ in config.block_shapes(kind)}
            if kind == "mamba3":
                block = Mamba3Block._from_views(views, mode)
            else:
                block = TransformerBlock._from_views(
                    views,
                    mode,
                    n_heads=config.n_heads,
                    n_kv_heads=config.n_kv_heads,
                    head_dim=config.head_dim,
                )
            self._blocks.append(block)
        self._has_attention = "attention" in config.layers
        self._workspaces = WorkspacePool()

    @property
    def numeric_mode(self):
        """Name of the numeric mode that this model computes in."""
        return mode_name(self._mode)

    @contextlib.contextmanager
    def _context(self):
        workspace = self._workspaces.acquire()
        try:
            with FloatEnvironment():
                yield Context(get_num_threads(), self._mode, workspace)
        finally:
            self._workspaces.give_back(workspace)

    # Public calls

    def forward(self, inputs, state=None, *, lengths=None, last_only=False):
        """Logits for token ids, without dropout.

        Parameters
        ----------
        inputs : array of int, shape (B, L)
            Token ids in [0, vocab).
        state : SambaState or None, default None
            None starts every block from a zero state. A state from `allocate_state` is read and updated in place, so a
            later `forward` or `step` on it continues the sequences.
        lengths : sequence of int or None, default None
            Ragged batch: row i is real at positions [0, lengths[i]) and padding after. The logits of each real
            position equal those of the row alone, those of padding are +0.0. Not together with `state`.
        last_only : bool, default False
            Return the logits of each row's last real position only.

        Returns
        -------
        ndarray of float32, shape (B, L, vocab), or (B, vocab) with `last_only`

        Raises
        ------
        TypeError
            `state` is not a SambaState, or an entry of `lengths` is not an integer.
        CapacityError
            More positions than the state or the rotary embedding has room for.
        NonFiniteError
            NaN or infinity in an activation.
        ValueError
            Bad ids, lengths or state. After any refusal the state is as it was.
        """
        ids, lengths = self._check_inputs(inputs, lengths)
        last_only = as_flag(last_only, "last_only")
        if state is None:
            self._check_positions(ids.shape[1] if lengths is None else int(lengths.max()))
            return self._forward(ids, None, lengths, last_only)
        if lengths is not None:
            raise ValueError("lengths must be None with a state: ragged batches are stateless")
        with _exclusive(state):
            self._check_state(state, ids)
            return self._forward(ids, state, None, last_only)

    def _forward(self, ids, state, lengths, last_only):
        with self._context() as ctx:
            if lengths is not None:
                return self._forward_ragged(ctx, ids, lengths, last_only)
            segment = SEGMENT_TOKENS if self._has_attention else 2 * SEGMENT_TOKENS
            if state is None and ids.size > 2 * SEGMENT_TOKENS:
                return self._forward_segments(ctx, ids, last_only, segment)
            x, advances = self._run_blocks(ctx, ids, state)
            if last_only:
                x = np.ascontiguousarray(x[:, -1:])
            logits = aligned_empty((ids.shape[0], x.shape[1], self.config.vocab))
            self._head_forward(ctx, _tokens(x), logits.reshape(-1, self.config.vocab))
            self._commit(state, ids.shape[1], advances)
        return logits[:, 0] if last_only else logits

    def allocate_state(self, batch_size, max_tokens):
        """A zero decode state.

        Parameters
        ----------
        batch_size : int
            Number of sequences.
        max_tokens : int
            Maximum total positions per sequence; with attention layers at most 8192.

        Returns
        -------
        SambaState
            One block state per layer in stack order, owned by the caller.
        """
        batch_size = as_index(batch_size, "batch_size", 1)
        max_tokens = as_index(max_tokens, "max_tokens", 1)
        self._check_positions(max_tokens, "max_tokens")
        layers = [
            block.allocate_state(batch_size) if kind == "mamba3" else block.allocate_state(batch_size, max_tokens)
            for kind, block in zip(self.config.layers, self._blocks)
        ]
        return SambaState(batch_size, max_tokens, layers)

    def step(self, inputs, state):
        """Decode one token per row and update `state` in place.

        The logits equal, in every bit, those that one forward over the whole sequence gives at that position.

        Parameters
        ----------
        inputs : array of int, shape (B,) or (B, 1)
            Token ids.
        state : SambaState
            From `allocate_state`.

        Returns
        -------
        ndarray of float32, shape (B, vocab)
        """
        if state is None:
            raise ValueError("state must be a SambaState, got None; allocate_state makes one")
        ids = self._step_ids(inputs)
        with _exclusive(state):
            self._check_state_shape(state, *ids.shape)
            return self._step(ids, state)

    def _step(self, ids, state):
        """`step` on ids (B, 1) and a state whose counts are checked."""
        self._check_layer_states(state, 1)
        with self._context() as ctx:
            x, advances = self._run_blocks(ctx, ids, state)
            logits = np.empty((len(ids), self.config.vocab), np.float32)
            self._head_forward(ctx, _tokens(x), logits)
            self._commit(state, 1, advances)
        return logits

    def hidden_states(self, inputs, *, lengths=None):
        """The residual stream before the first block and after each one.

        Parameters
        ----------
        inputs : array of int, shape (B, L)
            Token ids.
        lengths : sequence of int or None, default None
            Ragged batch; padding positions are +0.0.

        Returns
        -------
        list of ndarray of float32, shape (B, L, d_model)
            ``len(config.layers) + 1`` arrays: the embedding output, then each block's output. The final norm and the
            head applied to the last one give the logits.
        """
        ids, lengths = self._check_inputs(inputs, lengths)
        self._check_positions(ids.shape[1])
        padding = None if lengths is None else np.arange(ids.shape[1]) >= lengths[:, None]
        seen = []

        def keep(x):
            copy = x.copy()
            if padding is not None:
                copy[padding] = 0.0
            seen.append(copy)

        with self._context() as ctx:
            self._run_blocks(ctx, ids, padding=padding, keep=keep)
        return seen

    def token_logprobs(self, inputs, *, lengths=None):
        """Log-probability of each token given those before it.

        Parameters
        ----------
        inputs : array of int, shape (B, L)
            Token ids, L at least 2.
        lengths : sequence of int or None, default None
            Ragged batch; entries of padding are +0.0.

        Returns
        -------
        ndarray of float32, shape (B, L - 1)
            Entry (i, t) is ``log p(inputs[i, t + 1] | inputs[i, :t + 1])``, natural logarithm.
        """
        ids, lengths = self._check_inputs(inputs, lengths)
        batch, length = ids.shape
        if length < 2:
            raise ValueError(f"inputs must have at least 2 positions, got shape {ids.shape}")
        self._check_positions(length - 1)
        targets = ids[:, 1:].copy()
        padding = None
        if lengths is not None:
            padding = np.arange(length - 1) >= lengths[:, None] - 1
            targets[padding] = IGNORE_INDEX
        with self._context() as ctx:
            x, _ = self._run_blocks(ctx, np.ascontiguousarray(ids[:, :-1]), padding=padding)
            losses = self._row_losses(ctx, _tokens(x), targets.reshape(-1))
        return (np.float32(0.0) - losses).reshape(batch, length - 1)

    # Checks

    def _check_inputs(self, inputs, lengths):
        if lengths is None:
            return as_ids(inputs, "inputs", self.config.vocab, 2), None
        return as_ragged_ids(inputs, "inputs", self.config.vocab, lengths)

    def _step_ids(self, inputs):
        ids = as_ids(inputs, "inputs", self.config.vocab, (1, 2))
        if ids.ndim == 2 and ids.shape[1] != 1:
            raise ValueError(f"inputs of a step must have one token per row, (B,) or (B, 1), got shape {ids.shape}")
        return ids.reshape(-1, 1)

    def _check_positions(self, count, name="positions"):
        if self._has_attention and count > MAX_POSITIONS:
            raise CapacityError(f"{name} must be at most {MAX_POSITIONS} with attention layers, got {count}")

    def _check_state(self, state, ids):
        self._check_state_shape(state, *ids.shape)
        self._check_layer_states(state, ids.shape[1])

    def _check_layer_states(self, state, length):
        for i in range(len(self._blocks)):
            self._check_layer_state(i, state, length)

    def _check_state_shape(self, state, batch, length):
        try:
            state._check()
        except (TypeError, ValueError) as error:
            raise type(error)(f"state: {error}") from None
        if state.batch_size != batch:
            raise ValueError(f"state must have batch_size {batch} like the inputs, got {state.batch_size}")
        if len(state.layers) != len(self._blocks):
            raise ValueError(f"state must have {len(self._blocks)} layers, got {len(state.layers)}")
        if state.tokens + length > state.max_tokens:
            raise CapacityError(
                f"state has room for max_tokens = {state.max_tokens} positions, got {state.tokens + length} "
                f"({state.tokens} so far and {length} new)"
            )
        for i, (kind, layer) in enumerate(zip(self.config.layers, state.layers)):
            if not isinstance(layer, _STATE_KINDS[kind]):
                raise ValueError(f"state.layers[{i}] must be a {_STATE_KINDS[kind].__name__}, got {describe(layer)}")

    def _check_layer_state(self, i, state, length):
        """Shapes, room and finiteness of one layer's state."""
        try:
            self._blocks[i]._check_state(state.layers[i], state.batch_size, length)
        except (TypeError, ValueError) as error:
            raise type(error)(f"state.layers[{i}]: {error}") from None

    def _check_finite(self, ctx, x, layer):
        if not kernels.all_finite(x.reshape(-1), ctx.threads):
            self._refuse_activation(layer)

    def _refuse_activation(self, layer):
        where = "the embedding" if layer < 0 else f"layer {layer} ({self.config.layers[layer]})"
        raise NonFiniteError(f"the output of {where} must be finite, got NaN or infinity")

    # Computation

    def _run_blocks(self, ctx, ids, state=None, padding=None, keep=None):
        """Embedding and all blocks: the last block's output (B, L, D), and what commits the states."""
        shape = (*ids.shape, self.config.d_model)
        x, y = ctx.workspace.empty(shape), ctx.workspace.empty(shape)
        self._embed_forward(ctx, ids.reshape(-1), _tokens(x))
        advances = []
        for i, block in enumerate(self._blocks):
            self._check_finite(ctx, x, i - 1)
            if keep is not None:
                keep(x)
            layer_state = None if state is None else state.layers[i]
            advances.append(block._run(ctx, x, y, state=layer_state))
            x, y = y, x
            if padding is not None:
                x[padding] = 0.0
        self._check_finite(ctx, x, len(self._blocks) - 1)
        if keep is not None:
            keep(x)
        return x, advances

    def _embed_forward(self, ctx, ids, out):
        if isinstance(self._embed, np.ndarray):
            kernels.embedding_forward(self._embed, ids, out, ctx.threads)
        else:
            self._embed.rows(ids, out, ctx.threads)

    def _head_forward(self, ctx, x, logits):
        """Final norm and head: `x` (T, D) to `logits` (T, V)."""
        workspace = ctx.workspace
        mark = workspace.mark()
        normed = workspace.empty(x.shape)
        kernels.rms_norm_forward(x, self._norm_f, self.config.norm_eps, normed, None, False, ctx.threads)
        linalg.linear(normed, self._head, logits, ctx.threads, ctx.mode)
        workspace.release(mark)

    def _head_tile(self, tokens):
        """Tokens whose logits fit into `HEAD_BYTES`; whole power-of-two groups of leaves where it can be."""
        rows = max(1, HEAD_BYTES // (4 * self.config.vocab))
        if rows >= tokens:
            return tokens
        if rows < 128:
            return rows
        return 128 << ((rows // 128).bit_length() - 1)

    def _row_losses(self, ctx, x, targets):
        """Cross-entropy (T,) of each token's target, `x` (T, D) the last block's output; 0 where ignored."""
        workspace = ctx.workspace
        losses = np.empty(len(x), np.float32)
        tile = self._head_tile(len(x))
        mark = workspace.mark()
        buffer = workspace.empty((tile, self.config.vocab))
        for first in range(0, len(x), tile):
            rows = x[first : first + tile]
            logits = buffer[: len(rows)]
            self._head_forward(ctx, rows, logits)
            kernels.loss_rows(
                logits,
                targets[first : first + tile],
                IGNORE_INDEX,
                0.0,
                1.0,
                losses[first : first + tile],
                None,
                ctx.threads,
            )
        workspace.release(mark)
        return losses

    def _forward_segments(self, ctx, ids, last_only, tokens):
        batch, length = ids.shape
        size = max(_CHUNK, tokens // batch // _CHUNK * _CHUNK)
        logits = aligned_empty((batch, 1 if last_only else length, self.config.vocab))
        state = self.allocate_state(batch, length)
        for first in range(0, length, size):
            last = min(first + size, length)
            x, advances = self._run_blocks(ctx, np.ascontiguousarray(ids[:, first:last]), state)
            for row in range(batch):
                if not last_only:
                    self._head_forward(ctx, x[row], logits[row, first:last])
                elif last == length:
                    self._head_forward(ctx, x[row, -1:], logits[row])
            for advance in advances:
                advance()
            ctx.workspace.release((0, 0))
        return logits[:, 0] if last_only else logits

    def _forward_ragged(self, ctx, ids, lengths, last_only):
        batch, length = ids.shape
        vocab = self.config.vocab
        logits = np.zeros((batch, vocab) if last_only else (batch, length, vocab), np.float32)
        for rows in _similar_lengths(lengths):
            mark = ctx.workspace.mark()
            real = lengths[rows]
            padding = np.arange(real.max()) >= real[:, None]
            x, _ = self._run_blocks(ctx, np.ascontiguousarray(ids[rows, : real.max()]), padding=padding)
            if last_only:
                at = (rows, slice(None))
                x = x[np.arange(len(rows)), real - 1]
            else:
                row, position = np.nonzero(~padding)
                at = (rows[row], position)
                x = x[row, position]
            out = aligned_empty((len(x), vocab))
            self._head_forward(ctx, x, out)
            logits[at] = out
            ctx.workspace.release(mark)
        return logits

    def _commit(self, state, length, advances):
        if state is None:
            return
        with deferred_interrupts():
            for advance in advances:
                advance()
            state.tokens += length


def _exclusive(state):
    """The lock of a state: what two threads do to it at once would be neither's."""
    if not isinstance(state, SambaState):
        raise TypeError(f"state must be a SambaState, got {describe(state)}")
    return state._lock


def _tokens(x):
    """(B, L, D) as (T, D)."""
    return x.reshape(-1, x.shape[-1])


def _similar_lengths(lengths):
    """Groups of row numbers whose lengths are within a quarter of the longest: little padding is computed."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or 4 * lengths[order[i]] < 3 * lengths[order[start]]:
            yield order[start:i]
            start = i
