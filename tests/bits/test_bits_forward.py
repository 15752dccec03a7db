"""Promise: prefill, any split of it, steps, ragged rows and any batch give the same bits for the same position."""

import numpy as np
import pytest
from bits_models import CONFIGS, MODES, assert_same_bits, assert_same_states, ids, inference
from hypothesis import given, settings
from hypothesis import strategies as st

models = pytest.mark.parametrize("name", CONFIGS)
modes = pytest.mark.parametrize("mode", MODES)
quick = settings(max_examples=12, deadline=None, derandomize=True)


@models
@modes
@quick
@given(data=st.data())
def test_random_splits(name, mode, data):
    length = data.draw(st.integers(1, 150), "length")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=5), "cuts") | {length})
    model, tokens = inference(name, mode), ids(2, length)
    want = model.forward(tokens)
    whole, split = model.allocate_state(2, length), model.allocate_state(2, length + 3)
    assert_same_bits(model.forward(tokens, whole), want, "carried")
    first, outputs = 0, []
    for cut in cuts:
        if cut == first + 1 and data.draw(st.booleans(), "by step"):
            outputs.append(model.step(tokens[:, first], split)[:, None])
        else:
            outputs.append(model.forward(tokens[:, first:cut], split))
        first = cut
    assert_same_bits(np.concatenate(outputs, 1), want, f"cuts {cuts}")
    assert_same_states(split, whole)


@models
@modes
def test_steps_across_chunks(name, mode):
    model, tokens = inference(name, mode), ids(3, 135)
    want = model.forward(tokens)
    state = model.allocate_state(3, 135)
    for t in range(135):
        assert_same_bits(model.step(tokens[:, t], state), want[:, t], f"step {t}")


@models
@modes
@quick
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_ragged_row_is_row_alone(name, mode, lengths, seed):
    model = inference(name, mode)
    tokens = ids(len(lengths), max(lengths) + seed % 3, seed).astype(np.int64)
    rng = np.random.default_rng(seed)
    for row, length in zip(tokens, lengths):
        row[length:] = rng.choice([-1, 0, 96, 97, 2**40], len(row) - length)
    got = model.forward(tokens, lengths=lengths)
    last = model.forward(tokens, lengths=lengths, last_only=True)
    for i, length in enumerate(lengths):
        alone = model.forward(tokens[i : i + 1, :length])
        assert_same_bits(got[i, :length], alone[0], f"row {i} of length {length}")
        assert_same_bits(last[i], alone[0, -1], f"last of row {i}")
        assert_same_bits(got[i, length:], np.zeros_like(got[i, length:]), "padding")


@models
def test_batch_composition(name):
    model, tokens = inference(name), ids(9, 33)
    rows = [model.forward(tokens[i : i + 1])[0] for i in range(9)]
    for batch in range(1, 10):
        assert_same_bits(model.forward(tokens[:batch]), np.stack(rows[:batch]), f"batch of {batch}")
    order = [4, 1, 8, 0]
    assert_same_bits(model.forward(tokens[order]), np.stack([rows[i] for i in order]), "permuted")


@models
def test_last_only(name):
    model, tokens = inference(name), ids(3, 40)
    want = model.forward(tokens)
    assert_same_bits(model.forward(tokens, last_only=True), want[:, -1], "stateless")
    state = model.allocate_state(3, 40)
    model.forward(tokens[:, :30], state, last_only=True)
    assert_same_bits(model.forward(tokens[:, 30:], state, last_only=True), want[:, -1], "carried")


@models
def test_copies_of_a_state(name):
    model, tokens = inference(name), ids(3, 100)
    want = model.forward(tokens)
    state = model.allocate_state(3, 100)
    model.forward(tokens[:, :80], state)
    saved = state.to_dict()
    twin, chosen = state.copy(), state.select([2, 0, 2])
    for t in range(80, 100):
        assert_same_bits(model.step(tokens[:, t], state), want[:, t], "first branch")
    assert_same_bits(model.forward(tokens[:, 80:], twin), want[:, 80:], "copy")
    assert_same_bits(model.forward(tokens[[2, 0, 2], 80:], chosen), want[[2, 0, 2], 80:], "select")
    again = type(state).from_dict(saved)
    assert_same_bits(model.forward(tokens[:, 80:], again), want[:, 80:], "restored")


@models
@pytest.mark.parametrize("rows", [1, 60, 128, 200])
def test_head_in_tiles(name, rows, monkeypatch):
    model, tokens = inference(name), ids(2, 150)
    want = model.token_logprobs(tokens)
    monkeypatch.setattr("mojolearn.model.HEAD_BYTES", rows * 97 * 4)
    assert_same_bits(model.token_logprobs(tokens), want, "log-probabilities")


@models
@modes
@pytest.mark.parametrize("shape", [(1, 300), (3, 130), (2, 129)])
def test_segments_of_a_long_batch(name, mode, shape, monkeypatch):
    model, tokens = inference(name, mode), ids(*shape)
    want = model.forward(tokens)
    monkeypatch.setattr("mojolearn.model.SEGMENT_TOKENS", 64)
    assert_same_bits(model.forward(tokens), want, "segments")
    assert_same_bits(model.forward(tokens, last_only=True), want[:, -1], "last of the segments")
