"""Schedules: always the float32 nearest the exact value."""

from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mojolearn.training import ConstantLR, WarmupCosineLR, WarmupLinearLR, schedules

SCHEDULES = (ConstantLR, WarmupLinearLR, WarmupCosineLR)


def is_nearest(value, exact):
    """Whether `value` is the float32 nearest to `exact`; on a tie, the one with an even last bit."""
    value = np.float32(value)
    above = np.nextafter(value, np.float32(np.inf))
    below = np.nextafter(value, np.float32(-np.inf))
    error = abs(Fraction(float(value)) - exact)
    for other in (above, below):
        distance = abs(Fraction(float(other)) - exact)
        if distance < error or (distance == error and int(value.view(np.uint32)) & 1):
            return False
    return True


rates = st.floats(0, 2.0**127, width=32, allow_subnormal=True)
steps = st.integers(0, 40) | st.integers(0, 10**12)


@given(rates, rates, steps, steps, st.integers(0, 10**6))
def test_linear_is_nearest(peak, low, warmup, decay, at):
    total = max(1, warmup + decay)
    schedule = WarmupLinearLR(peak, warmup, total, low)
    t = 1 + at % (total + 2)
    if t <= warmup:
        exact = Fraction(peak) * t / warmup
    elif t >= total:
        exact = Fraction(low)
    else:
        exact = Fraction(peak) + (Fraction(low) - Fraction(peak)) * Fraction(t - warmup, total - warmup)
    assert is_nearest(schedule.lr_at(t), exact)
    constant = ConstantLR(peak, warmup).lr_at(t)
    assert is_nearest(constant, exact if t <= warmup else Fraction(peak))


@given(rates, rates, steps, st.integers(1, 10**6), st.integers(0, 10**6))
def test_fast_path_of_the_cosine_equals_the_exact_one(peak, low, warmup, decay, at):
    schedule = WarmupCosineLR(peak, warmup, warmup + decay, low)
    t = warmup + 1 + at % decay
    progress = Fraction(t - warmup, decay)
    exact = schedules._exact_rate(Fraction(peak), Fraction(low), progress, True)
    assert schedule.lr_at(t) == exact


@pytest.mark.parametrize("part", [Fraction(1, 7), Fraction(2, 5), Fraction(1, 1000), Fraction(999, 1000)])
def test_cosine_bounds(part):
    # cos(pi/7) and so on, from their minimal polynomials: T_n(cos(pi * a / n)) = (-1)^a
    low, high = schedules._cosine_bounds(part, 200)
    assert 0 < high - low < Fraction(1, 2**199)
    assert abs(float(low) - np.cos(np.pi * float(part))) < 1e-15
    middle = (low + high) / 2
    previous, value = Fraction(1), middle
    digits = 1 << 400
    for _ in range(part.denominator - 1):
        previous, value = value, Fraction(int((2 * middle * value - previous) * digits), digits)
    assert abs(value - (-1) ** part.numerator) < Fraction(1, 2**150)


def test_ties_go_to_even():
    # halfway between two neighbours, one way up and one way down
    odd, even = np.float32(1 + 2**-23), np.float32(1 + 2**-22)
    assert WarmupLinearLR(float(odd), 0, 2, float(even)).lr_at(1) == float(even)
    assert WarmupCosineLR(float(odd), 0, 2, float(even)).lr_at(1) == float(even)
    assert WarmupCosineLR(float(even), 0, 2, 1 + 2**-23).lr_at(1) == float(even)
    tiny = 2.0**-149
    assert WarmupLinearLR(tiny, 2, 2).lr_at(1) == 0.0
    assert WarmupLinearLR(3 * tiny, 2, 2).lr_at(1) == 2 * tiny


def test_shape_of_the_schedules():
    assert list(WarmupCosineLR(1.0, 0, 3, 0.0).lr_values(4)) == [0.75, 0.25, 0.0, 0.0]
    assert list(WarmupLinearLR(2.0, 2, 2, 0.5).lr_values(3)) == [1.0, 2.0, 0.5]  # warmup wins at the last step
    assert list(WarmupCosineLR(2.0, 2).lr_values(4)) == [1.0, 2.0, 2.0, 2.0]
    assert list(ConstantLR(2.0, 2, 3, 1.0).lr_values(5)) == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert ConstantLR(0.1).lr_at(2**63 - 1) == float(np.float32(0.1))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_views_agree(kind):
    schedule = kind(3e-4, 7, 50, 1e-5)
    values = schedule.lr_values(60)
    assert isinstance(values, array) and values.typecode == "f" and len(values) == 60
    assert list(values) == [schedule.lr_at(t) for t in range(1, 61)]
    assert [schedule.bits_at(t) for t in range(1, 61)] == np.array(values).view(np.uint32).tolist()
    assert len(schedule.lr_values(0)) == 0
    again = kind.from_config(schedule.config())
    assert again == schedule and hash(again) == hash(schedule) and again.lr_values(60) == values
    assert schedules.LRSchedule.from_config(schedule.config()) == schedule
    assert list(schedule.config()) == ["kind", "peak_lr", "min_lr", "warmup_steps", "total_steps"]


def test_config_holds_float32_values():
    assert WarmupCosineLR(1e-3, 8, 64, 1e-4).config() == {
        "kind": "cosine",
        "peak_lr": 0.0010000000474974513,
        "min_lr": 9.999999747378752e-05,
        "warmup_steps": 8,
        "total_steps": 64,
    }
    assert ConstantLR(1.0, 1, 5, 0.5).config()["min_lr"] == 0.0


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    "arguments, error",
    [
        ((-1e-3,), ValueError),
        ((float("nan"),), ValueError),
        ((float("inf"),), ValueError),
        ((1e39,), ValueError),
        (("1e-3",), TypeError),
        ((1e-3, -1), ValueError),
        ((1e-3, 1.0), TypeError),
        ((1e-3, True), TypeError),
        ((1e-3, 5, 4), ValueError),
        ((1e-3, 0, 0), ValueError),
        ((1e-3, 0, 4.0), TypeError),
        ((1e-3, 0, 4, -1.0), ValueError),
    ],
)
def test_refusals(kind, arguments, error):
    with pytest.raises(error):
        kind(*arguments)


@pytest.mark.parametrize("t, error", [(0, ValueError), (-1, ValueError), (1.0, TypeError), ("1", TypeError)])
def test_steps_that_are_refused(t, error):
    with pytest.raises(error, match="t must"):
        ConstantLR(1.0).lr_at(t)
    with pytest.raises(error, match="t must"):
        ConstantLR(1.0).bits_at(t)


def test_configs_that_are_refused():
    config = WarmupLinearLR(1.0, 1, 5).config()
    for bad, error in (
        ({**config, "kind": "exponential"}, ValueError),
        ({**config, "kind": ["linear"]}, ValueError),
        ({k: v for k, v in config.items() if k != "min_lr"}, ValueError),
        ({**config, "peak_lr": None}, TypeError),
        ([config], TypeError),
    ):
        with pytest.raises(error):
            WarmupLinearLR.from_config(bad)
    with pytest.raises(ValueError, match="kind"):
        WarmupCosineLR.from_config(config)
