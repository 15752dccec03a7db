"""``make demo``: a small hybrid model learns Python from the standard library of the machine that it runs on.

It trains for about three minutes on two cores, stops in between and resumes, compares itself with an order-2 byte
model on the same held-out bytes, draws its curves and writes a piece of code.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np

from examples.order2 import Order2Model
from mojolearn.cli import main as mojolearn
from mojolearn.data import TokenDataset

# Not the library itself: other people's packages, and tests, whose long tables are no prose of programs.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
STEPS = 2000
VALID_WINDOWS = 256
SEQ_LEN = 256


def library_folders() -> list[str]:
    """Patterns for the source of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = [root] + [
        folder
        for folder in sorted(root.rglob("*"))
        if folder.is_dir() and not LEFT_OUT & set(folder.relative_to(root).parts) and any(folder.glob("*.py"))
    ]
    return [str(folder / "*.py") for folder in folders]


def run(command: str, paths: list[str] | None = None) -> None:
    """Run a command line of the library and show it."""
    shown = f" '{paths[0]}' ..." if paths else ""
    name, *rest = shlex.split(command)
    print(f"\n$ mojolearn {name}{shown} {shlex.join(rest)}", flush=True)
    status = mojolearn([name, *(paths or []), *rest])
    if status:
        sys.exit(status)


def held_out_bits(folder: Path) -> float:
    """Bits per byte of the trained model at the last evaluation."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["bits_per_byte"] for row in rows if row["kind"] == "valid"][-1]


def order2_bits(paths: list[str]) -> float:
    """Bits per byte of the order-2 model, counted on the train split, on the windows that the evaluation uses."""
    train = TokenDataset(paths, 1, SEQ_LEN)
    valid = TokenDataset(paths, VALID_WINDOWS, SEQ_LEN, split="valid")
    inputs, targets = next(valid)
    model = Order2Model(train.tokens(0, train.n_tokens))
    return model.bits_per_byte(np.concatenate([inputs, targets[:, -1:]], axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="folder of the run, which is emptied first")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    paths = library_folders()

    settings = (
        f"--out {args.out} --steps {args.steps} --d-model 128 --layers mamba3,attention,mamba3 --n-heads 2 "
        f"--batch-size 8 --seq-len {SEQ_LEN} --lr 4e-3 --eval-windows {VALID_WINDOWS} --eval-every {args.steps // 5} "
        f"--save-every {args.steps // 5} --numeric-mode deterministic"
    )
    run(f"train {settings} --stop-after {args.steps // 2}", paths)
    run(f"train --out {args.out} --resume")
    run(f"plot {args.out}")
    run(f"generate {args.out} --prompt 'def ' --temperature 0.6 --max-new-tokens 400 --seed 1")

    ours, order2 = held_out_bits(args.out), order2_bits(paths)
    print(f"\nheld-out bits per byte: {ours:.3f} (this model), {order2:.3f} (interpolated order-2 byte model)")
    print(f"loss curves: {args.out / 'curves.png'}")
    if not ours < order2:
        sys.exit("the model should be below the order-2 model after a whole run")


if __name__ == "__main__":
    main()
