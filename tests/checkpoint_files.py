"""A small training state and, written from docs/formats.md alone, files of every layout.

Nothing here uses the library, so that tests can compare its readers and writers with an independent pair, and build
files that are wrong in one place and right (digests included) everywhere else. Run as a script, it makes the golden
checkpoint files of `tests/golden` that do not come from the public library.
"""

import hashlib
import json
import pathlib
import random
import struct

import numpy as np
import zstandard

STREAM_MAGIC = b"MOJOLEARN-SAMBA\x02\n"
ARCHIVE_MAGIC = b"MOJOLEARN-ARCHIVE\x01\r\n"
ARCHIVE_END = b"MOJOLEARN-END\r\n\x1a"
ARRAYS = {"parameters": "<f4", "exp_avg": "<f4", "exp_avg_sq": "<f4", "buf_initialized": "<i4"}

CONFIG = {
    "vocab": 5, "d_model": 4, "layers": ["attention"], "n_heads": 2, "n_kv_heads": 1, "head_dim": 2, "intermediate": 3,
    "tie_embeddings": False, "norm_eps": 9.999999747378752e-06, "dropout": 0.10000000149011612,
}  # fmt: skip
SHAPES = {
    "embed.weight": [5, 4],
    "layers.0.input_layernorm.weight": [4],
    "layers.0.post_attention_layernorm.weight": [4],
    "layers.0.q_proj.weight": [4, 4],
    "layers.0.k_proj.weight": [2, 4],
    "layers.0.v_proj.weight": [2, 4],
    "layers.0.o_proj.weight": [4, 4],
    "layers.0.gate_proj.weight": [3, 4],
    "layers.0.up_proj.weight": [3, 4],
    "layers.0.down_proj.weight": [4, 3],
    "norm_f.weight": [4],
    "lm_head.weight": [5, 4],
}


def canonical(value):
    """Canonical JSON as bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def small_state():
    """A whole training state of the model above; the same values for ever."""
    draw = random.Random(2024)
    registry, offset = [], 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        registry.append({"name": name, "shape": shape, "offset": offset, "size": size})
        offset += size
    floats = {
        name: np.array([draw.gauss(0.0, scale) for _ in range(offset)], np.float32)
        for name, scale in (("parameters", 0.05), ("exp_avg", 1e-4), ("exp_avg_sq", 1e-8))
    }
    floats["parameters"][:4] = [-0.0, 1e-45, 3.4e38, -3.4e38]
    return {
        "schema": "mojolearn.samba-stack-state.v1",
        "profile": "mojolearn.samba-stack.fp32.v1",
        "experiment_profile": "baseline",
        "numeric_mode": "identical",
        "config": dict(CONFIG),
        "registry": registry,
        **floats,
        "buf_initialized": np.zeros(len(registry), np.int32),
        "t": 17,
        "optimizer": {
            "kind": "adamw", "lr": 0.0006250000442378223, "beta1": 0.9, "beta2": 0.999, "eps": 1e-08,
            "weight_decay": 0.01, "max_norm": 1.0, "accumulation_steps": 1,
        },
        "schedule": {
            "kind": "cosine", "peak_lr": 0.0010000000474974513, "min_lr": 0.0, "warmup_steps": 8, "total_steps": 64
        },
        "rng": {"seed": 2**64 - 1, "counter": 2**32},
    }  # fmt: skip


def without_arrays(state):
    """The part of a state that is JSON."""
    return {key: value for key, value in state.items() if key not in ARRAYS}


def json_file(state, payload=None, indent=None):
    """The older JSON layout."""
    if payload is None:
        payload = dict(state)
        for name, dtype in ARRAYS.items():
            array = state[name].astype(dtype)
            payload[name] = {"dtype": dtype, "shape": list(array.shape), "hex": array.tobytes().hex()}
    digest = hashlib.sha256(canonical(payload)).hexdigest()
    envelope = {
        "schema": "mojolearn.samba-stack-json-checkpoint.v1", "payload": payload, "payload_sha256": digest
    }  # fmt: skip
    return canonical(envelope) + b"\n" if indent is None else json.dumps(envelope, indent=indent).encode()


def stream_file(state, change=lambda header: header, bodies=None):
    """The plain streamed layout; `change` may alter the header, or return other bytes for it."""
    bodies = bodies or [state[name].astype(dtype).tobytes() for name, dtype in ARRAYS.items()]
    header = change({
        "schema": "mojolearn.samba-stream.v2",
        "state": without_arrays(state),
        "arrays": [
            {"name": name, "dtype": dtype, "shape": [len(body) // 4], "nbytes": len(body),
             "sha256": hashlib.sha256(body).hexdigest()}
            for (name, dtype), body in zip(ARRAYS.items(), bodies, strict=True)
        ],
    })  # fmt: skip
    text = header if isinstance(header, bytes) else canonical(header)
    return STREAM_MAGIC + struct.pack("<Q", len(text)) + text + hashlib.sha256(text).digest() + b"".join(bodies)


def frame(plane):
    """A zstd frame as the archive wants it."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True).compress(plane)


def section(data, itemsize, chunk_elements=262144, make_frame=frame):
    """An array's section of an archive."""
    pieces = []
    for start in range(0, len(data), chunk_elements * itemsize):
        chunk = data[start : start + chunk_elements * itemsize]
        frames = [make_frame(chunk[k::itemsize]) for k in range(itemsize)]
        pieces += [struct.pack("<I", len(made)) for made in frames] + frames
    return b"".join([*pieces, hashlib.sha256(data).digest()])


def archive_file(header, sections):
    """An archive with all lengths and digests right, whatever it holds."""
    text = header if isinstance(header, bytes) else canonical(header)
    start = ARCHIVE_MAGIC + struct.pack("<Q", len(text)) + text + hashlib.sha256(text).digest()
    content = start + b"".join(sections) + ARCHIVE_END
    content += struct.pack("<Q", len(content) + 8 + 32)
    return content + hashlib.sha256(content).digest()


def archive_header(kind, state, arrays, chunk_elements=262144, extra=None):
    """An archive's header for (name, array) pairs."""
    return {
        "schema": "mojolearn.archive.v1",
        "kind": kind,
        "state": state,
        "arrays": [
            {"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "nbytes": array.nbytes}
            for name, array in arrays
        ],
        "chunk_elements": chunk_elements,
        "extra": None if extra is None else {"nbytes": len(canonical(extra))},
    }


def training_archive(state, chunk_elements=262144, extra=None, change=lambda header: header, make_frame=frame):
    """An archive of a training state."""
    arrays = [(name, state[name]) for name in ARRAYS]
    header = change(archive_header("training", without_arrays(state), arrays, chunk_elements, extra))
    sections = [] if extra is None else [section(canonical(extra), 1, chunk_elements)]
    sections += [section(array.tobytes(), 4, chunk_elements, make_frame) for _, array in arrays]
    return archive_file(header, sections)


def weights_archive(weight_format, arrays, change=lambda header: header):
    """An archive of weights alone; `arrays` are (name, array) pairs in the order of the file."""
    state = {
        "schema": "mojolearn.samba-weights.v1", "profile": "mojolearn.samba-stack.fp32.v1",
        "config": dict(CONFIG), "format": weight_format,
    }  # fmt: skip
    header = change(archive_header("inference", state, arrays))
    return archive_file(header, [section(array.tobytes(), array.dtype.itemsize) for _, array in arrays])


def read_archive(data):
    """(header, arrays by name, extra) of an archive, with every digest checked."""
    assert data[:20] == ARCHIVE_MAGIC
    (length,) = struct.unpack("<Q", data[20:28])
    text = data[28 : 28 + length]
    position = 28 + length + 32
    assert data[position - 32 : position] == hashlib.sha256(text).digest()
    header = json.loads(text)
    assert canonical(header) == text
    arrays = list(header["arrays"])
    if header["extra"] is not None:
        arrays.insert(0, {"name": "", "dtype": "|u1", "shape": [header["extra"]["nbytes"]], **header["extra"]})
    found = {}
    for entry in arrays:
        itemsize = np.dtype(entry["dtype"]).itemsize
        elements, chunks = entry["nbytes"] // itemsize, []
        for start in range(0, elements, header["chunk_elements"]):
            count = min(header["chunk_elements"], elements - start)
            chunk = np.empty((count, itemsize), np.uint8)
            lengths = struct.unpack(f"<{itemsize}I", data[position : position + 4 * itemsize])
            position += 4 * itemsize
            for k, length in enumerate(lengths):
                made = data[position : position + length]
                position += length
                chunk[:, k] = np.frombuffer(zstandard.ZstdDecompressor().decompress(made), np.uint8)
            chunks.append(chunk.tobytes())
        content = b"".join(chunks)
        assert data[position : position + 32] == hashlib.sha256(content).digest()
        position += 32
        found[entry["name"]] = np.frombuffer(content, entry["dtype"]).reshape(entry["shape"])
    assert data[position : position + 16] == ARCHIVE_END
    assert struct.unpack("<Q", data[position + 16 : position + 24]) == (len(data),)
    assert data[position + 24 :] == hashlib.sha256(data[: position + 24]).digest()
    extra = found.pop("", None)
    return header, found, None if extra is None else json.loads(extra.tobytes())


def small_weights(weight_format):
    """Arrays of an inference archive of the model above, in file order."""
    state = small_state()
    arrays = []
    for entry in state["registry"]:
        name, shape = entry["name"], entry["shape"]
        values = state["parameters"][entry["offset"] : entry["offset"] + entry["size"]].reshape(shape)
        if weight_format == "float32" or len(shape) == 1:
            arrays.append((name, values))
        elif weight_format == "bfloat16":
            arrays.append((name, (values.view(np.uint32) >> 16).astype(np.uint16)))
        else:
            draw = random.Random(name)
            codes = np.array([draw.randint(-127, 127) for _ in range(values.size)], np.int8).reshape(shape)
            arrays.append((name, codes))
            arrays.append((f"{name}.exponents", np.array([draw.randint(-12, -4) for _ in codes], np.int32)))
    return arrays


EXTRA = {
    "data": {"epoch": 2, "position": 12345678901234567890},
    "note": 'naïve "quoted" \U0001f600',
    "rates": [0.1, 1e-300, -0.0],
}


def make_golden(folder):
    """Write the golden files. They are made once: the library must read them for ever."""
    state = small_state()
    files = {
        "checkpoint_v1.json": json_file(state),
        "checkpoint_archive.ckpt": training_archive(state, chunk_elements=100, extra=EXTRA),
        "weights_bfloat16.ckpt": weights_archive("bfloat16", small_weights("bfloat16")),
        "weights_int8.ckpt": weights_archive("int8", small_weights("int8")),
    }
    for name, data in files.items():
        path = folder / name
        if path.exists():
            raise FileExistsError(f"{path} is golden and stays as it is")
        path.write_bytes(data)


if __name__ == "__main__":
    make_golden(pathlib.Path(__file__).resolve().parent / "golden")
