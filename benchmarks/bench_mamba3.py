"""The Mamba-3 block's own kernels, without its matrix products: forward and backward per mode, strong decay included.

    python -m benchmarks.bench_mamba3 [--threads 2] [--seconds 2]

An item is one chunk of 64 tokens of one head. "backward" counts everything between the two projections. The rows
"decaying" run the small shape with decays that reach zero inside a chunk. The digest is of the outputs, so that a
change of speed can be told from a change of bits. The last lines give the cost per token of a whole forward at growing
lengths, which should not grow.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time

import numpy as np

from mojolearn import _core
from mojolearn._context import Context, Workspace
from mojolearn.blocks import Mamba3Block
from mojolearn.blocks import mamba3 as block_module

# name: batch rows, length, width, shift of dt_bias
SHAPES = {
    "tiny": (4, 256, 256, -3.0),
    "small": (4, 256, 512, -3.0),
    "medium": (4, 256, 1024, -3.0),
    "small, decaying": (4, 256, 512, 2.0),
}
MODES = ("identical", "deterministic", "fast")
LENGTHS = (512, 4096, 32768)


def weights(d_model: int, dt_shift: float) -> dict[str, np.ndarray]:
    """Weights as at the start of training, but for the decay."""
    rng = np.random.default_rng(0)
    heads = d_model // 32
    ones = {"block_norm.weight": (d_model,), "B_norm.weight": (128,), "C_norm.weight": (128,), "D": (heads,)}
    ones |= {"B_bias": (heads, 128), "C_bias": (heads, 128)}
    values = {name: np.ones(shape) for name, shape in ones.items()}
    for name, shape in {
        "in_proj.weight": (4 * d_model + 288 + 3 * heads, d_model),
        "out_proj.weight": (d_model, 2 * d_model),
    }.items():
        values[name] = rng.uniform(-1, 1, shape) / np.sqrt(shape[1])
    values["dt_bias"] = dt_shift + rng.uniform(-1, 1, heads)
    return {name: value.astype(np.float32) for name, value in values.items()}


class KernelTimes:
    """Stands in for the kernel module: times `mix` (with `prepare`) and `backward`, passes the rest on."""

    def __init__(self, kernels):
        self._kernels = kernels
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def _timed(self, part, function, arguments):
        start = time.perf_counter()
        function(*arguments)
        self.seconds[part] += time.perf_counter() - start

    def prepare(self, *arguments):
        self._timed("forward", self._kernels.prepare, arguments)

    def mix(self, *arguments):
        self._timed("forward", self._kernels.mix, arguments)

    def backward(self, *arguments):
        self._timed("backward", self._kernels.backward, arguments)


class Discard:
    """A gradient sink that keeps a digest of what it is given."""

    def __init__(self):
        self.hash = hashlib.sha256()

    def linear(self, name, dc, a):
        self.hash.update(np.ascontiguousarray(dc))

    def colsum(self, name, rows):
        self.hash.update(np.ascontiguousarray(rows))


def measure_kernels(shape: tuple, mode: str, threads: int, seconds: float) -> tuple[float, float, str]:
    """Median seconds of the forward's and the backward's kernels, and a digest."""
    batch, length, d_model, dt_shift = shape
    rng = np.random.default_rng(1)
    x = rng.normal(size=(batch, length, d_model)).astype(np.float32)
    dy = rng.normal(scale=1e-3, size=x.shape).astype(np.float32)
    y, dx = np.empty_like(x), np.empty_like(x)
    block = Mamba3Block(weights(d_model, dt_shift), numeric_mode=mode)
    context = Context(threads, MODES.index(mode), Workspace())
    kernels = block_module.mamba3
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    end = time.perf_counter() + seconds
    sink = Discard()
    try:
        while time.perf_counter() < end or len(times["forward"]) < 4:
            watch = KernelTimes(kernels)
            block_module.mamba3 = watch
            sink = Discard()
            start = context.workspace.mark()
            tape: dict = {}
            block._run(context, x, y, None, tape)
            block._backward(context, tape, x, dy, dx, sink)
            context.workspace.release(start)
            for part, value in watch.seconds.items():
                times[part].append(value)
    finally:
        block_module.mamba3 = kernels
    sink.hash.update(y)
    sink.hash.update(dx)
    return statistics.median(times["forward"][1:]), statistics.median(times["backward"][1:]), sink.hash.hexdigest()[:12]


def measure_length(length: int, threads: int, seconds: float) -> tuple[float, int]:
    """Median seconds per token of a small block's forward, and the workspace's bytes per token."""
    block = Mamba3Block(weights(512, -3.0))
    x = np.random.default_rng(2).normal(size=(1, length, 512)).astype(np.float32)
    y = np.empty_like(x)
    context = Context(threads, 0, Workspace())
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        block._run(context, x, y)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / length, context.workspace.nbytes // length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    args = parser.parse_args()
    print(f"{_core.ISA}, {args.threads} threads; us per item and thread")
    print(f"{'':18}{'mode':>16}{'forward':>10}{'backward':>10}  digest")
    for name, shape in SHAPES.items():
        items = shape[0] * (shape[1] // 64) * (shape[2] // 32)
        for mode in MODES:
            forward, backward, digest = measure_kernels(shape, mode, args.threads, args.seconds)
            scale = 1e6 * args.threads / items
            print(f"{name:18}{mode:>16}{forward * scale:10.1f}{backward * scale:10.1f}  {digest}", flush=True)
    for length in LENGTHS:
        per_token, held = measure_length(length, args.threads, args.seconds)
        print(f"forward, width 512, 1 x {length:<6} {per_token * 1e6:8.2f} us and {held} bytes of scratch per token")


if __name__ == "__main__":
    main()
