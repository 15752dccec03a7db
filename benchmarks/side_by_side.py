"""Ratios of this library to PyTorch, both timed in turns in one run.

    python -m benchmarks.side_by_side --peer-python .venv-torch/bin/python [--only decode] [--rounds 5]

Every row starts one process per contender and asks each in turn for a burst; the table shows the median tokens/s and
the ratio. PyTorch lives in an environment of its own.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
PEER = HERE / "torch_samba.py"

# name, model, kind of work, shape, how PyTorch runs, floors of the ratio for (identical, deterministic)
ROWS = [
    ("forward tiny B=4 L=256", "tiny", "forward", (4, 256), "eager", 1.4, 1.4),
    ("forward tiny B=4 L=256", "tiny", "forward", (4, 256), "compiled", 1.4, 1.4),
    ("forward small B=4 L=256", "small", "forward", (4, 256), "eager", 1.2, 1.2),
    ("forward small B=4 L=256", "small", "forward", (4, 256), "compiled", 1.2, 1.2),
    ("forward medium B=1 L=2048", "medium", "forward", (1, 2048), "eager", 1.15, 1.15),
    ("train tiny B=4 L=256", "tiny", "train", (4, 256), "eager", 0.9, 1.8),
    ("train small B=4 L=256", "small", "train", (4, 256), "eager", 0.95, 1.45),
    ("train medium B=4 L=256", "medium", "train", (4, 256), "eager", 1.0, 1.2),
    ("train tiny B=4 L=256", "tiny", "train", (4, 256), "compiled", None, 1.5),
    ("train small B=4 L=256", "small", "train", (4, 256), "compiled", None, 1.2),
    ("decode tiny, 1 row", "tiny", "decode", (1, 0), "compiled", 2.5, 2.5),
    ("decode small, 1 row", "small", "decode", (1, 0), "compiled", 1.5, 1.5),
    ("decode medium, 1 row", "medium", "decode", (1, 0), "compiled", 1.2, 1.2),
    ("decode small, 8 rows", "small", "decode", (8, 0), "compiled, 1 row", 8.0, 8.0),
]


class Contender:
    """A process that runs work on request."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended before it was ready")
            if line.strip() == "READY":
                break

    def measure(self, seconds):
        """The median of a burst of at least `seconds`."""
        self.process.stdin.write(json.dumps({"min_s": seconds}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        """End the process."""
        self.process.stdin.write("q\n")
        self.process.stdin.flush()
        self.process.wait(timeout=30)


def ours(model, work, shape, numeric_mode, threads):
    """Command line of this library's process."""
    command = [sys.executable, "-m", "benchmarks.serve_mojolearn", "--config", model, "--mode", work]
    command += ["--batch", str(shape[0]), "--threads", str(threads), "--numeric-mode", numeric_mode]
    return command + (["--length", str(shape[1])] if shape[1] else [])


def theirs(python, model, work, shape, how, threads):
    """Command line of PyTorch's process."""
    rows = 1 if how.endswith("1 row") else shape[0]
    command = [python, str(PEER), "--config", model, "--mode", work, "--batch", str(rows)]
    command += ["--threads", str(threads)] + (["--length", str(shape[1])] if shape[1] else [])
    return command + (["--compile"] if how.startswith("compiled") else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True, help="interpreter of an environment that has torch")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--modes", default="identical,deterministic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a burst")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print("| work | mode | PyTorch | tokens/s: PyTorch | ours | ratio | floor | peak MiB: PyTorch | ours |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, model, work, shape, how, *floors in ROWS:
        if args.only not in f"{name} {how}":
            continue
        modes = [(m, f) for m, f in zip(("identical", "deterministic"), floors, strict=True) if m in args.modes and f]
        if not modes:
            continue
        peer = Contender(theirs(args.peer_python, model, work, shape, how, args.threads))
        contenders = [(m, f, Contender(ours(model, work, shape, m, args.threads))) for m, f in modes]
        peer_runs, runs = [], {m: [] for m, _ in modes}
        for _ in range(args.rounds):
            peer_runs.append(peer.measure(args.seconds))
            for mode, _, contender in contenders:
                runs[mode].append(contender.measure(args.seconds))
        reference = statistics.median(run["tok_s"] for run in peer_runs)
        for mode, floor, contender in contenders:
            own = statistics.median(run["tok_s"] for run in runs[mode])
            memory = f"{peer_runs[-1]['rss_mb']:.0f} | {runs[mode][-1]['rss_mb']:.0f}"
            speeds = f"{reference:.0f} | {own:.0f} | {own / reference:.2f}"
            print(f"| {name} | {mode} | {how} | {speeds} | {floor} | {memory} |", flush=True)
            contender.close()
        peer.close()


if __name__ == "__main__":
    main()
