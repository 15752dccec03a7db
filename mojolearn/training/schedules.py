"""Learning-rate schedules: at every step the float32 nearest the exact real value.

A float64 evaluation lands on that float32 unless the exact value lies within its error of the midpoint of two
neighbours. So a schedule evaluates in float64 with a generous error bound (`_FAST_ERROR`), and only where both ends of
the bound round to different float32 does it turn to exact rationals, with the cosine enclosed ever more tightly. Hence
no result depends on the machine's library of functions.
"""

import math
from array import array
from fractions import Fraction

import numpy as np

from mojolearn._arrays import as_index, as_real, describe
from mojolearn._numerics import default_environment

__all__ = ["ConstantLR", "LRSchedule", "WarmupCosineLR", "WarmupLinearLR"]

# Relative error allowed to the float64 evaluation. Its terms are all positive, so a few roundings of 2**-53 and a sine
# within a few units in the last place stay far below.
_FAST_ERROR = 2.0**-44

_MAX_STEP = 2**63 - 1


@default_environment
def _as_rate(value, name):
    """A learning rate as the float32 that is used, widened."""
    number = as_real(value, name, 0.0)
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    if math.isinf(rounded):
        raise ValueError(f"{name} must be within the range of float32, got {number}")
    return rounded


class LRSchedule:
    """Base of the three schedules; `from_config` makes the one that a config names.

    Steps count from 1. The first `warmup_steps` steps rise in a straight line to `peak_lr`.
    """

    kind = None

    def __init__(self, peak_lr, warmup_steps=0, total_steps=None, min_lr=0.0):
        self._peak_lr = _as_rate(peak_lr, "peak_lr")
        self._min_lr = _as_rate(min_lr, "min_lr")
        self._warmup_steps = as_index(warmup_steps, "warmup_steps", 0, _MAX_STEP)
        if total_steps is not None:
            total_steps = as_index(total_steps, "total_steps", max(1, self._warmup_steps), _MAX_STEP)
        self._total_steps = total_steps

    peak_lr = property(lambda self: self._peak_lr, doc="Rate at the end of the warmup, a float32 value.")
    min_lr = property(lambda self: self._min_lr, doc="Rate from the last step on, a float32 value.")
    warmup_steps = property(lambda self: self._warmup_steps, doc="Number of rising steps.")
    total_steps = property(lambda self: self._total_steps, doc="Step at which `min_lr` is reached, or None.")

    def __repr__(self):
        return (
            f"{type(self).__name__}({self._peak_lr!r}, warmup_steps={self._warmup_steps}, "
            f"total_steps={self._total_steps}, min_lr={self._min_lr!r})"
        )

    def __eq__(self, other):
        if not isinstance(other, LRSchedule):
            return NotImplemented
        return self.config() == other.config()

    def __hash__(self):
        return hash(tuple(self.config().values()))

    def config(self):
        """The schedule as a JSON-able dict: kind, peak_lr, min_lr, warmup_steps, total_steps."""
        return {
            "kind": self.kind,
            "peak_lr": self._peak_lr,
            "min_lr": self._min_lr,
            "warmup_steps": self._warmup_steps,
            "total_steps": self._total_steps,
        }

    @classmethod
    def from_config(cls, config):
        """The schedule that `config` describes; it must be of this class.

        Parameters
        ----------
        config : dict
            As `config` returns it. On the base class any kind will do.

        Raises
        ------
        TypeError
            Not a dict, or an entry of the wrong type.
        ValueError
            A missing entry, an unknown kind, or an entry out of range.
        """
        if not isinstance(config, dict):
            raise TypeError(f"config must be a dict, got {describe(config)}")
        wanted = ("kind", "peak_lr", "min_lr", "warmup_steps", "total_steps")
        missing = [name for name in wanted if name not in config]
        if missing:
            raise ValueError(f"config must have the entries {', '.join(wanted)}; {', '.join(missing)} missing")
        kinds = {one.kind: one for one in LRSchedule.__subclasses__() if issubclass(one, cls)}
        chosen = kinds.get(config["kind"]) if isinstance(config["kind"], str) else None
        if chosen is None:
            raise ValueError(f"config kind must be one of {tuple(kinds)}, got {describe(config['kind'])}")
        return chosen(config["peak_lr"], config["warmup_steps"], config["total_steps"], config["min_lr"])

    def lr_at(self, t):
        """Learning rate of step `t` (from 1), a float32 value as a float."""
        t = as_index(t, "t", 1, _MAX_STEP)
        return float(self._values(t, 1)[0])

    def bits_at(self, t):
        """Learning rate of step `t` as its 32 float32 bits, an int."""
        t = as_index(t, "t", 1, _MAX_STEP)
        return int(self._values(t, 1).view(np.uint32)[0])

    def lr_values(self, n):
        """Learning rates of steps 1 to `n`, an ``array('f')``."""
        n = as_index(n, "n", 0)
        return array("f", self._values(1, n).tobytes())

    @default_environment
    def _values(self, first, count):
        """float32 rates of `count` steps from step `first`."""
        rates = np.full(count, self._peak_lr, np.float32)
        rising = max(0, min(self._warmup_steps - first + 1, count))
        if rising:
            # t / warmup of the way from 0 to the peak
            self._fill(rates[:rising], first, 0, self._warmup_steps, 0.0, self._peak_lr, cosine=False)
        if self._total_steps is not None:
            before_end = max(rising, min(self._total_steps - first, count))
            rates[before_end:] = self._min_lr
            self._fill_decay(rates[rising:before_end], first + rising)
        return rates

    def _fill_decay(self, rates, first):
        """Write the rates between warmup and end, from step `first` on."""
        raise NotImplementedError

    @staticmethod
    def _fill(rates, first, start_step, end_step, start, end, cosine):
        """Rates on the way from `start` at `start_step` to `end` at `end_step`, straight or along half a cosine."""
        # Differences of steps are formed as integers: as floats, late steps of a long schedule would lose digits.
        span = end_step - start_step
        done = np.arange(len(rates), dtype=np.int64) + (first - start_step)
        weight = done / span
        rest = (span - done) / span
        if cosine:
            weight, rest = np.sin(weight * (np.pi / 2)) ** 2, np.sin(rest * (np.pi / 2)) ** 2
        value = end * weight + start * rest
        rates[:] = value * (1 - _FAST_ERROR)
        unsure = np.flatnonzero(rates != (value * (1 + _FAST_ERROR)).astype(np.float32))
        for i in unsure:
            progress = Fraction(first - start_step + int(i), span)
            rates[i] = _exact_rate(Fraction(start), Fraction(end), progress, cosine)


def _exact_rate(start, end, progress, cosine):
    """float32 nearest start + (end - start) * w, w = progress or (1 - cos(pi * progress)) / 2."""
    if not cosine:
        return _nearest_float32(start + (end - start) * progress)
    bits = 128
    while True:
        low, high = ((1 - c) / 2 for c in _cosine_bounds(progress, bits))
        a, b = (_nearest_float32(start + (end - start) * w) for w in (low, high))
        if a == b:
            return a
        bits *= 2


def _nearest_float32(value):
    """Nonnegative Fraction to the nearest float32, ties to even, as a float."""
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return float(round(value / unit) * unit)


# Where the cosine of a rational part of pi is rational (Niven's theorem): a tie can happen only there, and no enclosure
# would ever decide it.
_RATIONAL_COSINES = {
    Fraction(0): Fraction(1),
    Fraction(1, 3): Fraction(1, 2),
    Fraction(1, 2): Fraction(0),
    Fraction(2, 3): Fraction(-1, 2),
    Fraction(1): Fraction(-1),
}


def _cosine_bounds(part, bits):
    """Rational bounds of cos(pi * part), 0 <= part <= 1, about 2**-bits apart."""
    if part in _RATIONAL_COSINES:
        return _RATIONAL_COSINES[part], _RATIONAL_COSINES[part]
    # Fixed-point Taylor series. Each term is cut off by at most 2 units and there are fewer than `one`'s bits of them,
    # so 16 extra bits hold the error.
    one = 1 << (bits + 16)
    x = _pi(bits + 16) * part.numerator // part.denominator
    square = x * x // one
    term = total = one
    k = 0
    while term:
        k += 2
        term = term * square // one // (k * (k - 1))
        total += -term if k % 4 == 2 else term
    error = 1 << 15
    return Fraction(total - error, one), Fraction(total + error, one)


def _pi(bits):
    """pi in units of 2**-bits, within a few units: Machin's formula."""

    def arctan_inverse(x):
        power = total = (1 << (bits + 16)) // x
        k = 1
        while power:
            power //= x * x
            k += 2
            total += -(power // k) if k % 4 == 3 else power // k
        return total

    return (4 * (4 * arctan_inverse(5) - arctan_inverse(239))) >> 16


class ConstantLR(LRSchedule):
    """A straight rise over `warmup_steps` steps, then `peak_lr` for ever.

    Parameters
    ----------
    peak_lr : float
        At least 0, rounded to float32.
    warmup_steps : int, default 0
    total_steps : int or None
        Checked, but without effect.
    min_lr : float
        Checked, but without effect; the config says 0.

    Examples
    --------
    >>> from mojolearn.training import ConstantLR
    >>> list(ConstantLR(1.0, warmup_steps=4).lr_values(6))
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """

    kind = "constant"

    def __init__(self, peak_lr, warmup_steps=0, total_steps=None, min_lr=0.0):
        super().__init__(peak_lr, warmup_steps, total_steps, min_lr)
        self._min_lr = 0.0

    @default_environment
    def _values(self, first, count):
        rates = np.full(count, self._peak_lr, np.float32)
        rising = max(0, min(self._warmup_steps - first + 1, count))
        self._fill(rates[:rising], first, 0, max(1, self._warmup_steps), 0.0, self._peak_lr, cosine=False)
        return rates


class WarmupLinearLR(LRSchedule):
    """A straight rise to `peak_lr`, then a straight descent that reaches `min_lr` at `total_steps`.

    Parameters
    ----------
    peak_lr : float
        At least 0, rounded to float32.
    warmup_steps : int, default 0
        Steps of the rise; step `warmup_steps` has the peak, even when it is the last.
    total_steps : int or None
        At least 1 and `warmup_steps`. From this step on the rate is `min_lr`. None: the peak for ever.
    min_lr : float, default 0
        At least 0, rounded to float32.

    Examples
    --------
    >>> from mojolearn.training import WarmupLinearLR
    >>> list(WarmupLinearLR(1.0, warmup_steps=2, total_steps=6).lr_values(7))
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    kind = "linear"

    def _fill_decay(self, rates, first):
        if len(rates):
            self._fill(rates, first, self._warmup_steps, self._total_steps, self._peak_lr, self._min_lr, cosine=False)


class WarmupCosineLR(LRSchedule):
    """A straight rise to `peak_lr`, then half a cosine down to `min_lr` at `total_steps`.

    Parameters
    ----------
    peak_lr : float
        At least 0, rounded to float32.
    warmup_steps : int, default 0
        Steps of the rise; step `warmup_steps` has the peak, even when it is the last.
    total_steps : int or None
        At least 1 and `warmup_steps`. From this step on the rate is `min_lr`. None: the peak for ever.
    min_lr : float, default 0
        At least 0, rounded to float32.

    Examples
    --------
    >>> from mojolearn.training import WarmupCosineLR
    >>> list(WarmupCosineLR(1.0, warmup_steps=2, total_steps=6).lr_values(6))[1::2]
    [1.0, 0.5, 0.0]
    """

    kind = "cosine"

    def _fill_decay(self, rates, first):
        if len(rates):
            self._fill(rates, first, self._warmup_steps, self._total_steps, self._peak_lr, self._min_lr, cosine=True)
