"""Files broken at random: a short search in every run, a long one with ``make fuzz``."""

import os

import checkpoint_files as files
import fuzz_checkpoint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mojolearn import checkpoint
from mojolearn.checkpoint import _json
from mojolearn.errors import CheckpointError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda values: st.lists(values) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values),
    max_leaves=20,
)  # fmt: skip


def test_broken_files_are_refused(tmp_path):
    tried, read = fuzz_checkpoint.fuzz(tmp_path, 5.0, seed=0)
    assert tried > 20
    assert read < tried / 2


@pytest.mark.fuzz
def test_broken_files_are_refused_for_long(tmp_path):
    seconds = float(os.environ.get("MOJOLEARN_FUZZ_SECONDS", "600"))
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    fuzz_checkpoint.fuzz(tmp_path, seconds, seed)


@settings(max_examples=60, deadline=None)
@given(value=JSON_VALUES, key=st.sampled_from(sorted(set(files.small_state()) - set(files.ARRAYS))))
@pytest.mark.parametrize("make", [files.training_archive, files.stream_file, files.json_file])
def test_any_value_of_any_key_is_refused_or_kept(tmp_path_factory, make, value, key):
    state = files.small_state()
    state[key] = value
    path = tmp_path_factory.getbasetemp() / "any value"
    path.write_bytes(make(state))
    try:
        found, _, _ = checkpoint.load(path)
    except CheckpointError:
        return
    assert found[key] == value


@settings(max_examples=60, deadline=None)
@given(extra=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON_VALUES))
def test_any_extra_comes_back(tmp_path_factory, extra):
    path = tmp_path_factory.getbasetemp() / "any extra"
    checkpoint.save(path, files.small_state(), extra=extra)
    found = checkpoint.load(path)[1]
    assert found == extra
    assert _json.canonical(found) == _json.canonical(extra)


@settings(max_examples=200, deadline=None)
@given(value=JSON_VALUES)
def test_structure_of_json_text(value):
    def depth(value):
        if not isinstance(value, (dict, list)):
            return 0
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)

    def marks(value):
        if not isinstance(value, (dict, list)):
            return 0
        inner = value.values() if isinstance(value, dict) else value
        return 2 + max(0, len(value) - 1) + sum(map(marks, inner))

    found = _json.structure(_json.canonical(value))
    assert _json.nesting(found) == depth(value)
    assert len(found) == marks(value)
    assert _json.parse(_json.canonical(value), "text", 10**6) == value
