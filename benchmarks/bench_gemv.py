"""All weights of a model once: what decoding one row, or eight, costs in memory traffic.

    python -m benchmarks.bench_gemv [--threads 2] [--model small] [--rows 1 8] [--seconds 3]

The formats take turns. GB/s are of the packed bytes; the ratio is of tokens/s to those of float32 with as many rows.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import numpy as np

from mojolearn import _core

FORMATS = ("float32", "bfloat16", "int8")
# (n, k) of the weights of one layer pair, how many pairs, and the head
MODELS = {
    "tiny": ([(1336, 256), (256, 512), *[(256, 256)] * 4, *[(512, 256)] * 2, (256, 512)], 2, (256, 256)),
    "small": ([(2384, 512), (512, 1024), *[(512, 512)] * 4, *[(1536, 512)] * 2, (512, 1536)], 4, (8192, 512)),
    "medium": (
        [(4480, 1024), (1024, 2048), *[(1024, 1024)] * 2, *[(256, 1024)] * 2, *[(2816, 1024)] * 2, (1024, 2816)],
        6,
        (32000, 1024),
    ),
}


def packed(fmt: str, n: int, k: int) -> object:
    draw = np.random.default_rng(n + k)
    if fmt == "int8":
        return _core.linalg.PackedWeight.from_int8(
            draw.integers(-127, 128, (n, k), dtype=np.int8), np.full(n, -12, np.int32)
        )
    values = draw.standard_normal((n, k), dtype=np.float32) * np.float32(k**-0.5)
    if fmt == "bfloat16":
        return _core.linalg.PackedWeight.from_bfloat16((values.view(np.uint32) >> 16).astype(np.uint16))
    return _core.linalg.PackedWeight.from_float32(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of rows")
    args = parser.parse_args()
    pair, pairs, head = MODELS[args.model]
    shapes = [*pair * pairs, head]
    models = {fmt: [packed(fmt, n, k) for n, k in shapes] for fmt in FORMATS}
    draw = np.random.default_rng(0)
    print(f"{_core.ISA}, {args.threads} threads, {args.model}")
    for rows in args.rows:
        inputs = {k: draw.standard_normal((rows, k), dtype=np.float32) for _, k in shapes}
        outputs = [np.empty((rows, n), np.float32) for n, _ in shapes]
        times: dict[str, list[float]] = {fmt: [] for fmt in FORMATS}
        digests = {}
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end or len(times["int8"]) < 3:
            for fmt, weights in models.items():
                start = time.perf_counter()
                for weight, out, (_, k) in zip(weights, outputs, shapes, strict=True):
                    _core.linalg.linear(inputs[k], weight, out, args.threads)
                times[fmt].append(time.perf_counter() - start)
                digests[fmt] = hashlib.sha256(outputs[-1].tobytes()).hexdigest()[:12]
        base = np.median(times["float32"])
        for fmt, weights in models.items():
            took = np.median(times[fmt])
            size = sum(weight.nbytes for weight in weights)
            print(
                f"{rows} row{'s' if rows > 1 else ' '} {fmt:9} {size / 1e6:6.0f} MB {1e3 * took:8.2f} ms "
                f"{size / took / 1e9:6.1f} GB/s {rows / took:8.0f} tokens/s  ratio {base / took:.2f}  {digests[fmt]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
