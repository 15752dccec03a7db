"""``mojolearn verify``: the promises, checked on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from mojolearn.cli._common import add_command, checkpoint_file, emit, progress

EXAMPLES = """\
  mojolearn verify                       under a minute; compare the last line with another machine's
  mojolearn verify --checkpoint run      with your own model
  mojolearn verify --ranks 1,2,3,4       that several processes give the bits of one (needs MPI)
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
    parser.add_argument(
        "--ranks", metavar="LIST", type=_counts, help="train with these numbers of MPI processes and compare"
    )


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if not all(1 <= count <= 4 for count in counts):
        raise ValueError(f"ranks must be numbers from 1 to 4, got {text!r}")
    return counts


def run(args: argparse.Namespace) -> int:
    from mojolearn.verify import checks_for, verify

    if args.ranks:
        return _compare_ranks(args)
    checkpoint = None if args.checkpoint is None else checkpoint_file(args.checkpoint)
    with progress(len(checks_for(checkpoint)), "verifying", "check") as bar:
        report = verify(checkpoint, on_check=lambda name: bar.update(1))
    lines = [f"{'ok' if check['ok'] else 'FAILED':8}{check['name']:36}{check['detail']}" for check in report["checks"]]
    lines.append(f"digest  {report['digest'] or 'none, since a check failed'}")
    emit(args, report, "\n".join(lines))
    return 0 if report["ok"] else 1


def _compare_ranks(args: argparse.Namespace) -> int:
    """Ten steps with each number of processes: one digest a mode."""
    from mojolearn.distributed.digest import MODES, digest_of_processes, run_digest

    wanted = {mode: run_digest(None, mode) for mode in MODES}
    results = []
    with progress(len(args.ranks), "verifying", "run") as bar:
        for count in args.ranks:
            results.append({"ranks": count, "digests": digest_of_processes(count)})
            bar.update(1)
    ok = all(result["digests"] == wanted for result in results)
    lines = [
        f"{'ok' if result['digests'][mode] == wanted[mode] else 'FAILED':8}"
        f"{result['ranks']} ranks, {mode:20}{result['digests'][mode]}"
        for result in results
        for mode in MODES
    ]
    emit(args, {"ok": ok, "one_process": wanted, "results": results}, "\n".join(lines))
    return 0 if ok else 1
