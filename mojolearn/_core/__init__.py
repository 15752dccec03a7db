"""Compiled kernels, one build of each for every instruction set; this module picks the set that runs.

``MOJOLEARN_ISA`` (``baseline``, ``avx2`` or ``avx512``) forces one; otherwise it is the widest that was built and that
the processor has. All give the same bits.
"""

import importlib
import importlib.util
import os

try:
    from mojolearn._core import _pool
except ImportError as error:
    raise ImportError(
        "the compiled kernels of mojolearn are missing or do not fit this interpreter. In a source folder run "
        "'make build' (or 'pip install .') and import from there or from outside the folder"
    ) from error

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
FAMILIES = ("linalg", "layers", "attention", "mamba3", "decode")


def _built():
    def has_kernels(name):
        return any(importlib.util.find_spec(f"mojolearn._core.{name}.{family}") for family in FAMILIES)

    return tuple(name for name in INSTRUCTION_SETS if has_kernels(name))


def _choose(built, available, forced):
    if forced:
        if forced not in INSTRUCTION_SETS:
            raise ValueError(f"MOJOLEARN_ISA is {forced!r}; wanted one of {', '.join(INSTRUCTION_SETS)}")
        if forced not in available:
            raise RuntimeError(f"MOJOLEARN_ISA asks for {forced}, which this CPU lacks; it has {', '.join(available)}")
        if forced not in built:
            raise RuntimeError(f"MOJOLEARN_ISA asks for {forced}, which was not built; built: {', '.join(built)}")
        return forced
    usable = [name for name in built if name in available]
    if not usable:
        raise ImportError("no compiled kernels of mojolearn fit this CPU")
    return usable[-1]


BUILT = _built()
AVAILABLE = _pool.cpu_instruction_sets()
ISA = _choose(BUILT, AVAILABLE, os.environ.get("MOJOLEARN_ISA", "").strip().lower())


def __getattr__(name):
    if name in FAMILIES:
        module = importlib.import_module(f"mojolearn._core.{ISA}.{name}")
        globals()[name] = module
        return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
