"""``mojolearn plot``: the curves of runs as a picture."""

from __future__ import annotations

import argparse
from typing import Any

from mojolearn.cli._common import add_command, emit

EXAMPLES = """\
  mojolearn plot run                       writes run/curves.png
  mojolearn plot run-a run-b --out both.svg
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "plot",
        run,
        "draw the curves of runs",
        EXAMPLES,
        description="Draw loss, bits per byte, learning rate, gradient norm and speed of one or several runs.",
    )
    parser.add_argument("runs", nargs="+", metavar="DIR", help="folders of runs")
    parser.add_argument("--out", metavar="FILE", help="picture, .png or .svg (curves.png in the first folder)")


def run(args: argparse.Namespace) -> int:
    from mojolearn.plotting import plot_runs

    path = plot_runs(args.runs, args.out)
    emit(args, {"picture": str(path)}, str(path))
    return 0
