"""How speed and memory grow: threads, rows, the reading of memory, length, tiny numbers, low-bit weights, start-up.

    python -m benchmarks.bench_limits [--only threads]

Ratios come from runs in turns. Memory is the peak of a fresh process.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import mojolearn
from benchmarks.configs import CONFIGS, random_weights
from benchmarks.side_by_side import Contender
from mojolearn import _core


def serve(*options):
    """A process that runs work on request."""
    return Contender([sys.executable, "-m", "benchmarks.serve_mojolearn", *map(str, options)])


def medians(contenders, rounds=5, seconds=0.5):
    """Median tokens/s and last peak memory of each contender, asked in turns."""
    runs = [[contender.measure(seconds) for contender in contenders] for _ in range(rounds)]
    for contender in contenders:
        contender.close()
    return [(statistics.median(row[i]["tok_s"] for row in runs), runs[-1][i]["rss_mb"]) for i in range(len(contenders))]


def threads():
    """Two threads against one."""
    for name, options in (
        ("train small, 4 x 256", ("--config", "small", "--mode", "train", "--batch", 4, "--length", 256)),
        ("forward medium, 1 x 2048", ("--config", "medium", "--mode", "forward", "--length", 2048)),
        ("decode small, 1 row", ("--config", "small", "--mode", "decode")),
    ):
        one, two = medians([serve(*options, "--threads", n) for n in (1, 2)], rounds=3)
        print(
            f"{name}: 1 thread {one[0]:.0f}, 2 threads {two[0]:.0f} tokens/s, ratio {two[0] / one[0]:.2f}", flush=True
        )


def rows():
    """Decoding several rows at once."""
    sizes = (1, 2, 4, 8)
    found = medians([serve("--config", "small", "--mode", "decode", "--batch", n) for n in sizes], rounds=3)
    for n, (speed, _) in zip(sizes, found):
        print(f"decode small, {n} rows: {speed:.0f} tokens/s", flush=True)


def reading():
    """The rate at which one row's product reads a matrix that is read again and again: the limit of decoding."""
    steps, n_threads = 1024, mojolearn.get_num_threads()
    row = np.full((1, steps), 0.5, np.float32)
    for megabytes in (8, 32, 64, 99, 128, 158, 200, 300, 500):
        outputs = megabytes * 1_000_000 // (4 * steps)
        weight = _core.linalg.PackedWeight.from_float32(np.full((outputs, steps), 0.5, np.float32))
        out = np.empty((1, outputs), np.float32)
        times, end = [], time.perf_counter() + 1
        while time.perf_counter() < end:
            begin = time.perf_counter()
            _core.linalg.linear(row, weight, out, n_threads)
            times.append(time.perf_counter() - begin)
        print(f"{megabytes} MB: {4e-9 * outputs * steps / statistics.median(times):.1f} GB/s", flush=True)


def low_bit():
    """Decoding and prefill of packed weights, one run."""
    formats = ("float32", "bfloat16", "int8")
    for config in ("small", "medium", "medium-attn"):
        found = medians([serve("--config", config, "--mode", "decode", "--format", f) for f in formats], rounds=5)
        for name, (speed, _) in zip(formats, found):
            print(f"decode {config} {name}: {speed:.1f} tokens/s, {speed / found[0][0]:.2f} x float32", flush=True)
    options = ("--config", "small", "--mode", "forward", "--length", 512)
    found = medians([serve(*options, "--format", f) for f in formats], rounds=5)
    for name, (speed, _) in zip(formats, found):
        print(f"prefill small {name}: {speed:.0f} tokens/s, {speed / found[0][0]:.2f} x float32", flush=True)


def lengths():
    """Cost per token of a model of Mamba-3 layers as the text grows, and of decoding far into it."""
    config = mojolearn.SambaConfig(**{**CONFIGS["tiny-mamba"], "vocab": 256})
    model = mojolearn.SambaInference(config, random_weights(config))
    rng = np.random.default_rng(0)
    for length in (512, 2048, 8192, 32768):
        ids = rng.integers(0, 256, (1, length)).astype(np.int32)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            model.forward(ids, last_only=True)
            times.append(time.perf_counter() - start)
        print(f"forward of {length} tokens: {min(times) / length * 1e6:.2f} us per token", flush=True)
    state = model.allocate_state(1, 1 << 20)
    for part in range(4):
        columns = [np.array([token], np.int32) for token in rng.integers(0, 256, 4000)]
        start = time.perf_counter()
        for column in columns:
            model.step(column, state)
        print(f"decoding tokens {part * 4000} on: {(time.perf_counter() - start) / 4000 * 1e6:.1f} us", flush=True)


def tiny_numbers():
    """Models whose numbers decay to nothing or lie around the smallest normal number, against ordinary ones."""
    config = mojolearn.SambaConfig(**CONFIGS["tiny"])
    ids = np.random.default_rng(1).integers(0, config.vocab, (4, 257)).astype(np.int32)
    ordinary = random_weights(config)

    def changed(change, *endings):
        return {
            name: change(value).astype(np.float32) if name.endswith(endings) else value
            for name, value in ordinary.items()
        }

    kinds = {
        "ordinary": ordinary,
        "subnormal embeddings": changed(lambda x: x * 1e-38, "embed.weight"),
        "embeddings of 1e-30": changed(lambda x: x * 1e-28, "embed.weight"),
        "decays that run out in a chunk": changed(lambda x: np.full_like(x, 4.0), "dt_bias"),
        "projections of 1e-21": changed(lambda x: x * 1e-19, "in_proj.weight"),
        "all matrices of 1e-12": {k: np.float32(1e-10) * v if v.ndim == 2 else v for k, v in ordinary.items()},
        "output projections of 1e-32": changed(
            lambda x: x * 1e-30, "out_proj.weight", "o_proj.weight", "down_proj.weight"
        ),
    }
    for mode in ("identical", "deterministic"):
        work = {}
        for name, weights in kinds.items():
            stack = mojolearn.SambaStack(config, weights, numeric_mode=mode)
            model = mojolearn.SambaInference(config, weights, numeric_mode=mode)
            work["forward", name] = lambda model=model: model.forward(ids[:, :256])
            work["train", name] = lambda stack=stack: stack.train_step(ids[:, :-1], ids[:, 1:])
        times = {key: [] for key in work}
        for _ in range(5):
            for (kind, name), call in work.items():
                if kind == "train":  # the update of the last round makes ordinary numbers of the small ones
                    call.__defaults__[0].load_weights(kinds[name])
                start = time.perf_counter()
                call()
                times[kind, name].append(time.perf_counter() - start)
        for name in kinds:
            ratios = (min(times[kind, name]) / min(times[kind, "ordinary"]) for kind in ("forward", "train"))
            print(
                "{}, {}: forward {:.2f}, train {:.2f} x the time of ordinary ones".format(mode, name, *ratios),
                flush=True,
            )


def peak_of(code):
    """Peak memory (MiB) of a fresh interpreter that runs `code`."""
    code += "; from benchmarks.serve_mojolearn import peak_mebibytes; print(peak_mebibytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def memory():
    """Peaks of a training step and of inference from a saved file."""
    step = (
        "import numpy as np, mojolearn; from benchmarks.configs import CONFIGS; "
        "c = mojolearn.SambaConfig(**CONFIGS['small']); "
        "s = mojolearn.SambaStack(c, generator=mojolearn.training.Generator(0)); "
        "ids = np.random.default_rng(1).integers(0, c.vocab, (4, 257)); s.train_step(ids[:, :-1], ids[:, 1:])"
    )
    print(f"train step small, 4 x 256: {peak_of(step):.0f} MiB", flush=True)
    config = mojolearn.SambaConfig(**CONFIGS["medium"])
    weights = random_weights(config)
    with tempfile.TemporaryDirectory() as folder:
        peaks = {}
        for kind in ("float32", "bfloat16", "int8"):
            path = os.path.join(folder, kind)
            packed = mojolearn.lowbit.pack(weights, kind) if kind != "float32" else weights
            tensors = [(name, _portable(packed[name])) for name, _ in config.registry()]
            mojolearn.checkpoint.save_weights(path, config.to_dict(), tensors, format=kind)
            load = f"import numpy as np, mojolearn; m = mojolearn.SambaInference.from_checkpoint({path!r})"
            peaks[kind] = peak_of(load)
            run = "; m.forward(np.zeros((1, 2048), np.int32))" if kind == "float32" else ""
            print(
                f"medium {kind} loaded: {peaks[kind]:.0f} MiB, {peaks[kind] / peaks['float32']:.2f} x float32",
                flush=True,
            )
            if run:
                print(f"medium {kind} forward 1 x 2048: {peak_of(load + run):.0f} MiB", flush=True)


def _portable(tensor):
    if isinstance(tensor, mojolearn.lowbit.BF16Weight):
        return tensor.bits
    return (tensor.codes, tensor.exponents) if isinstance(tensor, mojolearn.lowbit.Int8Weight) else tensor


def start():
    """Import, and construction of an inference model against reading its bytes."""

    def seconds(code):
        return min(
            float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
            for _ in range(5)
        )

    clock = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    numpy_alone = seconds(clock.format("import numpy"))
    both = seconds(clock.format("import mojolearn"))
    print(f"import numpy {numpy_alone * 1e3:.0f} ms, with mojolearn {both * 1e3:.0f} ms", flush=True)
    config = mojolearn.SambaConfig(**CONFIGS["medium"])
    weights = random_weights(config)
    times, reads = [], []
    for _ in range(3):
        begin = time.perf_counter()
        for weight in weights.values():
            weight.view(np.int32).sum()
            weight.view(np.int32).sum()
        reads.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        mojolearn.SambaInference(config, weights)
        times.append(time.perf_counter() - begin)
    print(f"construct medium {min(times):.2f} s, its bytes read twice (one thread) {min(reads):.2f} s", flush=True)


QUESTIONS = {f.__name__: f for f in (threads, rows, reading, low_bit, lengths, tiny_numbers, memory, start)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=sorted(QUESTIONS))
    only = parser.parse_args().only
    for name, question in QUESTIONS.items():
        if only in (None, name):
            print(f"-- {question.__doc__}", flush=True)
            question()


if __name__ == "__main__":
    main()
