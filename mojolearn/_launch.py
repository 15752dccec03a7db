"""Pick the kernels; where the command line cannot have any, say so in its manner.

The package is imported before a command's first line runs, so a refused ``MOJOLEARN_ISA`` would end in a traceback.
"""

import itertools
import os
import sys
import traceback


def _is_command(argv: list[str], command_line: list[str]) -> bool:
    """Whether a process was started as ``mojolearn`` or ``python -m mojolearn``."""
    if argv[:1] == ["-m"]:  # while Python looks for the module
        return ("-m", "mojolearn") in itertools.pairwise(command_line)
    return os.path.basename(argv[0] if argv else "").removesuffix(".exe") == "mojolearn"


def _pick_kernels() -> None:
    try:
        from mojolearn import _core  # noqa: F401
    except (ImportError, RuntimeError, ValueError) as error:
        if not _is_command(sys.argv, sys.orig_argv):
            raise
        if "--debug" in sys.argv:
            traceback.print_exc()
        print(f"mojolearn: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


_pick_kernels()
