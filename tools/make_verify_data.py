"""Condense golden files into the expected values that `mojolearn verify` ships.

    python tools/make_verify_data.py

Reads ``tests/golden/train_*.npz`` and ``lowbit.npz``, results of the public library, and writes
``mojolearn/_verify_data/expected.json``: settings and batches as they are, large arrays as digests.
"""

import ast
import base64
import hashlib
import json
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
OUT = ROOT / "mojolearn" / "_verify_data" / "expected.json"


def digest(*arrays):
    """SHA-256 over the bytes of arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def training_case(path):
    """One golden training run."""
    file = np.load(path)
    initial = {name[5:]: file[name] for name in file.files if name.startswith("init.")}
    schedule = ast.literal_eval(str(file["schedule"])) if str(file["schedule"]) else None
    return {
        "name": path.stem.removeprefix("train_"),
        "config": json.loads(str(file["config"])),
        "seed": int(file["gen_seed"]),
        "options": json.loads(str(file["stack_kw"])),
        "schedule": schedule,
        "inputs": file["x"].tolist(),
        "targets": file["y"].tolist(),
        # loss, learning rate, step and gradient norm (-1 without clipping) of each step, exact as decimal text
        "log": file["log"].tolist(),
        "initial": digest(*initial.values()),
        "gradients": digest(*(file[f"grad.{name}"] for name in initial)),
        "final": digest(*(file[f"final.{name}"] for name in initial)),
        "exp_avg": digest(file["exp_avg"]),
        "exp_avg_sq": digest(file["exp_avg_sq"]),
        "loss_after": float(file["eval_loss"]),
    }


def lowbit_case():
    """A matrix and its codes."""
    file = np.load(GOLDEN / "lowbit.npz")
    return {
        "shape": list(file["w"].shape),
        "weights": base64.b64encode(np.ascontiguousarray(file["w"], dtype="<f4").tobytes()).decode(),
        "bf16_bits": digest(file["bf16_bits"]),
        "int8_codes": digest(file["int8_codes"]),
        "int8_exponents": digest(file["int8_exponents"]),
    }


def main():
    expected = {
        "training": [training_case(path) for path in sorted(GOLDEN.glob("train_*.npz"))],
        "lowbit": lowbit_case(),
    }
    OUT.write_text(json.dumps(expected, separators=(",", ":")) + "\n")
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
