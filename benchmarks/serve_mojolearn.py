"""Runs one kind of work on request, so that two libraries can be timed in turns.

    python -m benchmarks.serve_mojolearn --config small --mode train --batch 4 --length 256

prints READY, then answers every line of standard input with one JSON object: seconds, tokens/s, the digest of the
output and the peak memory of the process so far. ``q`` ends it.
"""

import argparse
import hashlib
import json
import sys
import time

import numpy as np

import mojolearn
from benchmarks.configs import CONFIGS, random_weights


def peak_mebibytes():
    """VmHWM of this process in MiB."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return float("nan")


def digest(*arrays):
    """Short SHA-256 over the bytes of arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


class Work:
    """One model and one kind of work on it."""

    def __init__(self, args):
        self.args = args
        config = mojolearn.SambaConfig(**CONFIGS[args.config])
        mojolearn.set_num_threads(args.threads)
        self.ids = np.random.default_rng(1).integers(0, config.vocab, (args.batch, args.length + 1)).astype(np.int32)
        if args.mode == "train":
            weights = random_weights(config)
            self.model = mojolearn.SambaStack(config, weights=weights, lr=1e-3, numeric_mode=args.numeric_mode)
        elif args.file:
            self.model = mojolearn.SambaInference.from_checkpoint(args.file, numeric_mode=args.numeric_mode)
        else:
            weights = random_weights(config)
            if args.format != "float32":
                weights = mojolearn.lowbit.pack(weights, args.format)
            self.model = mojolearn.SambaInference(config, weights, numeric_mode=args.numeric_mode)

    def run(self):
        """Do the work once.

        Returns
        -------
        seconds : float
        tokens : int
        output : tuple of ndarray
            What the digest is taken of.
        """
        return getattr(self, "run_" + self.args.mode)()

    def run_forward(self):
        start = time.perf_counter()
        logits = self.model.forward(self.ids[:, :-1])
        seconds = time.perf_counter() - start
        return seconds, logits.shape[0] * logits.shape[1], (logits[:, -1].copy(),)  # not a view of all

    def run_train(self):
        inputs, targets = self.ids[:, :-1], self.ids[:, 1:]
        start = time.perf_counter()
        out = self.model.train_step(inputs, targets)
        return time.perf_counter() - start, inputs.size, (np.float64(out["loss"]), self.model.flat[::97])

    def run_decode(self):
        args = self.args
        state = self.model.allocate_state(args.batch, args.prompt + args.tokens + 2)
        ids = np.random.default_rng(2).integers(0, self.model.config.vocab, (args.batch, args.prompt + args.tokens + 2))
        self.model.forward(ids[:, : args.prompt], state)
        for position in range(args.prompt, args.prompt + 2):
            self.model.step(ids[:, position], state)
        columns = [np.ascontiguousarray(ids[:, args.prompt + i]) for i in range(args.tokens)]
        start = time.perf_counter()
        for column in columns:
            logits = self.model.step(column, state)
        return time.perf_counter() - start, args.batch * args.tokens, (logits,)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="tiny", choices=sorted(CONFIGS))
    parser.add_argument("--mode", default="forward", choices=("forward", "train", "decode"))
    parser.add_argument("--numeric-mode", default="identical")
    parser.add_argument("--format", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--file", help="load this archive instead of making weights")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    work = Work(args)
    # Training goes on from run to run, so only the first run's output is the same in every process.
    first_output = digest(*work.run()[2])
    print("READY", flush=True)
    for line in sys.stdin:
        if line.strip() == "q":
            break
        request = json.loads(line or "{}")
        runs = []
        while not runs or (sum(run[0] for run in runs) < request.get("min_s", 0) and len(runs) < 50):
            runs.append(work.run())
        seconds, tokens, _ = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        answer = {"sec": seconds, "tok_s": tokens / seconds, "digest": first_output, "rss_mb": peak_mebibytes()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
