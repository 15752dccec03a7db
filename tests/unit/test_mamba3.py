"""The Mamba-3 block and its kernels: exact bits on every instruction set, thread count and split; gradients; states.

``mamba3_units.json`` holds digests of what a slow scalar model of the numerics page gives for the inputs that
`case_inputs` makes: chunks cut everywhere, strong decay, underflow, signed zeros and large values.
"""

import copy
import hashlib
import importlib
import json
import pickle

import numpy as np
import pytest
from mamba3_gradients import mamba3_gradients

from mojolearn import _core
from mojolearn._context import Context, Workspace
from mojolearn._numerics import get_num_threads
from mojolearn.blocks import Mamba3Block, Mamba3State
from mojolearn.blocks import mamba3 as block_module
from mojolearn.errors import NonFiniteError

ISAS = [isa for isa in _core.BUILT if isa in _core.AVAILABLE]
FIELDS = (
    "theta",
    "h",
    "buffer_qrot",
    "buffer_krot",
    "buffer_v",
    "buffer_dt",
    "buffer_sig",
    "buffer_adt",
    "pending_k",
    "pending_v",
)
REPORTS = ("h_last_", "k_last_", "v_last_", "theta_last_")


def noise(shape, salt):
    """Values in [-1, 1) by integer arithmetic alone, the same on every machine."""
    n = int(np.prod(shape))
    h = np.arange(n, dtype=np.uint32) + np.uint32(salt * 7919 + 1)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        h ^= h >> np.uint32(15)
        h *= np.uint32(multiplier)
    h ^= h >> np.uint32(16)
    return ((h >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)).reshape(shape)


def block_weights(d_model, salt, scale=1.0, dt_shift=-2.0):
    heads = d_model // 32
    shapes = {
        "block_norm.weight": (d_model,),
        "in_proj.weight": (4 * d_model + 288 + 3 * heads, d_model),
        "dt_bias": (heads,),
        "B_norm.weight": (128,),
        "C_norm.weight": (128,),
        "B_bias": (heads, 128),
        "C_bias": (heads, 128),
        "D": (heads,),
        "out_proj.weight": (d_model, 2 * d_model),
    }
    weights = {}
    for i, (name, shape) in enumerate(shapes.items()):
        value = noise(shape, salt + i)
        if name.endswith("proj.weight"):
            value = value * np.float32(scale * 2.0**-2)
        elif name == "dt_bias":
            value = value + np.float32(dt_shift)
        else:
            value = np.float32(1.0) + np.float32(0.5) * value
        weights[name] = value.astype(np.float32)
    return weights


def case_inputs(case):
    """weights, x and the output's gradient of a case of the digest file."""
    weights = block_weights(case["d_model"], case["salt"], case["scale"], case["dt_shift"])
    shape = case["batch"], case["length"], case["d_model"]
    arrays = []
    for i, exponent in enumerate((case["x_exponent"], case["dy_exponent"])):
        value = np.ldexp(noise(shape, case["salt"] + 20 + i), exponent)
        special = np.array([0.0, -0.0, 1e-40, -1e-40, 300.0, -300.0, 1e-20, 2.0**-126], np.float32)
        pick = (noise(shape, case["salt"] + 30 + i) * 64 + 64).astype(np.int64)  # 0 to 127
        value = np.where(pick < 8, special[pick % 8], value) if case["special"] else value
        arrays.append(value.astype(np.float32))
    return weights, *arrays


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:24]


def digests(arrays):
    return {name: digest(array) for name, array in arrays.items()}


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(
        np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32)
    )


def relative_error(value, want):
    return np.sqrt(np.square(value - want).sum() / np.square(want).sum())


def snapshot(state):
    return {name: getattr(state, name).copy() for name in FIELDS} | {
        "buffered_tokens": state.buffered_tokens,
        "pending": state.pending,
    }


def unchanged(state, before):
    return (
        all(same_bits(getattr(state, name), before[name]) for name in FIELDS)
        and state.buffered_tokens == before["buffered_tokens"]
        and state.pending == before["pending"]
    )


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads((golden / "mamba3_units.json").read_text())


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """The block's kernels from one instruction set."""
    for family in ("mamba3", "linalg", "layers"):
        module = importlib.import_module(f"mojolearn._core.{request.param}.{family}")
        monkeypatch.setattr(block_module, family, module)
    return request.param


def test_bits_of_the_slow_model(isa, cases):
    for case in cases:
        weights, x, dy = case_inputs(case)
        block = Mamba3Block(weights, numeric_mode="identical")
        assert digest(block.forward(x)) == case["y"], case
        assert digests({name: getattr(block, name) for name in REPORTS}) == case["reports"], case
        assert digests(block.backward(x, dy)) == case["gradients"], case


def test_splits_and_states_have_the_bits_of_the_slow_model(isa, cases):
    for case in cases:
        weights, x, _ = case_inputs(case)
        block = Mamba3Block(weights)
        state = block.allocate_state(case["batch"])
        parts, at = [], 0
        for count in case["splits"]:
            parts.append(block.forward(x[:, at : at + count], state))
            at += count
        assert digest(np.concatenate(parts, axis=1)) == case["y"], case
        assert digests({name: getattr(state, name) for name in FIELDS}) == case["state"], case
        assert state.buffered_tokens == case["buffered_tokens"]


def run_digests(mode):
    """Digests of an output and of gradients."""
    weights, x, dy = block_weights(96, 5), noise((2, 150, 96), 1), noise((2, 150, 96), 2)
    block = Mamba3Block(weights, numeric_mode=mode)
    return digest(block.forward(x)), digests(block.backward(x, dy))


@pytest.fixture(scope="module")
def plain_run():
    """Digests by mode, of the default instruction set and thread count."""
    return {mode: run_digests(mode) for mode in ("identical", "deterministic")}


@pytest.mark.parametrize("mode", ("identical", "deterministic"))
def test_threads_move_no_bit(plain_run, threads, mode):
    assert run_digests(mode) == plain_run[mode]


def test_instruction_sets_agree_in_deterministic_mode(plain_run, isa):
    assert run_digests("deterministic") == plain_run["deterministic"]


@pytest.mark.parametrize("mode", ("identical", "deterministic", "fast"))
def test_gradients_of_float64(mode):
    weights, x, dy = block_weights(64, 11), noise((2, 140, 64), 12), noise((2, 140, 64), 13)
    want_y, want = mamba3_gradients(weights, x, dy)
    block = Mamba3Block(weights, numeric_mode=mode)
    assert relative_error(block.forward(x), want_y) < 2e-6
    for name, gradient in block.backward(x, dy).items():
        assert relative_error(gradient, want[name]) < 2e-4, name


def test_deterministic_gradients_are_as_near_to_float64_as_identical_ones():
    """Root-mean-square relative errors over ten seeds, tensor by tensor."""
    squares = {"identical": {}, "deterministic": {}}
    for seed in range(10):
        weights = block_weights(32, 100 + 50 * seed)
        x, dy = noise((1, 130, 32), 120 + 50 * seed), noise((1, 130, 32), 121 + 50 * seed)
        _, want = mamba3_gradients(weights, x, dy)
        for mode, sums in squares.items():
            for name, gradient in Mamba3Block(weights, numeric_mode=mode).backward(x, dy).items():
                sums[name] = sums.get(name, 0.0) + relative_error(gradient, want[name]) ** 2
    for name, error in squares["deterministic"].items():
        assert np.sqrt(error) <= 1.05 * np.sqrt(squares["identical"][name]), name


@pytest.mark.parametrize("mode", ("identical", "deterministic"))
def test_rows_of_a_batch_do_not_meet(mode):
    weights, x, dy = block_weights(64, 21), noise((3, 70, 64), 22), noise((3, 70, 64), 23)
    block = Mamba3Block(weights, numeric_mode=mode)
    y, dx = block.forward(x), block.backward(x, dy)["x"]
    for row in range(3):
        one = slice(row, row + 1)
        assert same_bits(block.forward(x[one]), y[one])
        assert same_bits(block.backward(x[one], dy[one])["x"], dx[one])


def test_steps_equal_the_forward_across_chunk_borders():
    weights, x = block_weights(32, 31), noise((2, 200, 32), 32)
    block = Mamba3Block(weights)
    state = block.allocate_state(2)
    steps = [block.step(x[:, t], state) for t in range(200)]
    assert same_bits(np.concatenate(steps, axis=1), block.forward(x))
    assert state.buffered_tokens == 200 - 3 * 64


def test_full_chunk_stays_open():
    block = Mamba3Block(block_weights(32, 31))
    state = block.allocate_state(1)
    block.forward(noise((1, 64, 32), 33), state)
    assert state.buffered_tokens == 64
    assert not state.h.any()
    block.step(noise((1, 32), 34), state)
    assert state.buffered_tokens == 1
    assert state.h.any()


@pytest.mark.parametrize("rebuild", (copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state)), lambda s: s))
def test_states_can_be_copied_and_restored(rebuild):
    block = Mamba3Block(block_weights(32, 41))
    x = noise((2, 90, 32), 42)
    state = block.allocate_state(2)
    block.forward(x[:, :30], state)
    kept = snapshot(state)
    want = block.forward(x[:, 30:], rebuild(state))
    for name in FIELDS:
        getattr(state, name)[...] = kept[name]
    state.buffered_tokens = kept["buffered_tokens"]
    assert same_bits(block.forward(x[:, 30:], state), want)


def test_state_arrays_are_used_in_place():
    block = Mamba3Block(block_weights(32, 41))
    arrays = {name: np.zeros_like(getattr(block.allocate_state(1), name)) for name in FIELDS}
    state = Mamba3State(**arrays)
    block.forward(noise((1, 5, 32), 43), state)
    assert all(getattr(state, name) is arrays[name] for name in FIELDS)
    assert arrays["buffer_dt"][0, :5].all()
    assert not arrays["buffer_dt"][0, 5:].any()


def test_ragged_rows_equal_the_rows_alone():
    block = Mamba3Block(block_weights(32, 51))
    x = noise((3, 80, 32), 52)
    x[0, 3:] = np.nan
    y = block.forward(x, lengths=[3, 65, 80])
    for row, length in enumerate((3, 65, 80)):
        assert same_bits(y[row, :length], block.forward(x[row : row + 1, :length])[0])
        assert not y[row, length:].view(np.uint32).any()


def test_strided_and_read_only_input():
    block = Mamba3Block(block_weights(32, 51))
    wide = noise((2, 40, 64), 53)
    want = block.forward(np.ascontiguousarray(wide[:, ::2, ::2]))
    assert same_bits(block.forward(wide[:, ::2, ::2]), want)
    frozen = np.ascontiguousarray(wide[:, ::2, ::2])
    frozen.flags.writeable = False
    assert same_bits(block.forward(frozen), want)


def test_memory_of_a_forward_does_not_grow_with_the_length():
    block = Mamba3Block(block_weights(32, 61))
    held = []
    for shape in ((1, 1024, 32), (1, 8192, 32), (3, 3000, 32), (20, 200, 32)):
        x = noise(shape, 62)
        workspace = Workspace()
        block._run(Context(1, 0, workspace), x, np.empty_like(x))
        held.append(workspace.nbytes)
    assert max(held) <= 1.1 * held[0]


@pytest.mark.parametrize(("batch", "length"), [(3, 90), (2, 300), (5, 64), (1, 257)])
def test_forwards_in_pieces_have_the_same_bits(monkeypatch, batch, length):
    """Long or many rows are worked on in pieces of 1024 tokens; here in pieces of 128."""
    block = Mamba3Block(block_weights(32, 63))
    x = noise((batch, length + 9, 32), 64)
    whole, pieces = block.allocate_state(batch), block.allocate_state(batch)
    want = [block.forward(x[:, :9], whole), block.forward(x[:, 9:], whole)]
    reports = [getattr(block, name) for name in REPORTS]
    stateless = block.forward(x)
    monkeypatch.setattr(block_module, "_PIECE_TOKENS", 128)
    got = [block.forward(x[:, :9], pieces), block.forward(x[:, 9:], pieces)]
    assert all(same_bits(a, b) for a, b in zip(got, want))
    assert all(same_bits(getattr(block, name), value) for name, value in zip(REPORTS, reports))
    assert unchanged(pieces, snapshot(whole))
    assert same_bits(block.forward(x), stateless)


@pytest.mark.parametrize("mode", ("identical", "deterministic"))
def test_backward_in_pieces_has_the_same_bits(monkeypatch, mode):
    block = Mamba3Block(block_weights(64, 68), numeric_mode=mode)
    x, dy = noise((5, 70, 64), 69), noise((5, 70, 64), 70)
    want = digests(block.backward(x, dy))
    monkeypatch.setattr(block_module, "_CALL_ITEMS", 9)  # two rows of two heads and two chunks
    assert digests(block.backward(x, dy)) == want


def test_input_states_in_pieces(monkeypatch):
    block = Mamba3Block(block_weights(32, 65))
    x = noise((1, 300, 32), 66)
    runs = []
    for size in (1024, 128):
        monkeypatch.setattr(block_module, "_PIECE_TOKENS", size)
        state = block.allocate_state(1)
        given = [noise(getattr(state, name).shape, 67) for name in ("theta", "h", "pending_k", "pending_v")]
        state.set_input_states(*given)
        runs.append((block.forward(x, state), snapshot(state)))
    assert same_bits(runs[0][0], runs[1][0])
    assert unchanged(state, runs[0][1])


def test_constructor_refuses_other_weights():
    weights = block_weights(32, 71)
    for value in (None, [1], {}):
        with pytest.raises(ValueError, match="weights must"):
            Mamba3Block(value)
    with pytest.raises(ValueError, match=r"unknown.*'gain'"):
        Mamba3Block(weights | {"gain": weights["D"]})
    with pytest.raises(ValueError, match=r"missing.*'D'"):
        Mamba3Block({name: value for name, value in weights.items() if name != "D"})
    with pytest.raises(ValueError, match=r"weights\['D'\] must have shape \(1,\), got \(2,\)"):
        Mamba3Block(weights | {"D": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match="multiple of 32, got 33"):
        Mamba3Block(weights | {"block_norm.weight": np.ones(33, np.float32)})
    with pytest.raises(TypeError, match="float32"):
        Mamba3Block(weights | {"D": np.ones(1)})
    with pytest.raises(ValueError, match="numeric_mode"):
        Mamba3Block(weights, numeric_mode="exact")


def test_weights_must_be_finite_at_the_first_call():
    block = Mamba3Block(block_weights(32, 71) | {"D": np.array([np.nan], np.float32)})
    with pytest.raises(NonFiniteError, match=r"\['D'\]"):
        block.forward(np.zeros((1, 1, 32), np.float32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"theta": None}, ValueError, "theta must"),
        ({"h": np.zeros((1, 1, 64, 127), np.float32)}, ValueError, r"h must .*\(1, 1, 64, 128\)"),
        ({"buffer_v": np.zeros((1, 64, 1, 64))}, ValueError, "buffer_v must .* float64"),
        ({"h": np.zeros((1, 1, 128, 64), np.float32).swapaxes(2, 3)}, ValueError, "h must be C-contiguous"),
        ({"buffered_tokens": 65}, ValueError, "buffered_tokens must be at most 64, got 65"),
        ({"buffered_tokens": -1}, ValueError, "buffered_tokens must be at least 0"),
        ({"buffered_tokens": 1.0}, TypeError, "buffered_tokens must be an integer"),
        ({"pending": 1}, TypeError, "pending must be a bool"),
    ],
)
def test_states_refuse_what_does_not_fit(change, error, message):
    state = Mamba3Block(block_weights(32, 71)).allocate_state(1)
    fields = {name: getattr(state, name) for name in FIELDS}
    with pytest.raises(error, match=message):
        Mamba3State(**fields | change)


def test_state_refuses_read_only_arrays():
    state = Mamba3Block(block_weights(32, 71)).allocate_state(1)
    fields = {name: getattr(state, name) for name in FIELDS}
    fields["h"].flags.writeable = False
    with pytest.raises(ValueError, match="h must be C-contiguous, aligned and writable"):
        Mamba3State(**fields)


def test_refused_calls_change_nothing():
    block = Mamba3Block(block_weights(32, 71))
    state = block.allocate_state(2)
    x = noise((2, 10, 32), 72)
    block.forward(x, state)
    before = snapshot(state)
    for call, error in (
        (lambda: block.forward(x[:1], state), ValueError),
        (lambda: block.forward(x[:, :, :31], state), ValueError),
        (lambda: block.forward(x.astype(np.float64), state), TypeError),
        (lambda: block.forward(x * np.float32(np.inf), state), NonFiniteError),
        (lambda: block.forward(x, "state"), ValueError),
        (lambda: block.forward(x, state, lengths=[1, 1]), ValueError),
        (lambda: block.step(x, state), ValueError),
        (lambda: block.step(x[:, 0], None), ValueError),
    ):
        with pytest.raises(error):
            call()
        assert unchanged(state, before)


@pytest.mark.parametrize("name", FIELDS)
def test_states_must_be_finite(name):
    block = Mamba3Block(block_weights(32, 71))
    state = block.allocate_state(1)
    state.pending = name.startswith("pending")
    getattr(state, name).reshape(-1)[-1] = np.nan
    with pytest.raises(NonFiniteError, match=f"{name} of the state must be finite"):
        block.step(noise((1, 32), 73), state)


def test_input_states_are_checked_and_copied():
    block = Mamba3Block(block_weights(32, 71))
    state = block.allocate_state(1)
    good = [np.ones_like(getattr(state, name)) for name in ("theta", "h", "pending_k", "pending_v")]
    before = snapshot(state)
    with pytest.raises(ValueError, match="v must have shape"):
        state.set_input_states(*good[:3], np.zeros((1, 1, 63), np.float32))
    with pytest.raises(TypeError, match="k must be native float32"):
        state.set_input_states(*good[:2], good[2].astype(np.float64), good[3])
    assert unchanged(state, before)
    state.set_input_states(*good)
    good[1][...] = 7.0
    assert state.pending
    assert (state.h == 1.0).all()
    block.step(noise((1, 32), 74), state)
    assert not state.pending
    assert not state.pending_k.any()
    assert not state.pending_v.any()


def test_input_states_need_an_empty_buffer():
    block = Mamba3Block(block_weights(32, 71))
    state = block.allocate_state(1)
    block.step(noise((1, 32), 74), state)
    state.set_input_states(state.theta, state.h, state.pending_k, state.pending_v)
    with pytest.raises(ValueError, match="buffered_tokens = 1"):
        block.step(noise((1, 32), 75), state)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_allocate_state_takes_a_positive_integer(value, error):
    with pytest.raises(error, match="batch_size"):
        Mamba3Block(block_weights(32, 71)).allocate_state(value)


def test_reports_come_from_direct_calls_only():
    block = Mamba3Block(block_weights(32, 81))
    x = noise((2, 66, 32), 82)
    assert not any(hasattr(block, name) for name in REPORTS)
    block._run(Context(get_num_threads(), 0, Workspace()), x, np.empty_like(x))
    assert not any(hasattr(block, name) for name in REPORTS)
    state = block.allocate_state(2)
    block.forward(x, state)
    assert same_bits(block.k_last_, state.buffer_krot[:, 1])
    assert same_bits(block.v_last_, state.buffer_v[:, 1])
    assert same_bits(block.theta_last_, state.theta)
    assert block.h_last_.shape == (2, 1, 64, 128)
