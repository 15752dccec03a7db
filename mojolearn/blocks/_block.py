"""What both kinds of blocks share: weights, input checks, ragged rows, the commit of a state, gradients by name."""

import numpy as np

from mojolearn import lowbit
from mojolearn._arrays import as_float32, as_lengths, describe
from mojolearn._context import Context, WorkspacePool, aligned_empty
from mojolearn._core import layers, linalg
from mojolearn._core._pool import FloatEnvironment
from mojolearn._gradients import GradientSink
from mojolearn._interrupt import deferred_interrupts
from mojolearn._numerics import get_num_threads, mode_index, mode_name
from mojolearn.errors import NonFiniteError

# Rows of a state: more would overflow the sizes of its arrays before it filled any memory.
MAX_BATCH = 2**31 - 1


def block_weights(weights, shapes):
    """Independent copies of a block's weights, with names and shapes checked.

    Parameters
    ----------
    weights : dict
        float32 arrays, or packed matrices of `mojolearn.lowbit`, by name.
    shapes : dict
        The shape that each name must have.

    Returns
    -------
    views : dict
        Arrays, and panel matrices for what was packed.
    weight_format : str
        "float32", or the packed format that occurs.
    """
    if not isinstance(weights, dict):
        raise ValueError(f"weights must be a dict of float32 arrays by name, got {describe(weights)}")
    missing = [name for name in shapes if name not in weights]
    extra = [str(name) for name in weights if name not in shapes]
    if missing or extra:
        raise ValueError(
            "weights must have exactly the names of the block; "
            f"missing: {missing or 'none'}, unknown: {extra or 'none'}"
        )
    views = {}
    for name, shape in shapes.items():
        value = weights[name]
        if lowbit.is_packed(value):
            if tuple(value.shape) != tuple(shape):
                raise ValueError(f"weights[{name!r}] must have shape {tuple(shape)}, got {tuple(value.shape)}")
            views[name] = packed_view(name, value)
        else:
            views[name] = np.array(as_float32(value, f"weights[{name!r}]", shape=tuple(shape)))
    return views, lowbit.format_of(weights)


def packed_view(name, value):
    """A packed matrix as panels for the kernels; the small bias matrices, which no product reads, as float32."""
    if name.endswith("_bias"):
        return lowbit.materialize_one(value, name)
    if value.format == "bfloat16":
        return linalg.PackedWeight.from_bfloat16(value.bits)
    return linalg.PackedWeight.from_int8(value.codes, value.exponents)


class Block:
    """Base of `Mamba3Block` and `TransformerBlock`.

    A subclass provides ``_run(ctx, x, y, state=None, tape=None, report=None)``, ``_backward(ctx, tape, x, dy, dx,
    sink)``, ``_check_state(state, batch, tokens)`` and ``d_model``. ``_run`` never changes the state: it returns the
    call that commits the new one.
    """

    def _setup(self, views, mode, weight_format="float32"):
        self._weights = views
        self._mode = mode
        self._finite = None
        self._workspaces = WorkspacePool()
        self.weight_format = weight_format

    @property
    def numeric_mode(self):
        """Numeric mode of this block."""
        return mode_name(self._mode)

    @staticmethod
    def _mode_index(mode):
        return mode_index(mode)

    def forward(self, x, state=None, *, lengths=None):
        """Output of the block, residual included.

        Parameters
        ----------
        x : array of float32, shape (B, L, D)
            Input rows.
        state : block state or None, default None
            Carried state: read, and updated in place when the call has succeeded.
        lengths : sequence of int or None, default None
            Ragged batch: row i is real at positions [0, lengths[i]); only without a state. Padding of the output
            is exactly +0.0.

        Returns
        -------
        ndarray of float32, shape (B, L, D)

        Raises
        ------
        TypeError
            `x` of another dtype than float32.
        ValueError
            Wrong rank or shape, non-finite values, a state that does not fit, lengths together with a state.
        """
        x = as_float32(x, "x", shape=(None, None, self.d_model))
        padding = None
        if lengths is not None:
            if state is not None:
                raise ValueError("lengths must be None when a state is given: ragged batches carry no state")
            padding = np.arange(x.shape[1]) >= as_lengths(lengths, *x.shape[:2])[:, None]
            x = np.where(padding[:, :, None], np.float32(0), x)
        self._check_finite(x)
        if state is not None:
            self._check_state(state, *x.shape[:2])
        y = aligned_empty(x.shape)
        report = {}
        self._call(lambda ctx: self._run(ctx, x, y, state, None, report))
        for name, value in report.items():
            setattr(self, name, value)
        if padding is not None:
            y[padding] = 0.0
        return y

    def __call__(self, x, state=None, *, lengths=None):
        return self.forward(x, state, lengths=lengths)

    def step(self, x, state):
        """The carried forward of one token per row.

        Parameters
        ----------
        x : array of float32, shape (B, 1, D) or (B, D)
        state : block state
            Updated in place.

        Returns
        -------
        ndarray of float32, shape (B, 1, D)
        """
        if state is None:
            raise ValueError("state must be a state from allocate_state, got None")
        x = as_float32(x, "x")
        if x.ndim == 2:
            x = x[:, None]
        if x.ndim != 3 or x.shape[1] != 1:
            raise ValueError(f"x must have shape (B, 1, {self.d_model}) or (B, {self.d_model}), got {x.shape}")
        return self.forward(x, state)

    def backward(self, x, grad_output):
        """Gradients of the stateless forward.

        Parameters
        ----------
        x : array of float32, shape (B, L, D)
            The forward's input.
        grad_output : array of float32, shape (B, L, D)
            Gradient with respect to the output.

        Returns
        -------
        dict
            "x" and every weight's name, each with a gradient of its shape.
        """
        x = as_float32(x, "x", shape=(None, None, self.d_model))
        dy = as_float32(grad_output, "grad_output", shape=x.shape)
        if self.weight_format != "float32":
            raise ValueError(f"backward needs float32 weights, this block has {self.weight_format}")
        self._check_finite(x)
        if not np.isfinite(dy).all():
            raise NonFiniteError("grad_output must be finite, got NaN or infinity")
        names = list(self._weights)
        shapes = [self._weights[name].shape for name in names]
        sizes = [int(np.prod(shape)) for shape in shapes]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        sink = GradientSink(aligned_empty((int(offsets[-1]),)), names, shapes, offsets[:-1].tolist())
        y, dx = aligned_empty(x.shape), aligned_empty(x.shape)

        def run(ctx):
            tokens = x.shape[0] * x.shape[1]
            sink.begin(tokens, ctx.threads, ctx.mode)
            sink.piece(tokens)
            tape = {}
            self._run(ctx, x, y, None, tape)
            self._backward(ctx, tape, x, dy, dx, sink)

        self._call(run)
        return {"x": dx, **{name: sink.view(name).copy() for name in names}}

    def _call(self, run):
        """Run with a workspace in the default floating-point environment, then commit what the run returns."""
        workspace = self._workspaces.acquire()
        try:
            with FloatEnvironment():
                advance = run(Context(get_num_threads(), self._mode, workspace))
                if advance is not None:
                    with deferred_interrupts():
                        advance()
        finally:
            self._workspaces.give_back(workspace)

    def _check_finite(self, x):
        if not layers.all_finite(x.reshape(-1), get_num_threads()):
            raise NonFiniteError("x must be finite, got NaN or infinity")
        if self._finite is None:
            bad = [name for name, value in self._weights.items() if not np.isfinite(_as_array(value)).all()]
            if bad:
                raise NonFiniteError(f"weights must be finite, got NaN or infinity in {bad}")
            self._finite = True


def _as_array(value):
    return value.unpack() if isinstance(value, linalg.PackedWeight) else value
