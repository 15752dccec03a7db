"""Causal attention alone: forward, backward and one decoded token, with underflow and without.

    python -m benchmarks.bench_attention [--threads 2] [--seconds 2]

GFLOP/s count 2 operations per visible pair, head column and product: two products forward, five backward (scores and
gradients of weights are made again). The rows "vanishing" run the small shape on values that underflow everywhere.
The digest is of the outputs, so that a change of speed can be told from a change of bits. Where the interpreter has
PyTorch, its scaled_dot_product_attention takes turns with the forward.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np

from mojolearn import _core
from mojolearn._context import Workspace

# name: batch rows, length, query heads, key-value heads, head width, scale of values and gradients
SHAPES = {
    "small train": (4, 256, 8, 8, 64, 1.0),
    "medium train": (4, 256, 16, 4, 64, 1.0),
    "small, long": (1, 2048, 8, 8, 64, 1.0),
    "medium, long": (1, 2048, 16, 4, 64, 1.0),
    "vanishing": (4, 256, 8, 8, 64, 1e-36),
}
# name: batch rows, query heads, key-value heads, head width, cached keys
STEPS = {
    "small decode": (1, 8, 8, 64, 128),
    "small decode, long": (1, 8, 8, 64, 2048),
    "medium decode": (1, 16, 4, 64, 128),
    "8 rows decode": (8, 8, 8, 64, 512),
}


def median_seconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median time of each call; they take turns for so long."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def digest(*arrays: np.ndarray) -> str:
    """Short digest of the bytes of arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.tobytes())
    return total.hexdigest()[:12]


def peer(q: np.ndarray, k: np.ndarray, v: np.ndarray, threads: int) -> Callable[[], object] | None:
    """PyTorch's forward of (B, H, L, hd) arrays, where there is PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(array) for array in (q, k, v)]

    def call():
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    return call


def run_shape(name: str, threads: int, seconds: float) -> None:
    """Print the rows of one training or prefill shape."""
    attention = _core.attention
    b, length, heads, kv, hd, scale = SHAPES[name]
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, b * length, heads * hd)).astype(np.float32)
    rows = rng.standard_normal((2, b * length, kv * hd)).astype(np.float32)
    rows[1] *= np.float32(scale)
    dout *= np.float32(scale)
    packed = np.empty((2, b, kv, attention.packed_rows(length), attention.head_width(hd)), np.float32)
    for i in range(2):
        attention.pack_heads(rows[i], packed[i], hd, None, 0, 0, threads)
    out, dq = np.empty_like(q), np.empty_like(q)
    maxima, denominators = np.empty((2, b, heads, length), np.float32)
    dk, dv = np.empty_like(rows)
    workspace = Workspace()

    def forward():
        attention.attention_forward(q, *packed, out, maxima, denominators, hd, 0, 0, 0, workspace, threads)

    def backward():
        attention.attention_backward(dout, q, *packed, maxima, denominators, dq, dk, dv, hd, 0, workspace, threads)

    calls = {"forward": forward, "backward": backward}
    by_head = [a.reshape(b, length, -1, hd).transpose(0, 2, 1, 3) for a in (q, *rows)]
    torch_forward = peer(*by_head, threads)
    if torch_forward:
        calls["PyTorch forward"] = torch_forward
    products = {"forward": 2, "backward": 5, "PyTorch forward": 2}
    flops = b * heads * length * (length + 1) * hd
    for call, median in median_seconds(calls, seconds).items():
        ours = {"forward": (out,), "backward": (dq, dk, dv)}.get(call)
        print(
            f"{name:20} {call:16} {median * 1e3:9.2f} ms {products[call] * flops / median / 1e9:7.0f} GFLOP/s  "
            f"{digest(*ours) if ours else ''}"
        )


def run_step(name: str, threads: int, seconds: float) -> None:
    """Print the row of one decode shape."""
    attention = _core.attention
    b, heads, kv, hd, cached = STEPS[name]
    rng = np.random.default_rng(0)
    caches = rng.standard_normal((2, b, kv, cached + 1, hd)).astype(np.float32)
    q = rng.standard_normal((b, heads * hd)).astype(np.float32)
    new = rng.standard_normal((2, b, kv * hd)).astype(np.float32)
    out = np.empty_like(q)
    workspace = Workspace()
    calls = {"step": lambda: attention.attention_step(q, *new, *caches, out, cached, 0, workspace, threads)}
    median = median_seconds(calls, seconds)["step"]
    print(f"{name:20} {'step':16} {median * 1e3:9.3f} ms {caches.nbytes / median / 1e9:7.1f} GB/s     {digest(out)}")


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    options = parser.parse_args()
    print(f"{options.threads} threads, {_core.ISA}")
    for name in SHAPES:
        run_shape(name, options.threads, options.seconds)
    for name in STEPS:
        run_step(name, options.threads, options.seconds)


if __name__ == "__main__":
    main()
