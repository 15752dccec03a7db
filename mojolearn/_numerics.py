"""Numeric mode and thread count: process-wide defaults, and what this build can do."""

import functools
import os
import platform

from mojolearn._arrays import as_index, describe
from mojolearn._core._pool import FloatEnvironment

__all__ = [
    "DETERMINISTIC_PROFILES",
    "MAX_THREADS",
    "MODE_NAMES",
    "default_environment",
    "get_num_threads",
    "get_numeric_mode",
    "mode_index",
    "mode_name",
    "numeric_mode",
    "set_num_threads",
    "set_numeric_mode",
    "show_config",
]

# The position is the number that the kernels take.
MODE_NAMES = ("identical", "deterministic", "fast")

# Names of the sets of summation orders that mode "deterministic" has used, newest last. A checkpoint of that
# mode names its set, so that a library which no longer has the set can say so instead of drifting silently.
DETERMINISTIC_PROFILES = ("mojolearn.deterministic.v1",)

MAX_THREADS = 256  # size of the kernels' thread table

_defaults = {"mode": None, "threads": None}


def default_environment(function):
    """Decorator: run in the default floating-point environment, whatever the caller has set, and restore the caller's.

    Kernels see to this themselves. It is for functions that also round numbers in Python.
    """

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        with FloatEnvironment():
            return function(*args, **kwargs)

    return guarded


def mode_index(mode, name="numeric_mode"):
    """Kernel number of a mode name; None means the library default.

    Parameters
    ----------
    mode : {"identical", "deterministic", "fast"} or None
    name : str
        The argument's name, for the message.

    Returns
    -------
    int
    """
    if mode is None:
        mode = get_numeric_mode()
    if not isinstance(mode, str):
        raise TypeError(f"{name} must be one of {MODE_NAMES} or None, got {describe(mode)}")
    if mode not in MODE_NAMES:
        raise ValueError(f"{name} must be one of {MODE_NAMES}, got {mode!r}")
    return MODE_NAMES.index(mode)


def mode_name(index):
    """Name of a kernel mode number."""
    return MODE_NAMES[index]


def set_numeric_mode(mode):
    """Set the default numeric mode of objects made from now on.

    Parameters
    ----------
    mode : {"identical", "deterministic", "fast"}

    Raises
    ------
    TypeError
        Not a string.
    ValueError
        Not the name of a mode.
    """
    if mode is None:
        raise TypeError(f"mode must be one of {MODE_NAMES}, got None")
    _defaults["mode"] = MODE_NAMES[mode_index(mode, "mode")]


def get_numeric_mode():
    """The default numeric mode: as set, else ``MOJOLEARN_NUMERIC_MODE``, else ``"identical"``."""
    if _defaults["mode"] is None:
        wanted = os.environ.get("MOJOLEARN_NUMERIC_MODE", "identical")
        _defaults["mode"] = MODE_NAMES[mode_index(wanted, "MOJOLEARN_NUMERIC_MODE")]
    return _defaults["mode"]


def numeric_mode():
    """The default numeric mode; the same as `get_numeric_mode`."""
    return get_numeric_mode()


def set_num_threads(n):
    """Set the number of threads that kernels use, the calling thread included.

    Parameters
    ----------
    n : int
        At least 1. More than the machine has cores is allowed and changes no bit.
    """
    _defaults["threads"] = as_index(n, "n", 1, MAX_THREADS)


def get_num_threads():
    """The number of threads: as set, else ``MOJOLEARN_NUM_THREADS``, else the CPUs this process may use."""
    if _defaults["threads"] is None:
        wanted = os.environ.get("MOJOLEARN_NUM_THREADS", "").strip()
        if wanted:
            try:
                number = int(wanted)
            except ValueError:
                raise ValueError(f"MOJOLEARN_NUM_THREADS must be an integer, got {wanted!r}") from None
            _defaults["threads"] = as_index(number, "MOJOLEARN_NUM_THREADS", 1, MAX_THREADS)
        else:
            _defaults["threads"] = _usable_cpus()
    return _defaults["threads"]


def _usable_cpus():
    """CPUs in this process's affinity mask, less what its control group's quota takes away."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    quota = _cgroup_quota()
    if quota is not None:
        count = min(count, max(1, int(quota)))
    return max(1, min(count, MAX_THREADS))


def _cgroup_quota():
    """CPUs granted by the control group (version 2) of this process, or None."""
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            path = next((line[3:].strip() for line in file if line.startswith("0::")), "/")
        for folder in (f"/sys/fs/cgroup{path}", "/sys/fs/cgroup"):
            limit = os.path.join(folder, "cpu.max")
            if os.path.exists(limit):
                with open(limit, encoding="ascii") as file:
                    quota, period = file.read().split()[:2]
                return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return None


def show_config(quiet=False):
    """Print what was built, what this CPU has and what runs.

    Parameters
    ----------
    quiet : bool, default False
        Return the facts without printing them.

    Returns
    -------
    dict
        ``version``, ``isa`` (the instruction set that runs), ``isa_built``, ``isa_cpu``, ``threads``,
        ``cpus`` (usable by this process), ``numeric_mode``, ``profiles``, ``python``, ``numpy``, ``platform``.
    """
    import numpy

    import mojolearn
    from mojolearn import _core

    facts = {
        "version": mojolearn.__version__,
        "isa": _core.ISA,
        "isa_built": tuple(_core.BUILT),
        "isa_cpu": tuple(_core.AVAILABLE),
        "threads": get_num_threads(),
        "cpus": _usable_cpus(),
        "numeric_mode": get_numeric_mode(),
        "profiles": DETERMINISTIC_PROFILES,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "platform": platform.platform(),
    }
    if not quiet:
        for name, value in facts.items():
            text = ", ".join(value) if isinstance(value, tuple) else value
            print(f"{name:12} {text}")
    return facts
