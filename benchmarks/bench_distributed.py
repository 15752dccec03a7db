"""Training with several ranks: what a step sends, what the cost model predicts, and what it takes here.

    python -m benchmarks.bench_distributed                              the tables of docs/distributed.md
    mpiexec -n 2 python -m benchmarks.bench_distributed --measure tiny   a step on this machine, phase by phase

The prediction is `mojolearn.distributed.predicted_seconds`: computing, then communicating, nothing at the same time.
A measured step is that of the slowest rank; ranks that share a machine share its memory and cores, so this shows what
the division itself costs and not how machines scale.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

import mojolearn
from benchmarks.configs import CONFIGS, random_weights
from mojolearn.distributed import MPIComm, Network, launched_ranks, predicted_seconds, step_costs

RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
NETWORKS = {"10 Gbit/s": Network(10e9, 30e-6), "100 Gbit/s": Network(100e9, 10e-6)}
# Tokens/s of training on a rank with two cores, mode deterministic; and how much faster a whole machine is.
SPEEDS = {"small": 1500.0, "medium": 300.0}
MACHINES = {"two cores": 1, "32 cores": 16}
LENGTH = 1024
WEAK_ROWS = 4  # of each rank
STRONG_ROWS = 256  # of the whole batch


def cost_table() -> Iterator[str]:
    """Bytes and messages of a step, from the model."""
    yield "| model | ranks | MB sent by a rank | messages sent by a rank | least possible MB |"
    yield "| --- | --- | --- | --- | --- |"
    for name in SPEEDS:
        config = mojolearn.SambaConfig(**CONFIGS[name])
        for ranks in RANKS:
            costs = step_costs(config, WEAK_ROWS * ranks, LENGTH, ranks)
            most = max(cost.bytes_sent for cost in costs)
            messages = max(cost.messages_sent + cost.control_messages for cost in costs)
            least = 2 * 4 * config.num_parameters * (ranks - 1) / ranks
            yield f"| {name} | {ranks} | {most / 1e6:.0f} | {messages} | {least / 1e6:.0f} |"


def efficiency(name: str, rows: int, ranks: int, network: Network, speedup: int) -> float:
    """Share of the time that is computing."""
    config = mojolearn.SambaConfig(**CONFIGS[name])
    computing, communicating = predicted_seconds(config, rows, LENGTH, ranks, network, SPEEDS[name] * speedup)
    return computing / (computing + communicating)


def scaling_table(rows_of: Callable[[int], int]) -> Iterator[str]:
    """Predicted speed-up over one rank, for each model, network and kind of machine."""
    yield "| model | network | rank | " + " | ".join(map(str, RANKS)) + " |"
    yield "| --- | --- | --- |" + " --- |" * len(RANKS)
    for name in SPEEDS:
        for title, network in NETWORKS.items():
            for machine, speedup in MACHINES.items():
                cells = []
                for ranks in RANKS:
                    cells.append(f"{ranks * efficiency(name, rows_of(ranks), ranks, network, speedup):.3g}")
                yield f"| {name} | {title} | {machine} | " + " | ".join(cells) + " |"


def tables() -> dict[str, str]:
    """The tables of docs/distributed.md by name."""
    return {
        "costs": "\n".join(cost_table()),
        "weak": "\n".join(scaling_table(lambda ranks: WEAK_ROWS * ranks)),
        "strong": "\n".join(scaling_table(lambda ranks: STRONG_ROWS)),
    }


def timed(owner: object, method: str, seconds: dict[str, float]) -> None:
    """Let the calls of a method add to ``seconds``."""
    inner = getattr(owner, method)

    def call(*args: object) -> object:
        start = time.perf_counter()
        try:
            return inner(*args)
        finally:
            seconds[method] = seconds.get(method, 0.0) + time.perf_counter() - start

    setattr(owner, method, call)


def measure(args: argparse.Namespace) -> None:
    """Steps of all ranks; rank 0 prints the medians of the slowest rank's phases."""
    comm = MPIComm()
    config = mojolearn.SambaConfig(**CONFIGS[args.measure])
    mojolearn.set_num_threads(args.threads)
    stack = mojolearn.SambaStack(config, random_weights(config), numeric_mode="deterministic", max_norm=1.0, comm=comm)
    rows = args.rows * comm.size
    ids = np.random.default_rng(0).integers(0, config.vocab, (rows, args.length + 1)).astype(np.int32)
    phases: dict[str, float] = {}
    for method in ("_run_own_rows", "_agree_on_loss", "_join_sums", "_finish_embedding", "agree_on_norm", "share"):
        timed(stack._team, method, phases)
    logs = []
    for _ in range(args.steps + 1):
        phases.clear()
        before = dataclasses.replace(comm.traffic)
        start = time.perf_counter()
        stack.train_step(ids[:, :-1], ids[:, 1:])
        logs.append({"step": time.perf_counter() - start, **phases})
        sent = comm.traffic.array_bytes - before.array_bytes, comm.traffic.array_messages - before.array_messages
    gathered = comm.gather((logs[1:], sent))
    if gathered is None:
        return
    print(f"{comm.size} ranks, {args.measure}, {args.rows} x {args.length} tokens a rank")
    for name in logs[0]:
        slowest = statistics.median(max(log[i][name] for log, _ in gathered) for i in range(args.steps))
        print(f"  {name.strip('_'):18}{slowest * 1e3:10.1f} ms")
    model = step_costs(config, rows, args.length, comm.size, ids=ids[:, :-1])
    for rank, ((_, (nbytes, messages)), cost) in enumerate(zip(gathered, model)):
        model_says = f"model {cost.bytes_sent:,} in {cost.messages_sent}"
        print(f"  rank {rank} sent {nbytes:,} bytes in {messages} messages; {model_says}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=sorted(CONFIGS), help="measure steps of this model, under mpiexec")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4, help="of a rank")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if args.measure:
        measure(args)
    elif launched_ranks()[0] == 0:
        for name, table in tables().items():
            print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    main()
