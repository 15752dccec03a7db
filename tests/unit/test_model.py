"""What both model classes share, and `SambaInference`: calls, states, copies, weights."""

import copy
import pickle
import threading

import numpy as np
import pytest

from mojolearn import lowbit
from mojolearn.blocks import Mamba3State, TransformerState
from mojolearn.config import SambaConfig
from mojolearn.errors import CapacityError, CheckpointError, NonFiniteError
from mojolearn.inference import SambaInference
from mojolearn.interop import save_safetensors
from mojolearn.model import SambaState
from mojolearn.stack import SambaStack
from mojolearn.training import Generator, cross_entropy

CONFIG = SambaConfig(40, 32, ("mamba3", "attention"), n_heads=2, n_kv_heads=1, intermediate=24)
IDS = np.random.default_rng(0).integers(0, 40, (2, 9))


@pytest.fixture(scope="module")
def stack():
    return SambaStack(CONFIG, generator=Generator(3))


@pytest.fixture(scope="module")
def lm(stack):
    return SambaInference(CONFIG, stack.parameters())


def test_names_of_forward(lm, stack):
    want = lm.forward(IDS)
    assert want.shape == (2, 9, 40) and want.dtype == np.float32 and type(want) is np.ndarray
    for got in (lm(IDS), lm.logits(IDS), stack.forward(IDS), stack(IDS)):
        assert np.array_equal(got, want)


def test_results_are_the_callers(lm):
    first = lm.forward(IDS)
    kept = first.copy()
    first[...] = 0.0
    assert np.array_equal(lm.forward(IDS), kept)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u8"])
def test_ids_of_any_integer_type(lm, dtype):
    wide = np.repeat(IDS.astype(dtype), 2, axis=1)[:, ::2]
    wide.flags.writeable = False
    assert np.array_equal(lm.forward(wide), lm.forward(IDS))


def test_weights_are_copied(stack):
    weights = {name: value.copy() for name, value in stack.parameters().items()}
    model = SambaInference(CONFIG, weights)
    want = model.forward(IDS)
    for value in weights.values():
        value[...] = 0.0
    assert np.array_equal(model.forward(IDS), want)
    model.parameters()["embed.weight"][...] = 0.0
    assert np.array_equal(model.forward(IDS), want)


def test_weights_of_any_layout(stack, lm):
    weights = {name: np.asfortranarray(value) for name, value in stack.parameters().items()}
    assert np.array_equal(SambaInference(CONFIG, weights).forward(IDS), lm.forward(IDS))


def test_parameters(stack, lm):
    got, want = lm.parameters(), stack.parameters()
    assert list(got) == list(want) == [name for name, _ in CONFIG.registry()]
    for name, value in want.items():
        assert np.array_equal(got[name], value) and got[name].flags.writeable


@pytest.mark.parametrize("fmt", lowbit.FORMATS)
def test_packed_weights(stack, fmt):
    packed = lowbit.pack(stack.parameters(), fmt)
    plain, _ = lowbit.unpack(packed)
    model, exact = SambaInference(CONFIG, packed), SambaInference(CONFIG, plain)
    assert model.weight_format == fmt and exact.weight_format == "float32"
    assert np.array_equal(model.forward(IDS), exact.forward(IDS))
    states = model.allocate_state(2, 9), exact.allocate_state(2, 9)
    for t in range(9):
        assert np.array_equal(model.step(IDS[:, t], states[0]), exact.step(IDS[:, t], states[1]))
    for name, value in plain.items():
        assert np.array_equal(model.parameters()[name], value)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert twin.weight_format == fmt and np.array_equal(twin.forward(IDS), model.forward(IDS))


def test_some_packed_weights(stack):
    weights = dict(stack.parameters())
    weights["embed.weight"] = lowbit.pack_one(weights["embed.weight"], "int8")
    model = SambaInference(CONFIG, weights)
    assert model.weight_format == "int8"
    plain, _ = lowbit.unpack(weights)
    assert np.array_equal(model.forward(IDS), SambaInference(CONFIG, plain).forward(IDS))


def test_untied_head(stack):
    config = SambaConfig.from_dict({**CONFIG.to_dict(), "tie_embeddings": False})
    weights = {**stack.parameters(), "lm_head.weight": stack.parameters()["embed.weight"] * np.float32(2)}
    assert np.array_equal(SambaInference(config, weights).forward(IDS), 2 * stack.forward(IDS))


def test_copies(lm):
    want = lm.forward(IDS)
    for twin in (pickle.loads(pickle.dumps(lm)), copy.copy(lm), copy.deepcopy(lm)):
        assert twin.config == lm.config and twin.numeric_mode == lm.numeric_mode
        assert np.array_equal(twin.forward(IDS), want)


def test_representations(lm, stack):
    assert "parameters in 2 layers" in repr(lm) and "float32" in repr(lm)
    assert "step 0" in repr(SambaStack(CONFIG, weights=stack.parameters()))
    assert "tokens=0" in repr(lm.allocate_state(1, 4))


def test_allocate_state(lm):
    state = lm.allocate_state(np.int64(2), np.uint8(7))
    assert (state.batch_size, state.max_tokens, state.tokens) == (2, 7, 0)
    mamba, attention = state.layers
    assert isinstance(mamba, Mamba3State) and isinstance(attention, TransformerState)
    assert mamba.h.shape == (2, 1, 64, 128) and attention.k_cache.shape == (2, 1, 7, 16)
    assert not mamba.h.any() and not attention.k_cache.any()
    assert state.nbytes > mamba.h.nbytes


def test_capacity(lm):
    state = lm.allocate_state(2, 8)
    lm.forward(IDS[:, :8], state)
    before = state.to_dict()
    for call in (lambda: lm.step(IDS[:, 8], state), lambda: lm.forward(IDS[:, 8:], state)):
        with pytest.raises(CapacityError, match=r"max_tokens = 8 .* 9 "):
            call()
    fresh = lm.allocate_state(2, 8)
    with pytest.raises(CapacityError, match="9"):
        lm.forward(IDS, fresh)
    assert fresh.tokens == 0 and not fresh.layers[1].k_cache.any()
    after = state.to_dict()
    for old, new in zip(before["layers"], after["layers"]):
        assert all(np.array_equal(old[name], new[name]) for name in old)


def test_state_copies_share_nothing(lm):
    state = lm.allocate_state(2, 16)
    lm.forward(IDS, state)
    for other in (state.copy(), state.select([1, 0, 1]), SambaState.from_dict(state.to_dict())):
        assert other.tokens == 9
        for one, two in zip(state.layers, other.layers):
            fields = ("h", "theta") if isinstance(one, Mamba3State) else ("k_cache", "v_cache")
            for name in fields:
                assert not np.shares_memory(getattr(one, name), getattr(two, name))
    for twin in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert np.array_equal(lm.step(IDS[:, 0], twin), lm.step(IDS[:, 0], state.copy()))


def test_hidden_states(lm, stack):
    hidden = lm.hidden_states(IDS)
    assert len(hidden) == 3 and all(h.shape == (2, 9, 32) for h in hidden)
    assert np.array_equal(hidden[0], stack.parameters()["embed.weight"][IDS])
    ragged = lm.hidden_states(IDS, lengths=[4, 9])
    for got, want in zip(ragged, hidden):
        assert np.array_equal(got[0, :4], want[0, :4]) and not got[0, 4:].any()
        assert np.array_equal(got[1], want[1])


def test_token_logprobs(lm):
    got = lm.token_logprobs(IDS)
    logits = lm.forward(IDS)[:, :-1].reshape(-1, 40)
    want = cross_entropy(logits, IDS[:, 1:].reshape(-1).astype(np.int32), reduction="none")
    assert got.shape == (2, 8) and np.array_equal(got.reshape(-1), -np.asarray(want))
    ragged = lm.token_logprobs(IDS, lengths=[5, 9])
    assert np.array_equal(ragged[0, :4], got[0, :4]) and not ragged[0, 4:].any()
    assert np.array_equal(ragged[1], got[1])


def test_ragged_padding_cannot_break_a_call(stack):
    """An id that overflows the first block is harmless in the padding."""
    weights = {name: value.copy() for name, value in stack.parameters().items()}
    weights["embed.weight"][:, 0] = 0.0
    weights["embed.weight"][0] = np.eye(32, dtype=np.float32)[0]
    weights["layers.0.in_proj.weight"][:, 0] = 3e38
    model = SambaInference(CONFIG, weights)
    ids = np.where(IDS == 0, 1, IDS)
    with pytest.raises(NonFiniteError):
        model.forward(np.where(np.arange(9) > 5, 0, ids))
    want = model.forward(ids[:, :5])
    got = model.forward(np.where(np.arange(9) > 5, 0, ids), lengths=[5, 5])
    assert np.array_equal(got[:, :5], want)


def test_two_threads_share_a_model(lm):
    want = lm.forward(IDS)
    wrong = []

    def work(seed):
        rows = np.random.default_rng(seed).permutation(2)
        for _ in range(20):
            state = lm.allocate_state(2, 9)
            if not np.array_equal(lm.forward(IDS[rows]), want[rows]):
                wrong.append("forward")
            lm.forward(IDS[rows, :7], state)
            if not np.array_equal(lm.step(IDS[rows, 7], state), want[rows, 7]):
                wrong.append("step")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("fmt", lowbit.FORMATS)
def test_from_safetensors(stack, fmt, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "weights.safetensors"
    packed = lowbit.pack(stack.parameters(), fmt)
    save_safetensors(path, CONFIG, packed.items(), fmt, packed=[n for n, v in packed.items() if lowbit.is_packed(v)])
    model = SambaInference.from_safetensors(path)
    assert model.weight_format == fmt
    assert np.array_equal(model.forward(IDS), SambaInference(CONFIG, packed).forward(IDS))
    # A file of other software: no metadata, so the configuration comes from the caller.
    plain = dict(stack.parameters())
    safetensors.save_file({name: np.ascontiguousarray(value) for name, value in plain.items()}, path)
    with pytest.raises(CheckpointError, match="config"):
        SambaInference.from_safetensors(path)
    assert np.array_equal(SambaInference.from_safetensors(path, CONFIG).forward(IDS), stack.forward(IDS))
    plain["norm_f.weight"] = np.full(32, np.nan, np.float32)
    safetensors.save_file(plain, path)
    with pytest.raises(CheckpointError, match=r"weights.safetensors.*norm_f.weight"):
        SambaInference.from_safetensors(path, CONFIG)
