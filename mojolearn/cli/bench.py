"""``mojolearn bench``: how fast this machine is with this build, in half a minute."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from mojolearn.cli._common import add_command, add_numeric_options, emit, progress

EXAMPLES = """\
  mojolearn bench
  mojolearn bench --threads 1 --numeric-mode deterministic --json
"""

CONFIG: dict[str, Any] = {
    "vocab": 256,
    "d_model": 256,
    "layers": ["mamba3", "attention"] * 2,
    "n_heads": 4,
    "intermediate": 512,
}
BATCH, LENGTH, DECODED = 4, 256, 128


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "bench",
        run,
        "measure the speed of this machine",
        EXAMPLES,
        description="Measure forward, training and decoding of a model with 3 million parameters.",
    )
    parser.add_argument("--seconds", type=float, default=4.0, metavar="X", help="time for each measurement (4)")
    add_numeric_options(parser)


def run(args: argparse.Namespace) -> int:
    import numpy as np

    import mojolearn
    from mojolearn import _core
    from mojolearn.training import Generator

    stack = mojolearn.SambaStack(
        mojolearn.SambaConfig(**CONFIG), generator=Generator(0), numeric_mode=args.numeric_mode
    )
    ids = np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH + 1)).astype(np.int32)
    model = mojolearn.SambaInference(stack.config, stack.parameters(), numeric_mode=args.numeric_mode)

    def decode() -> int:
        state = model.allocate_state(1, DECODED + 1)
        for column in ids[:1, :DECODED].T:
            model.step(column, state)
        return DECODED

    def forward() -> int:
        return int(model.forward(ids[:, :-1]).shape[1]) * BATCH

    def train() -> int:
        stack.train_step(ids[:, :-1], ids[:, 1:])
        return BATCH * LENGTH

    speeds = {}
    with progress(3, "measuring", "kind") as bar:
        for name, work in (("forward", forward), ("train", train), ("decode", decode)):
            speeds[name] = _speed(work, args.seconds)
            bar.update(1)
    result = {
        "instruction_set": _core.ISA,
        "threads": mojolearn.get_num_threads(),
        "numeric_mode": stack.numeric_mode,
        "parameters": stack.config.num_parameters,
        "tokens_per_second": speeds,
    }
    head = f"{result['instruction_set']}, {result['threads']} threads, mode {result['numeric_mode']}"
    emit(args, result, "\n".join([head, *(f"{name:8}{speed:12,.0f} tokens/s" for name, speed in speeds.items())]))
    return 0


def _speed(work: Callable[[], int], seconds: float) -> float:
    """Tokens per second of the fastest run within the given time; the first one only warms up."""
    work()
    best, spent = 0.0, 0.0
    while spent < seconds:
        started = time.perf_counter()
        tokens = work()
        taken = time.perf_counter() - started
        spent += taken
        best = max(best, tokens / taken)
    return best
