"""Whatever is wrong with a file is a CheckpointError, found in bounded memory."""

import functools
import json
import os
import random
import struct
import sys
import tracemalloc

import checkpoint_files as files
import numpy as np
import pytest
import zstandard

from mojolearn import checkpoint
from mojolearn.errors import CheckpointError

MAKERS = {
    "archive": functools.partial(files.training_archive, chunk_elements=100, extra=files.EXTRA),
    "v2": files.stream_file,
    "json": files.json_file,
}


@pytest.fixture(scope="module", params=MAKERS)
def good(request):
    """A good file of each layout."""
    return MAKERS[request.param](files.small_state())


def read_weights(path):
    with checkpoint.WeightsReader(path) as reader:
        return list(reader)


def check_refused(path, data, match=".", readers=(checkpoint.load,)):
    path.unlink(missing_ok=True)  # some file systems force a file that is written over to the disk
    path.write_bytes(data)
    for read in readers:
        with pytest.raises(CheckpointError, match=match) as caught:
            read(path)
        assert str(path) in str(caught.value)


ALL_READERS = (checkpoint.load, read_weights, functools.partial(checkpoint.inspect, verify=True))


# Chance damage


def test_every_truncation_is_refused(tmp_path, good):
    # A line feed at the end of the JSON layout may be missing.
    for length in range(len(good) - good.endswith(b"\n")):
        check_refused(tmp_path / "file", good[:length])


def test_truncations_are_refused_by_every_reader(tmp_path, good):
    for length in range(0, len(good) - 1, 97):
        check_refused(tmp_path / "file", good[:length], readers=ALL_READERS)


@pytest.mark.parametrize("more", [b"\0", b"\n", b" ", b"}", b"more", b"\0" * 4096])
def test_appended_bytes_are_refused(tmp_path, good, more):
    check_refused(tmp_path / "file", good + more, readers=ALL_READERS)


def test_a_flipped_bit_in_any_byte_is_refused(tmp_path, good):
    draw = random.Random(3)
    for position in range(len(good)):
        data = bytearray(good)
        data[position] ^= 1 << draw.randrange(8)
        check_refused(tmp_path / "file", data)


def test_any_flipped_bit_of_a_sample_is_refused_by_every_reader(tmp_path, good):
    for position in range(0, len(good), 61):
        for bit in range(8):
            data = bytearray(good)
            data[position] ^= 1 << bit
            check_refused(tmp_path / "file", data, readers=ALL_READERS)


@pytest.mark.long
def test_every_flipped_bit_is_refused(tmp_path, good):
    for position in range(len(good)):
        for bit in range(8):
            data = bytearray(good)
            data[position] ^= 1 << bit
            check_refused(tmp_path / "file", data)


def test_flipped_bits_in_a_real_checkpoint_are_refused(golden, tmp_path):
    state, _, _ = checkpoint.load(golden / "train_hybrid.samba2")
    checkpoint.save(tmp_path / "good", state)
    draw = random.Random(4)
    for path in (golden / "train_hybrid.samba2", tmp_path / "good"):
        data = bytearray(path.read_bytes())
        for part in range(100):
            position = draw.randrange(len(data) * part // 100, len(data) * (part + 1) // 100)
            bit = 1 << draw.randrange(8)
            data[position] ^= bit
            check_refused(tmp_path / "file", data)
            data[position] ^= bit


def test_swapped_and_missing_blocks_are_refused(tmp_path, good):
    size = len(good) // 8
    blocks = [good[start : start + size] for start in range(0, len(good), size)]
    for i in range(len(blocks) - 1):
        check_refused(tmp_path / "file", b"".join([*blocks[:i], *blocks[i + 1 :]]))
        swapped = list(blocks)
        swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
        check_refused(tmp_path / "file", b"".join(swapped))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\0", "neither an archive nor JSON"),
        (b"PK\x03\x04 a zip file", "neither an archive nor JSON"),
        (b"\x80\x04\x95 a pickle", "neither an archive nor JSON"),
        (b"{", "closing bracket"),
        (b"{}", "keys payload"),
        (b"[]", "neither an archive nor JSON"),
        (b'{"a":1,}', "not valid JSON"),
        (b"MOJOLEARN-ARCHIVE", "ends within the magic number"),
        (b"MOJOLEARN-ARCHIVE\x02\r\n" + bytes(100), "version 2 is not known"),
        (b"MOJOLEARN-ARCHIVE\x01\n" + bytes(100), "not known, or the magic number is damaged"),
        (files.ARCHIVE_MAGIC, "ends within the length of the header"),
        (files.STREAM_MAGIC, "ends within the length of the header"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, data, message):
    check_refused(tmp_path / "file", data, message, ALL_READERS)


def test_folders_and_missing_files_are_the_systems_errors(tmp_path):
    for read in ALL_READERS:
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")
        with pytest.raises(IsADirectoryError):
            read(tmp_path)


# Files made to deceive: all digests are right, one thing is wrong

STATE_CHANGES = {
    "schema": (lambda state: state.update(schema="other"), "schema is 'other'"),
    "profile": (lambda state: state.update(profile=None), "profile is None"),
    "experiment": (lambda state: state.update(experiment_profile="new"), "experiment_profile is 'new'"),
    "mode": (lambda state: state.update(numeric_mode="exact"), "numeric_mode is 'exact'"),
    "mode list": (lambda state: state.update(numeric_mode=["fast"]), "numeric_mode"),
    "no orders": (lambda state: state.update(numeric_mode="deterministic"), "lacks deterministic_profile"),
    "other orders": (
        lambda state: state.update(
            numeric_mode="deterministic", deterministic_profile={"name": "mojolearn.deterministic.v0", "n_shards": 1}
        ),
        "profile 'mojolearn.deterministic.v0', which this library does not have",
    ),
    "no shards": (
        lambda state: state.update(
            numeric_mode="deterministic", deterministic_profile={"name": "mojolearn.deterministic.v1", "n_shards": 0}
        ),
        "n_shards is 0",
    ),
    "orders of no use": (lambda state: state.update(deterministic_profile={}), "has a deterministic_profile"),
    "t": (lambda state: state.update(t=-1), "t is -1"),
    "t float": (lambda state: state.update(t=17.0), "t is 17.0"),
    "t bool": (lambda state: state.update(t=True), "t is True"),
    "t huge": (lambda state: state.update(t=2**63), "t is 9223372036854775808"),
    "rng list": (lambda state: state.update(rng=[0, 0]), "rng is not an object"),
    "rng seed": (lambda state: state["rng"].update(seed=2**64), "rng.seed"),
    "rng counter": (lambda state: state["rng"].update(counter=2**32 + 1), "rng.counter"),
    "rng incomplete": (lambda state: state["rng"].pop("counter"), "rng lacks counter"),
    "optimizer": (lambda state: state.update(optimizer=None), "optimizer is not an object"),
    "optimizer kind": (lambda state: state["optimizer"].update(kind="sgd"), "optimizer.kind is 'sgd'"),
    "optimizer text": (lambda state: state["optimizer"].update(lr="0.1"), "optimizer.lr is '0.1'"),
    "optimizer incomplete": (lambda state: state["optimizer"].pop("eps"), "optimizer lacks eps"),
    "accumulation": (lambda state: state["optimizer"].update(accumulation_steps=0), "accumulation_steps is 0"),
    "schedule": (lambda state: state["schedule"].update(kind="step"), "schedule.kind is 'step'"),
    "schedule steps": (lambda state: state["schedule"].update(warmup_steps=1.5), "warmup_steps is 1.5"),
    "config": (lambda state: state.update(config=[]), "config is not an object"),
    "config incomplete": (lambda state: state["config"].pop("vocab"), "config lacks vocab"),
    "config more": (lambda state: state["config"].update(window=7), "not how a configuration is written"),
    "config float": (lambda state: state["config"].update(vocab=5.0), "config: vocab"),
    "config eps": (lambda state: state["config"].update(norm_eps=1e-5), "not how a configuration is written"),
    "config invalid": (lambda state: state["config"].update(layers=["rnn"]), "config: layers"),
    "config layers": (lambda state: state["config"].update(layers="attention"), "config: layers"),
    "config heads": (lambda state: state["config"].update(n_heads=3), "config: n_heads"),
    "another config": (lambda state: state["config"].update(vocab=6), r"registry\[0\] is"),
    "many layers": (lambda state: state["config"].update(layers=["attention"] * 13), "13 layers, too many"),
    "registry": (lambda state: state.update(registry={}), "registry is not a list"),
    "registry short": (lambda state: state["registry"].pop(), "registry has 11 entries, but the config makes 12"),
    "registry name": (lambda state: state["registry"][3].update(name="q"), r"registry\[3\] is"),
    "registry shape": (lambda state: state["registry"][3].update(shape=[2, 8]), r"registry\[3\] is"),
    "registry offset": (lambda state: state["registry"][3].update(offset=0), r"registry\[3\] is"),
    "registry entry": (lambda state: state["registry"].insert(3, []), "registry has 13 entries"),
}


@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("change", STATE_CHANGES)
def test_states_that_do_not_fit_together_are_refused(tmp_path, layout, change):
    state = files.small_state()
    alter, message = STATE_CHANGES[change]
    alter(state)
    check_refused(tmp_path / "file", MAKERS[layout](state), message, ALL_READERS)


@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("key", sorted(set(files.small_state()) - {"experiment_profile", *files.ARRAYS}))
def test_missing_keys_are_named(tmp_path, layout, key):
    state = files.small_state()
    del state[key]
    check_refused(tmp_path / "file", MAKERS[layout](state), f"the state lacks {key}")


@pytest.mark.parametrize("layout", MAKERS)
def test_arrays_of_another_size_are_refused(tmp_path, layout):
    for name in files.ARRAYS:
        state = files.small_state()
        state[name] = state[name][:-1]
        check_refused(tmp_path / "file", MAKERS[layout](state), name, ALL_READERS)
        state[name] = np.concatenate([state[name]] * 2)
        check_refused(tmp_path / "file", MAKERS[layout](state), name, ALL_READERS)


def test_archives_have_no_unknown_keys(tmp_path):
    check_refused(tmp_path / "file", files.training_archive({**files.small_state(), "note": 1}), "know: note")


HEADER_CHANGES = {
    "key": (lambda header: {**header, "more": 1}, "must be an object with the keys"),
    "missing": (lambda header: {key: header[key] for key in header if key != "arrays"}, "must be an object"),
    "list": (lambda header: [header], "must be an object"),
    "schema": (lambda header: {**header, "schema": "x"}, "schema is 'x'"),
    "state": (lambda header: {**header, "state": []}, "state must be an object"),
    "arrays": (lambda header: {**header, "arrays": {}}, "arrays a list"),
    "no arrays": (lambda header: {**header, "arrays": []}, "end mark is missing|describes a file of"),
    "order": (lambda header: {**header, "arrays": header["arrays"][::-1]}, "length|array 0 is buf"),
    "empty": (lambda header: b"", "length is given as 0 bytes"),
    "text": (lambda header: b"header", "not valid JSON"),
    "two": (lambda header: files.canonical(header) * 2, "not valid JSON"),
    "latin": (lambda header: b'"\xe9"', "not ASCII"),
    "utf-16": (lambda header: json.dumps(header).encode("utf-16"), "not ASCII"),
    "duplicate": (
        lambda header: files.canonical(header)[:-1] + b',"state":{}}',
        "has the key 'state' twice in one object",
    ),
    "nan": (lambda header: files.canonical(header).replace(b'"t":17', b'"t":NaN'), "NaN, which is not JSON"),
    "infinity": (lambda header: files.canonical(header).replace(b'"t":17', b'"t":-Infinity'), "-Infinity"),
    "overflow": (lambda header: files.canonical(header).replace(b'"t":17', b'"t":1e999'), "1e999, which is too large"),
    "digits": (
        lambda header: files.canonical(header).replace(b'"t":17', b'"t":' + b"7" * 5000),
        "an integer of 5000 digits",
    ),
    "deep": (
        lambda header: files.canonical(header).replace(b'"t":17', b'"t":' + b"[" * 3000 + b"]" * 3000),
        "levels deep, more than 64",
    ),
    "deep in strings": (
        lambda header: files.canonical(header).replace(b'"t":17', b'"t":"' + b'[\\"{' * 100 + b'\\\\"'),
        "t is ",
    ),
    "open": (lambda header: b"[" * 100000, "levels deep"),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["archive", "v2"])
@pytest.mark.parametrize("change", HEADER_CHANGES)
def test_headers_made_to_deceive_are_refused(tmp_path, layout, change):
    alter, message = HEADER_CHANGES[change]
    check_refused(tmp_path / "file", MAKERS[layout](files.small_state(), change=alter), message, ALL_READERS)


def alter_entry(index, **values):
    def change(header):
        header["arrays"][index].update(values)
        return header

    return change


@pytest.mark.parametrize("layout", ["archive", "v2"])
@pytest.mark.parametrize(
    "values",
    [
        {"name": "other"},
        {"name": None},
        {"dtype": "<f8"},
        {"dtype": "<i4"},
        {"dtype": "O"},
        {"dtype": ["<f4"]},
        {"shape": []},
        {"shape": 3},
        {"shape": [-1]},
        {"shape": [1.0]},
        {"shape": [True]},
        {"shape": [2**62, 4], "nbytes": 0},
        {"shape": [1, 1, 1]},
        {"nbytes": 0},
        {"nbytes": -4},
        {"nbytes": "7"},
        {"nbytes": 2**64},
        {"shape": [2**40], "nbytes": 2**42},
        {"more": 1},
    ],
    ids=repr,
)
def test_descriptions_of_arrays_that_are_wrong_are_refused(tmp_path, layout, values):
    for index in range(4):
        if values != {"dtype": ["<f4", "<i4"][index == 3]}:
            data = MAKERS[layout](files.small_state(), change=alter_entry(index, **values))
            check_refused(tmp_path / "file", data, readers=ALL_READERS)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 64, "A" * 64, 64 * "g", None, 7])
def test_stream_digests_that_are_wrong_are_refused(tmp_path, digest):
    data = files.stream_file(files.small_state(), alter_entry(1, sha256=digest))
    check_refused(tmp_path / "file", data, readers=ALL_READERS)


@pytest.mark.parametrize("chunk_elements", [0, -1, 1.5, True, 262145, 2**40, None])
def test_chunk_sizes_that_are_wrong_are_refused(tmp_path, chunk_elements):
    data = files.training_archive(
        files.small_state(), change=lambda header: {**header, "chunk_elements": chunk_elements}
    )
    check_refused(tmp_path / "file", data, "chunk_elements", ALL_READERS)


@pytest.mark.parametrize("extra", [[], {}, {"nbytes": 0}, {"nbytes": -1}, {"nbytes": 2**40}, {"nbytes": 1.0}, 7, False])
def test_descriptions_of_extra_that_are_wrong_are_refused(tmp_path, extra):
    data = files.training_archive(files.small_state(), change=lambda header: {**header, "extra": extra})
    check_refused(tmp_path / "file", data, readers=ALL_READERS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "extra is not a JSON object"),
        (b"7", "extra is not a JSON object"),
        (b'{"a":1,"a":2}', "extra has the key 'a' twice"),
        (b'{"a":NaN}', "extra holds NaN"),
        (b'{"a":', "extra is not valid JSON"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "65 levels deep"),
        (b'{"a":[' + b"0," * 5000000 + b"0]}", "brackets and commas"),
        (b'"' + b"\\" * 1000 + b'"', "not a JSON object"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_extra_that_is_wrong_is_refused(tmp_path, text, message):
    state = files.small_state()
    arrays = [(name, state[name]) for name in files.ARRAYS]
    header = files.archive_header("training", files.without_arrays(state), arrays)
    header["extra"] = {"nbytes": len(text)}
    sections = [files.section(text, 1), *(files.section(array.tobytes(), 4) for _, array in arrays)]
    check_refused(tmp_path / "file", files.archive_file(header, sections), message)


@pytest.mark.parametrize(
    "text",
    [
        lambda text: text.replace(b"1e-08", b"1E-08"),
        lambda text: text.replace(b"1e-08", b"0.00000001"),
        lambda text: text.replace(b'"t":17', b'"t":-17'),
        lambda text: text.replace(b'"adamw"', b'"adam\\u0077"'),
        lambda text: text.replace(b'{"payload"', b' {"payload"'),
        lambda text: text + b"\n",
        lambda text: text[:-1] + b"\r\n",
    ],
)
def test_json_text_in_a_form_that_its_digest_does_not_see_is_refused(tmp_path, text):
    data = files.json_file(files.small_state())
    assert text(data) != data
    check_refused(tmp_path / "file", text(data))


@pytest.mark.parametrize(
    "change",
    [
        {"hex": "0"},
        {"hex": "zz"},
        {"hex": "00 00 00 "},
        {"hex": None},
        {"dtype": "<i4"},
        {"shape": [1]},
        {"shape": None},
        {"more": 1},
    ],
    ids=repr,
)
def test_json_arrays_that_are_wrong_are_refused(tmp_path, change):
    state = files.small_state()
    payload = dict(state)
    for name, dtype in files.ARRAYS.items():
        payload[name] = {"dtype": dtype, "shape": list(state[name].shape), "hex": state[name].tobytes().hex()}
    if isinstance(change.get("hex"), str):
        change = {"hex": (change["hex"] * 10000)[: len(payload["exp_avg"]["hex"]) - (change["hex"] == "0")]}
    payload["exp_avg"].update(change)
    check_refused(tmp_path / "file", files.json_file(state, payload), "exp_avg")


# Frames


def reframed(alter):
    """An archive whose frames are made by `alter`, the rest being consistent."""
    return files.training_archive(files.small_state(), make_frame=alter)


FRAMES = {
    "without checksum": lambda plane: zstandard.ZstdCompressor(write_checksum=False).compress(plane),
    "without size": lambda plane: zstandard.ZstdCompressor(
        write_checksum=True, write_content_size=False
    ).compress(plane),
    "of another size": lambda plane: files.frame(plane[:-1]),
    "larger": lambda plane: files.frame(plane + b"\0"),
    "empty": lambda plane: files.frame(b""),
    "two": lambda plane: files.frame(plane) + files.frame(b""),
    "and more": lambda plane: files.frame(plane) + b"more",
    "skippable": lambda plane: b"\x50\x2a\x4d\x18" + struct.pack("<I", len(plane)) + plane,
    "random": lambda plane: b"\x28\xb5\x2f\xfd" + bytes(range(60)),
    "nothing": lambda plane: b"",
    "short": lambda plane: files.frame(plane)[:-1],
    "expanding": lambda plane: files.frame(bytes(64 << 20)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_that_are_wrong_are_refused(tmp_path, kind):
    check_refused(tmp_path / "file", reframed(FRAMES[kind]), "array parameters: a frame")


def test_a_frame_of_other_content_is_refused(tmp_path):
    # The file's own digests are right, the section's content digest is not.
    other = files.section(bytes(4 * 136), 4)
    state = files.small_state()
    arrays = [(name, state[name]) for name in files.ARRAYS]
    header = files.archive_header("training", files.without_arrays(state), arrays)
    sections = [files.section(array.tobytes(), 4) for _, array in arrays]
    assert state["exp_avg"].nbytes == 4 * 136
    sections[1] = other[:-32] + sections[1][-32:]
    check_refused(tmp_path / "file", files.archive_file(header, sections), "exp_avg does not match its digest")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "file"
    data = bytearray(files.training_archive(files.small_state(), chunk_elements=50))
    path.write_bytes(data)
    with checkpoint.WeightsReader(path) as reader:
        start = data.index(b"\x28\xb5\x2f\xfd") - 16  # the lengths of the first chunk's frames
        data[start] += 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            list(reader)
    data[start] -= 1
    path.write_bytes(data)
    with checkpoint.WeightsReader(path) as reader:
        os.truncate(path, start + 20)
        with pytest.raises(CheckpointError, match="ends within array parameters"):
            list(reader)


def test_the_end_mark_must_tell_the_size(tmp_path):
    good = files.training_archive(files.small_state())
    check_refused(tmp_path / "file", good[:-40] + struct.pack("<Q", len(good) + 1) + good[-32:], "the end mark says")
    check_refused(tmp_path / "file", good[:-56] + b"X" + good[-55:], "the end mark is missing")


# Files of weights

WEIGHTS_CHANGES = {
    "format": (lambda header: header["state"].update(format="int4"), "format is 'int4'"),
    "other format": (lambda header: header["state"].update(format="int8"), "array 0 is embed.weight <u2"),
    "float format": (lambda header: header["state"].update(format="float32"), "array 0 is embed.weight <u2"),
    "schema": (lambda header: header["state"].update(schema="x"), "schema is 'x'"),
    "more": (lambda header: header["state"].update(t=1), "other keys"),
    "config": (lambda header: header["state"]["config"].update(vocab=6), "array 0 is embed.weight"),
    "name": (lambda header: header["arrays"][0].update(name="embed"), "array 0 is embed"),
    "flat": (lambda header: header["arrays"][0].update(shape=[20]), "array 0 is embed.weight"),
    "kind": (lambda header: header.update(kind="training"), "the state lacks"),
    "unknown kind": (lambda header: header.update(kind="x"), "kind is 'x'"),
}


@pytest.mark.parametrize("change", WEIGHTS_CHANGES)
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    alter, message = WEIGHTS_CHANGES[change]

    def altered(header):
        alter(header)
        return header

    data = files.weights_archive("bfloat16", files.small_weights("bfloat16"), altered)
    check_refused(tmp_path / "file", data, message, (read_weights, checkpoint.inspect))


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8"])
def test_missing_and_additional_tensors_are_refused(tmp_path, weight_format):
    arrays = files.small_weights(weight_format)
    for changed in (arrays[:-1], arrays[1:], [*arrays, ("more", arrays[0][1])], [arrays[1], arrays[0], *arrays[2:]]):
        data = files.weights_archive(weight_format, changed)
        check_refused(tmp_path / "file", data, "array", (read_weights, checkpoint.inspect))


# Memory


@pytest.mark.parametrize("layout", ["archive", "v2"])
def test_huge_sizes_take_no_memory(tmp_path, layout):
    """A header may claim a model of terabytes that fits together; the file is too short for it."""
    state = files.small_state()
    config = {**files.CONFIG, "vocab": 2**31 - 1, "d_model": 4096, "n_heads": 2, "n_kv_heads": 2, "head_dim": 2048}
    shapes = {
        name: [{5: config["vocab"], 4: 4096, 2: 4096}.get(size, size) for size in shape]
        for name, shape in files.SHAPES.items()
    }
    offset = 0
    state.update(config=config, registry=[])
    for name, shape in shapes.items():
        size = int(np.prod([1, *shape]))
        state["registry"].append({"name": name, "shape": shape, "offset": offset, "size": size})
        offset += size

    def claim(header):
        for entry in header["arrays"][:3]:
            entry.update(shape=[offset], nbytes=4 * offset)
        return header

    data = MAKERS[layout](state, change=claim)
    tracemalloc.start()
    try:
        check_refused(tmp_path / "file", data, r"bytes, but (the file|it) has", ALL_READERS)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 2**20 + 1, 2**40, 2**64 - 1])
@pytest.mark.parametrize("magic", [files.ARCHIVE_MAGIC, files.STREAM_MAGIC])
def test_lengths_of_headers_take_no_memory(tmp_path, magic, length):
    tracemalloc.start()
    try:
        check_refused(tmp_path / "file", magic + struct.pack("<Q", length) + bytes(100), "header", ALL_READERS)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layout", MAKERS)
def test_many_small_values_take_no_memory(tmp_path, layout):
    state = {**files.small_state(), "experiment_profile": [[] for _ in range(600000)]}
    data = MAKERS[layout](state)
    del state
    tracemalloc.start()
    try:
        check_refused(tmp_path / "file", data, "brackets and commas|length is given")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_large_json_file_is_refused_unread(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        file.write(b"{")
        file.truncate(257 << 20)
    with pytest.raises(CheckpointError, match="too many for a JSON checkpoint"):
        checkpoint.load(tmp_path / "file")


def test_nesting_is_refused_whatever_the_recursion_limit(tmp_path):
    data = files.stream_file(files.small_state(), lambda header: b"[" * 100000 + b"]" * 100000)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        check_refused(tmp_path / "file", data, "100000 levels deep")
    finally:
        sys.setrecursionlimit(before)
