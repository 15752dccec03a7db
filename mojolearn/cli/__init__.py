"""The command line: ``mojolearn`` and ``python -m mojolearn``.

Each subcommand is a module of this package with two functions, ``add_parser(subparsers)`` and ``run(args) -> int``.
Data go to standard output, notes and progress to standard error. The exit status is 0 when all went well, 1 when
something failed or a check did not hold, 2 for a wrong command line, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from mojolearn._arrays import as_index
from mojolearn._numerics import MAX_THREADS
from mojolearn.cli import bench, evaluate, export, generate, inspect, plot, ranks, train, verify
from mojolearn.cli._common import UsageError, given_values
from mojolearn.distributed import launched_ranks

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
    args = _parse(parser, argv)
    if args.command is None and not args.version:
        parser.print_help(sys.stderr)
        return 2
    try:
        _check_ranks(args)
        _apply_numeric_options(args)
        status: int = _show_version() if args.version else args.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(args, error, 2)
    except BrokenPipeError as error:
        # The reader of our output, `head` say, has seen enough. Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ranks.end_job(error)
        return 1
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        ranks.end_job(error)
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        return _fail(args, error, 1)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    if ranks.speaks():
        return parser.parse_args(argv)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return parser.parse_args(argv)


def _check_ranks(args: argparse.Namespace) -> None:
    if launched_ranks()[1] > 1 and args.command != "train":
        raise UsageError("mpiexec is for train; start the other commands without it")


def _fail(args: argparse.Namespace, error: Exception, status: int) -> int:
    if not ranks.is_told_by_rank_0(error):
        _report(args, error)
    ranks.end_job(error)
    return status


def _apply_numeric_options(args: argparse.Namespace) -> None:
    import mojolearn

    with given_values():
        if getattr(args, "threads", None) is not None:
            mojolearn.set_num_threads(as_index(args.threads, "threads", 1, MAX_THREADS))
        # what the environment says is read now, whether the command will ask for it or not
        mojolearn.get_num_threads()
        mojolearn.get_numeric_mode()


def _report(args: argparse.Namespace, error: Exception) -> None:
    if getattr(args, "debug", False):
        traceback.print_exception(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    else:
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError):
            message = f"not enough memory: {error}" if str(error) else "not enough memory"
    rank, count, _ = launched_ranks()
    alone = count > 1 and not getattr(error, "on_all_ranks", False) and not isinstance(error, UsageError)
    where = f" rank {rank}:" if alone else ""
    program = f"mojolearn {args.command}" if args.command else "mojolearn"
    print(f"{program}:{where} error: {message}", file=sys.stderr)


def _show_version() -> int:
    import mojolearn

    print(f"mojolearn {mojolearn.__version__}")
    mojolearn.show_config()
    return 0
