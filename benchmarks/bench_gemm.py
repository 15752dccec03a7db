"""Matrix products at the shapes of the small model and 2048^3, packing included, beside PyTorch or NumPy.

    python -m benchmarks.bench_gemm [--threads 2] [--seconds 2]

PyTorch is used where the interpreter has it, else NumPy. The two sides take turns; each figure is the median of their
turns. The digest is of our result, so that a change of speed can be told from a change of bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from mojolearn import _core
from mojolearn._context import aligned_empty

TOKENS = 1024
# outputs and inputs of the small model's matrices; forward x W^T, and backward dy W and dy^T x
MATRICES = [(2390, 512), (512, 1024), (512, 512), (1536, 512), (512, 1536), (8192, 512)]
# form, m, n, k: out (m, n) is a sum of k terms
SHAPES = [("nt", TOKENS, n, k) for n, k in MATRICES]
SHAPES += [("nn", TOKENS, k, n) for n, k in MATRICES]
SHAPES += [("tn", n, k, TOKENS) for n, k in MATRICES]
SHAPES += [("nt", 2048, 2048, 2048)]
# Seconds. Threads of the other side spin for a while after its turn; they have to be asleep when the next one is timed.
WARM_UP, TURN = 0.006, 0.01
# scales of the operands, and what they make of the products
UNDERFLOW = {
    "normal": (1.0, 1.0),
    "all vanish": (1e-20, 1e-20),
    "at the border": (1e-19, 1e-19),
    "subnormal": (1e-40, 1.0),
}


def library(threads: int) -> tuple[str, Callable[..., Callable[[], object]]]:
    """Name of the other side, and a maker of its product."""
    try:
        import torch
    except ImportError:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))

        def numpy_product(form: str, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Callable[[], object]:
            left, right = a.T if form == "tn" else a, b.T if form == "nt" else b
            return lambda: np.matmul(left, right, out=out)

        return f"NumPy {np.__version__}", numpy_product

    torch.set_num_threads(threads)

    def torch_product(form: str, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Callable[[], object]:
        left, right, result = torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(out)
        left, right = left.T if form == "tn" else left, right.T if form == "nt" else right
        return lambda: torch.mm(left, right, out=result)

    return f"PyTorch {torch.__version__}", torch_product


def operands(form: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(m + n + k)
    a = draw.standard_normal((k, m) if form == "tn" else (m, k), dtype=np.float32)
    b = draw.standard_normal((n, k) if form == "nt" else (k, n), dtype=np.float32)
    return a, b


def medians(sides: list[Callable[[], object]], seconds: float) -> list[float]:
    """Median time of each, taken in turns of several calls."""
    times: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for side, found in zip(sides, times, strict=True):
            begin, calls = time.perf_counter(), 0
            while time.perf_counter() - begin < WARM_UP:
                side()
            start = time.perf_counter()
            while time.perf_counter() - start < TURN:
                side()
                calls += 1
            found.append((time.perf_counter() - start) / calls)
    return [float(np.median(found)) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape")
    args = parser.parse_args()
    name, product = library(args.threads)
    print(f"{_core.ISA}, {args.threads} threads, GFLOP/s; beside {name}")
    print(f"{'product':24}{'ours':>8}{'theirs':>8}{'ratio':>7}  digest")
    for form, m, n, k in SHAPES:
        a, b = operands(form, m, n, k)
        out, theirs = aligned_empty((m, n)), aligned_empty((m, n))
        kernel = getattr(_core.linalg, f"gemm_{form}")
        ours, other = medians([partial(kernel, a, b, out, args.threads), product(form, a, b, theirs)], args.seconds)
        work = 2e-9 * m * n * k
        digest = hashlib.sha256(out.tobytes()).hexdigest()[:12]
        print(
            f"{form} {m} x {n} x {k:<10}{work / ours:8.0f}{work / other:8.0f}{other / ours:7.2f}  {digest}", flush=True
        )
    print("\nunderflow, nt 512 x 512 x 512, one thread")
    base = None
    for label, scales in UNDERFLOW.items():
        a, b = (x * np.float32(scale) for x, scale in zip(operands("nt", 512, 512, 512), scales, strict=True))
        out = np.empty((512, 512), np.float32)
        (ours,) = medians([partial(_core.linalg.gemm_nt, a, b, out, 1)], args.seconds / 2)
        base = base or ours
        print(f"{label:16}{2e-9 * 512**3 / ours:8.0f} GFLOP/s, {ours / base:.1f} times normal", flush=True)


if __name__ == "__main__":
    main()
