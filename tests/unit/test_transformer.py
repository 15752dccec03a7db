"""The transformer block and its kernels: exact bits on every instruction set, thread count and split.

``attention_units.json`` holds digests of what a slow scalar model of the numerics page gives for the inputs that
`pattern` makes, stress inputs (underflow, signed zeros, large scores) included.
"""

import hashlib
import importlib
import json

import numpy as np
import pytest

from mojolearn import _core
from mojolearn._context import Workspace
from mojolearn.blocks import TransformerBlock, TransformerState
from mojolearn.errors import CapacityError, NonFiniteError

ISAS = [isa for isa in _core.BUILT if isa in _core.AVAILABLE]
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


def mixed(n, salt):
    """n well-mixed 32-bit words, by integer arithmetic alone."""
    h = np.arange(n, dtype=np.uint32) + np.uint32(salt * 7919 + 1)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        h ^= h >> np.uint32(15)
        h *= np.uint32(multiplier)
    return h ^ (h >> np.uint32(16))


def pattern(shape, salt, kind="normal"):
    """float32 values of a kind, the same on every machine."""
    n = int(np.prod(shape))
    x = (mixed(n, salt) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    choice = mixed(n, salt + 1)
    if kind == "wide":  # 2^-60 to 1
        x = np.ldexp(x, -(choice % 61).astype(np.int32))
    elif kind == "tiny":  # products underflow
        x = np.where(choice % 10 == 0, np.float32(-0.0), x * np.float32(2.0**-63))
    elif kind == "large":
        x = x * np.float32(40.0)
    elif kind == "subnormal":
        x = np.where(choice % 2 == 0, x * np.float32(2.0**-127), x * np.float32(8.0))
    elif kind == "vanishing":
        x = x * np.float32(2.0**-122)
    elif kind == "negative":
        x = -np.abs(x) * np.float32(2.0**-119)
    return x.astype(np.float32).reshape(shape)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:24]


def attention_inputs(case):
    """queries, keys, values (by head), gradient of the output of a case of the digest file."""
    b, length, heads, kv, hd, first = (case[k] for k in ("batch", "length", "heads", "kv", "hd", "first"))
    q, k, v, d = case["kinds"]
    salt = case["salt"]
    return (
        pattern((b, length, heads, hd), salt, q),
        pattern((b, kv, first + length, hd), salt + 10, k),
        pattern((b, kv, first + length, hd), salt + 20, v),
        pattern((b, length, heads, hd), salt + 30, d),
    )


def block_inputs(case):
    """weights, x, gradient of the output."""
    d, kv, inner, salt = case["heads"] * case["hd"], case["kv"] * case["hd"], case["intermediate"], case["salt"]
    shapes = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    rows = {"q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d), "gate": (inner, d), "up": (inner, d)}
    shapes.update({f"{name}_proj.weight": shape for name, shape in rows.items()})
    shapes["down_proj.weight"] = (d, inner)
    weights = {name: pattern(shape, salt + 5 * i) * case["scale"] for i, (name, shape) in enumerate(shapes.items())}
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    x = pattern((case["batch"], case["length"], d), salt + 50, case["kinds"][0])
    return weights, x, pattern(x.shape, salt + 60, case["kinds"][1])


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads((golden / "attention_units.json").read_text())


@pytest.fixture(params=ISAS)
def attention(request):
    return importlib.import_module(f"mojolearn._core.{request.param}.attention")


def pack(attention, by_head, first, base, hd):
    """Packed rows from position `base` on, of which those before `first` come from a cache."""
    b, kv, span, _ = by_head.shape
    out = np.full((b, kv, attention.packed_rows(span - base), attention.head_width(hd)), np.nan, np.float32)
    rows = np.ascontiguousarray(by_head[:, :, first:].transpose(0, 2, 1, 3)).reshape(-1, kv * hd)
    cache = np.ascontiguousarray(by_head[:, :, :first]) if first else None
    assert attention.pack_heads(rows, out, hd, cache, base, first - base, 2)
    return out


def run_forward(attention, case, threads, base=0):
    q, k, v, _ = attention_inputs(case)
    b, length, heads, hd = q.shape
    out = np.empty((b * length, heads * hd), np.float32)
    maxima, denominators = np.empty((2, b, heads, length), np.float32)
    keys, values = (pack(attention, a, case["first"], base, hd) for a in (k, v))
    queries = q.reshape(out.shape)
    attention.attention_forward(
        queries, keys, values, out, maxima, denominators, hd, case["first"], base, case["window"], Workspace(), threads
    )
    return queries, keys, values, out, maxima, denominators


@pytest.mark.parametrize("threads", (1, 3))
def test_attention_kernels_have_the_bits_of_the_slow_model(attention, cases, threads):
    for case in cases["attention"]:
        saved = run_forward(attention, case, threads)
        assert digest(saved[3]) == case["digests"]["out"], case
        if case["first"]:
            continue
        dout = attention_inputs(case)[3].reshape(saved[3].shape)
        dq, dk, dv = np.full_like(dout, 7.0), *np.full((2, len(dout), case["kv"] * case["hd"]), 7.0, np.float32)
        queries, keys, values, _, maxima, denominators = saved
        attention.attention_backward(
            dout,
            queries,
            keys,
            values,
            maxima,
            denominators,
            dq,
            dk,
            dv,
            case["hd"],
            case["window"],
            Workspace(),
            threads,
        )
        got = {"dq": digest(dq), "dk": digest(dk), "dv": digest(dv)}
        assert got == {name: case["digests"][name] for name in got}, case


def flushed_product(a, b):
    """F(a * b) of float32 arrays: the product is exact in float64, and rounds to float32 gradually."""
    product = (np.asarray(a, np.float64) * np.asarray(b, np.float64)).astype(np.float32)
    return np.where(np.abs(product) < np.float32(2.0**-126), np.copysign(np.float32(0), product), product)


def factors_next_to_the_border(weights):
    """For each weight a factor whose product with it lies just below 2^-126 and rounds up to it, where there is one."""
    factors = []
    for weight in weights:
        mantissa = int(np.frexp(np.float64(weight))[0] * 2**24)
        other = (2**48 - 2**23 - 1) // mantissa
        if mantissa * other >= 2**48 - 2**24:
            scale = -126 - np.frexp(np.float64(weight))[1]
            factors.append(np.float32(np.ldexp(np.float64(other), scale - 24)))
    return np.array(factors, np.float32)


def test_results_that_round_up_to_the_smallest_normal_number(attention):
    # With scores of 0 query p weighs its keys 1 / (p + 1) each. Hardware that flushes gives 0 for such products.
    length = 70
    weights = np.float32(1) / np.arange(1, length + 1, dtype=np.float32)
    factors = factors_next_to_the_border(weights)
    assert len(factors) >= 32
    hd = len(factors) // 2 * 2
    factors = factors[:hd]
    want = flushed_product(weights[:, None], factors)
    assert (want == np.float32(2.0**-126)).any(axis=1).sum() >= 20
    q, values = np.zeros((1, length, 1, hd), np.float32), np.zeros((1, 1, length, hd), np.float32)
    queries, keys = q.reshape(length, hd), pack(attention, np.zeros_like(values), 0, 0, hd)
    values[0, 0, 0] = factors
    out, maxima, denominators = np.empty_like(queries), *np.empty((2, 1, 1, length), np.float32)
    attention.attention_forward(
        queries, keys, pack(attention, values, 0, 0, hd), out, maxima, denominators, hd, 0, 0, 0, Workspace(), 1
    )
    assert out.tobytes() == want.tobytes()
    zeros = pack(attention, np.zeros_like(values), 0, 0, hd)
    for p in (1, 2, 10, 45, 69):
        dout = np.zeros_like(queries)
        dout[p] = factors
        dq, dk, dv = np.full((3, length, hd), 7.0, np.float32)
        attention.attention_backward(
            dout, queries, keys, zeros, maxima, denominators, dq, dk, dv, hd, 0, Workspace(), 1
        )
        expected = np.zeros_like(dv)
        expected[: p + 1] = want[p]
        assert dv.tobytes() == expected.tobytes() and not dq.any() and not dk.any()


def zero_sign_cases():
    """Cases in which a skipped term of a hidden key decides the sign of a zero: (q, k, v, dout, signs wanted).

    All scores are 0, so weights are uniform; 40 positions are two tiles of queries on every instruction set. The
    first head of the group leaves the gradient of one key at -0, since its only term underflows.
    """
    length, vanishing = 40, np.float32(-(2.0**-123))
    for positive_at, becomes_positive in ((3, True), (None, False)):
        q, dout = np.zeros((2, 1, length, 2, 2), np.float32)
        k, v = np.zeros((2, 1, 1, length, 2), np.float32)
        # the last key: only the last query sees it
        dout[0, -1, 0] = vanishing
        # second head: terms -0 only, but for one query of the first tile, from which the key is hidden
        dout[0, :, 1] = -1.0
        dout[0, -1, 1] = -0.0
        if positive_at is not None:
            dout[0, positive_at, 1] = 1.0
        yield q, k, v, dout, ("dv", length - 1, becomes_positive)
    for tail in (1.0, -1.0):
        # The second head's query 31 has a sum of weight times gradient that underflows to -0; keys of the next tile,
        # hidden from it, make it +0 if their gradient is positive. Then the gradient of score 1 is -0, else +0.
        q, dout = np.zeros((2, 1, length, 2, 2), np.float32)
        k, v = np.zeros((2, 1, 1, length, 2), np.float32)
        v[0, 0, :32, 0], v[0, 0, 0, 0], v[0, 0, 32:, 0] = -(2.0**-40), -(2.0**-25), tail
        v[0, 0, :, 1], v[0, 0, 0, 1] = -1.0, -0.5
        dout[0, 31, 1, 0] = 2.0**-100
        q[0, :, 0], q[0, :, 1] = -0.0, -1.0
        q[0, 31, 1] = 1.0
        # first head: the gradient of key 1 is one term, which underflows to -0
        q[0, 1, 0] = 2.0**-125
        dout[0, 1, 0, 1] = 0.25
        yield q, k, v, dout, ("dk", 1, tail < 0)


def test_hidden_keys_decide_the_sign_of_a_zero(attention):
    for q, k, v, dout, (name, key, positive) in zero_sign_cases():
        length = q.shape[1]
        queries, dout = q.reshape(length, 4), dout.reshape(length, 4)
        keys, values = pack(attention, k, 0, 0, 2), pack(attention, v, 0, 0, 2)
        maxima, denominators = np.empty((2, 1, 2, length), np.float32)
        attention.attention_forward(
            queries, keys, values, np.empty_like(queries), maxima, denominators, 2, 0, 0, 0, Workspace(), 1
        )
        dq, gradients = np.empty_like(queries), np.full((2, length, 2), 7.0, np.float32)
        attention.attention_backward(
            dout, queries, keys, values, maxima, denominators, dq, *gradients, 2, 0, Workspace(), 1
        )
        got = gradients[("dk", "dv").index(name), key]
        assert got.tobytes() == np.full(2, 0.0 if positive else -0.0, np.float32).tobytes(), (name, got)


def test_keys_before_the_window_need_not_be_there(attention, cases):
    for case in cases["attention"]:
        base = max(0, case["first"] - case["window"] + 1) if case["window"] else 0
        if base:
            assert digest(run_forward(attention, case, 2, base)[3]) == case["digests"]["out"], case


@pytest.mark.parametrize("threads", (1, 2))
def test_one_token_has_the_bits_of_the_packed_kernel(attention, cases, threads):
    for case in cases["attention"]:
        # the last query alone, against the keys before it in a cache
        q, k, v, _ = attention_inputs(case)
        b, length, heads, hd = q.shape
        kv, cached, window = k.shape[1], k.shape[2] - 1, case["window"]
        slots = window or cached + 5
        caches = np.full((2, b, kv, slots, hd), np.inf, np.float32)
        for position in range(max(0, cached - window + 1) if window else 0, cached):
            caches[:, :, :, position % slots] = k[:, :, position], v[:, :, position]
        queries = np.ascontiguousarray(q[:, -1]).reshape(b, heads * hd)
        new = np.concatenate([a[:, :, -1].reshape(b, kv * hd) for a in (k, v)], axis=1)
        out = np.empty_like(queries)
        finite = attention.attention_step(
            queries, new[:, : kv * hd], new[:, kv * hd :], *caches, out, cached, window, Workspace(), threads
        )
        assert finite
        want = run_forward(attention, case, 1)[3].reshape(b, length, heads * hd)[:, -1]
        assert out.tobytes() == np.ascontiguousarray(want).tobytes(), case


@pytest.mark.parametrize("threads", (1, 2))
def test_elementwise_kernels_do_not_depend_on_the_instruction_set(threads):
    kernels = [importlib.import_module(f"mojolearn._core.{isa}.attention") for isa in ISAS]
    results = []
    for kernel in kernels:
        cosines, sines = np.empty((2, 300, 11), np.float32)
        kernel.rope_table(cosines, sines, 22, 10000.0)
        x = pattern((6, 66), 1, "wide")
        kernel.rope(x, cosines, sines, 3, 290, 22, False, threads)
        back = x.copy()
        kernel.rope(back, cosines, sines, 3, 290, 22, True, threads)
        gate, up, dact = (pattern((5, 37), i, kind) * 9 for i, kind in enumerate(("normal", "wide", "subnormal")))
        act, dgate, dup = np.empty((3, 5, 37), np.float32)
        kernel.swiglu_forward(gate, up, act, threads)
        again = np.empty_like(act)
        kernel.swiglu_backward(dact, gate, up, again, dgate, dup, threads)
        assert again.tobytes() == act.tobytes()
        results.append(b"".join(a.tobytes() for a in (cosines, sines, x, back, act, dgate, dup)))
    assert len(set(results)) == 1


def test_rotary_table_and_gate_against_float64(attention):
    cosines, sines = np.empty((2, 8192, 4), np.float32)
    attention.rope_table(cosines, sines, 8, 500.0)
    angles = np.arange(8192)[:, None] * 500.0 ** (-np.arange(4) / 4.0)
    # the angle is a float32 product: its rounding is what separates the two
    assert np.abs(cosines - np.cos(angles)).max() < 1.2e-3
    assert np.abs(sines[:100] - np.sin(angles[:100])).max() < 2e-5
    gate, up = pattern((3, 50), 1) * 6, pattern((3, 50), 2)
    act = np.empty_like(gate)
    attention.swiglu_forward(gate, up, act, 1)
    np.testing.assert_allclose(act, gate / (1 + np.exp(-gate.astype(np.float64))) * up, rtol=1e-6, atol=1e-7)


def test_block_has_the_bits_of_the_slow_model(cases, threads):
    for case in cases["block"]:
        weights, x, dy = block_inputs(case)
        block = TransformerBlock(weights, n_heads=case["heads"], n_kv_heads=case["kv"], window=case["window"])
        got = {"y": digest(block.forward(x))}
        got.update({name: digest(value) for name, value in block.backward(x, dy).items()})
        wrong = [name for name, value in got.items() if value != case["digests"][name]]
        assert not wrong, case


def small_block(window=0, salt=3, queries=1, **options):
    case = {"heads": 4, "kv": 2, "hd": 6, "intermediate": 10, "salt": salt, "scale": 0.4, "batch": 2, "length": 41}
    weights, x, dy = block_inputs({**case, "kinds": ("normal", "normal")})
    weights["q_proj.weight"] = weights["q_proj.weight"] * np.float32(queries)
    return TransformerBlock(weights, n_heads=4, n_kv_heads=2, window=window, **options), x, dy


@pytest.mark.parametrize("window", (0, 1, 3, 16, 40, 41, 100))
@pytest.mark.parametrize("cuts", ([1] * 41, [41], [16, 16, 9], [1, 39, 1], [5, 1, 1, 20, 1, 13]))
def test_any_split_of_a_sequence_gives_the_same_bits(window, cuts):
    block, x, _ = small_block(window)
    whole = block(x)
    state, at, parts = block.allocate_state(2, 41), 0, []
    for n in cuts:
        parts.append(block.step(x[:, at], state) if n == 1 else block.forward(x[:, at : at + n], state))
        at += n
    assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()
    assert state.cached_tokens == 41
    one_pass = block.allocate_state(2, 41)
    block.forward(x, one_pass)
    for got, want in ((state.keys(), one_pass.keys()), (state.values(), one_pass.values())):
        assert got.shape == (2, 2, min(41, window or 41), 6)
        assert got.tobytes() == want.tobytes()


def test_a_window_as_long_as_the_sequence_is_full_attention():
    full, x, dy = small_block()
    wide, _, _ = small_block(41)
    assert full(x).tobytes() == wide(x).tobytes()
    for name, gradient in full.backward(x, dy).items():
        assert gradient.tobytes() == wide.backward(x, dy)[name].tobytes(), name


@pytest.mark.parametrize("window", (0, 7))
def test_rows_do_not_know_each_other(window):
    block, x, _ = small_block(window)
    whole = block(x)
    for i in range(2):
        assert block(x[i : i + 1]).tobytes() == whole[i : i + 1].tobytes()
    assert block(x[::-1]).tobytes() == whole[::-1].tobytes()
    padded = x.copy()
    padded[0, 30:] = np.nan
    ragged = block(padded, lengths=[30, 41])
    assert ragged[1].tobytes() == whole[1].tobytes()
    assert ragged[0, :30].tobytes() == whole[0, :30].tobytes()
    assert ragged[0, 30:].tobytes() == bytes(ragged[0, 30:].nbytes)


def test_options_change_the_result():
    block, x, _ = small_block()
    base = block(x)
    for options in ({"rope_theta": 100.0}, {"norm_eps": 0.5}):
        assert not np.allclose(small_block(**options)[0](x), base, atol=1e-6), options


def test_read_only_and_strided_input():
    block, x, dy = small_block()
    want = block(x)
    wide = np.repeat(x, 2, axis=2)[:, :, ::2]
    wide.flags.writeable = False
    assert block(wide).tobytes() == want.tobytes()
    frozen = dy.copy()
    frozen.flags.writeable = False
    assert block.backward(wide, frozen)["x"].tobytes() == block.backward(x, dy)["x"].tobytes()
    assert block(x[:1, :1]).shape == (1, 1, 24)


@pytest.mark.parametrize("window", (0, 5))
def test_a_refused_call_leaves_the_state_as_it_was(window):
    block, x, _ = small_block(window)
    state = block.allocate_state(2, 8)
    block.forward(x[:, :6], state)
    before = state.k_cache.tobytes(), state.v_cache.tobytes()
    with pytest.raises(CapacityError, match=r"8 positions; 6 are cached and 3 more .* 9"):
        block.forward(x[:, :3], state)
    bad = x[:, :2].copy()
    bad[1, 1, 5] = np.inf
    with pytest.raises(NonFiniteError, match="x must be finite"):
        block.forward(bad, state)
    assert (state.k_cache.tobytes(), state.v_cache.tobytes(), state.cached_tokens) == (*before, 6)
    for cache in (state.k_cache, state.v_cache):
        kept = cache[1, 0, 3, 2]
        for value in (np.nan, -np.inf):
            cache[1, 0, 3, 2] = value
            for call in (lambda: block.step(x[:, 0], state), lambda: block.forward(x[:, :2], state)):
                with pytest.raises(NonFiniteError, match="cache"):
                    call()
        cache[1, 0, 3, 2] = kept
    assert (state.k_cache.tobytes(), state.v_cache.tobytes(), state.cached_tokens) == (*before, 6)


@pytest.mark.parametrize("factor", [0, 1000], ids=["scores of zero", "weights of zero"])
def test_an_infinity_in_a_cache_is_found_whatever_meets_it(factor):
    block, x, _ = small_block(queries=factor)
    state = block.allocate_state(2, 50)
    block.forward(x[:, :30], state)
    for cache in (state.k_cache, state.v_cache):
        for slot in range(30):
            kept = cache[1, 1, slot, 4]
            cache[1, 1, slot, 4] = np.inf
            with pytest.raises(NonFiniteError, match="cache"):
                block.step(x[:, 30], state)
            cache[1, 1, slot, 4] = kept
    block.step(x[:, 30], state)


def test_slots_that_no_position_has_filled_may_hold_anything():
    block, x, _ = small_block()
    state = block.allocate_state(2, 50)
    state.k_cache[...] = np.nan
    state.v_cache[...] = np.nan
    got = [block.forward(x[:, :40], state), block.step(x[:, 40], state)]
    assert np.concatenate(got, axis=1).tobytes() == block(x).tobytes()


def test_state_fields():
    block, x, _ = small_block(window=4)
    state = block.allocate_state(2, 20)
    assert state.capacity == 4 and state.k_cache.shape == (2, 2, 4, 6)
    assert block.allocate_state(np.int64(1), 3).capacity == 4
    block.forward(x[:, :7], state)
    # position p lies in slot p mod 4
    assert state.keys().tobytes() == state.k_cache[:, :, [3, 0, 1, 2]].tobytes()
    state.keys()[...] = 0
    assert np.abs(state.k_cache).min() > 0
    again = TransformerState(
        batch_size=2,
        n_kv_heads=2,
        head_dim=6,
        max_tokens=20,
        k_cache=state.k_cache.copy(),
        v_cache=state.v_cache.copy(),
        cached_tokens=7,
        window=4,
    )
    assert block.step(x[:, 7], again).tobytes() == block.step(x[:, 7], state).tobytes()
    assert "cached_tokens=8" in repr(state)


def test_positions_are_bounded():
    block, x, _ = small_block(max_positions=40)
    with pytest.raises(CapacityError, match="at most 40, got 41"):
        block(x)
    with pytest.raises(CapacityError, match="max_tokens must be at most 40, got 41"):
        block.allocate_state(1, 41)
    with pytest.raises(CapacityError, match="8192, got 8193"):
        small_block()[0].allocate_state(1, 8193)
    roomy = TransformerState(2, 2, 6, 50, *np.zeros((2, 2, 2, 50, 6), np.float32))
    with pytest.raises(CapacityError, match="max_tokens of the state"):
        block.step(x[:, 0], roomy)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"n_heads": 5}, ValueError, "n_heads \\* head_dim must be d_model = 24"),
        ({"head_dim": 8}, ValueError, "head_dim=8"),
        ({"n_heads": 8}, ValueError, "head_dim must be even, got 3"),
        ({"n_kv_heads": 3}, ValueError, "n_kv_heads must divide n_heads = 4, got 3"),
        ({"n_heads": 4.0}, TypeError, "n_heads"),
        ({"n_heads": True}, TypeError, "n_heads"),
        ({"window": -1}, ValueError, "window"),
        ({"window": "4"}, TypeError, "window"),
        ({"rope_theta": 0.5}, ValueError, "rope_theta"),
        ({"rope_theta": float("inf")}, ValueError, "rope_theta"),
        ({"max_positions": 0}, ValueError, "max_positions"),
        ({"max_positions": 8193}, ValueError, "max_positions"),
        ({"norm_eps": -1e-6}, ValueError, "norm_eps"),
        ({"norm_eps": None}, TypeError, "norm_eps"),
        ({"numeric_mode": "exact"}, ValueError, "exact"),
    ],
)
def test_refused_options(options, error, text):
    block, _, _ = small_block()
    weights = {name: np.array(value) for name, value in block._weights.items()}
    with pytest.raises(error, match=text):
        TransformerBlock(weights, **{"n_heads": 4, "n_kv_heads": 2, **options})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k_cache": np.zeros((2, 2, 8, 6), np.float64)}, "k_cache must be a float32 array of shape"),
        ({"v_cache": np.zeros((2, 2, 7, 6), np.float32)}, "v_cache"),
        ({"v_cache": np.zeros((2, 2, 6, 8), np.float32).transpose(0, 1, 3, 2)}, "v_cache must be C-contiguous"),
        ({"k_cache": [0.0]}, "k_cache"),
        ({"cached_tokens": 9}, "cached_tokens"),
        ({"window": 3}, "k_cache"),
    ],
)
def test_refused_states(change, text):
    fields = {"batch_size": 2, "n_kv_heads": 2, "head_dim": 6, "max_tokens": 8}
    fields.update(k_cache=np.zeros((2, 2, 8, 6), np.float32), v_cache=np.zeros((2, 2, 8, 6), np.float32))
    with pytest.raises(ValueError, match=text):
        TransformerState(**{**fields, **change})
    # the same, found at the call, when a field is set later
    block, x, _ = small_block()
    state = TransformerState(**fields)
    for name, value in change.items():
        setattr(state, name, value)
    with pytest.raises(ValueError, match="window" if "window" in change else text):
        block.step(x[:, 0], state)


def test_small_heads_and_memory_that_grows_with_the_length_only():
    workspaces = []
    for length in (1024, 4096):
        workspace = Workspace()
        attention = importlib.import_module(f"mojolearn._core.{_core.ISA}.attention")
        width = attention.head_width(2)
        rows = np.zeros((length, 2), np.float32)
        packed = np.zeros((1, 1, attention.packed_rows(length), width), np.float32)
        maxima, denominators = np.empty((2, 1, 1, length), np.float32)
        out = np.empty_like(rows)
        attention.attention_forward(rows, packed, packed, out, maxima, denominators, 2, 0, 0, 0, workspace, 2)
        grads = np.empty((3, length, 2), np.float32)
        attention.attention_backward(out, rows, packed, packed, maxima, denominators, *grads, 2, 0, workspace, 2)
        workspaces.append(workspace.nbytes)
        assert not grads.any() and not out.any()
    assert workspaces[1] < 4.5 * max(workspaces[0], 1 << 21)
