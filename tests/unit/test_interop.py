"""safetensors files: an independent reader reads what we write; files of other software are read or refused."""

import json
import struct

import numpy as np
import pytest

import mojolearn
from mojolearn import interop, lowbit
from mojolearn.errors import CheckpointError
from mojolearn.training import Generator

safetensors = pytest.importorskip("safetensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

TIED = mojolearn.SambaConfig(vocab=23, d_model=32, layers=("mamba3",))
UNTIED = mojolearn.SambaConfig(
    vocab=23, d_model=32, layers=("attention",), n_heads=2, intermediate=40, tie_embeddings=False
)


def weights_of(config):
    return mojolearn.SambaStack(config, generator=Generator(3)).parameters()


def metadata_of(config, fmt="float32"):
    return {"mojolearn.config": json.dumps(config.to_dict()), "mojolearn.format": fmt}


def save(path, config, weights, fmt="float32", **options):
    packed = {name for name, value in weights.items() if lowbit.is_packed(value)}
    return interop.save_safetensors(path, config, weights.items(), fmt, packed=packed, **options)


def write_file(path, header, data=b""):
    """A file from a header that need not make sense."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_tensors(path, tensors, metadata):
    """A file of (dtype, array) pairs; the numpy part of safetensors has no bfloat16."""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, array) in tensors.items():
        first, data = len(data), data + array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [first, len(data)]}
    write_file(path, header, data)


def bfloat16_bits(array):
    return lowbit.pack_one(array.reshape(1, -1), "bfloat16").bits.reshape(array.shape)


def logits(model):
    return model.forward(np.arange(12).reshape(2, 6)).tobytes()


@pytest.mark.parametrize("config", (TIED, UNTIED))
@pytest.mark.parametrize("fmt", lowbit.FORMATS)
def test_written_files_are_read_by_the_reference_implementation(tmp_path, config, fmt):
    path = tmp_path / "model.safetensors"
    weights = lowbit.pack(weights_of(config), fmt)
    save(path, config, weights, fmt, extra={"note": "é"})
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata["mojolearn.config"]) == config.to_dict()
    assert metadata["mojolearn.format"] == fmt
    # Raw bytes, because NumPy has no bfloat16.
    entries = dict(safetensors.deserialize(path.read_bytes()))
    assert ("lm_head.weight" in entries) == (not config.tie_embeddings)
    for name, value in weights.items():
        entry = entries.pop(name)
        if isinstance(value, lowbit.Int8Weight):
            exponents = entries.pop(f"{name}.exponents")
            assert (entry["dtype"], exponents["dtype"]) == ("I8", "I32")
            assert entry["data"] == value.codes.tobytes()
            assert exponents["data"] == value.exponents.tobytes()
        elif isinstance(value, lowbit.BF16Weight):
            assert (entry["dtype"], entry["data"]) == ("BF16", value.bits.tobytes())
        else:
            assert (entry["dtype"], entry["data"]) == ("F32", value.tobytes())
        assert tuple(entry["shape"]) == value.shape
    assert not entries


@pytest.mark.parametrize("config", (TIED, UNTIED))
@pytest.mark.parametrize("fmt", lowbit.FORMATS)
def test_round_trip(tmp_path, config, fmt):
    path = tmp_path / "model.safetensors"
    weights = lowbit.pack(weights_of(config), fmt)
    digest = save(path, config, weights, fmt)
    assert digest == save(tmp_path / "again.safetensors", config, weights, fmt)
    found_config, found = interop.load_safetensors(path)
    assert found_config == config
    assert list(found) == list(weights)
    assert lowbit.format_of(found) == fmt
    model = mojolearn.SambaInference.from_safetensors(path)
    assert model.weight_format == fmt
    assert logits(model) == logits(mojolearn.SambaInference(config, weights))
    if fmt != "int8":
        stack = mojolearn.SambaStack.from_safetensors(path, lr=0.01)
        assert logits(stack) == logits(model)


def test_files_begin_every_tensor_at_a_multiple_of_its_element_size(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, UNTIED, lowbit.pack(weights_of(UNTIED), "int8"), "int8")
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    sizes = {"F32": 4, "I32": 4, "I8": 1}
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


@pytest.mark.parametrize("names", (("embed.weight",), ("lm_head.weight",), ("embed.weight", "lm_head.weight")))
def test_a_tied_head_may_be_stored_under_either_name_or_twice(tmp_path, names):
    path = tmp_path / "model.safetensors"
    weights = weights_of(TIED)
    stored = {name: value for name, value in weights.items() if name != "embed.weight"}
    stored |= dict.fromkeys(names, weights["embed.weight"])
    safetensors_numpy.save_file(stored, path, metadata_of(TIED))
    model = mojolearn.SambaInference.from_safetensors(path)
    assert logits(model) == logits(mojolearn.SambaInference(TIED, weights))


def test_a_tied_head_that_differs_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = dict(weights_of(TIED))
    weights["lm_head.weight"] = weights["embed.weight"] + np.float32(1)
    safetensors_numpy.save_file(weights, path, metadata_of(TIED))
    with pytest.raises(CheckpointError, match="differ, but the config ties them"):
        interop.load_safetensors(path)


def test_an_untied_model_needs_both(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = dict(weights_of(UNTIED))
    del weights["lm_head.weight"]
    safetensors_numpy.save_file(weights, path, metadata_of(UNTIED))
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        interop.load_safetensors(path)


def test_config_of_the_caller(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = weights_of(TIED)
    safetensors_numpy.save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"no metadata mojolearn\.config"):
        interop.load_safetensors(path)
    config, found = interop.load_safetensors(path, TIED)
    assert config == TIED
    assert all(found[name].tobytes() == value.tobytes() for name, value in weights.items())
    with pytest.raises(TypeError, match="config must be a SambaConfig"):
        interop.load_safetensors(path, TIED.to_dict())
    safetensors_numpy.save_file(weights, path, metadata_of(TIED))
    with pytest.raises(CheckpointError, match="not of the given"):
        interop.load_safetensors(path, UNTIED)


def test_bfloat16_vectors_are_widened(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = weights_of(TIED)
    rounded = {name: bfloat16_bits(value) for name, value in weights.items()}
    write_tensors(path, {name: ("BF16", bits) for name, bits in rounded.items()}, metadata_of(TIED, "bfloat16"))
    _, found = interop.load_safetensors(path)
    for name, bits in rounded.items():
        assert lowbit.is_packed(found[name]) == (bits.ndim == 2)
        assert lowbit.materialize_one(found[name]).tobytes() == lowbit.widen_bf16(bits).tobytes()


def test_truncated_files_are_refused(tmp_path):
    path, cut = tmp_path / "model.safetensors", tmp_path / "cut.safetensors"
    save(path, TIED, weights_of(TIED))
    data = path.read_bytes()
    for length in [0, 7, 8, 9, 100, *range(200, len(data), len(data) // 20), len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            interop.load_safetensors(cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="the file at"):
        interop.load_safetensors(cut)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"", "header of 0 bytes"),
        (b"not json", "header"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"\xff\xfe", "header"),
        ([ENTRY], "not a JSON object"),
        ({"__metadata__": {"a": 1}}, "object of strings"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "no dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "dtype": "F16"}}, "dtype 'F16'"),
        ({"a": {**ENTRY, "shape": [-2]}}, "not lists of sizes"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "not lists of sizes"),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, "its shape and dtype want"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "takes -8 bytes"),
        ({"a": ENTRY, "b": ENTRY}, "overlap or hole"),
        ({"a": {**ENTRY, "data_offsets": [4, 12]}}, "overlap or hole"),
        ({"a": ENTRY, "__metadata__": {"mojolearn.config": "{}"}}, "config"),
        ({"a": ENTRY, "__metadata__": {"mojolearn.config": "["}}, r"mojolearn\.config"),
    ],
)
def test_headers_that_make_no_sense_are_refused(tmp_path, header, match):
    path = tmp_path / "model.safetensors"
    write_file(path, header, bytes(8))
    with pytest.raises(CheckpointError, match=match):
        interop.load_safetensors(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm_f.weight": None}, r"missing norm_f\.weight"),
        ({"more": np.zeros(3, np.float32)}, "unknown more"),
        ({"norm_f.weight": np.zeros(31, np.float32)}, r"norm_f\.weight has shape \(31,\)"),
        ({"norm_f.weight": np.zeros(32, np.int8)}, "missing"),
        ({"norm_f.weight": np.zeros(32, np.int32)}, "must not have dtype I32"),
        ({"norm_f.weight": np.zeros(32, np.float64)}, "dtype 'F64'"),
        ({"embed.weight": np.zeros((23, 32), np.int8)}, r"missing embed\.weight\.exponents"),
        (
            {"embed.weight": np.zeros((23, 32), np.int8), "embed.weight.exponents": np.zeros(22, np.int32)},
            r"embed\.weight\.exponents has shape \(22,\)",
        ),
        (
            {"embed.weight": np.zeros((23, 32), np.int8), "embed.weight.exponents": np.zeros(23, np.float32)},
            r"embed\.weight\.exponents",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path, change, match):
    path = tmp_path / "model.safetensors"
    weights = {**weights_of(TIED), **change}
    weights = {name: value for name, value in weights.items() if value is not None}
    safetensors_numpy.save_file(weights, path, {"mojolearn.config": json.dumps(TIED.to_dict())})
    with pytest.raises(CheckpointError, match=match):
        interop.load_safetensors(path)


def test_two_packed_formats_and_a_wrong_format_name_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = weights_of(TIED)
    save(path, TIED, weights, "float32")
    data = path.read_bytes().replace(b'"mojolearn.format":"float32"', b'"mojolearn.format":"floatXX"')
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="floatXX"):
        interop.load_safetensors(path)
    entries = {name: ("F32", value) for name, value in weights.items()}
    packed = lowbit.pack_one(weights["embed.weight"], "int8")
    entries["embed.weight"] = "I8", packed.codes
    entries["embed.weight.exponents"] = "I32", packed.exponents
    entries["layers.0.B_bias"] = "BF16", bfloat16_bits(weights["layers.0.B_bias"])
    write_tensors(path, entries, {"mojolearn.config": json.dumps(TIED.to_dict())})
    with pytest.raises(CheckpointError, match="mixes bfloat16 and int8"):
        interop.load_safetensors(path)


def test_tensors_that_were_not_announced_leave_the_old_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    weights = dict(weights_of(TIED))
    for broken in (
        list(weights.items())[:-1],
        list(reversed(weights.items())),
        [(name, value.astype(np.float64)) for name, value in weights.items()],
    ):
        with pytest.raises(ValueError, match="announced"):
            interop.save_safetensors(path, TIED, iter(broken))
        assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        interop.load_safetensors(tmp_path / "none.safetensors")
