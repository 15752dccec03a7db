"""SGD, Adam and AdamW, updating the caller's arrays in place.

A step that is refused changes nothing: every check, the finiteness of gradients, parameters and moments included, comes
before the single pass that updates all of them.
"""

import math

import numpy as np

from mojolearn._arrays import as_flag, as_float32, as_index, as_real, describe
from mojolearn._context import Workspace
from mojolearn._core import layers
from mojolearn._interrupt import deferred_interrupts
from mojolearn._numerics import MODE_NAMES, default_environment, get_num_threads, mode_index
from mojolearn.errors import NonFiniteError
from mojolearn.training._inplace import as_writable_list
from mojolearn.training.accumulation import accumulate_grads, accumulation_is_aligned, is_power_of_two
from mojolearn.training.losses import as_max_norm, measure_clip
from mojolearn.training.schedules import ConstantLR, WarmupCosineLR, WarmupLinearLR

__all__ = ["SGD", "Adam", "AdamW", "as_betas", "as_float32_real"]

_MAX_STEP = 2**63 - 1


def as_float32_real(value, name, low=None):
    """A hyperparameter, kept as given, that is finite as float32 too."""
    number = as_real(value, name, low)
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if not np.isfinite(rounded):
        raise ValueError(f"{name} must be within the range of float32, got {number}")
    return number


def as_betas(value, names=("betas[0]", "betas[1]")):
    """A pair of decays in [0, 1), as float32 too."""
    if not isinstance(value, (tuple, list, np.ndarray)) or (isinstance(value, np.ndarray) and value.ndim != 1):
        raise TypeError(f"betas must be a pair of numbers, got {describe(value)}")
    if len(value) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {len(value)} of them")
    betas = tuple(as_real(beta, name, 0.0, 1.0, high_open=True) for beta, name in zip(value, names))
    for beta, name in zip(betas, names):
        if np.float32(beta) >= 1:
            raise ValueError(f"{name} must be less than 1 as float32, got {beta}")
    return betas


class _Optimizer:
    """What the three optimizers share: parameters, step count, learning rate, clipping, state."""

    def __init__(self, params, lr, weight_decay, lr_schedule, accumulation_steps, maximize, numeric_mode):
        arrays = as_writable_list(params, "params")
        self.lr = lr
        self.weight_decay = weight_decay
        self.lr_schedule = lr_schedule
        self.accumulation_steps = as_index(accumulation_steps, "accumulation_steps", 1)
        if not is_power_of_two(self.accumulation_steps):
            raise ValueError(f"accumulation_steps must be a power of two, got {self.accumulation_steps}")
        self.maximize = as_flag(maximize, "maximize")
        self.numeric_mode = MODE_NAMES[mode_index(numeric_mode)]
        self._single = not isinstance(params, (list, tuple))
        self.params = arrays
        size = sum(array.size for array in arrays)
        self._shapes = [array.shape for array in arrays]
        self.t = 0
        self.lr_ = None
        self.total_norm_ = None
        self.clip_coef_ = None
        self.exp_avg = np.zeros(size, np.float32)
        self.exp_avg_sq = np.zeros(size, np.float32)
        self.buf_initialized = np.zeros(len(arrays), np.int32)

    @property
    def lr(self):
        """Learning rate; a schedule overwrites it at each step."""
        return self._lr

    @lr.setter
    def lr(self, value):
        self._lr = as_float32_real(value, "lr")

    @property
    def weight_decay(self):
        """Weight decay."""
        return self._weight_decay

    @weight_decay.setter
    def weight_decay(self, value):
        self._weight_decay = as_float32_real(value, "weight_decay")

    @property
    def lr_schedule(self):
        """Schedule that sets `lr` before each step, or None."""
        return self._lr_schedule

    @lr_schedule.setter
    def lr_schedule(self, value):
        if value is not None and not isinstance(value, (ConstantLR, WarmupLinearLR, WarmupCosineLR)):
            raise TypeError(
                f"lr_schedule must be a ConstantLR, WarmupLinearLR, WarmupCosineLR or None, got {describe(value)}"
            )
        self._lr_schedule = value

    def __repr__(self):
        size = self.exp_avg.size
        return f"<{type(self).__name__}: {size:,} parameters in {len(self.params)} arrays, step {self.t}, lr {self.lr}>"

    @default_environment
    def step(self, grads, max_norm=None):
        """Update the parameters by one step.

        Parameters
        ----------
        grads : float32 array or list of them
            One for each parameter, of its shape.
        max_norm : float, optional
            Clip the total L2 norm of the gradients to this. The arrays in `grads` are then rewritten with the clipped
            gradients.

        Returns
        -------
        float or None
            The total norm before clipping; None without `max_norm`.

        Raises
        ------
        TypeError
            A gradient is not a float32 array.
        ValueError
            A wrong count or shape, `max_norm` out of range, or a gradient, parameter, moment or total norm that is not
            finite. Parameters, gradients, moments and step count are then as they were.
        """
        self._check_own_arrays()
        if max_norm is not None:
            max_norm = as_max_norm(max_norm)
        grads = self._check_grads(grads, rewritten=max_norm is not None)
        t = as_index(self.t, "t", 0, _MAX_STEP - 1) + 1
        lr = self._lr if self._lr_schedule is None else self._lr_schedule.lr_at(t)
        threads = get_num_threads()
        total, coefficient = self._examine(grads, max_norm, threads)
        with deferred_interrupts():
            self._update(grads, t, lr, coefficient, threads)
            self.t = t
            self._lr = lr
            self.lr_ = float(np.float32(lr))
            self.total_norm_ = total
            self.clip_coef_ = coefficient
        return total

    def step_accumulated(self, microbatch_grads, tokens):
        """One step with the sum of the gradients of `accumulation_steps` micro-batches.

        Parameters
        ----------
        microbatch_grads : list
            One entry per micro-batch, each as `step` takes it; see `accumulate_grads`.
        tokens : int
            Tokens of the whole step; a split that is not aligned (`accumulation_is_aligned`) is refused.

        Raises
        ------
        ValueError
            The number of entries is not `accumulation_steps`, the split is not aligned, or as `step`.
        """
        if not isinstance(microbatch_grads, (list, tuple)):
            raise TypeError(f"microbatch_grads must be a list, got {describe(microbatch_grads)}")
        if len(microbatch_grads) != self.accumulation_steps:
            raise ValueError(
                f"microbatch_grads must have accumulation_steps entries ({self.accumulation_steps}), "
                f"got {len(microbatch_grads)}"
            )
        tokens = as_index(tokens, "tokens", 1)
        if not accumulation_is_aligned(tokens, self.accumulation_steps):
            raise ValueError(
                f"tokens must allow an aligned split in {self.accumulation_steps} micro-batches, got {tokens}"
            )
        return self.step(accumulate_grads(microbatch_grads, tokens))

    def state_dict(self):
        """Step count and moments: t, exp_avg, exp_avg_sq and buf_initialized. The arrays are copies."""
        return {
            "t": self.t,
            "exp_avg": self.exp_avg.copy(),
            "exp_avg_sq": self.exp_avg_sq.copy(),
            "buf_initialized": self.buf_initialized.copy(),
        }

    def load_state_dict(self, state):
        """Restore what `state_dict` returned.

        Raises
        ------
        TypeError
            Not a dict, or an array of another dtype.
        ValueError
            An entry is missing, out of range or of the wrong size. The optimizer is then as it was.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict, got {describe(state)}")
        missing = [name for name in ("t", "exp_avg", "exp_avg_sq", "buf_initialized") if name not in state]
        if missing:
            raise ValueError(f"state must have the entries of state_dict(); {', '.join(missing)} missing")
        t = as_index(state["t"], "state['t']", 0, _MAX_STEP)
        exp_avg = as_float32(state["exp_avg"], "state['exp_avg']", self.exp_avg.shape)
        exp_avg_sq = as_float32(state["exp_avg_sq"], "state['exp_avg_sq']", self.exp_avg_sq.shape)
        started = np.asarray(state["buf_initialized"])
        if started.dtype != np.int32:
            raise TypeError(f"state['buf_initialized'] must be int32, got {describe(started)}")
        if started.shape != self.buf_initialized.shape or ((started != 0) & (started != 1)).any():
            raise ValueError(
                f"state['buf_initialized'] must be {len(self.params)} values of 0 or 1, got {describe(started)}"
            )
        with deferred_interrupts():
            self.exp_avg[...] = exp_avg
            self.exp_avg_sq[...] = exp_avg_sq
            self.buf_initialized[...] = started
            self.t = t

    def _check_own_arrays(self):
        """Refuse arrays that were put in place of the optimizer's own and do not fit them."""
        size = sum(math.prod(shape) for shape in self._shapes)
        if [getattr(param, "shape", None) for param in self.params] != self._shapes:
            raise ValueError(f"params must keep the shapes that the optimizer was made for, {self._shapes}")
        named = [(f"params[{i}]", param, np.float32, param.shape) for i, param in enumerate(self.params)]
        named += [(name, getattr(self, name), np.float32, (size,)) for name in ("exp_avg", "exp_avg_sq")]
        named.append(("buf_initialized", self.buf_initialized, np.int32, (len(self._shapes),)))
        for name, array, dtype, shape in named:
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{name} must be a {dtype.__name__} array of shape {shape}, got {describe(array)}")
            if not array.flags.carray:
                raise ValueError(f"{name} must be C-contiguous, aligned and writable")

    def _check_grads(self, grads, rewritten):
        if isinstance(grads, (list, tuple)):
            if len(grads) != len(self.params):
                raise ValueError(f"grads must have one entry per parameter ({len(self.params)}), got {len(grads)}")
        elif not self._single:
            raise TypeError(f"grads must be a list of {len(self.params)} arrays, got {describe(grads)}")
        if rewritten:
            arrays = as_writable_list(grads, "grads")
        else:
            entries = grads if isinstance(grads, (list, tuple)) else [grads]
            arrays = [as_float32(entry, f"grads[{i}]") for i, entry in enumerate(entries)]
        for i, param in enumerate(self.params):
            if arrays[i].shape != param.shape:
                raise ValueError(f"grads[{i}] must have shape {param.shape}, got {arrays[i].shape}")
        return arrays

    def _examine(self, grads, max_norm, threads):
        """All of a step that can fail: the total norm and the factor that clips it, None without `max_norm`."""
        total = coefficient = None
        if max_norm is None:
            self._check_finite({"grads": grads}, threads)
        else:
            total, coefficient = measure_clip(grads, max_norm, threads)
        self._check_state(threads)
        return total, coefficient

    def _check_state(self, threads):
        arrays = {"params": self.params, "exp_avg": [self.exp_avg], "exp_avg_sq": [self.exp_avg_sq]}
        self._check_finite(arrays, threads)

    @staticmethod
    def _check_finite(lists, threads):
        """Refuse NaN and infinity in lists of arrays, by name, in one pass."""
        bad = layers.first_nonfinite([array for arrays in lists.values() for array in arrays], threads)
        for name, arrays in lists.items():
            if 0 <= bad < len(arrays):
                which = name if len(arrays) == 1 else f"{name}[{bad}]"
                raise NonFiniteError(f"{which} must be finite, got NaN or infinity in it")
            bad -= len(arrays)

    def _update(self, grads, t, lr, coefficient, threads):
        """Write parameters and moments of step `t`, and the gradients when they are scaled by `coefficient`."""
        raise NotImplementedError


class SGD(_Optimizer):
    """Stochastic gradient descent, with momentum if wanted.

    Parameters
    ----------
    params : float32 array or list of them
        Updated in place: contiguous and writable.
    lr : float, default 1e-3
    momentum : float, default 0
        At least 0. The first step's momentum is the gradient itself.
    dampening : float, default 0
        Share of the gradient that is kept from the momentum.
    weight_decay : float, default 0
        Added to the gradient, times the parameter.
    nesterov : bool, default False
        Needs momentum and no dampening.
    lr_schedule : ConstantLR, WarmupLinearLR or WarmupCosineLR, optional
        Sets `lr` before each step.
    accumulation_steps : int, default 1
        Micro-batches of `step_accumulated`, a power of two.
    maximize : bool, default False
        Ascend instead.
    numeric_mode : {"identical", "deterministic", "fast"} or None
        All the same here: every element is on its own.

    Attributes
    ----------
    t : int
        Steps done.
    lr_ : float or None
        The float32 learning rate of the last step.
    total_norm_, clip_coef_ : float or None
        Norm and factor of the last step, when it clipped.
    exp_avg : ndarray of float32
        Momentum of all parameters, one after another.

    Raises
    ------
    TypeError
        A parameter is not a float32 array, or an argument is of the wrong type.
    ValueError
        A parameter that cannot be updated in place, or an argument out of range.
    """

    def __init__(
        self,
        params,
        lr=0.001,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        lr_schedule=None,
        accumulation_steps=1,
        maximize=False,
        *,
        numeric_mode=None,
    ):
        self.momentum = as_float32_real(momentum, "momentum", 0.0)
        self.dampening = as_float32_real(dampening, "dampening")
        self.nesterov = as_flag(nesterov, "nesterov")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                "nesterov needs momentum above 0 and dampening 0, "
                f"got momentum {self.momentum} and dampening {self.dampening}"
            )
        super().__init__(params, lr, weight_decay, lr_schedule, accumulation_steps, maximize, numeric_mode)

    def _update(self, grads, t, lr, coefficient, threads):
        layers.sgd_step(
            self.params,
            grads,
            self.exp_avg if self.momentum != 0.0 else None,
            self.buf_initialized,
            lr,
            self.momentum,
            self.dampening,
            self.weight_decay,
            self.nesterov,
            self.maximize,
            coefficient,
            True,
            threads,
        )


class Adam(_Optimizer):
    """Adam: steps scaled by running moments of the gradient; weight decay is added to the gradient.

    Parameters
    ----------
    params : float32 array or list of them
        Updated in place: contiguous and writable.
    lr : float, default 1e-3
    betas : pair of float, default (0.9, 0.999)
        Decay of the two moments, in [0, 1).
    eps : float, default 1e-8
        Added to the denominator, at least 0.
    weight_decay : float, default 0
    lr_schedule : ConstantLR, WarmupLinearLR or WarmupCosineLR, optional
        Sets `lr` before each step.
    accumulation_steps : int, default 1
        Micro-batches of `step_accumulated`, a power of two.
    maximize : bool, default False
        Ascend instead.
    numeric_mode : {"identical", "deterministic", "fast"} or None
        All the same here: every element is on its own.

    Attributes
    ----------
    t : int
        Steps done.
    lr_ : float or None
        The float32 learning rate of the last step.
    total_norm_, clip_coef_ : float or None
        Norm and factor of the last step, when it clipped.
    exp_avg, exp_avg_sq : ndarray of float32
        Moments of all parameters, one after another.

    Raises
    ------
    TypeError
        A parameter is not a float32 array, or an argument is of the wrong type.
    ValueError
        A parameter that cannot be updated in place, or an argument out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mojolearn.training import Adam
    >>> weight = np.zeros(3, np.float32)
    >>> optimizer = Adam(weight, lr=0.5)
    >>> optimizer.step(np.array([1, -2, 4], np.float32))
    >>> weight
    array([-0.5,  0.5, -0.5], dtype=float32)
    """

    _decoupled = False

    def __init__(
        self,
        params,
        lr=0.001,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        lr_schedule=None,
        accumulation_steps=1,
        maximize=False,
        *,
        numeric_mode=None,
    ):
        self.betas = betas
        self.eps = eps
        super().__init__(params, lr, weight_decay, lr_schedule, accumulation_steps, maximize, numeric_mode)
        # aligned, and in huge pages: a step streams through them
        self.exp_avg = Workspace().zeros(self.exp_avg.size)
        self.exp_avg_sq = Workspace().zeros(self.exp_avg.size)

    @property
    def betas(self):
        """Decay of the two moments."""
        return self._betas

    @betas.setter
    def betas(self, value):
        self._betas = as_betas(value)

    @property
    def eps(self):
        """What is added to the denominator."""
        return self._eps

    @eps.setter
    def eps(self, value):
        self._eps = as_float32_real(value, "eps", 0.0)

    def _update(self, grads, t, lr, coefficient, threads):
        layers.adam_step(
            self.params,
            grads,
            self.exp_avg,
            self.exp_avg_sq,
            t,
            lr,
            *self._betas,
            self._eps,
            self._weight_decay,
            self._decoupled,
            self.maximize,
            coefficient,
            True,
            threads,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay: parameters shrink by ``1 - lr * weight_decay`` before each step.

    Parameters
    ----------
    params : float32 array or list of them
        Updated in place: contiguous and writable.
    lr : float, default 1e-3
    betas : pair of float, default (0.9, 0.999)
        Decay of the two moments, in [0, 1).
    eps : float, default 1e-8
        Added to the denominator, at least 0.
    weight_decay : float, default 0.01
    lr_schedule : ConstantLR, WarmupLinearLR or WarmupCosineLR, optional
        Sets `lr` before each step.
    accumulation_steps : int, default 1
        Micro-batches of `step_accumulated`, a power of two.
    maximize : bool, default False
        Ascend instead.
    numeric_mode : {"identical", "deterministic", "fast"} or None
        All the same here: every element is on its own.

    See Also
    --------
    Adam : attributes and errors.
    """

    _decoupled = True

    def __init__(
        self,
        params,
        lr=0.001,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        lr_schedule=None,
        accumulation_steps=1,
        maximize=False,
        *,
        numeric_mode=None,
    ):
        super().__init__(
            params, lr, betas, eps, weight_decay, lr_schedule, accumulation_steps, maximize, numeric_mode=numeric_mode
        )
