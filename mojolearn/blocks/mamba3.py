"""The Mamba-3 block (single input, single output) and its decode state."""

import copy

import numpy as np

from mojolearn._arrays import as_flag, as_float32, as_index, describe
from mojolearn._core import layers, linalg, mamba3
from mojolearn._numerics import get_num_threads
from mojolearn.blocks._block import MAX_BATCH, Block, block_weights
from mojolearn.errors import NonFiniteError

__all__ = ["Mamba3Block", "Mamba3State"]

_CHUNK = 64
_HEAD_DIM = 64
_STATE_SIZE = 128
_ANGLES = 32
_NORM_EPS = 1e-05

# One call of the backward's kernels handles about so many chunks of a head, so that Ctrl-C need not wait for long.
_CALL_ITEMS = 1024

_SMALL_WEIGHTS = ("dt_bias", "B_norm.weight", "C_norm.weight", "B_bias", "C_bias", "D")

# A forward that keeps nothing for a backward works on so many tokens at a time, whole chunks: enough for matrix
# products at full speed, and its memory stays the same for any length.
_PIECE_TOKENS = 1024

# Fields of a state that hold one row per buffered token, with the rest of their shape after (B, 64, H).
_BUFFERS = {
    "buffer_qrot": (_STATE_SIZE,),
    "buffer_krot": (_STATE_SIZE,),
    "buffer_v": (_HEAD_DIM,),
    "buffer_dt": (),
    "buffer_sig": (),
    "buffer_adt": (),
}


def _state_shapes(batch, heads):
    shapes = {"theta": (batch, heads, _ANGLES), "h": (batch, heads, _HEAD_DIM, _STATE_SIZE)}
    shapes |= {name: (batch, _CHUNK, heads, *rest) for name, rest in _BUFFERS.items()}
    shapes |= {"pending_k": (batch, heads, _STATE_SIZE), "pending_v": (batch, heads, _HEAD_DIM)}
    return shapes


class Mamba3State:
    """Decode state of a `Mamba3Block`, owned by the caller.

    The arrays are used as they are, not copied; they may be looked at, stored and edited between calls.

    Parameters
    ----------
    theta : ndarray of float32, shape (B, H, 32)
        Rotation angles after the last token.
    h : ndarray of float32, shape (B, H, 64, 128)
        The recurrent state that enters the open chunk.
    buffer_qrot, buffer_krot : ndarray of float32, shape (B, 64, H, 128)
        Rotated queries and keys of the open chunk's tokens.
    buffer_v : ndarray of float32, shape (B, 64, H, 64)
        Their values.
    buffer_dt, buffer_sig, buffer_adt : ndarray of float32, shape (B, 64, H)
        Their step sizes, trapezoid gates and log decays.
    pending_k, pending_v : ndarray of float32, shapes (B, H, 128) and (B, H, 64)
        Key and value of a token before the first, set by `set_input_states`.
    buffered_tokens : int, default 0
        Tokens of the open chunk, 0 to 64; buffer rows from there on mean nothing.
    pending : bool, default False
        Whether `pending_k` and `pending_v` are still to be applied.

    Raises
    ------
    ValueError
        An array of the wrong shape or dtype, or one that is not a writable C-contiguous ndarray; `buffered_tokens` out
        of range.
    """

    def __init__(
        self,
        theta,
        h,
        buffer_qrot,
        buffer_krot,
        buffer_v,
        buffer_dt,
        buffer_sig,
        buffer_adt,
        pending_k,
        pending_v,
        buffered_tokens=0,
        pending=False,
    ):
        self.theta = theta
        self.h = h
        self.buffer_qrot = buffer_qrot
        self.buffer_krot = buffer_krot
        self.buffer_v = buffer_v
        self.buffer_dt = buffer_dt
        self.buffer_sig = buffer_sig
        self.buffer_adt = buffer_adt
        self.pending_k = pending_k
        self.pending_v = pending_v
        self.buffered_tokens = buffered_tokens
        self.pending = pending
        if not isinstance(theta, np.ndarray) or theta.ndim != 3:
            raise ValueError(f"theta must be a float32 array of shape (B, H, {_ANGLES}), got {describe(theta)}")
        self._check(*theta.shape[:2])

    def __repr__(self):
        batch, heads, _ = self.theta.shape
        return (
            f"Mamba3State(batch_size={batch}, heads={heads}, buffered_tokens={self.buffered_tokens}, "
            f"pending={self.pending})"
        )

    def set_input_states(self, theta, h, k, v):
        """Continue from states that came from elsewhere; copied.

        Parameters
        ----------
        theta : array of float32, shape (B, H, 32)
        h : array of float32, shape (B, H, 64, 128)
        k, v : arrays of float32, shapes (B, H, 128) and (B, H, 64)
            Rotated key and value of the last token before. They are folded into `h` with the weight of the next
            token, at the next call.

        Raises
        ------
        TypeError
            Another dtype than float32.
        ValueError
            Wrong shape.
        """
        theta = as_float32(theta, "theta", shape=self.theta.shape)
        h = as_float32(h, "h", shape=self.h.shape)
        k = as_float32(k, "k", shape=self.pending_k.shape)
        v = as_float32(v, "v", shape=self.pending_v.shape)
        self.theta[...] = theta
        self.h[...] = h
        self.pending_k[...] = k
        self.pending_v[...] = v
        self.pending = True

    def _check(self, batch, heads):
        self.buffered_tokens = as_index(self.buffered_tokens, "buffered_tokens", 0, _CHUNK)
        self.pending = as_flag(self.pending, "pending")
        for name, shape in _state_shapes(batch, heads).items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != shape:
                raise ValueError(f"{name} must be a float32 array of shape {shape}, got {describe(array)}")
            if not array.flags.carray:
                raise ValueError(f"{name} must be C-contiguous, aligned and writable")

    def _rows(self, part):
        """A state over the same memory for some of the rows."""
        arrays = {name: getattr(self, name)[part] for name in _state_shapes(0, 0)}
        return Mamba3State(**arrays, buffered_tokens=self.buffered_tokens, pending=self.pending)

    def _assign(self, other):
        """Take over a state that is at least a chunk further on; rows that buffer nothing keep what they hold."""
        for name in _state_shapes(0, 0):
            rows = slice(0, other.buffered_tokens) if name in _BUFFERS else slice(None)
            getattr(self, name)[:, rows] = getattr(other, name)[:, rows]
        self.buffered_tokens = other.buffered_tokens
        self.pending = other.pending

    def _kernel_arrays(self):
        arrays = (
            self.theta,
            self.h,
            self.buffer_krot,
            self.buffer_v,
            self.buffer_dt,
            self.buffer_sig,
            self.buffer_adt,
        )
        pending = (self.pending_k, self.pending_v) if self.pending else (None, None)
        return tuple(None if array is None else array.reshape(-1) for array in arrays + pending)


class Mamba3Block(Block):
    """Pre-norm Mamba-3 block with its residual: a gated, rotating, decaying state of 128 rows per head of 64 channels.

    Parameters
    ----------
    weights : dict
        float32 arrays, copied, or packed matrices of `mojolearn.lowbit`. With ``H = D / 32`` heads:
        ``block_norm.weight`` (D), ``in_proj.weight`` (4 D + 288 + 3 H, D), ``dt_bias`` (H), ``B_norm.weight`` (128),
        ``C_norm.weight`` (128), ``B_bias`` (H, 128), ``C_bias`` (H, 128), ``D`` (H), ``out_proj.weight`` (D, 2 D).
    numeric_mode : {'identical', 'deterministic', 'fast'}, optional
        None uses the library default. "identical" differs from the others in `backward`; "fast" moreover lets matrix
        products flush tiny results early.

    Attributes
    ----------
    d_model : int
        Width of the rows, a multiple of 32.
    weight_format : str
        "float32", or the packed format of the matrices.
    h_last_ : ndarray, shape (B, H, 64, 128)
        After a direct call: the recurrent state after the last token.
    k_last_, v_last_ : ndarray, shapes (B, H, 128) and (B, H, 64)
        Rotated key and value of the last token.
    theta_last_ : ndarray, shape (B, H, 32)
        Rotation angles after the last token.

    Raises
    ------
    TypeError
        A tensor that is not float32.
    ValueError
        Missing or unknown names, wrong shapes, a width that is not a multiple of 32.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn import Mamba3Block
    >>> rng = np.random.default_rng(0)
    >>> shapes = {"block_norm.weight": (32,), "in_proj.weight": (419, 32), "dt_bias": (1,), "B_norm.weight": (128,)}
    >>> shapes |= {"C_norm.weight": (128,), "B_bias": (1, 128), "C_bias": (1, 128), "D": (1,)}
    >>> shapes |= {"out_proj.weight": (32, 64)}
    >>> block = Mamba3Block({name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()})
    >>> x = rng.normal(size=(2, 10, 32)).astype(np.float32)
    >>> state = block.allocate_state(2)
    >>> parts = [block.forward(x[:, :7], state)] + [block.step(x[:, i], state) for i in range(7, 10)]
    >>> bool(np.array_equal(np.concatenate(parts, axis=1), block.forward(x)))
    True
    """

    def __init__(self, weights, *, numeric_mode=None):
        mode = self._mode_index(numeric_mode)
        views, weight_format = block_weights(weights, _weight_shapes(_width(weights)))
        self._setup(views, mode, weight_format)

    @classmethod
    def _from_views(cls, views, mode):
        """A block over weights that somebody else owns and has checked."""
        block = cls.__new__(cls)
        block._setup(views, mode)
        return block

    @property
    def d_model(self):
        """Width of the rows."""
        return self._weights["block_norm.weight"].shape[0]

    @property
    def _heads(self):
        return self.d_model // 32

    def allocate_state(self, batch_size):
        """A zero state.

        Parameters
        ----------
        batch_size : int
            Number of sequences.

        Returns
        -------
        Mamba3State
        """
        shapes = _state_shapes(as_index(batch_size, "batch_size", 1, MAX_BATCH), self._heads)
        return Mamba3State(**{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})

    def _check_state(self, state, batch, tokens):
        if not isinstance(state, Mamba3State):
            raise ValueError(f"state must be a Mamba3State, got {describe(state)}")
        state._check(batch, self._heads)
        if state.pending and state.buffered_tokens:
            raise ValueError(
                f"input states need a state without buffered tokens, got buffered_tokens = {state.buffered_tokens}"
            )
        names = ["theta", "h", *_BUFFERS] + (["pending_k", "pending_v"] if state.pending else [])
        for name in names:
            if not layers.all_finite(getattr(state, name).reshape(-1), get_num_threads()):
                raise NonFiniteError(f"{name} of the state must be finite, got NaN or infinity")

    def _run(self, ctx, x, y, state=None, tape=None, report=None):
        batch, length, _ = x.shape
        if tape is not None or batch * length <= _PIECE_TOKENS:
            return self._run_piece(ctx, x, y, state, tape, report)
        rows = max(1, _PIECE_TOKENS // length)
        commits, reports = [], []
        for first in range(0, batch, rows):
            part = slice(first, first + rows)
            part_state = None if state is None else state._rows(part)
            reports.append(None if report is None else {})
            run = self._run_piece if length <= _PIECE_TOKENS else self._run_long
            commits.append(run(ctx, x[part], y[part], part_state, None, reports[-1]))
        if report is not None:
            report.update({name: np.concatenate([part[name] for part in reports]) for name in reports[0]})
        if state is None:
            return None

        def commit():
            for part in commits:
                part()
            state.buffered_tokens = _open_tokens(state.buffered_tokens + length)
            state.pending = False

        return commit

    def _run_long(self, ctx, x, y, state, tape, report):
        """Forward of long rows in pieces that a state of their own carries, so that memory does not grow with them."""
        batch, length, _ = x.shape
        carried = self.allocate_state(batch) if state is None else copy.deepcopy(state)
        for first in range(0, length, _PIECE_TOKENS):
            part = slice(first, min(first + _PIECE_TOKENS, length))
            mark = ctx.workspace.mark()
            piece, out = np.ascontiguousarray(x[:, part]), y[:, part]
            target = out if out.flags.c_contiguous else np.empty_like(piece)
            commit = self._run_piece(ctx, piece, target, carried, None, report if part.stop == length else None)
            commit()
            if target is not out:
                out[...] = target
            ctx.workspace.release(mark)
        return None if state is None else lambda: state._assign(carried)

    def _run_piece(self, ctx, x, y, state, tape, report):
        batch, length, d_model = x.shape
        tokens, heads, inner = batch * length, self._heads, 2 * d_model
        weights, workspace, threads = self._weights, ctx.workspace, ctx.threads
        x, y = x.reshape(tokens, d_model), y.reshape(tokens, d_model)
        buffered = 0 if state is None else state.buffered_tokens
        chunks = mamba3.chunk_count(length, buffered)
        plane = mamba3.plane_length(length, buffered)

        new = _NewState(workspace, state, batch, heads, length, chunks) if state is not None else None
        theta_last = None
        if new is None and report is not None:
            theta_last = np.empty(batch * heads * _ANGLES, np.float32)
        mark = None if tape is not None else workspace.mark()
        sumsq = workspace.empty(tokens) if tape is not None else None
        normed = workspace.empty((tokens, d_model))
        proj = workspace.empty((tokens, 2 * inner + 2 * _STATE_SIZE + 3 * heads + _ANGLES))
        panels = workspace.empty((2, batch * chunks * _STATE_SIZE * _CHUNK))
        rate = workspace.empty(tokens * _ANGLES)
        rstd = workspace.empty((2, batch * chunks * _CHUNK))
        scalars = workspace.empty((3, batch * heads * plane))
        gate = workspace.empty((tokens, inner))
        kept = None
        if tape is not None:
            items = batch * heads * chunks
            h = workspace.empty(items * _STATE_SIZE * _HEAD_DIM)
            cosine, sine = workspace.empty((2, items * _ANGLES * _CHUNK))
            kept = (h, cosine, sine, workspace.empty(tokens * inner))
            tape.update(
                sumsq=sumsq, normed=normed, proj=proj, panels=panels, rate=rate, rstd=rstd, scalars=scalars, gate=gate
            )
            tape["kept"] = kept

        layers.rms_norm_forward(x, weights["block_norm.weight"], _NORM_EPS, normed, sumsq, True, threads)
        linalg.linear(normed, weights["in_proj.weight"], proj, threads, ctx.mode)
        inner_mark = workspace.mark()
        arrays = None if state is None else state._kernel_arrays()
        workers = min(threads, batch * chunks)
        mamba3.prepare(
            proj.reshape(-1),
            weights["dt_bias"],
            weights["B_norm.weight"],
            weights["C_norm.weight"],
            arrays,
            *panels,
            rate,
            *rstd,
            *scalars,
            workspace.empty((workers, mamba3.prepare_scratch(heads))),
            batch,
            length,
            buffered,
            workers,
        )
        reports = None
        if report is not None:
            reports = [
                np.empty(batch * heads * n, np.float32) for n in (_HEAD_DIM * _STATE_SIZE, _STATE_SIZE, _HEAD_DIM)
            ]
        if new is not None:
            produced = new.kernel_arrays()
        else:
            produced = None if theta_last is None else (theta_last,) + (None,) * 7
        workers = min(threads, batch * heads)
        mamba3.mix(
            proj.reshape(-1),
            *panels,
            rate,
            *scalars,
            weights["B_bias"].reshape(-1),
            weights["C_bias"].reshape(-1),
            weights["D"],
            arrays,
            gate.reshape(-1),
            produced,
            None if reports is None else tuple(reports),
            kept,
            workspace.empty((workers, mamba3.mix_scratch_size())),
            batch,
            length,
            buffered,
            workers,
        )
        workspace.release(inner_mark)
        linalg.linear(gate, weights["out_proj.weight"], y, threads, ctx.mode)
        layers.add(x, y, y, threads)
        if mark is not None:
            workspace.release(mark)
        if report is not None:
            h_last, k_last, v_last = reports
            theta_last = new.theta.copy() if new is not None else theta_last
            report["h_last_"] = h_last.reshape(batch, heads, _HEAD_DIM, _STATE_SIZE)
            report["k_last_"] = k_last.reshape(batch, heads, _STATE_SIZE)
            report["v_last_"] = v_last.reshape(batch, heads, _HEAD_DIM)
            report["theta_last_"] = theta_last.reshape(batch, heads, _ANGLES)
        return None if new is None else new.commit

    def _backward(self, ctx, tape, x, dy, dx, sink):
        batch, length, d_model = x.shape
        tokens, heads, inner = batch * length, self._heads, 2 * d_model
        weights, workspace, threads = self._weights, ctx.workspace, ctx.threads
        x, dy, dx = (array.reshape(tokens, d_model) for array in (x, dy, dx))
        mark = workspace.mark()

        dgate = workspace.empty((tokens, inner))
        linalg.gemm_nn(dy, weights["out_proj.weight"], dgate, threads, ctx.mode)
        sink.linear("out_proj.weight", dy, tape["gate"])

        pack = workspace.empty((tokens, tape["proj"].shape[1]))
        rows = {
            "D": workspace.empty((tokens, heads)),
            "B_bias": workspace.empty((tokens, heads * _STATE_SIZE)),
            "C_bias": workspace.empty((tokens, heads * _STATE_SIZE)),
            "B_norm.weight": workspace.empty((tokens, _STATE_SIZE)),
            "C_norm.weight": workspace.empty((tokens, _STATE_SIZE)),
        }
        self._mix_backward(ctx, tape, dgate, pack, tuple(rows.values()), batch, length)
        for name, array in rows.items():
            sink.colsum(name, array)
        dt_column = 2 * inner + 2 * _STATE_SIZE
        sink.colsum("dt_bias", pack[:, dt_column : dt_column + heads])

        dnormed, norm_rows = workspace.empty((2, tokens, d_model))
        linalg.gemm_nn(pack, weights["in_proj.weight"], dnormed, threads, ctx.mode)
        sink.linear("in_proj.weight", pack, tape["normed"])
        layers.rms_norm_backward_collapsed(
            dnormed, x, weights["block_norm.weight"], tape["sumsq"], _NORM_EPS, dy, dx, norm_rows, threads
        )
        sink.colsum("block_norm.weight", norm_rows)
        workspace.release(mark)

    def _mix_backward(self, ctx, tape, dgate, pack, rows, batch, length):
        """What lies between the projections, some batch rows at a time: fills `pack` and `rows`."""
        heads, workspace, exact_order = self._heads, ctx.workspace, ctx.mode == 0
        chunks, plane = mamba3.chunk_count(length, 0), mamba3.plane_length(length, 0)
        weights = tuple(self._weights[name].reshape(-1) for name in _SMALL_WEIGHTS)
        step = max(1, _CALL_ITEMS // (heads * chunks))
        for first in range(0, batch, step):
            count = min(step, batch - first)
            items = count * heads * chunks
            adjoints = items if exact_order else 1  # the other orders keep them in scratch
            workers = min(ctx.threads, items)

            def cut(*arrays, part=slice(first, first + count), whole=count == batch):
                return tuple((array if whole else array.reshape(batch, -1)[part]).reshape(-1) for array in arrays)

            mark = workspace.mark()
            between = (
                workspace.empty(adjoints * _CHUNK * _HEAD_DIM),
                workspace.empty(adjoints * _STATE_SIZE * _HEAD_DIM),
                workspace.empty(adjoints),
                *workspace.empty((4, count * heads * plane)),
                workspace.empty(items * _CHUNK * _ANGLES),
                workspace.empty(items * _ANGLES),
            )
            mamba3.backward(
                *cut(dgate, tape["proj"]),
                cut(*tape["panels"]),
                *cut(tape["rate"]),
                cut(*tape["rstd"]),
                cut(*tape["scalars"]),
                cut(*tape["kept"]),
                weights,
                *cut(pack),
                cut(*rows),
                between,
                workspace.empty(mamba3.backward_scratch(count * heads, chunks, exact_order, workers)),
                count,
                length,
                workers,
                ctx.mode,
            )
            workspace.release(mark)


def _open_tokens(total):
    """How many of ``total`` tokens lie in the open chunk; a full chunk stays open until the next token."""
    return (total - 1) % _CHUNK + 1


class _NewState:
    """What a call makes of a state: the new values beside it, and the copy that commits them."""

    def __init__(self, workspace, state, batch, heads, length, chunks):
        self._state = state
        total = state.buffered_tokens + length
        self._buffered = _open_tokens(total)
        # rows of the last chunk that this call adds: all of them, or what follows the buffered ones
        self._first = 0 if chunks > 1 else state.buffered_tokens
        rows = self._buffered - self._first
        self.theta = workspace.empty((batch, heads, _ANGLES))
        changes = chunks > 1 or state.pending
        self._h = workspace.empty((batch, heads, _HEAD_DIM, _STATE_SIZE)) if changes else None
        self._rows = {name: workspace.empty((batch, rows, heads, *rest)) for name, rest in _BUFFERS.items()}

    def kernel_arrays(self):
        h = None if self._h is None else self._h.reshape(-1)
        return (self.theta.reshape(-1), h, *(rows.reshape(-1) for rows in self._rows.values()))

    def commit(self):
        state = self._state
        state.theta[...] = self.theta
        if self._h is not None:
            state.h[...] = self._h
        for name, rows in self._rows.items():
            getattr(state, name)[:, self._first : self._buffered] = rows
        state.buffered_tokens = self._buffered
        if state.pending:
            state.pending_k[...] = 0.0
            state.pending_v[...] = 0.0
            state.pending = False


def _width(weights):
    """d_model, read off the block norm; other errors are found when the shapes are compared."""
    if not isinstance(weights, dict):
        raise ValueError(f"weights must be a dict of float32 arrays by name, got {describe(weights)}")
    if "block_norm.weight" not in weights:
        raise ValueError("weights must have exactly the names of the block; missing: ['block_norm.weight']")
    d_model = as_float32(weights["block_norm.weight"], "weights['block_norm.weight']", ndim=1).shape[0]
    if d_model % 32:
        raise ValueError(f"d_model must be a multiple of 32, got {d_model} from weights['block_norm.weight']")
    return d_model


def _weight_shapes(d_model):
    heads = d_model // 32
    return {
        "block_norm.weight": (d_model,),
        "in_proj.weight": (4 * d_model + 2 * _STATE_SIZE + 3 * heads + _ANGLES, d_model),
        "dt_bias": (heads,),
        "B_norm.weight": (_STATE_SIZE,),
        "C_norm.weight": (_STATE_SIZE,),
        "B_bias": (heads, _STATE_SIZE),
        "C_bias": (heads, _STATE_SIZE),
        "D": (heads,),
        "out_proj.weight": (d_model, 2 * d_model),
    }
