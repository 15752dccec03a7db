"""``make bench``: the short set of measurements, with a history.

    python -m benchmarks [--threads 2] [--only decode] [--peers]

Each row runs in a fresh process and reports tokens/s, the peak of its memory and a digest of its output. A dated JSON
record goes to ``benchmarks/history/``; the table compares it with the last record and the best one of the same kind of
machine. When a row became more than 10 % slower than in the last record, twice in a row, or the digest of a row has
changed, the exit status is 1 and no record is kept; a change that is meant is accepted by removing the old records.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.side_by_side import Contender
from mojolearn import _core

HISTORY = Path(__file__).resolve().parent / "history"
TOLERANCE = 0.9  # of the last record's speed
BURST_SECONDS = 4

DETERMINISTIC = "--numeric-mode deterministic"
ROWS = {
    "forward tiny, 4 x 256": "--config tiny --mode forward --batch 4 --length 256",
    "forward small, 4 x 256": "--config small --mode forward --batch 4 --length 256",
    "forward small, 1 x 2048": "--config small --mode forward --batch 1 --length 2048",
    "forward small int8, 4 x 256": "--config small --mode forward --batch 4 --length 256 --format int8",
    "train tiny, 4 x 256": "--config tiny --mode train --batch 4 --length 256",
    "train tiny, 4 x 256, deterministic": f"--config tiny --mode train --batch 4 --length 256 {DETERMINISTIC}",
    "train small, 4 x 256": "--config small --mode train --batch 4 --length 256",
    "train small, 4 x 256, deterministic": f"--config small --mode train --batch 4 --length 256 {DETERMINISTIC}",
    "decode tiny, 1 row": "--config tiny --mode decode --tokens 128",
    "decode small, 1 row": "--config small --mode decode --tokens 64",
    "decode small, 8 rows": "--config small --mode decode --batch 8 --tokens 32",
    "decode small bfloat16, 1 row": "--config small --mode decode --tokens 64 --format bfloat16",
    "decode small int8, 1 row": "--config small --mode decode --tokens 64 --format int8",
}


def machine() -> dict[str, object]:
    """What decides about speed: processor features, cores and the instruction set that runs."""
    flags = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = " ".join(sorted(line.split(":")[1].split()))
                break
    except OSError:
        pass
    return {
        "machine": platform.machine(),
        "cpu_flags": hashlib.sha256(flags.encode()).hexdigest()[:16],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_set": _core.ISA,
    }


def measure(options: str, threads: int) -> dict[str, object]:
    """One row in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.serve_mojolearn", *options.split(), "--threads", str(threads)]
    contender = Contender(command)
    try:
        answer = contender.measure(BURST_SECONDS)
    finally:
        contender.close()
    return {"tokens_per_second": answer["tok_s"], "peak_mib": answer["rss_mb"], "digest": answer["digest"]}


def read_history() -> list[dict]:
    """All records, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(HISTORY.glob("*.json"))]


def compare(name: str, row: dict, record: dict, history: list[dict]) -> dict:
    """What the records say about a row: the last and the best speed on such a machine, memory, and the last digest."""
    alike = [
        old["rows"][name]
        for old in history
        if name in old["rows"] and old["machine"] == record["machine"] and old["threads"] == record["threads"]
    ]
    digests = [old["rows"][name]["digest"] for old in history if name in old["rows"]]
    best = max((old["tokens_per_second"] for old in alike), default=None)
    return {
        "to_last": row["tokens_per_second"] / alike[-1]["tokens_per_second"] if alike else None,
        "to_best": row["tokens_per_second"] / best if best else None,
        "memory": row["peak_mib"] / alike[-1]["peak_mib"] if alike else None,
        "digest_changed": bool(digests) and digests[-1] != row["digest"],
    }


def _ratio(value: float | None) -> str:
    return f"{value:9.2f}" if value is not None else "        -"


def run(args: argparse.Namespace) -> int:
    history = read_history()
    record = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "threads": args.threads,
        "rows": {},
    }
    print(f"{record['date']}  {record['machine']}  {args.threads} threads")
    print(f"{'':36}{'tokens/s':>10}{'to last':>9}{'to best':>9}{'MiB':>8}{'to last':>9}  digest")
    failures = []
    for name, options in ROWS.items():
        if args.only and args.only not in name:
            continue
        row = measure(options, args.threads)
        against = compare(name, row, record, history)
        if against["to_last"] is not None and against["to_last"] < TOLERANCE:
            again = measure(options, args.threads)
            if again["tokens_per_second"] > row["tokens_per_second"]:
                row = again
                against = compare(name, row, record, history)
            if against["to_last"] < TOLERANCE:
                failures.append(f"{name}: {against['to_last']:.2f} of the last record's speed, twice")
        if against["digest_changed"]:
            failures.append(f"{name}: the digest has changed")
        record["rows"][name] = row
        print(
            f"{name:36}{row['tokens_per_second']:10,.0f}{_ratio(against['to_last'])}{_ratio(against['to_best'])}"
            f"{row['peak_mib']:8,.0f}{_ratio(against['memory'])}  {row['digest']}"
            f"{'  CHANGED' if against['digest_changed'] else ''}",
            flush=True,
        )
    if failures:
        # Not kept: the next run has to face the same record again.
        for failure in failures:
            print(f"FAILED {failure}", file=sys.stderr)
        return 1
    HISTORY.mkdir(exist_ok=True)
    path = HISTORY / f"{record['date'].replace(':', '')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {path}")
    return 0


def run_peers(args: argparse.Namespace) -> int:
    """Hand over to the comparison with PyTorch, which lives in an environment of its own."""
    python = os.environ.get("MOJOLEARN_TORCH_PYTHON", ".venv-torch/bin/python")
    if not Path(python).exists():
        print(
            f"no PyTorch at {python}: make one with `python3 -m venv .venv-torch` and "
            "`.venv-torch/bin/pip install torch numpy`, or name another in MOJOLEARN_TORCH_PYTHON",
            file=sys.stderr,
        )
        return 1
    command = [sys.executable, "-m", "benchmarks.side_by_side", "--peer-python", python]
    return subprocess.run(command + (["--only", args.only] if args.only else []), check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads of each row")
    parser.add_argument("--only", metavar="TEXT", help="only rows whose name holds this text")
    parser.add_argument("--peers", action="store_true", help="compare with PyTorch instead")
    args = parser.parse_args()
    return run_peers(args) if args.peers else run(args)


if __name__ == "__main__":
    sys.exit(main())
