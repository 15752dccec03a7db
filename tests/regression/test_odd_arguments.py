"""Paths, prompts, data positions and headers of the wrong kind are refused by name."""

import json
import os
import struct

import numpy as np
import pytest

import mojolearn
from mojolearn import checkpoint
from mojolearn.data import TokenDataset
from mojolearn.export import export
from mojolearn.generation import generate
from mojolearn.training import Generator

CONFIG = mojolearn.SambaConfig(vocab=256, d_model=32, layers=("mamba3",))
STACK = mojolearn.SambaStack(CONFIG, generator=Generator(1))

LOADERS = [
    mojolearn.SambaStack.from_checkpoint,
    mojolearn.SambaInference.from_checkpoint,
    mojolearn.SambaStack.from_safetensors,
    mojolearn.SambaInference.from_safetensors,
    checkpoint.inspect,
    STACK.save_checkpoint,
]


@pytest.mark.parametrize("use", LOADERS, ids=lambda use: use.__qualname__)
@pytest.mark.parametrize(
    "path, error", [(None, TypeError), (3, TypeError), (["a"], TypeError), ("\ud800", ValueError), ("a\0b", ValueError)]
)
def test_paths(use, path, error):
    with pytest.raises(error, match="path must"):
        use(path)


@pytest.mark.parametrize("dtype", [[], {}, [[]], None, 3, True])
def test_safetensors_header_with_a_dtype_that_is_no_name(tmp_path, dtype):
    file = tmp_path / "model.safetensors"
    export(STACK, file, format="int8")
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["norm_f.weight"]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    for load in (mojolearn.SambaStack.from_safetensors, mojolearn.SambaInference.from_safetensors):
        with pytest.raises(mojolearn.CheckpointError, match="dtype"):
            load(file)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("out", 3, TypeError),
        ("format", np.zeros(3), ValueError),
        ("keep", None, TypeError),
        ("keep", 3, TypeError),
        ("keep", "embed.weight", TypeError),
        ("progress", True, TypeError),
    ],
)
def test_export(tmp_path, name, value, error):
    with pytest.raises(error, match=name):
        export(STACK, **{"out": tmp_path / "model.ckpt", name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("model", None, TypeError),
        ("model", CONFIG, TypeError),
        ("state", {}, TypeError),
        ("prompt", "\ud800", ValueError),
        ("prompt", np.array(3), TypeError),
        ("stop", "\udcff", ValueError),
        ("stop", np.array(3.0), TypeError),
        ("seed", np.array(0.5), TypeError),
        ("seed", bytearray(b"a"), TypeError),
    ],
)
def test_generate(name, value, error):
    with pytest.raises(error, match=name):
        generate(**{"model": STACK, "prompt": "ab", name: value})


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdefgh" * 50)
    return TokenDataset(tmp_path / "text", 2, 8)


@pytest.mark.parametrize(
    "name, value",
    [("seed", False), ("seed", 0.0), ("seed", np.zeros((2, 2))), ("valid_fraction", np.zeros(0)), ("epoch", 2**64)],
)
def test_data_positions(data, name, value):
    next(data)
    before = data.state_dict()
    with pytest.raises(ValueError, match=name):
        data.load_state_dict({**before, name: value})
    assert data.state_dict() == before


@pytest.mark.parametrize("name", ["start", "stop"])
@pytest.mark.parametrize("value", [None, 1.0, "1", True, np.zeros(2)])
def test_token_ranges(data, name, value):
    with pytest.raises(TypeError, match=name):
        data.tokens(**{"start": 0, "stop": 3, name: value})


def test_data_from_a_pipe_or_nowhere(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe"):
        TokenDataset(tmp_path / "pipe", 1, 1)  # opening it would wait for a writer for ever
    with pytest.raises(ValueError, match="empty path"):
        TokenDataset("", 1, 1)
