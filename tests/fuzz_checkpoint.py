"""Break checkpoint files in every way that comes to mind and see that the readers refuse them and nothing worse.

Run as a script (or as ``make fuzz``): ``python tests/fuzz_checkpoint.py [SECONDS] [SEED]``. A file that makes a reader
fail is kept in the temporary folder and named.

Two kinds of damage: bytes changed anywhere, which the digests must notice; and a file that is consistent but for one
value, its digests computed anew, which the checks behind the digests must notice or which must not matter.
"""

import copy
import pathlib
import random
import resource
import sys
import tempfile
import time

import checkpoint_files as files
import numpy as np
import zstandard

from mojolearn import checkpoint
from mojolearn.errors import CheckpointError

# Values put in the place of others.
ODD_VALUES = [
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**300, 0.0, -0.0,
    0.5, 1e-308, 1e308, "", "x", "0" * 64, "parameters", "<f4", "<f8", "|O", "../../etc/passwd", "\u0000", "é", [], {},
    [0], [[]], [1, 2, 3], {"": None}, ["attention"] * 50, ["mamba3"], "inference", "training", "int8", "deterministic",
]  # fmt: skip

# Most memory that a reader may take beside what it had: far above what the small files need.
MEMORY_BYTES = 1 << 30
SECONDS_EACH = 60.0


def weights(weight_format):
    """A good file of weights."""
    return files.weights_archive(weight_format, files.small_weights(weight_format))


def good_files():
    """Good files of every layout and kind."""
    state = files.small_state()
    return [
        files.training_archive(state, chunk_elements=50, extra=files.EXTRA),
        files.training_archive(state),
        files.stream_file(state),
        files.json_file(state),
        files.json_file(state, indent=1),
        *map(weights, ("float32", "bfloat16", "int8")),
    ]


def change_bytes(draw, data):
    """A file with a few places changed, cut out, doubled or moved."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5, 20))):
        start = draw.randrange(len(data) + 1)
        end = min(len(data), start + draw.choice((0, 1, 1, 2, 4, 8, 32, 500)))
        kind = draw.randrange(6)
        if kind == 0 and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[start:end] = draw.randbytes(end - start)
        elif kind == 2:
            del data[start:end]
        elif kind == 3:
            data[start:start] = data[start:end]
        elif kind == 4:
            data[start:end] = draw.choice((b"\0", b"\xff")) * (end - start)
        else:
            data[start:start] = draw.randbytes(draw.choice((1, 4, 100)))
        if not data:
            break
    return bytes(data)


def change_value(draw, value):
    """A JSON value with one place in it changed."""
    value = copy.deepcopy(value)
    holder, key, inner = None, None, value
    while isinstance(inner, (dict, list)) and inner and draw.random() < 0.85:
        holder = inner
        key = draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        inner = inner[key]
    if holder is None:
        return draw.choice(ODD_VALUES)
    kind = draw.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[draw.randrange(len(holder))])
    elif kind == 1:
        holder[draw.choice(("more", "", "t", "sha256"))] = draw.choice(ODD_VALUES)
    elif kind == 2 and type(inner) in (int, float):
        holder[key] = inner + draw.choice((-1, 1, 4, 0.5, 1e9, 2**32))
    elif kind == 2 and isinstance(inner, str) and inner:
        cut = draw.randrange(len(inner))
        holder[key] = inner[:cut] + draw.choice(("", "x", inner)) + inner[cut + 1 :]
    else:
        holder[key] = draw.choice(ODD_VALUES)
    return value


def change_frame(draw):
    """A maker of frames of which a few are odd."""

    def make(plane):
        if draw.random() > 0.2:
            return files.frame(plane)
        kind = draw.randrange(6)
        if kind == 0:
            return change_bytes(draw, files.frame(plane))
        if kind == 1:
            return files.frame(plane + draw.randbytes(draw.choice((1, 100))))
        if kind == 2:
            return files.frame(bytes(1 << draw.choice((0, 10, 20, 24))))
        if kind == 3:
            return zstandard.ZstdCompressor(write_content_size=False).compress(plane)
        if kind == 4:
            return draw.randbytes(draw.choice((0, 4, 20, 200)))
        return files.frame(plane) * 2

    return make


def consistent_file(draw):
    """A file with digests that are right, and something else that perhaps is not."""
    state = files.small_state()
    kind = draw.randrange(6)

    def change(header):
        changed = change_value(draw, header)
        while draw.random() < 0.3:
            changed = change_value(draw, changed)
        return changed

    if kind == 0:
        return files.training_archive(state, draw.choice((1, 50, 262144)), draw.choice((None, files.EXTRA)), change)
    if kind == 1:
        return files.stream_file(state, change)
    if kind == 2:
        payload = dict(state)
        for name, dtype in files.ARRAYS.items():
            payload[name] = {"dtype": dtype, "shape": list(state[name].shape), "hex": state[name].tobytes().hex()}
        return files.json_file(state, change(payload))
    if kind == 3:
        weight_format = draw.choice(("float32", "bfloat16", "int8"))
        return files.weights_archive(weight_format, files.small_weights(weight_format), change)
    if kind == 4:
        return files.training_archive(state, draw.choice((7, 50, 262144)), make_frame=change_frame(draw))
    text = change_bytes(draw, files.canonical(files.EXTRA))
    arrays = [(name, state[name]) for name in files.ARRAYS]
    header = files.archive_header("training", files.without_arrays(state), arrays)
    header["extra"] = {"nbytes": len(text)}
    return files.archive_file(header, [files.section(array, size) for array, size in [
        (text, 1), *((array.tobytes(), 4) for _, array in arrays)
    ]])  # fmt: skip


def contents(path):
    """All that a file holds, as seen by every reader that takes its kind; CheckpointError if one refuses it."""
    found = [checkpoint.inspect(path, verify=True)]
    if found[0]["kind"] == "training":
        state, extra, _ = checkpoint.load(path)
        found += [extra, {key: _comparable(value) for key, value in state.items()}]
    with checkpoint.WeightsReader(path) as reader:
        found.append([(name, _comparable(tensor)) for name, tensor in reader])
    for told in ("file_size", "sha256"):
        found[0].pop(told)
    return found


def _comparable(value):
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def check(path, data, expected=None):
    """Read a file; it is refused with a CheckpointError, or it holds what is expected (if that is known)."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    started = time.perf_counter()
    try:
        found = contents(path)
    except CheckpointError as error:
        assert str(path) in str(error), "the error does not name the file"
        return False
    finally:
        seconds = time.perf_counter() - started
        assert seconds < SECONDS_EACH, f"{seconds:.1f} s for {len(data)} bytes"
    assert expected is None or found == expected, "a damaged file was read as if it were good"
    return True


def fuzz(folder, seconds, seed):
    """Check damaged files until the time is over.

    Parameters
    ----------
    folder : Path
        For the files.
    seconds : float
    seed : int

    Returns
    -------
    tried, read : int
        How many files were tried, and how many of them could be read.
    """
    draw = random.Random(seed)
    path = folder / "fuzzed"
    good = []
    for data in good_files():
        path.write_bytes(data)
        good.append((data, contents(path)))
    tried = read = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if draw.random() < 0.5:
            data, expected = draw.choice(good)
            read += check(path, change_bytes(draw, data), expected)
        else:
            read += check(path, consistent_file(draw))
        tried += 1
    return tried, read


def main():
    """Fuzz as told by the command line."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mojolearn-fuzz-"))
    print(f"seed {seed}, files in {folder}")
    tried, read = fuzz(folder, seconds, seed)
    (folder / "fuzzed").unlink(missing_ok=True)
    folder.rmdir()
    print(f"{tried} damaged files: {tried - read} refused, {read} read as they should be")


if __name__ == "__main__":
    main()
