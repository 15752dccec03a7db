"""How fast, how small and with how much memory are checkpoints saved and loaded?

    python -m benchmarks.bench_checkpoint [--megabytes 700] [--folder .] [--repeats 5]

The state is that of a trained model by its statistics: normal parameters, moments of many magnitudes. The baseline is a
plain copy: the raw bytes are read from one file, written to another without buffering and forced to the disk. Beside
it stand the stricter ones of writing those bytes from memory and forcing them to the disk, and of reading them into new
arrays, from the system's cache. The rounds of all contenders alternate, so that a busy machine slows all of them.
Memory is the growth of the process's peak beside the arrays themselves.
"""

import argparse
import os
import pathlib
import statistics
import time

import numpy as np

from mojolearn import checkpoint
from mojolearn.config import SambaConfig

ARRAYS = ("parameters", "exp_avg", "exp_avg_sq")
PART = 1 << 20
TITLES = ("MB/s best", "median", "x copy", "x write", "x read", "CPU s/GB", "extra MiB")


def trained_state(megabytes):
    """A training state whose arrays take about so many megabytes."""
    vocab = max(2, int(megabytes * 1e6 / 12 / 768) - 7_000)
    config = SambaConfig(vocab, 768, ("mamba3", "attention"), n_heads=12, intermediate=2048)
    registry, offset = [], 0
    for name, shape in config.registry():
        size = int(np.prod(shape))
        registry.append({"name": name, "shape": list(shape), "offset": offset, "size": size})
        offset += size
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((3, offset), dtype=np.float32)
    magnitudes = np.exp(draw.standard_normal(offset, dtype=np.float32))
    return {
        "schema": "mojolearn.samba-stack-state.v1",
        "profile": "mojolearn.samba-stack.fp32.v1",
        "experiment_profile": "baseline",
        "numeric_mode": "identical",
        "config": config.to_dict(),
        "registry": registry,
        "parameters": noise[0] * np.float32(0.02),
        "exp_avg": noise[1] * magnitudes * np.float32(1e-4),
        "exp_avg_sq": np.square(noise[2] * magnitudes) * np.float32(1e-8),
        "buf_initialized": np.zeros(len(registry), np.int32),
        "t": 1000,
        "optimizer": {
            "kind": "adamw", "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
            "max_norm": None, "accumulation_steps": 1,
        },
        "schedule": None,
        "rng": {"seed": 7, "counter": 1000},
    }  # fmt: skip


def write_plainly(path, state):
    """The raw bytes, unbuffered, and fsync."""
    with open(path, "wb", buffering=0) as file:
        for name in ARRAYS:
            view = memoryview(state[name]).cast("B")
            for start in range(0, len(view), PART):
                file.write(view[start : start + PART])
        os.fsync(file.fileno())


def copy_plainly(source, target):
    """Another file of the raw bytes, unbuffered, and fsync."""
    part = memoryview(bytearray(PART))
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        while count := old.readinto(part):
            new.write(part[:count])
        os.fsync(new.fileno())


def read_plainly(path, state):
    """The raw bytes into new arrays."""
    arrays = []
    with open(path, "rb", buffering=0) as file:
        for name in ARRAYS:
            arrays.append(np.empty_like(state[name]))
            view = memoryview(arrays[-1]).cast("B")
            while view:
                view = view[file.readinto(view) :]


def read_weights(path):
    """All tensors of a file, one after the other."""
    with checkpoint.WeightsReader(path) as reader:
        for _ in reader:
            pass


def peak_bytes(reset=False):
    """The process's peak of resident memory, counted anew from now on if asked for."""
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no peak of memory in /proc/self/status")


def main():
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=700, help="size of the state")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(), help="a folder on the disk to measure")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    state = trained_state(options.megabytes)
    raw = sum(state[name].nbytes for name in ARRAYS)
    files = {name: options.folder / f"bench_checkpoint.{name}" for name in ("raw", "copy", "archive", "v2")}
    # What each contender does, and the bytes of the arrays that it returns.
    contenders = {
        "plain write + fsync": (lambda: write_plainly(files["raw"], state), 0),
        "plain copy + fsync": (lambda: copy_plainly(files["raw"], files["copy"]), 0),
        "save": (lambda: checkpoint.save(files["archive"], state), 0),
        "save, compression=None": (lambda: checkpoint.save(files["v2"], state, compression=None), 0),
        "plain read": (lambda: read_plainly(files["raw"], state), raw),
        "load": (lambda: checkpoint.load(files["archive"]), raw),
        "load, v2": (lambda: checkpoint.load(files["v2"]), raw),
        "weights by tensor": (lambda: read_weights(files["archive"]), 2 * raw // 3),
        "inspect": (lambda: checkpoint.inspect(files["archive"]), 0),
        "inspect, verify": (lambda: checkpoint.inspect(files["archive"], verify=True), 0),
    }
    seconds = {name: [] for name in contenders}
    cpu = {name: [] for name in contenders}
    memory = dict.fromkeys(contenders, 0)
    try:
        for _ in range(options.repeats):
            for name, (run, kept) in contenders.items():
                before = peak_bytes(reset=True)
                started, worked = time.perf_counter(), time.process_time()
                run()
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - worked)
                memory[name] = max(memory[name], peak_bytes() - before - kept)
        sizes = {name: path.stat().st_size for name, path in files.items()}
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)
    baselines = {name: seconds[name] for name in ("plain copy + fsync", "plain write + fsync", "plain read")}
    print(f"{raw / 1e6:.0f} MB of parameters and moments; archive {sizes['archive'] / raw:.4f} of them")
    print(f"{'':24}" + "".join(map("{:>10}".format, TITLES)))
    for name, taken in seconds.items():
        ratios = [statistics.median(p / s for p, s in zip(plain, taken, strict=True)) for plain in baselines.values()]
        print(
            f"{name:24}{raw / 1e6 / min(taken):10.0f}{raw / 1e6 / statistics.median(taken):10.0f}"
            f"{ratios[0]:10.2f}{ratios[1]:10.2f}{ratios[2]:10.2f}"
            f"{min(cpu[name]) / raw * 1e9:10.2f}{max(0, memory[name]) / 2**20:10.0f}"
        )


if __name__ == "__main__":
    main()
