"""Processes that save, to be killed, limited or run side by side; started by test_checkpoint_atomic.py."""

import contextlib
import hashlib
import os
import pathlib
import random
import resource
import signal
import sys
import time

import checkpoint_files as files
import numpy as np

from mojolearn import checkpoint

TEMPORARY = ".mojolearn-"


def state_number(number):
    """One of several states of half a megabyte that can be told apart."""
    state = files.small_state()
    state["config"] = {**files.CONFIG, "vocab": 5000}
    state["registry"], offset = [], 0
    for name, shape in files.SHAPES.items():
        shape = [5000 if size == 5 else size for size in shape]
        size = int(np.prod(shape))
        state["registry"].append({"name": name, "shape": shape, "offset": offset, "size": size})
        offset += size
    for array in ("parameters", "exp_avg", "exp_avg_sq"):
        state[array] = np.random.default_rng(number).standard_normal(offset, dtype=np.float32)
    state["t"] = number
    return state


def kill(folder, kills, compression):
    """Kill savers at random moments; after each, the file must be one of those that were being written, whole."""
    path = folder / "file"
    states = [state_number(number) for number in range(4)]
    digests = [checkpoint.save(folder / f"{number}", state, compression=compression)
               for number, state in enumerate(states)]  # fmt: skip
    checkpoint.save(path, states[0], compression=compression)
    started = time.perf_counter()
    checkpoint.save(path, states[0], compression=compression)
    duration = time.perf_counter() - started
    draw = random.Random(compression)
    seen, litter = set(), 0
    for i in range(kills):
        child = os.fork()
        if child == 0:
            for number in range(i, i + 1000):
                checkpoint.save(path, states[number % 4], compression=compression)
            os._exit(1)
        time.sleep(draw.uniform(0, 4 * duration))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the saver ended by itself: {status}"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found in digests, "neither old nor new"
        state, _, _ = checkpoint.load(path)
        assert state["t"] == digests.index(found)
        seen.add(state["t"])
        litter += len(leftovers(folder))
    assert len(seen) > 1, "every saver was killed before it had saved anything"
    checkpoint.save(path, states[0], compression=compression)
    assert not leftovers(folder), "the next save left something lying"
    # Only the instant between naming and rename may leave something until then.
    assert litter <= kills // 5, f"{litter} files were left by {kills} kills"


def limit(folder):
    """Save with a limit on the size of files, as on a full disk."""
    path = folder / "file"
    old = files.small_state()
    before = checkpoint.save(path, old)
    large = state_number(1)
    for bytes_allowed in (0, 1, 4000, 100_000, 300_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, resource.RLIM_INFINITY))
        for compression in ("zstd", None):
            with contextlib.suppress(OSError):
                checkpoint.save(path, large, compression=compression)
                raise AssertionError("saved in spite of the limit")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert hashlib.sha256(path.read_bytes()).hexdigest() == before
        assert [entry.name for entry in folder.iterdir()] == ["file"]
    checkpoint.save(folder / "elsewhere", large)
    assert checkpoint.load(folder / "elsewhere")[0]["t"] == 1
    checkpoint.save(path, large)
    assert checkpoint.load(path)[0]["t"] == 1


def contend(folder, number):
    """Save the same path again and again."""
    state = state_number(number)
    for _ in range(20):
        checkpoint.save(folder / "file", state)
        assert checkpoint.load(folder / "file")[0]["t"] in (1, 2)


def leftovers(folder):
    """Temporary files in a folder."""
    return [name for name in os.listdir(folder) if name.startswith(TEMPORARY)]


if __name__ == "__main__":
    task, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if task == "kill":
        kill(folder, int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
    elif task == "limit":
        limit(folder)
    elif task == "contend":
        contend(folder, int(sys.argv[3]))
