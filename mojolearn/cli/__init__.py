"""The command line: ``mojolearn`` and ``python -m mojolearn``.

Each subcommand is a module of this package with two functions, ``add_parser(subparsers)`` and ``run(args) -> int``.
Data go to standard output, notes and progress to standard error. The exit status is 0 when all went well, 1 when
something failed or a check did not hold, 2 for a wrong command line, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from mojolearn.cli import bench, evaluate, export, generate, inspect, plot, train, verify
from mojolearn.cli._common import UsageError

__all__ = ["main"]

COMMANDS = (train, evaluate, generate, export, inspect, verify, bench, plot)

EPILOG = """\
examples:
  mojolearn train books/ --out run            train on the text of a folder
  mojolearn train --out run --resume          go on after an interruption, to the same bits
  mojolearn eval run                          bits per byte on the held-out text
  mojolearn generate run --prompt "Once "     write text
  mojolearn export run --format int8 --out small.ckpt
  mojolearn plot run --out curves.png

`mojolearn COMMAND --help` explains a command and gives examples.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mojolearn",
        description="Train and serve small language models on the CPU, with the same bits everywhere.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and how this build runs here")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Parameters
    ----------
    argv : sequence of str or None, default None
        Arguments without the program's name; None takes those of the process.

    Returns
    -------
    int
        The exit status.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        return _show_version()
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        _apply_numeric_options(args)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        _report(args, error)
        return 2
    except BrokenPipeError:
        # The reader of our output, `head` say, has seen enough. Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except MemoryError as error:
        _report(args, RuntimeError(f"not enough memory: {error}" if str(error) else "not enough memory"))
        return 1
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        _report(args, error)
        return 1


def _apply_numeric_options(args: argparse.Namespace) -> None:
    import mojolearn

    if getattr(args, "threads", None) is not None:
        mojolearn.set_num_threads(args.threads)


def _report(args: argparse.Namespace, error: Exception) -> None:
    if args.debug:
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    else:
        message = " ".join(str(error).split()) or type(error).__name__
    print(f"mojolearn {args.command}: error: {message}", file=sys.stderr)


def _show_version() -> int:
    import mojolearn

    print(f"mojolearn {mojolearn.__version__}")
    mojolearn.show_config()
    return 0
