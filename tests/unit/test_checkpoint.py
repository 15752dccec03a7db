"""Round trips, layouts, options and what `inspect` and `WeightsReader` tell."""

import hashlib
import json
import tracemalloc

import checkpoint_files as files
import numpy as np
import pytest

from mojolearn import checkpoint
from mojolearn.config import SambaConfig
from mojolearn.errors import CheckpointError

STREAMS = ("train_hybrid.samba2", "train_readme.samba2")


def check_same_state(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[key].dtype == value.dtype
            assert found[key].tobytes() == value.tobytes(), key
        else:
            assert found[key] == value, key


def larger_state(chunks=2.5, values="noise"):
    """A state whose arrays span several chunks."""
    config = SambaConfig(vocab=int(chunks * 262144) // 64, d_model=64, layers=("mamba3",))
    registry, offset = [], 0
    for name, shape in config.registry():
        size = int(np.prod(shape))
        registry.append({"name": name, "shape": list(shape), "offset": offset, "size": size})
        offset += size
    draw = np.random.default_rng(1)
    state = files.small_state()
    state.update(config=config.to_dict(), registry=registry, buf_initialized=np.zeros(len(registry), np.int32))
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        noise = draw.standard_normal(offset, dtype=np.float32)
        state[name] = noise if values == "noise" else np.zeros(offset, np.float32)
    return state


# Golden files


@pytest.mark.parametrize("name", STREAMS)
def test_stream_of_the_public_library_is_written_back_byte_for_byte(golden, tmp_path, name):
    state, extra, info = checkpoint.load(golden / name)
    assert extra is None
    assert info["layout"] == "v2"
    digest = checkpoint.save(tmp_path / "again", state, compression=None)
    data = (golden / name).read_bytes()
    assert (tmp_path / "again").read_bytes() == data
    assert digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", STREAMS)
def test_stream_has_the_values_of_the_run_that_wrote_it(golden, name):
    state, _, _ = checkpoint.load(golden / name)
    with np.load(golden / name.replace("samba2", "npz")) as run:
        for entry in state["registry"]:
            stored = state["parameters"][entry["offset"] : entry["offset"] + entry["size"]]
            assert stored.tobytes() == run[f"final.{entry['name']}"].tobytes()
        assert state["exp_avg"].tobytes() == run["exp_avg"].tobytes()
        assert state["exp_avg_sq"].tobytes() == run["exp_avg_sq"].tobytes()


def test_golden_json_layout(golden):
    state, extra, info = checkpoint.load(golden / "checkpoint_v1.json")
    check_same_state(state, files.small_state())
    assert (extra, info["layout"]) == (None, "json")


def test_golden_archive(golden):
    state, extra, info = checkpoint.load(golden / "checkpoint_archive.ckpt")
    check_same_state(state, files.small_state())
    assert (extra, info["layout"]) == (files.EXTRA, "archive")


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8"])
def test_golden_weights(golden, weight_format):
    arrays = dict(files.small_weights(weight_format))
    with checkpoint.WeightsReader(golden / f"weights_{weight_format}.ckpt") as reader:
        assert (reader.kind, reader.format, reader.numeric_mode) == ("inference", weight_format, None)
        assert reader.config == files.CONFIG
        found = dict(reader)
    assert list(found) == list(files.SHAPES)
    for name, tensor in found.items():
        parts = tensor if isinstance(tensor, tuple) else (tensor,)
        expected = [arrays[name], arrays[f"{name}.exponents"]] if len(parts) == 2 else [arrays[name]]
        for part, wanted in zip(parts, expected, strict=True):
            assert (part.dtype, part.shape) == (wanted.dtype, wanted.shape)
            assert part.tobytes() == wanted.tobytes()


# Round trips


@pytest.mark.parametrize("compression", ["zstd", None])
@pytest.mark.parametrize("mode", ["identical", "fast", "deterministic"])
def test_round_trip(tmp_path, compression, mode):
    state = files.small_state()
    state["numeric_mode"] = mode
    if mode == "deterministic":
        state["deterministic_profile"] = {"name": "mojolearn.deterministic.v1", "n_shards": 1}
    digest = checkpoint.save(tmp_path / "file", state, compression=compression)
    assert digest == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    assert checkpoint.inspect(tmp_path / "file", verify=True)["sha256"] == digest
    found, extra, _ = checkpoint.load(tmp_path / "file")
    check_same_state(found, state)
    assert extra is None


@pytest.mark.parametrize("level", [None, 1, 2, 9, 22])
def test_archive_can_be_read_from_its_description(tmp_path, level):
    state = files.small_state()
    checkpoint.save(tmp_path / "file", state, extra=files.EXTRA, level=level)
    header, arrays, extra = files.read_archive((tmp_path / "file").read_bytes())
    assert header["kind"] == "training"
    check_same_state({**header["state"], **arrays}, state)
    assert extra == files.EXTRA


@pytest.mark.parametrize("values", ["noise", "zeros"])
def test_arrays_of_many_chunks(tmp_path, values):
    state = larger_state(values=values)
    assert state["parameters"].size % files.archive_header("", {}, [])["chunk_elements"]
    checkpoint.save(tmp_path / "file", state)
    _, arrays, _ = files.read_archive((tmp_path / "file").read_bytes())
    found, _, _ = checkpoint.load(tmp_path / "file")
    for name in files.ARRAYS:
        assert arrays[name].tobytes() == found[name].tobytes() == state[name].tobytes()


@pytest.mark.parametrize("chunk_elements", [1, 7, 100, 262144])
def test_any_chunk_size_is_read(tmp_path, chunk_elements):
    (tmp_path / "file").write_bytes(files.training_archive(files.small_state(), chunk_elements, extra=files.EXTRA))
    found, extra, _ = checkpoint.load(tmp_path / "file")
    check_same_state(found, files.small_state())
    assert extra == files.EXTRA


def test_bytes_are_the_same_every_time(tmp_path):
    state = larger_state()
    digests = {checkpoint.save(tmp_path / f"{i}", state) for i in range(5)}
    assert len(digests) == 1


def test_json_in_another_form_is_read(tmp_path):
    (tmp_path / "file").write_bytes(files.json_file(files.small_state(), indent=3))
    check_same_state(checkpoint.load(tmp_path / "file")[0], files.small_state())


def test_header_in_another_form_is_read(tmp_path):
    state = files.small_state()
    spaced = files.stream_file(state, lambda header: json.dumps(header, indent=1).encode())
    (tmp_path / "file").write_bytes(spaced)
    check_same_state(checkpoint.load(tmp_path / "file")[0], state)


def test_older_layouts_may_have_more_keys(tmp_path):
    state = {**files.small_state(), "note": [1, None]}
    del state["experiment_profile"]
    (tmp_path / "file").write_bytes(files.stream_file(state))
    found, _, _ = checkpoint.load(tmp_path / "file")
    check_same_state(found, state)
    checkpoint.save(tmp_path / "again", found, compression=None)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


def test_trained_state_shrinks(golden, tmp_path):
    for name in STREAMS:
        state, _, _ = checkpoint.load(golden / name)
        checkpoint.save(tmp_path / "file", state)
        raw = sum(state[array].nbytes for array in files.ARRAYS)
        assert (tmp_path / "file").stat().st_size <= 0.86 * raw


def test_loaded_arrays_are_the_callers(tmp_path):
    for compression in ("zstd", None):
        checkpoint.save(tmp_path / "file", files.small_state(), compression=compression)
        state, _, _ = checkpoint.load(tmp_path / "file")
        for name in files.ARRAYS:
            state[name][:] = 1
            assert state[name].flags.owndata


def test_strided_and_read_only_arrays_are_saved(tmp_path):
    state = files.small_state()
    wide = np.zeros(2 * len(state["exp_avg"]), np.float32)
    wide[::2] = state["exp_avg"]
    strided = {**state, "exp_avg": wide[::2]}
    strided["parameters"].flags.writeable = False
    checkpoint.save(tmp_path / "file", strided)
    check_same_state(checkpoint.load(tmp_path / "file")[0], state)


# Memory


@pytest.mark.parametrize("compression", ["zstd", None])
def test_memory_besides_the_arrays_is_bounded(tmp_path, compression):
    state = larger_state(chunks=24)
    raw = sum(state[name].nbytes for name in files.ARRAYS)
    assert raw > 64 << 20
    tracemalloc.start()
    try:
        checkpoint.save(tmp_path / "file", state, compression=compression)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        found, _, _ = checkpoint.load(tmp_path / "file")
        loading = tracemalloc.get_traced_memory()[1] - raw
        del found
        tracemalloc.reset_peak()
        with checkpoint.WeightsReader(tmp_path / "file") as reader:
            largest = max(tensor.nbytes for _, tensor in reader)
        streaming = tracemalloc.get_traced_memory()[1] - 2 * largest
        tracemalloc.reset_peak()
        checkpoint.inspect(tmp_path / "file", verify=True)
        verifying = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(saving, loading, streaming, verifying) < 48 << 20


# Options


def test_extra_comes_back(tmp_path):
    for extra in ({}, files.EXTRA, {"big": "x" * (3 << 20), "ids": list(range(100000))}):
        checkpoint.save(tmp_path / "file", files.small_state(), extra=extra)
        found = checkpoint.load(tmp_path / "file")[1]
        assert found == extra
        assert checkpoint.inspect(tmp_path / "file")["extra"] == extra


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ([], TypeError),
        ("text", TypeError),
        ({1: 2}, TypeError),
        ({"a": (1, 2)}, TypeError),
        ({"a": np.float32(1)}, TypeError),
        ({"a": {1, 2}}, TypeError),
        ({"a": b""}, TypeError),
        ({"a": float("nan")}, ValueError),
        ({"a": [float("inf")]}, ValueError),
        ({"a": "\ud83d\ude00"}, ValueError),
        ({"\udc00": 1}, ValueError),
        ({"a": "x" * (64 << 20)}, ValueError),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_extra_that_would_not_come_back_is_refused(tmp_path, extra, error):
    with pytest.raises(error, match="extra"):
        checkpoint.save(tmp_path / "file", files.small_state(), extra=extra)
    assert not list(tmp_path.iterdir())


def test_deep_extra_is_refused(tmp_path):
    extra = {}
    for _ in range(63):
        extra = {"a": extra}
    checkpoint.save(tmp_path / "file", files.small_state(), extra=extra)
    assert checkpoint.load(tmp_path / "file")[1] == extra
    with pytest.raises(ValueError, match="deeper than 64"):
        checkpoint.save(tmp_path / "file", files.small_state(), extra={"a": extra})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": "gzip"}, ValueError, "compression must be 'zstd' or None, got 'gzip'"),
        ({"compression": None, "extra": {}}, ValueError, "carries no extra"),
        ({"compression": None, "level": 3}, ValueError, "has no level"),
        ({"level": 0}, ValueError, "level must be from 1 to 22, got 0"),
        ({"level": 23}, ValueError, "level must be from 1 to 22, got 23"),
        ({"level": True}, TypeError, "level must be an integer"),
        ({"level": 1.0}, TypeError, "level must be an integer"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        checkpoint.save(tmp_path / "file", files.small_state(), **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, ["a"]])
def test_path_of_another_type(path):
    with pytest.raises(TypeError):
        checkpoint.save(path, files.small_state())
    for read in (checkpoint.load, checkpoint.inspect, checkpoint.WeightsReader):
        with pytest.raises(TypeError):
            read(path)


@pytest.mark.parametrize("compression", ["zstd", None])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("exp_avg"), "the state lacks exp_avg"),
        (lambda state: state.pop("rng"), "the state lacks rng"),
        (lambda state: state.update(exp_avg=state["exp_avg"][1:]), "exp_avg"),
        (lambda state: state.update(exp_avg=state["exp_avg"].astype(np.float64)), "exp_avg must be a flat array"),
        (lambda state: state.update(exp_avg=state["exp_avg"][None]), "exp_avg must be a flat array"),
        (lambda state: state.update(t=-1), "t is -1"),
        (lambda state: state.update(t=1.5), "t is 1.5"),
        (lambda state: state.update(t=True), "t is True"),
        (lambda state: state.update(schema="x"), "schema is 'x'"),
        (lambda state: state.update(numeric_mode="deterministic"), "lacks deterministic_profile"),
        (lambda state: state["optimizer"].update(lr=float("nan")), "finite"),
    ],
)
def test_state_that_could_not_be_loaded_is_not_saved(tmp_path, compression, change, message):
    state = files.small_state()
    change(state)
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path / "file", state, compression=compression)
    assert not list(tmp_path.iterdir())


def test_state_must_be_a_dict(tmp_path):
    with pytest.raises(TypeError, match="state must be a dict"):
        checkpoint.save(tmp_path / "file", [])


def test_archive_refuses_to_save_unknown_keys(tmp_path):
    with pytest.raises(CheckpointError, match="does not know: note"):
        checkpoint.save(tmp_path / "file", {**files.small_state(), "note": 1})


# inspect


@pytest.mark.parametrize("layout", ["archive", "v2", "json"])
def test_inspect_tells_what_is_there(tmp_path, layout):
    state = files.small_state()
    make = {"archive": files.training_archive, "v2": files.stream_file, "json": files.json_file}[layout]
    data = make(state)
    (tmp_path / "file").write_bytes(data)
    found = checkpoint.inspect(tmp_path / "file")
    assert json.loads(json.dumps(found)) == found
    total = state["parameters"].size
    expected = {
        "layout": layout, "kind": "training", "file_size": len(data), "config": files.CONFIG, "num_parameters": total,
        "weight_format": "float32", "numeric_mode": "identical", "deterministic_profile": None, "step": 17,
        "optimizer": state["optimizer"], "schedule": state["schedule"], "rng": state["rng"], "extra": None,
        "verified": False, "sha256": None,
        "tensors": [{"name": name, "shape": shape} for name, shape in files.SHAPES.items()],
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    arrays = {entry["name"]: entry for entry in found["arrays"]}
    assert arrays["exp_avg"]["shape"] == [total]
    assert arrays["exp_avg"]["nbytes"] == 4 * total
    for name in files.ARRAYS:
        assert arrays[name]["digest"] == hashlib.sha256(state[name].tobytes()).hexdigest()
    verified = checkpoint.inspect(tmp_path / "file", verify=True)
    assert verified == {**found, "verified": True, "sha256": hashlib.sha256(data).hexdigest()}


def test_content_digest_does_not_depend_on_the_level(tmp_path):
    state = larger_state(chunks=1.2)
    digests = set()
    for level in (1, 3, 12):
        checkpoint.save(tmp_path / "file", state, level=level)
        digests.add(tuple(entry["digest"] for entry in checkpoint.inspect(tmp_path / "file")["arrays"]))
    assert len(digests) == 1


def test_content_digest_is_that_of_the_arrays_bytes(tmp_path):
    state = larger_state(chunks=2.5)
    for compression in ("zstd", None):
        checkpoint.save(tmp_path / "file", state, compression=compression)
        for entry in checkpoint.inspect(tmp_path / "file")["arrays"]:
            assert entry["digest"] == hashlib.sha256(state[entry["name"]]).hexdigest()


def test_inspect_does_not_read_the_arrays(tmp_path):
    checkpoint.save(tmp_path / "file", larger_state(chunks=12))
    tracemalloc.start()
    try:
        checkpoint.inspect(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_inspect_verify_reads_every_byte(tmp_path):
    checkpoint.save(tmp_path / "file", files.small_state())
    data = bytearray((tmp_path / "file").read_bytes())
    data[-100] ^= 1
    (tmp_path / "file").write_bytes(data)
    checkpoint.inspect(tmp_path / "file")
    with pytest.raises(CheckpointError):
        checkpoint.inspect(tmp_path / "file", verify=True)


# Weights, one tensor at a time


@pytest.mark.parametrize("layout", ["archive", "v2", "json"])
def test_training_checkpoints_are_read_by_tensor(tmp_path, layout):
    state = files.small_state()
    make = {"archive": files.training_archive, "v2": files.stream_file, "json": files.json_file}[layout]
    (tmp_path / "file").write_bytes(make(state))
    with checkpoint.WeightsReader(tmp_path / "file") as reader:
        assert (reader.kind, reader.format, reader.numeric_mode) == ("training", "float32", "identical")
        assert (reader.layout, reader.config, reader.extra) == (layout, files.CONFIG, None)
        assert reader.registry == [(name, tuple(shape)) for name, shape in files.SHAPES.items()]
        found = list(reader)
    for (name, tensor), entry in zip(found, state["registry"], strict=True):
        assert (name, list(tensor.shape)) == (entry["name"], entry["shape"])
        stored = state["parameters"][entry["offset"] : entry["offset"] + entry["size"]]
        assert tensor.tobytes() == stored.tobytes()


def test_tensors_that_cross_chunks(tmp_path):
    state = larger_state(chunks=2.5)
    checkpoint.save(tmp_path / "file", state)
    with checkpoint.WeightsReader(tmp_path / "file") as reader:
        flat = np.concatenate([tensor.ravel() for _, tensor in reader])
    assert flat.tobytes() == state["parameters"].tobytes()


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8"])
def test_save_weights(tmp_path, weight_format):
    arrays = files.small_weights(weight_format)
    tensors = {name: array for name, array in arrays if not name.endswith(".exponents")}
    for name, array in arrays:
        if name.endswith(".exponents"):
            tensors[name[:-10]] = (tensors[name[:-10]], array)
    one_by_one = ((name, tensor) for name, tensor in tensors.items())
    checkpoint.save_weights(tmp_path / "file", files.CONFIG, one_by_one, weight_format, extra=files.EXTRA)
    header, found, extra = files.read_archive((tmp_path / "file").read_bytes())
    assert (header["kind"], header["state"]["format"], extra) == ("inference", weight_format, files.EXTRA)
    assert list(found) == [name for name, _ in arrays]
    for name, array in arrays:
        assert found[name].tobytes() == array.tobytes()
        assert found[name].shape == array.shape
    with checkpoint.WeightsReader(tmp_path / "file") as reader:
        assert reader.extra == files.EXTRA
        assert [name for name, _ in reader] == list(files.SHAPES)
    told = checkpoint.inspect(tmp_path / "file", verify=True)
    assert (told["kind"], told["weight_format"], told["step"], told["rng"]) == ("inference", weight_format, None, None)


def test_some_matrices_may_stay_float32(tmp_path):
    full = dict(files.small_weights("float32"))
    packed = dict(files.small_weights("bfloat16"))
    names = {"embed.weight", "lm_head.weight"}
    tensors = [(name, packed[name] if name in names else full[name]) for name in files.SHAPES]
    checkpoint.save_weights(tmp_path / "file", files.CONFIG, tensors, "bfloat16", packed=names)
    with checkpoint.WeightsReader(tmp_path / "file") as reader:
        assert {name for name, tensor in reader if tensor.dtype == np.uint16} == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[:-1], "array lm_head.weight is missing"),
        (lambda tensors: tensors[1:], "'layers.0.input_layernorm.weight' where 'embed.weight' belongs"),
        (lambda tensors: [*tensors, ("more", tensors[0][1])], "'more' where None belongs"),
        (lambda tensors: [("embed.weight", tensors[0][1].T), *tensors[1:]], "embed.weight must be <f4 of shape"),
        (lambda tensors: [("embed.weight", tensors[0][1].astype(">f4")), *tensors[1:]], "embed.weight must be <f4"),
        (lambda tensors: [("embed.weight", (tensors[0][1],) * 2), *tensors[1:]], "must be <f4"),
    ],
)
def test_weights_that_do_not_fit_are_not_saved(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        checkpoint.save_weights(tmp_path / "file", files.CONFIG, change(files.small_weights("float32")))
    assert not list(tmp_path.iterdir())


def test_wrong_options_for_weights(tmp_path):
    tensors = files.small_weights("float32")
    with pytest.raises(ValueError, match="format must be one of float32, bfloat16, int8, got 'int4'"):
        checkpoint.save_weights(tmp_path / "file", files.CONFIG, tensors, "int4")
    with pytest.raises(ValueError, match=r"packed must name matrices of the model, got norm_f.weight"):
        checkpoint.save_weights(tmp_path / "file", files.CONFIG, tensors, "int8", packed=["norm_f.weight"])
    with pytest.raises(CheckpointError, match="config lacks layers"):
        checkpoint.save_weights(tmp_path / "file", {}, tensors)


def test_weights_alone_are_no_training_state(tmp_path):
    checkpoint.save_weights(tmp_path / "file", files.CONFIG, files.small_weights("float32"))
    with pytest.raises(CheckpointError, match=r"weights of a model alone; exp_avg, .* are missing"):
        checkpoint.load(tmp_path / "file")


def test_weights_are_read_once(tmp_path):
    checkpoint.save(tmp_path / "file", files.small_state())
    with checkpoint.WeightsReader(tmp_path / "file") as reader:
        next(iter(reader))
        with pytest.raises(ValueError, match="open it again"):
            next(iter(reader))


def test_damaged_moments_are_found_when_only_weights_are_read(tmp_path):
    checkpoint.save(tmp_path / "file", files.small_state())
    data = bytearray((tmp_path / "file").read_bytes())
    data[-100] ^= 1
    (tmp_path / "file").write_bytes(data)
    with checkpoint.WeightsReader(tmp_path / "file") as reader, pytest.raises(CheckpointError, match="digest"):
        list(reader)
