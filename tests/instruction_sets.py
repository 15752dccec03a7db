"""The library on another instruction set than that of the process, and floats that are hard on arithmetic."""

import contextlib
import importlib
import sys
import types

import numpy as np
from exact_sums import numbers

from mojolearn import _core

RUN_HERE = [name for name in _core.BUILT if name in _core.AVAILABLE]


def kernels(name, family):
    """The module of a kernel family for an instruction set."""
    return importlib.import_module(f"mojolearn._core.{name}.{family}")


@contextlib.contextmanager
def instruction_set(name):
    """Let all modules of the library call the kernels of an instruction set inside the block.

    Objects that hold packed weights must be made and used inside one block.
    """
    swapped = []
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("mojolearn"):
            for key, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value.__name__.startswith(f"mojolearn._core.{_core.ISA}."):
                    swapped.append((module, key, value))
    try:
        for module, key, value in swapped:
            setattr(module, key, kernels(name, value.__name__.rsplit(".", 1)[1]))
        yield
    finally:
        for module, key, value in swapped:
            setattr(module, key, value)


def _from_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


# Zeros, the smallest and largest subnormal, the edge of the normal numbers, ones and their neighbours, the largest.
EDGES = _from_bits(
    [0, 1, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x3F7FFFFF]
    + [0x3F800000, 0x3F800001, 0x7E967699, 0x7F7FFFFF]
)
# Sums and products of these fall half-way between two floats.
TIES = np.float32([1, 2**-24, 2**-23, 1 + 2**-23, 3 * 2**-25, 2**-12, 1 + 2**-12, 1.5, 2**24, 2**23 + 0.5])

KINDS = ("normal", "tiny", "vanishing", "subnormal", "border", "spread", "wide", "edges", "ties")


def hostile(draw, shape, kind):
    """Finite float32 values of a kind; signed zeros among them.

    The kinds of `exact_sums.numbers`; spread: any exponent from 2**-30 to 2**30; wide: any bits of a finite float;
    edges and ties: from short lists.
    """
    if kind == "spread":
        values = draw.standard_normal(shape) * 2.0 ** draw.integers(-30, 31, shape)
    elif kind == "wide":
        bits = draw.integers(0, 0x7F800000, shape, dtype=np.uint32) | draw.integers(0, 2, shape, dtype=np.uint32) << 31
        return _from_bits(bits)
    elif kind in ("edges", "ties"):
        values = draw.choice(EDGES if kind == "edges" else TIES, shape) * draw.choice([-1, 1], shape)
    else:
        values = numbers(draw, shape, kind)
    values = np.asarray(values, np.float32)
    return np.where(draw.random(shape) < 0.03, np.copysign(np.float32(0), values), values)


def differences(got, want):
    """How many cells differ in a bit; NaNs count as equal."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    if got.dtype != np.float32:
        return int((got != want).sum())
    return int(((got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))).sum())
