"""``mojolearn verify``: the promises, checked on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from mojolearn.cli._common import add_command, checkpoint_file, emit, progress

EXAMPLES = """\
  mojolearn verify                       under a minute; compare the last line with another machine's
  mojolearn verify --checkpoint run      with your own model
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "verify",
        run,
        "check the promises about bits on this machine",
        EXAMPLES,
        description="Check on this machine that results equal the shipped ones, over threads, instruction sets, "
        "micro-batches, splits of a sequence and a resume, and print one digest that two machines can compare.",
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="check with this model: a checkpoint or folder of a run")


def run(args: argparse.Namespace) -> int:
    from mojolearn.verify import checks_for, verify

    checkpoint = None if args.checkpoint is None else checkpoint_file(args.checkpoint)
    with progress(len(checks_for(checkpoint)), "verifying", "check") as bar:
        report = verify(checkpoint, on_check=lambda name: bar.update(1))
    lines = [
        f"{'ok' if check['ok'] else 'FAILED':8}{check['name']:36}{check['detail']}" for check in report["checks"]
    ]
    lines.append(f"digest  {report['digest'] or 'none, since a check failed'}")
    emit(args, report, "\n".join(lines))
    return 0 if report["ok"] else 1
