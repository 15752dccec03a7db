"""The transformer block: rotary causal attention with grouped key/value heads, and a gated feed-forward."""

import numpy as np

from mojolearn._arrays import as_float32, as_index, as_real, describe
from mojolearn._core import attention, layers, linalg
from mojolearn._numerics import default_environment
from mojolearn.blocks._block import MAX_BATCH, Block, block_weights
from mojolearn.errors import CapacityError, NonFiniteError

__all__ = ["TransformerBlock", "TransformerState"]

# The profile's sine and cosine are defined up to 8192 radians, the angle of the last position's first pair.
_LAST_POSITIONS = 8192

# What a block is made for; the kernels rely on it without asking again.
_FIXED = frozenset(("n_heads", "n_kv_heads", "head_dim", "window", "rope_theta", "max_positions", "norm_eps"))

_rope_tables = {}


def rope_table(head_dim, theta, positions):
    """(cosines, sines) of at least `positions` rows, grown by doubling and shared by all blocks of a shape."""
    key = head_dim, theta
    table = _rope_tables.get(key)
    if table is None or len(table[0]) < positions:
        rows = min(max(256, 1 << (positions - 1).bit_length()), _LAST_POSITIONS)
        table = np.empty((rows, head_dim // 2), np.float32), np.empty((rows, head_dim // 2), np.float32)
        attention.rope_table(*table, head_dim, theta)
        _rope_tables[key] = table
    return table


class TransformerState:
    """Key/value cache of a `TransformerBlock`, owned by the caller.

    Parameters
    ----------
    batch_size, n_kv_heads, head_dim : int
        Sizes of the block and of the batch.
    max_tokens : int
        Positions that a sequence may have.
    k_cache, v_cache : ndarray of float32, shape (batch_size, n_kv_heads, slots, head_dim)
        Rotated keys, and values. ``slots`` is `max_tokens`, or `window` if that is not 0; position p lies in slot
        ``p % slots``. Used as they are, not copied; slots that no position has filled may hold anything.
    cached_tokens : int, default 0
        Positions seen so far. With a window it keeps counting past the slots.
    window : int, default 0
        Sliding window of the block; 0 is full causal attention.
    """

    def __init__(self, batch_size, n_kv_heads, head_dim, max_tokens, k_cache, v_cache, cached_tokens=0, window=0):
        self.batch_size = batch_size
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.max_tokens = max_tokens
        self.window = window
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.cached_tokens = cached_tokens
        self._check()

    @property
    def capacity(self):
        """Number of slots of a row and head."""
        return self.window or self.max_tokens

    def keys(self):
        """Copies of the cached keys in the order of positions, shape (B, KV, min(cached_tokens, capacity), hd)."""
        return self._latest(self.k_cache)

    def values(self):
        """Copies of the cached values in the order of positions; shaped as `keys`."""
        return self._latest(self.v_cache)

    def __repr__(self):
        return (
            f"TransformerState(batch_size={self.batch_size}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"max_tokens={self.max_tokens}, cached_tokens={self.cached_tokens}, window={self.window})"
        )

    def _latest(self, cache):
        count = min(self.cached_tokens, self.capacity)
        slots = np.arange(self.cached_tokens - count, self.cached_tokens) % self.capacity
        return cache[:, :, slots]

    def _check(self):
        self._check_counts()
        self._check_caches()

    def _check_counts(self):
        for name, low in (("batch_size", 1), ("n_kv_heads", 1), ("head_dim", 1), ("max_tokens", 1), ("window", 0)):
            setattr(self, name, as_index(getattr(self, name), name, low))
        self.cached_tokens = as_index(self.cached_tokens, "cached_tokens", 0, self.max_tokens)

    def _check_caches(self):
        shape = (self.batch_size, self.n_kv_heads, self.capacity, self.head_dim)
        for name in ("k_cache", "v_cache"):
            cache = getattr(self, name)
            if not isinstance(cache, np.ndarray) or cache.dtype != np.float32 or cache.shape != shape:
                raise ValueError(f"{name} must be a float32 array of shape {shape}, got {describe(cache)}")
            if not cache.flags.carray:
                raise ValueError(f"{name} must be C-contiguous, aligned and writable")

    def _append(self, keys, values):
        """Commit new rows, both (B, L, KV, hd)."""
        length = keys.shape[1]
        first = self.cached_tokens + max(0, length - self.capacity)  # older rows would be overwritten at once
        end = self.cached_tokens + length
        while first < end:
            slot = first % self.capacity
            count = min(end - first, self.capacity - slot)
            row = first - self.cached_tokens
            self.k_cache[:, :, slot : slot + count] = keys[:, row : row + count].transpose(0, 2, 1, 3)
            self.v_cache[:, :, slot : slot + count] = values[:, row : row + count].transpose(0, 2, 1, 3)
            first += count
        self.cached_tokens = end


class TransformerBlock(Block):
    """Pre-norm transformer block: RMSNorm, rotary causal attention, RMSNorm, SwiGLU; a residual around each half.

    Parameters
    ----------
    weights : dict
        float32 arrays, copied, or packed matrices of `mojolearn.lowbit`: ``input_layernorm.weight`` (D),
        ``post_attention_layernorm.weight`` (D), ``q_proj.weight`` (n_heads * head_dim, D), ``k_proj.weight`` and
        ``v_proj.weight`` (n_kv_heads * head_dim, D), ``o_proj.weight`` (D, n_heads * head_dim), ``gate_proj.weight``
        and ``up_proj.weight`` (intermediate, D), ``down_proj.weight`` (D, intermediate).
    n_heads : int
        Query heads.
    n_kv_heads : int, optional
        Key/value heads, a divisor of `n_heads`, which is the default. Query head h reads head
        ``h // (n_heads // n_kv_heads)``.
    head_dim : int, optional
        Even, with ``n_heads * head_dim == D``; default ``D // n_heads``.
    window : int, default 0
        A query sees its own position and the ``window - 1`` before it; 0 means all before it.
    rope_theta : float, default 10000.0
        Base of the rotary frequencies, at least 1; rounded to float32.
    max_positions : int, default 8192
        Longest sequence, at most 8192.
    norm_eps : float, default 1e-6
        Epsilon of both norms, rounded to float32.
    numeric_mode : {'identical', 'deterministic', 'fast'}, optional
        None uses the library default. All three run the same kernels here.

    Attributes
    ----------
    d_model, intermediate, n_heads, n_kv_heads, head_dim, window, max_positions : int
    rope_theta, norm_eps : float
    weight_format : str
        "float32", or the packed format of the matrices.

    Raises
    ------
    TypeError
        A tensor that is not float32, or a number of the wrong type.
    ValueError
        Missing or unknown names, wrong shapes, sizes that do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn import TransformerBlock
    >>> rng = np.random.default_rng(0)
    >>> shapes = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
    >>> shapes |= {f"{name}_proj.weight": (32, 32) for name in "qkvo"}
    >>> shapes |= {"gate_proj.weight": (48, 32), "up_proj.weight": (48, 32), "down_proj.weight": (32, 48)}
    >>> block = TransformerBlock(
    ...     {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}, n_heads=4
    ... )
    >>> x = rng.normal(size=(2, 10, 32)).astype(np.float32)
    >>> state = block.allocate_state(2, max_tokens=10)
    >>> parts = [block.forward(x[:, :7], state)] + [block.step(x[:, i], state) for i in range(7, 10)]
    >>> bool(np.array_equal(np.concatenate(parts, axis=1), block.forward(x)))
    True
    """

    def __init__(
        self,
        weights,
        *,
        n_heads,
        n_kv_heads=None,
        head_dim=None,
        window=0,
        rope_theta=10000.0,
        max_positions=8192,
        norm_eps=1e-06,
        numeric_mode=None,
    ):
        mode = self._mode_index(numeric_mode)
        n_heads = as_index(n_heads, "n_heads", 1)
        n_kv_heads = n_heads if n_kv_heads is None else as_index(n_kv_heads, "n_kv_heads", 1)
        d_model, intermediate = _sizes(weights)
        head_dim = d_model // n_heads if head_dim is None else as_index(head_dim, "head_dim", 2)
        if n_heads * head_dim != d_model:
            raise ValueError(
                f"n_heads * head_dim must be d_model = {d_model}, got n_heads={n_heads}, head_dim={head_dim}"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads = {n_heads}, got {n_kv_heads}")
        views, weight_format = block_weights(
            weights, _shapes(d_model, n_heads * head_dim, n_kv_heads * head_dim, intermediate)
        )
        self._shape(
            views,
            n_heads,
            n_kv_heads,
            head_dim,
            as_index(window, "window", 0, 2**31 - 1),
            as_real(rope_theta, "rope_theta", 1.0, 3e38),
            as_index(max_positions, "max_positions", 1, _LAST_POSITIONS),
            as_real(norm_eps, "norm_eps", 0.0, 3e38),
        )
        self._setup(views, mode, weight_format)

    def __setattr__(self, name, value):
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(f"{name} is fixed when a TransformerBlock is made, got {value!r} for it later")
        super().__setattr__(name, value)

    @classmethod
    def _from_views(cls, views, mode, *, n_heads, n_kv_heads=None, head_dim=None, window=0):
        """A block over weights that somebody else owns and has checked."""
        block = cls.__new__(cls)
        d_model = views["input_layernorm.weight"].shape[0]
        block._shape(views, n_heads, n_kv_heads or n_heads, head_dim or d_model // n_heads, window)
        block._setup(views, mode)
        return block

    @default_environment
    def _shape(
        self,
        views,
        n_heads,
        n_kv_heads,
        head_dim,
        window,
        rope_theta=10000.0,
        max_positions=_LAST_POSITIONS,
        norm_eps=1e-06,
    ):
        self.d_model = views["input_layernorm.weight"].shape[0]
        self.intermediate = views["gate_proj.weight"].shape[0]
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.rope_theta = float(np.float32(rope_theta))
        self.max_positions = max_positions
        self.norm_eps = float(np.float32(norm_eps))

    def allocate_state(self, batch_size, max_tokens):
        """An empty cache.

        Parameters
        ----------
        batch_size : int
            Number of sequences.
        max_tokens : int
            Positions that a sequence may have, at most `max_positions`.

        Returns
        -------
        TransformerState
        """
        batch_size = as_index(batch_size, "batch_size", 1, MAX_BATCH)
        max_tokens = as_index(max_tokens, "max_tokens", 1)
        self._check_positions(max_tokens, "max_tokens")
        shape = (batch_size, self.n_kv_heads, self.window or max_tokens, self.head_dim)
        return TransformerState(
            batch_size,
            self.n_kv_heads,
            self.head_dim,
            max_tokens,
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
            window=self.window,
        )

    def _check_positions(self, count, name="positions"):
        if count > self.max_positions:
            raise CapacityError(f"{name} must be at most {self.max_positions}, got {count}")

    def _check_state(self, state, batch, tokens):
        if not isinstance(state, TransformerState):
            raise ValueError(f"state must be a TransformerState, got {describe(state)}")
        state._check_counts()
        if state.batch_size != batch:
            raise ValueError(f"state must have batch_size {batch}, got {state.batch_size}")
        for name in ("n_kv_heads", "head_dim", "window"):
            if getattr(state, name) != getattr(self, name):
                raise ValueError(f"state must have {name} {getattr(self, name)}, got {getattr(state, name)}")
        state._check_caches()
        self._check_positions(state.max_tokens, "max_tokens of the state")
        if state.cached_tokens + tokens > state.max_tokens:
            raise CapacityError(
                f"state has room for max_tokens = {state.max_tokens} positions; {state.cached_tokens} are cached "
                f"and {tokens} more came, which makes {state.cached_tokens + tokens}"
            )

    def _run(self, ctx, x, y, state=None, tape=None, report=None):
        batch, length, d_model = x.shape
        tokens = batch * length
        weights, workspace, threads = self._weights, ctx.workspace, ctx.threads
        kv_columns = self.n_kv_heads * self.head_dim
        x, y = x.reshape(tokens, d_model), y.reshape(tokens, d_model)
        first = 0 if state is None else state.cached_tokens
        self._check_positions(first + length)
        if tape is None:
            # the new rows of the cache outlive this call: they are committed when the whole call has succeeded
            new = workspace.empty((tokens, 2 * kv_columns)) if state is not None else None
            mark = workspace.mark()
            normed = workspace.empty((tokens, d_model))
            inner = workspace.mark()
            queries = workspace.empty((tokens, d_model))
            if new is None:
                new = workspace.empty((tokens, 2 * kv_columns))
            sumsq1 = sumsq2 = None
            context, residual, normed2 = normed, y, normed
        else:
            new = workspace.empty((tokens, 2 * kv_columns))
            normed, queries, context, residual, normed2 = workspace.empty((5, tokens, d_model))
            sumsq1, sumsq2 = workspace.empty((2, tokens))

        layers.rms_norm_forward(x, weights["input_layernorm.weight"], self.norm_eps, normed, sumsq1, False, threads)
        linalg.linear(normed, weights["q_proj.weight"], queries, threads, ctx.mode)
        linalg.linear(normed, weights["k_proj.weight"], new[:, :kv_columns], threads, ctx.mode)
        linalg.linear(normed, weights["v_proj.weight"], new[:, kv_columns:], threads, ctx.mode)
        self._rotate(ctx, queries, length, first)
        self._rotate(ctx, new[:, :kv_columns], length, first)
        attended = self._attend(ctx, queries, new, context, batch, first, state, tape is not None)
        if tape is None:
            workspace.release(inner)
            out = normed
        else:
            out = y
        linalg.linear(context, weights["o_proj.weight"], y, threads, ctx.mode)
        layers.add(x, y, residual, threads)

        layers.rms_norm_forward(
            residual, weights["post_attention_layernorm.weight"], self.norm_eps, normed2, sumsq2, False, threads
        )
        gate, up = workspace.empty((2, tokens, self.intermediate))
        linalg.linear(normed2, weights["gate_proj.weight"], gate, threads, ctx.mode)
        linalg.linear(normed2, weights["up_proj.weight"], up, threads, ctx.mode)
        if tape is None:
            act = gate
        else:
            mark = workspace.mark()
            act = workspace.empty((tokens, self.intermediate))
        attention.swiglu_forward(gate, up, act, threads)
        linalg.linear(act, weights["down_proj.weight"], out, threads, ctx.mode)
        layers.add(residual, out, y, threads)
        workspace.release(mark)

        if tape is not None:
            tape.update(
                normed=normed,
                sumsq1=sumsq1,
                queries=queries,
                attended=attended,
                context=context,
                residual=residual,
                sumsq2=sumsq2,
                normed2=normed2,
                gate=gate,
                up=up,
            )
        if state is None:
            return None
        rows = new.reshape(batch, length, 2, self.n_kv_heads, self.head_dim)
        return lambda: state._append(rows[:, :, 0], rows[:, :, 1])

    def _backward(self, ctx, tape, x, dy, dx, sink):
        batch, length, d_model = x.shape
        tokens = batch * length
        weights, workspace, threads = self._weights, ctx.workspace, ctx.threads
        x, dy, dx = (array.reshape(tokens, d_model) for array in (x, dy, dx))
        kv_columns = self.n_kv_heads * self.head_dim
        mark = workspace.mark()
        dresidual, dnormed, term = workspace.empty((3, tokens, d_model))

        # feed-forward half
        inner = workspace.mark()
        dact, act, dgate = workspace.empty((3, tokens, self.intermediate))
        linalg.gemm_nn(dy, weights["down_proj.weight"], dact, threads, ctx.mode)
        dup = dact
        attention.swiglu_backward(dact, tape["gate"], tape["up"], act, dgate, dup, threads)
        sink.linear("down_proj.weight", dy, act)
        sink.linear("gate_proj.weight", dgate, tape["normed2"])
        sink.linear("up_proj.weight", dup, tape["normed2"])
        linalg.gemm_nn(dgate, weights["gate_proj.weight"], dnormed, threads, ctx.mode)
        linalg.gemm_nn(dup, weights["up_proj.weight"], term, threads, ctx.mode)
        layers.add(dnormed, term, dnormed, threads)
        workspace.release(inner)
        self._norm_backward(
            ctx, "post_attention_layernorm.weight", dnormed, tape["residual"], tape["sumsq2"], dy, dresidual, sink
        )

        # attention half
        dcontext, dqueries = workspace.empty((2, tokens, d_model))
        dkeys, dvalues = workspace.empty((2, tokens, kv_columns))
        linalg.gemm_nn(dresidual, weights["o_proj.weight"], dcontext, threads, ctx.mode)
        sink.linear("o_proj.weight", dresidual, tape["context"])
        attention.attention_backward(
            dcontext,
            tape["queries"],
            *tape["attended"],
            dqueries,
            dkeys,
            dvalues,
            self.head_dim,
            self.window,
            workspace,
            threads,
        )
        self._rotate(ctx, dqueries, length, 0, inverse=True)
        self._rotate(ctx, dkeys, length, 0, inverse=True)
        for i, (name, gradient) in enumerate((("q", dqueries), ("k", dkeys), ("v", dvalues))):
            sink.linear(f"{name}_proj.weight", gradient, tape["normed"])
            linalg.gemm_nn(gradient, weights[f"{name}_proj.weight"], term if i else dnormed, threads, ctx.mode)
            if i:
                layers.add(dnormed, term, dnormed, threads)
        self._norm_backward(ctx, "input_layernorm.weight", dnormed, x, tape["sumsq1"], dresidual, dx, sink)
        workspace.release(mark)

    def _norm_backward(self, ctx, name, dnormed, x, sumsq, residual, dx, sink):
        """dx = gradient of a norm's input + residual; `dnormed` is overwritten."""
        layers.rms_norm_backward(
            dnormed, x, self._weights[name], sumsq, self.norm_eps, residual, dx, dnormed, ctx.threads
        )
        sink.colsum(name, dnormed)

    def _rotate(self, ctx, rows, length, first, inverse=False):
        cosines, sines = rope_table(self.head_dim, self.rope_theta, first + length)
        attention.rope(rows, cosines, sines, length, first, self.head_dim, inverse, ctx.threads)

    def _attend(self, ctx, queries, new, context, batch, first, state, keep):
        """Attention of all new tokens; returns what the backward needs if `keep`."""
        kv_columns = self.n_kv_heads * self.head_dim
        length = len(queries) // batch
        if state is not None and length == 1:
            finite = attention.attention_step(
                queries,
                new[:, :kv_columns],
                new[:, kv_columns:],
                state.k_cache,
                state.v_cache,
                context,
                first,
                self.window,
                ctx.workspace,
                ctx.threads,
            )
            _check_cache(finite)
            return None
        base = max(0, first - self.window + 1) if self.window else 0
        shape = (
            batch,
            self.n_kv_heads,
            attention.packed_rows(first + length - base),
            attention.head_width(self.head_dim),
        )
        keys, values = ctx.workspace.empty(shape), ctx.workspace.empty(shape)
        maxima, denominators = ctx.workspace.empty((2, batch, self.n_heads, length)) if keep else (None, None)
        k_cache, v_cache = (None, None) if state is None else (state.k_cache, state.v_cache)
        cached = first - base
        finite = attention.pack_heads(new[:, :kv_columns], keys, self.head_dim, k_cache, base, cached, ctx.threads)
        finite &= attention.pack_heads(new[:, kv_columns:], values, self.head_dim, v_cache, base, cached, ctx.threads)
        _check_cache(finite)
        attention.attention_forward(
            queries,
            keys,
            values,
            context,
            maxima,
            denominators,
            self.head_dim,
            first,
            base,
            self.window,
            ctx.workspace,
            ctx.threads,
        )
        return keys, values, maxima, denominators


def _check_cache(finite):
    if not finite:
        raise NonFiniteError("k_cache and v_cache of the state must be finite where they are filled")


def _sizes(weights):
    """d_model and intermediate as the weights have them; what is wrong with them is said by `block_weights`."""
    if not isinstance(weights, dict):
        raise ValueError(f"weights must be a dict of float32 arrays by name, got {describe(weights)}")
    sizes = []
    for name, rank in (("input_layernorm.weight", 1), ("gate_proj.weight", 2)):
        shape = getattr(weights.get(name), "shape", None)
        if name not in weights:
            raise ValueError(f"weights must have {name!r}; names that came: {[str(key) for key in weights]}")
        if shape is None:
            shape = as_float32(weights[name], f"weights[{name!r}]").shape
        if len(shape) != rank or shape[0] < 1:
            raise ValueError(f"weights[{name!r}] must be a non-empty array of rank {rank}, got shape {tuple(shape)}")
        sizes.append(shape[0])
    return sizes


def _shapes(d_model, query_rows, kv_rows, intermediate):
    return {
        "input_layernorm.weight": (d_model,),
        "post_attention_layernorm.weight": (d_model,),
        "q_proj.weight": (query_rows, d_model),
        "k_proj.weight": (kv_rows, d_model),
        "v_proj.weight": (kv_rows, d_model),
        "o_proj.weight": (d_model, query_rows),
        "gate_proj.weight": (intermediate, d_model),
        "up_proj.weight": (intermediate, d_model),
        "down_proj.weight": (d_model, intermediate),
    }
