"""TokenDataset: which tokens come in which order, positions, and what is refused."""

import hashlib
import json

import numpy as np
import pytest

from mojolearn.data import TokenDataset, find_files, shuffled_index


def scalar_shuffle(position, size, seed, epoch):
    """The documented shuffle in plain Python integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    half = max(1, ((size - 1).bit_length() + 1) // 2)
    value = position
    while True:
        left, right = value >> half, value & ((1 << half) - 1)
        for turn in range(6):
            key = mix(
                (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + turn * 0x8CB92BA72F3D8DD7 + 1) & mask
            )
            left, right = right, left ^ (mix(right ^ key) & ((1 << half) - 1))
        value = left << half | right
        if value < size:
            return value


@pytest.fixture
def text(tmp_path):
    """A file of 2,000 bytes in which every four bytes occur once."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"%c%c" % (48 + i // 40, 80 + i % 40) for i in range(1000)))
    return path


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (2**64 - 1, 3)])
def test_the_shuffle_is_a_permutation_and_equals_a_scalar_model(size, seed, epoch):
    order = shuffled_index(range(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == [scalar_shuffle(i, size, seed, epoch) for i in range(size)]


def test_the_shuffle_reaches_beyond_32_bits():
    size = 2**40 + 3
    assert shuffled_index([0, size - 1], size, 5).tolist() == [
        scalar_shuffle(0, size, 5, 0),
        scalar_shuffle(size - 1, size, 5, 0),
    ]


def test_the_order_depends_on_seed_and_epoch():
    orders = [shuffled_index(range(500), 500, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    fixed_points = sum(i == value for i, value in enumerate(orders[0]))
    assert fixed_points < 10


def test_every_window_comes_once_an_epoch_and_targets_are_inputs_moved_by_one(text):
    content = text.read_bytes()
    data = TokenDataset(text, batch_size=4, seq_len=16, valid_fraction=0.0)
    assert data.n_windows == (2000 - 1) // 16 == 124
    assert len(data) == 31
    rows = []
    for _ in range(31):
        np.testing.assert_array_equal(data.peek(), data.peek())
        ahead = data.peek()
        x, y = next(data)
        np.testing.assert_array_equal(ahead, (x, y))
        assert x.shape == y.shape == (4, 16)
        assert x.dtype == y.dtype == np.int32
        assert x.flags.c_contiguous and y.flags.c_contiguous
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
        rows += [bytes(row.tolist()) + bytes([last]) for row, last in zip(x, y[:, -1].tolist(), strict=True)]
    assert sorted(rows) == sorted(content[i * 16 : i * 16 + 17] for i in range(124))
    assert rows != [content[i * 16 : i * 16 + 17] for i in range(124)]
    assert (data.epoch, data.window) == (0, 124)


def test_a_batch_across_the_end_of_an_epoch_leaves_no_window_out(text):
    data = TokenDataset(text, batch_size=5, seq_len=16, valid_fraction=0.0)
    starts = []
    for _ in range(124):
        x, _ = data.next_batch()
        starts += [bytes(row.tolist()) for row in x]
    for epoch in range(5):
        assert len(set(starts[epoch * 124 : (epoch + 1) * 124])) == 124
    assert starts[:124] != starts[124:248]


def test_the_splits_share_no_token_and_together_hold_all(text):
    content = text.read_bytes()
    train = TokenDataset(text, batch_size=2, seq_len=10, valid_fraction=0.25)
    valid = TokenDataset(text, batch_size=2, seq_len=10, valid_fraction=0.25, split="valid", seed=9)
    assert bytes(train.tokens(0, train.n_tokens).tolist()) == content[:1500]
    assert bytes(valid.tokens(0, valid.n_tokens).tolist()) == content[1500:]


def test_validation_is_one_pass_in_order_with_a_smaller_last_batch(text):
    content = text.read_bytes()
    valid = TokenDataset(text, batch_size=4, seq_len=16, split="valid")
    assert valid.n_windows == 199 // 16 == 12
    valid = TokenDataset(text, batch_size=5, seq_len=16, split="valid")
    for _ in range(2):
        batches = list(valid)
        assert [len(x) for x, _ in batches] == [5, 5, 2]
        inputs = b"".join(bytes(x.ravel().tolist()) for x, _ in batches)
        assert inputs == content[1800 : 1800 + 192]
    assert len(valid) == 3


def test_files_are_joined_across_borders_in_an_order_of_their_own(tmp_path):
    parts = [bytes([65 + i]) * length for i, length in enumerate([5, 0, 1, 700, 33])]
    for i, part in enumerate(parts):
        (tmp_path / f"{i}.txt").write_bytes(part)
    data = TokenDataset(tmp_path, batch_size=1, seq_len=8, valid_fraction=0.0)
    order = shuffled_index(range(5), 5, 0x6D6F6A6F).tolist()
    assert [path.name for path in data.files] == [f"{i}.txt" for i in order]
    joined = b"".join(parts[i] for i in order)
    assert bytes(data.tokens(0, data.n_tokens).tolist()) == joined
    for start in range(0, len(joined), 37):
        assert bytes(data.tokens(start, min(start + 90, 739)).tolist()) == joined[start : start + 90]


def test_more_files_than_stay_open(tmp_path):
    for i in range(600):
        (tmp_path / f"{i:03}.txt").write_bytes(b"%03d" % i)
    data = TokenDataset(tmp_path, batch_size=1, seq_len=8, valid_fraction=0.0)
    joined = bytes(data.tokens(0, 1800).tolist())
    assert sorted(joined[i : i + 3] for i in range(0, 1800, 3)) == [b"%03d" % i for i in range(600)]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", ">u2"])
def test_npy_token_files(tmp_path, dtype):
    tokens = np.arange(100, 250, dtype=dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    data = TokenDataset(tmp_path / "tokens.npy", batch_size=1, seq_len=8, valid_fraction=0.0)
    np.testing.assert_array_equal(data.tokens(0, 150), np.arange(100, 250))
    assert data.max_id == (255 if dtype == "uint8" else 249)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_token_files(tmp_path, dtype):
    path = tmp_path / "tokens.bin"
    np.arange(40_000, 40_300, dtype="<" + np.dtype(dtype).str[1:]).tofile(path)
    data = TokenDataset(path, batch_size=1, seq_len=8, valid_fraction=0.0, dtype=dtype)
    np.testing.assert_array_equal(data.tokens(0, 300), np.arange(40_000, 40_300))
    assert data.max_id == 40_299


def test_the_position_travels_in_json_to_another_object_mid_epoch(text):
    first = TokenDataset(text, batch_size=7, seq_len=16, seed=3)
    for _ in range(20):
        next(first)
    assert first.epoch == 1
    state = json.loads(json.dumps(first.state_dict()))
    second = TokenDataset([str(text)], batch_size=7, seq_len=16, seed=3)
    second.load_state_dict(state)
    for _ in range(20):
        for one, other in zip(next(first), next(second), strict=True):
            np.testing.assert_array_equal(one, other)
    assert first.state_dict() == second.state_dict()


def test_the_digest_is_that_of_type_length_and_content(text, tmp_path):
    content = text.read_bytes()
    data = TokenDataset(text, batch_size=1, seq_len=8)
    assert data.digest == hashlib.sha256(b"|u1 2000\n" + content).hexdigest()
    copy = tmp_path / "other"
    copy.mkdir()
    (copy / "renamed.txt").write_bytes(content)
    assert TokenDataset(copy, batch_size=1, seq_len=8).digest == data.digest
    (copy / "renamed.txt").write_bytes(content[:-1] + b"~")
    assert TokenDataset(copy, batch_size=1, seq_len=8).digest != data.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed must be 3, got 4"),
        ({"split": "valid"}, "split must be 'train'"),
        ({"seq_len": 8}, "seq_len must be 16, got 8"),
        ({"valid_fraction": 0.2}, "valid_fraction must be 0.1, got 0.2"),
        ({"digest": "0" * 64}, "the data differ"),
        ({"schema": "other"}, "schema"),
        ({"window": 10_000}, "window"),
        ({"epoch": -1}, "epoch"),
    ],
)
def test_a_state_of_other_data_or_settings_is_refused(text, change, message):
    data = TokenDataset(text, batch_size=2, seq_len=16, seed=3)
    next(data)
    before = data.state_dict()
    with pytest.raises(ValueError, match=message):
        data.load_state_dict({**before, "epoch": 2, "window": 9, **change})
    assert data.state_dict() == before


def test_a_state_of_another_kind_is_refused(text):
    data = TokenDataset(text, batch_size=2, seq_len=16)
    with pytest.raises(TypeError, match="state must be a dict"):
        data.load_state_dict([1])
    with pytest.raises(ValueError, match="without digest, epoch"):
        data.load_state_dict({"schema": "mojolearn.token-dataset.v1"})


def test_folders_globs_hidden_and_binary_files(tmp_path):
    (tmp_path / "a" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a/c.py", "a/d.txt", "a/__pycache__/c.pyc", ".git/x", "a/.hidden"):
        (tmp_path / name).write_bytes(b"text " * 10)
    (tmp_path / "a" / "image").write_bytes(b"\x89PNG\0\0")
    named, found = find_files(tmp_path)
    assert named == []
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a/c.py", "a/d.txt", "a/image", "b.txt"]

    data = TokenDataset(tmp_path, batch_size=1, seq_len=8)
    assert [path.name for path in data.skipped] == ["image"]
    assert sorted(path.name for path in data.files) == ["b.txt", "c.py", "d.txt"]

    named, found = find_files([tmp_path / "**" / "*.txt", tmp_path / "b.txt"])
    assert sorted(path.name for path in named) == ["b.txt", "d.txt"]
    assert found == []


def test_what_cannot_be_read_is_said(tmp_path, text):
    def refused(error, message, paths, **options):
        with pytest.raises(error, match=message):
            TokenDataset(paths, **{"batch_size": 1, "seq_len": 8, **options})

    binary, short, empty = tmp_path / "binary", tmp_path / "short.txt", tmp_path / "empty"
    binary.write_bytes(b"ab\0cd" * 10)
    short.write_bytes(b"12345678")
    empty.mkdir()
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "bad.npy").write_bytes(b"no array")
    np.save(tmp_path / "float.npy", np.zeros(100))
    np.save(tmp_path / "negative.npy", np.full(100, -1))

    refused(FileNotFoundError, "nowhere.txt", tmp_path / "nowhere.txt")
    refused(FileNotFoundError, r"\*\.rst", str(tmp_path / "*.rst"))
    refused(ValueError, "empty folder", empty)
    refused(ValueError, "binary file .*byte 2 is NUL", binary)
    refused(ValueError, r"8 tokens are fewer than a window of seq_len \+ 1 = 9", short)
    refused(ValueError, "valid split has 200 of 2000 tokens", text, split="valid", seq_len=200)
    refused(ValueError, "batch_size must be at most 18", text, seq_len=100, batch_size=19, valid_fraction=0.05)
    refused(ValueError, "dtype must be one of .* got None", tmp_path / "odd.bin")
    refused(ValueError, "must hold 2-byte tokens .*got 3 bytes", tmp_path / "odd.bin", dtype="uint16")
    refused(ValueError, "cannot be read as a .npy file", tmp_path / "bad.npy")
    refused(ValueError, "float64 of shape", tmp_path / "float.npy")
    with pytest.raises(ValueError, match="token id outside"):
        next(TokenDataset(tmp_path / "negative.npy", batch_size=1, seq_len=8))
    np.save(tmp_path / "good.npy", np.arange(100))
    refused(ValueError, "all token files .* or all text files", [text, tmp_path / "good.npy"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 1.5}, TypeError),
        ({"seq_len": 0}, ValueError),
        ({"seq_len": "8"}, TypeError),
        ({"seed": -1}, ValueError),
        ({"split": "test"}, ValueError),
        ({"valid_fraction": 1.0}, ValueError),
        ({"valid_fraction": float("nan")}, ValueError),
        ({"valid_fraction": "0.1"}, TypeError),
        ({"dtype": "float32"}, ValueError),
        ({"paths": []}, ValueError),
        ({"paths": 3}, TypeError),
        ({"paths": [3]}, TypeError),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(text, options, error):
    with pytest.raises(error, match=next(iter(options))):
        TokenDataset(**{"paths": text, "batch_size": 1, "seq_len": 8, **options})


def test_a_file_that_shrinks_is_noticed(text):
    data = TokenDataset(text, batch_size=1, seq_len=8)
    text.write_bytes(b"short")
    with pytest.raises(OSError, match="no longer what it was"):
        next(data)
