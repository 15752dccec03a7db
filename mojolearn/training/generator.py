"""`Generator`: random draws that depend on a seed, a stream number and a position, and on nothing else."""

import math
from collections.abc import Sequence

import numpy as np

from mojolearn._arrays import as_float32, as_index, as_real, describe
from mojolearn._core import layers
from mojolearn._numerics import default_environment, get_num_threads
from mojolearn.errors import NonFiniteError, RandomStreamError

__all__ = ["Generator"]

_MAX_SEED = 2**64 - 1
_MAX_STREAMS = 2**32
_MAX_POSITION = 2**62  # positions of the normal draws are pairs of words, counted in 64 bits

_MAX_FAN = 2**64 - 1
_MAX_RANK = 32
_MAX_SIZE = 2**60  # elements of an array, far above any memory

_KEY_ENTRIES = ("seed", "stream", "p", "scale", "offset")


class Generator:
    """Source of random arrays, initial weights and dropout masks.

    Every draw takes one stream, numbered from 0, and element i of the result is a function of (seed, stream, i) alone
    (Philox4x32-10), whatever the number of threads. A call that is refused takes no stream.

    Parameters
    ----------
    seed : int
        In [0, 2**64).

    Raises
    ------
    TypeError
        `seed` is not an integer.
    ValueError
        `seed` is out of range.

    Examples
    --------
    >>> from mojolearn.training import Generator
    >>> generator = Generator(7)
    >>> generator.uniform((2, 3), -1.0, 1.0).shape
    (2, 3)
    >>> generator.state_dict()
    {'seed': 7, 'counter': 1}
    """

    def __init__(self, seed):
        self._seed = as_index(seed, "seed", 0, _MAX_SEED)
        self._counter = 0

    seed = property(lambda self: self._seed, doc="The seed.")
    counter = property(lambda self: self._counter, doc="Number of the next stream; 2**32 when none is left.")

    def __repr__(self):
        return f"Generator({self._seed}), next stream {self._counter}"

    def _check_stream_left(self):
        if self._counter >= _MAX_STREAMS:
            raise RandomStreamError(
                f"the generator of seed {self._seed} has no stream left: all {_MAX_STREAMS} are used"
            )

    def next_stream(self):
        """Take a stream and return its number.

        Raises
        ------
        RandomStreamError
            None is left.
        """
        self._check_stream_left()
        stream = self._counter
        self._counter += 1
        return stream

    def state_dict(self):
        """``{"seed": int, "counter": int}``; the counter is the number of the next stream."""
        return {"seed": self._seed, "counter": self._counter}

    def load_state_dict(self, state):
        """Set seed and counter.

        Raises
        ------
        TypeError
            `state` is not a dict, or an entry is not an integer.
        ValueError
            An entry is missing or out of range. The generator is then as it was.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict, got {describe(state)}")
        for name in ("seed", "counter"):
            if name not in state:
                raise ValueError(f"state must have the entries seed and counter; {name} is missing")
        seed = as_index(state["seed"], "state['seed']", 0, _MAX_SEED)
        counter = as_index(state["counter"], "state['counter']", 0, _MAX_STREAMS)
        self._seed, self._counter = seed, counter

    @default_environment
    def uniform(self, shape, low=0.0, high=1.0):
        """Uniform values in [low, high).

        Parameters
        ----------
        shape : int or sequence of int
            Extents of at least 1; ``()`` gives a single value.
        low, high : float
            ``low <= high``; both are rounded to float32, and so is the upper end of what is drawn.

        Returns
        -------
        ndarray of float32
        """
        shape = _as_shape(shape)
        low, high = as_real(low, "low"), as_real(high, "high")
        if high < low:
            raise ValueError(f"high must be at least low, got low {low} and high {high}")
        low32, high32 = _as_float32(low, "low"), _as_float32(high, "high")
        with np.errstate(over="ignore"):
            span = high32 - low32
        if not np.isfinite(span):
            raise ValueError(f"high - low must be within the range of float32, got low {low} and high {high}")
        return self._draw(layers.uniform, shape, float(low32), float(span))

    @default_environment
    def normal(self, shape, mean=0.0, std=1.0):
        """Normal values.

        Parameters
        ----------
        shape : int or sequence of int
            Extents of at least 1; ``()`` gives a single value.
        mean, std : float
            ``std >= 0``; both are rounded to float32.

        Returns
        -------
        ndarray of float32
        """
        shape = _as_shape(shape)
        mean = _as_float32(as_real(mean, "mean"), "mean")
        std = _as_float32(as_real(std, "std", 0.0), "std")
        return self._draw(layers.normal, shape, float(mean), float(std))

    @default_environment
    def kaiming_uniform(self, shape, fan_in, a=None):
        """Uniform initial weights with bound ``sqrt(2 / (1 + a**2)) * sqrt(3 / fan_in)``.

        Parameters
        ----------
        shape : int or sequence of int
        fan_in : int
            Number of inputs of the layer, at least 1.
        a : float, optional
            Slope of the leaky rectifier; ``sqrt(5)`` by default.

        Returns
        -------
        ndarray of float32
        """
        fan_in = as_index(fan_in, "fan_in", 1, _MAX_FAN)
        a = math.sqrt(5.0) if a is None else as_real(a, "a", -1e150, 1e150)
        bound = math.sqrt(2.0 / (1.0 + a * a)) * math.sqrt(3.0 / fan_in)
        return self.uniform(shape, -bound, bound)

    @default_environment
    def kaiming_normal(self, shape, fan_in, gain=None):
        """Normal initial weights with standard deviation ``gain / sqrt(fan_in)``.

        Parameters
        ----------
        shape : int or sequence of int
        fan_in : int
            Number of inputs of the layer, at least 1.
        gain : float, optional
            At least 0; ``sqrt(2)`` by default.

        Returns
        -------
        ndarray of float32
        """
        fan_in = as_index(fan_in, "fan_in", 1, _MAX_FAN)
        gain = math.sqrt(2.0) if gain is None else as_real(gain, "gain", 0.0)
        return self.normal(shape, 0.0, gain / math.sqrt(fan_in))

    @default_environment
    def xavier_uniform(self, shape, fan_in, fan_out, gain=1.0):
        """Uniform initial weights with bound ``gain * sqrt(6 / (fan_in + fan_out))``.

        Parameters
        ----------
        shape : int or sequence of int
        fan_in, fan_out : int
            Numbers of inputs and outputs of the layer, at least 1.
        gain : float, default 1
            At least 0.

        Returns
        -------
        ndarray of float32
        """
        fans = as_index(fan_in, "fan_in", 1, _MAX_FAN) + as_index(fan_out, "fan_out", 1, _MAX_FAN)
        bound = as_real(gain, "gain", 0.0) * math.sqrt(6.0 / fans)
        return self.uniform(shape, -bound, bound)

    @default_environment
    def xavier_normal(self, shape, fan_in, fan_out, gain=1.0):
        """Normal initial weights with standard deviation ``gain * sqrt(2 / (fan_in + fan_out))``.

        Parameters
        ----------
        shape : int or sequence of int
        fan_in, fan_out : int
            Numbers of inputs and outputs of the layer, at least 1.
        gain : float, default 1
            At least 0.

        Returns
        -------
        ndarray of float32
        """
        fans = as_index(fan_in, "fan_in", 1, _MAX_FAN) + as_index(fan_out, "fan_out", 1, _MAX_FAN)
        return self.normal(shape, 0.0, as_real(gain, "gain", 0.0) * math.sqrt(2.0 / fans))

    @default_environment
    def dropout(self, x, p, offset=0, stream=None):
        """Set elements to zero with probability `p` and divide the others by ``1 - p``.

        Parameters
        ----------
        x : float32 array of any shape
            Finite and not empty.
        p : float
            In [0, 1), after rounding to float32 too.
        offset : int, default 0
            Position in the stream of the first element, so that pieces of an array can be masked one by one.
        stream : int, optional
            Stream to use, in [0, 2**32); by default the next one is taken.

        Returns
        -------
        y : ndarray of float32
            The shape of `x`.
        key : dict
            seed, stream, p, scale and offset: what `dropout_backward` needs.

        Raises
        ------
        TypeError
            `x` is not float32, or a number is of the wrong type.
        ValueError
            `x` is empty or not finite, or a number is out of range. No stream has been taken.
        """
        x = as_float32(x, "x")
        p = _as_rate(p, "p")
        offset = as_index(offset, "offset", 0, _MAX_POSITION - x.size)
        if stream is None:
            self._check_stream_left()
            key_stream = self._counter
        else:
            key_stream = as_index(stream, "stream", 0, _MAX_STREAMS - 1)
        _check_finite(x, "x")
        scale = float(np.float32(1.0 / (1.0 - p)))
        y = np.empty_like(x)
        layers.dropout(x, y, p, scale, self._seed, key_stream, offset, get_num_threads())
        if stream is None:
            self._counter += 1
        return y, {"seed": self._seed, "stream": key_stream, "p": p, "scale": scale, "offset": offset}

    @default_environment
    def dropout_backward(self, dy, key):
        """Gradient of `dropout`: the same mask and scale applied to `dy`.

        Parameters
        ----------
        dy : float32 array
            Gradient with respect to the result of `dropout`.
        key : dict
            What `dropout` returned; its seed is used, so any generator will do. No stream is taken.

        Returns
        -------
        ndarray of float32
        """
        dy = as_float32(dy, "dy")
        if not isinstance(key, dict):
            raise TypeError(f"key must be a dict, got {describe(key)}")
        missing = [name for name in _KEY_ENTRIES if name not in key]
        if missing:
            raise ValueError(f"key must have the entries {', '.join(_KEY_ENTRIES)}; {', '.join(missing)} missing")
        seed = as_index(key["seed"], "key['seed']", 0, _MAX_SEED)
        stream = as_index(key["stream"], "key['stream']", 0, _MAX_STREAMS - 1)
        p = _as_rate(key["p"], "key['p']")
        scale = float(_as_float32(as_real(key["scale"], "key['scale']", 0.0), "key['scale']"))
        offset = as_index(key["offset"], "key['offset']", 0, _MAX_POSITION - dy.size)
        _check_finite(dy, "dy")
        dx = np.empty_like(dy)
        layers.dropout(dy, dx, p, scale, seed, stream, offset, get_num_threads())
        return dx

    def _draw(self, kernel, shape, first, second):
        self._check_stream_left()
        out = np.empty(shape, np.float32)
        kernel(out, first, second, self._seed, self._counter, 0, get_num_threads())
        self._counter += 1
        return out


def _as_shape(shape):
    if hasattr(shape, "__index__") and not (isinstance(shape, np.ndarray) and shape.ndim):
        return (as_index(shape, "shape", 1, _MAX_SIZE),)
    if not isinstance(shape, (Sequence, np.ndarray)) or isinstance(shape, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"shape must be an integer or a sequence of integers, got {describe(shape)}")
    if isinstance(shape, np.ndarray) and shape.ndim != 1:
        raise TypeError(f"shape must be an integer or a sequence of integers, got {describe(shape)}")
    shape = tuple(as_index(extent, f"shape[{i}]", 1, _MAX_SIZE) for i, extent in enumerate(shape))
    if len(shape) > _MAX_RANK or math.prod(shape) > _MAX_SIZE:
        raise ValueError(
            f"shape must have at most {_MAX_RANK} extents and 2**60 elements in all, got {describe(shape)}"
        )
    return shape


def _as_float32(value, name):
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if not np.isfinite(rounded):
        raise ValueError(f"{name} must be within the range of float32, got {value}")
    return rounded


def _as_rate(value, name):
    """A dropout rate as a float32 value; one that rounds to 1 would divide by zero."""
    rate = float(np.float32(as_real(value, name, 0.0, 1.0, high_open=True)))
    if rate >= 1.0:
        raise ValueError(f"{name} must be less than 1 as float32, got {value}")
    return rate


def _check_finite(array, name):
    if not layers.all_finite(array, get_num_threads()):
        raise NonFiniteError(f"{name} must be finite, got NaN or infinity in it")
