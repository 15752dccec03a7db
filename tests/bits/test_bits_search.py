"""A search for inputs on which two instruction sets, two thread counts, or the kernels and a plain model differ.

Every family of kernels is called with floats of hostile kinds: subnormals, signed zeros, exact ties, the largest
floats, sums that drift through the underflow range. What is compared is bytes; NaNs count as equal.
"""

import functools

import numpy as np
import plain_model as plain
import pytest
from instruction_sets import KINDS, RUN_HERE, differences, hostile, instruction_set, kernels

import mojolearn
from mojolearn import Mamba3Block, SambaConfig, SambaInference, TransformerBlock, lowbit

FLOAT = np.float32
THREADS = (1, 3)


def empty(*shape):
    return np.full(shape, np.nan, FLOAT)


def sizes(draw, *largest):
    return [int(draw.integers(1, n + 1)) for n in largest]


# A case is (run, model): run(name, threads) and model() give arrays by name. `model` is None where only instruction
# sets and threads are compared.


def products(draw, kind):
    m, n, k = sizes(draw, 40, 70, 300)
    a, b = hostile(draw, (m, k), kind), hostile(draw, (n, k), kind)
    rows = hostile(draw, (k, n), kind)
    older, newer = hostile(draw, (2, 200), kind)
    merged = older.copy()

    def run(name, threads):
        linalg = kernels(name, "linalg")
        out = {key: empty(m, n) for key in ("nt", "nn", "tn", "panels")}
        linalg.gemm_nt(a, b, out["nt"], threads)
        linalg.gemm_nn(a, np.ascontiguousarray(b.T), out["nn"], threads)
        linalg.gemm_tn(np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), out["tn"], threads)
        linalg.linear(a, linalg.PackedWeight.from_float32(b), out["panels"], threads)
        out["colsum"], out["merge"] = empty(n), empty(200)
        linalg.colsum(rows, out["colsum"], threads)
        linalg.merge(older, newer, out["merge"], threads)
        return out

    def model():
        product = plain.matmul(a, b)
        sums = {"colsum": plain.colsum(rows), "merge": plain.add(merged, newer)}
        return dict.fromkeys(("nt", "nn", "tn", "panels"), product) | sums

    return run, model


def packed(draw, kind):
    m, n, k = sizes(draw, 20, 70, 200)
    x, weight = hostile(draw, (m, k), kind), hostile(draw, (n, k), kind)
    bits = plain.to_bfloat16(weight)
    codes, exponents = plain.to_int8(weight)

    def run(name, threads):
        linalg = kernels(name, "linalg")
        out = {"bits": np.empty((n, k), np.uint16), "codes": np.empty((n, k), np.int8)}
        out |= {"exponents": np.empty(n, np.int32), "bfloat16": empty(m, n), "int8": empty(m, n), "one": empty(1, n)}
        out |= {"from bits": empty(n, k), "from codes": empty(n, k)}
        linalg.to_bfloat16(weight, out["bits"], threads)
        linalg.to_int8(weight, out["codes"], out["exponents"], threads)
        linalg.from_bfloat16(bits, out["from bits"], threads)
        linalg.from_int8(codes, exponents, out["from codes"], threads)
        linalg.linear(x, linalg.PackedWeight.from_bfloat16(bits), out["bfloat16"], threads)
        linalg.linear(x, linalg.PackedWeight.from_int8(codes, exponents), out["int8"], threads)
        linalg.linear(x[:1], linalg.PackedWeight.from_int8(codes, exponents), out["one"], threads)
        return out

    def model():
        values = plain.from_bfloat16(bits)
        levels = plain.from_int8(codes, exponents)
        return {
            "bits": bits,
            "codes": codes,
            "exponents": exponents,
            "from bits": values,
            "from codes": levels,
            "bfloat16": plain.matmul(x, values),
            "int8": plain.matmul(x, levels),
            "one": plain.matmul(x[:1], levels),
        }

    return run, model


def norms(draw, kind):
    m, d = sizes(draw, 40, 70)
    eps = FLOAT(draw.choice([1e-5, 1e-6, 0.0, 1e-30]))
    x, dy, residual = (hostile(draw, (m, d), kind) for _ in range(3))
    w = hostile(draw, (d,), kind)
    wide_x, wide_dy, wide_w = hostile(draw, (m, 64), kind), hostile(draw, (m, 64), kind), hostile(draw, (64,), kind)

    def run(name, threads):
        layers = kernels(name, "layers")
        out = {"y": empty(m, d), "dx": empty(m, d), "rows": empty(m, d), "sum": empty(m, d)}
        layers.rms_norm_forward(x, w, eps, out["y"], None, False, threads)
        layers.rms_norm_backward(dy, x, w, None, eps, residual, out["dx"], out["rows"], threads)
        layers.add(x, dy, out["sum"], threads)
        out |= {"block y": empty(m, 64), "block dx": empty(m, 64), "block rows": empty(m, 64)}
        squares = empty(m)
        layers.rms_norm_forward(wide_x, wide_w, eps, out["block y"], squares, True, threads)
        layers.rms_norm_backward_collapsed(
            wide_dy, wide_x, wide_w, squares, eps, None, out["block dx"], out["block rows"], threads
        )
        return out

    def model():
        dx, rows = plain.rms_norm_backward(dy, x, w, eps)
        block_dx, block_rows = plain.rms_norm_backward_collapsed(wide_dy, wide_x, wide_w, eps, lanes=True)
        return {
            "y": plain.rms_norm(x, w, eps),
            "dx": plain.add(dx, residual),
            "rows": rows,
            "sum": plain.add(x, dy),
            "block y": plain.rms_norm(wide_x, wide_w, eps, lanes=True),
            "block dx": block_dx,
            "block rows": block_rows,
        }

    return run, model


def losses(draw, kind):
    n, vocab = sizes(draw, 20, 200)
    logits, dy = hostile(draw, (n, vocab), kind), hostile(draw, (n, 9), kind)
    targets = draw.integers(0, vocab, n).astype(np.int32)
    targets[draw.random(n) < 0.2] = -100
    ids = draw.integers(0, 5, n).astype(np.int32)
    smoothing, divisor = float(FLOAT(draw.choice([0.0, 0.1]))), float(draw.choice([1, 7, 64]))

    def run(name, threads):
        layers = kernels(name, "layers")
        out = {"loss": empty(n), "dlogits": empty(n, vocab), "table": np.zeros((5, 9), FLOAT), "rows": empty(n, 9)}
        layers.loss_rows(logits, targets, -100, smoothing, divisor, out["loss"], out["dlogits"], threads)
        layers.embedding_backward(dy, ids, out["table"], threads)
        layers.embedding_forward(dy, ids % n, out["rows"], threads)
        return out

    def model():
        loss, dlogits = plain.cross_entropy_rows(logits, targets, -100, smoothing, divisor)
        table = plain.embedding_backward(dy, ids, 5)
        return {"loss": loss, "dlogits": dlogits, "table": table, "rows": plain.F(dy[ids % n])}

    return run, model


def draws(draw, kind):
    (n,) = sizes(draw, 5000)
    seed, stream = int(draw.integers(0, 2**63)), int(draw.integers(0, 2**32))
    offset = int(draw.integers(0, 2**40))
    x = hostile(draw, (n,), kind)
    p = FLOAT(draw.random() * 0.9)
    scale, low, span = FLOAT(1 / (1 - np.float64(p))), *hostile(draw, (2,), kind)

    def run(name, threads):
        layers = kernels(name, "layers")
        out = {"uniform": empty(n), "normal": empty(n), "dropout": empty(n)}
        layers.uniform(out["uniform"], low, span, seed, stream, offset, threads)
        layers.normal(out["normal"], low, span, seed, stream, offset, threads)
        layers.dropout(x, out["dropout"], p, scale, seed, stream, offset, threads)
        return out

    def model():
        return {
            "uniform": plain.fma(plain.units(seed, stream, offset, n), span, low),
            "normal": plain.normals(seed, stream, offset, n, low, span),
            "dropout": plain.dropout(x, p, scale, seed, stream, offset),
        }

    return run, model


def updates(draw, kind):
    lengths = sizes(draw, 3000, 9)
    n = sum(lengths)
    params, grads, first, second = (hostile(draw, (n,), kind) for _ in range(4))
    second = np.abs(second)
    t = int(draw.integers(1, 10**6))
    rate, b1, b2, eps, decay = (float(FLOAT(v)) for v in (draw.choice([1e-3, 0.3]), 0.9, 0.999, 1e-8, 0.01))
    momentum, dampening = float(FLOAT(0.9)), float(FLOAT(draw.choice([0.0, 0.1])))
    max_norm = float(FLOAT(draw.choice([0.5, 1e30])))
    cut = lengths[0]

    def pieces(array):
        return [array[:cut], array[cut:]]

    def run(name, threads):
        layers = kernels(name, "layers")
        out = {}
        norm = layers.gradient_norm(pieces(grads), threads)
        out["norm"] = FLOAT([norm])
        out["clipped"] = grads.copy()
        layers.scale(pieces(out["clipped"]), layers.clip_coefficient(max_norm, norm), threads)
        for key, decoupled in (("AdamW", True), ("Adam", False)):
            p, m, v = params.copy(), first.copy(), second.copy()
            layers.adam_step(
                pieces(p), pieces(grads), m, v, t, rate, b1, b2, eps, decay, decoupled, False, None, False, threads
            )
            out |= {key: p, f"{key} first": m, f"{key} second": v}
        p, b = params.copy(), first.copy()
        started = np.array([1, 0], np.int32)
        layers.sgd_step(
            pieces(p), pieces(grads), b, started, rate, momentum, dampening, decay, True, False, None, False, threads
        )
        return out | {"SGD": p, "SGD buffer": b}

    def model():
        norm = plain.gradient_norm(pieces(grads))
        out = {"norm": FLOAT([norm]), "clipped": plain.mul(plain.clip_coefficient(max_norm, norm), grads)}
        for key, decoupled in (("AdamW", True), ("Adam", False)):
            p, m, v = plain.adam_step(params, grads, first, second, t, rate, b1, b2, eps, decay, decoupled)
            out |= {key: p, f"{key} first": m, f"{key} second": v}
        started = np.arange(n) < cut
        out["SGD"], out["SGD buffer"] = plain.sgd_step(params, grads, first, started, rate, momentum, dampening, decay)
        return out

    return run, model


BLOCK_CONFIG = SambaConfig(2, 32, ("mamba3", "attention"), n_heads=4, n_kv_heads=2, intermediate=40)
BLOCKS = {
    "mamba3": (0, Mamba3Block, {}, plain.mamba3_block),
    "attention": (1, TransformerBlock, {"n_heads": 4, "n_kv_heads": 2}, plain.transformer_block),
}


def _block(draw, kind, block, length, modes, backward):
    layer, cls, options, plain_block = BLOCKS[block]
    shapes = BLOCK_CONFIG.block_shapes(BLOCK_CONFIG.layers[layer])
    hard = kind if draw.random() < 0.5 else "normal"
    w = {name: hostile(draw, shape, hard) * FLOAT(0.3) for name, shape in shapes}
    for name in w:
        if "norm" in name:
            w[name] = np.abs(w[name]) + FLOAT(0.5)
    batch = 2 if length < 20 else 1
    x, dy = hostile(draw, (batch, length, 32), kind), hostile(draw, (batch, length, 32), kind)

    def run(name, threads):
        out = {}
        with instruction_set(name):
            mojolearn.set_num_threads(threads)
            for mode in modes:
                made = cls(w, numeric_mode=mode, **options)
                out[f"{mode} y"] = made.forward(x)
                if backward:
                    grads = made.backward(x, dy)
                    out |= {f"{mode} {key}": value for key, value in grads.items()}
        return out

    def model():
        args = (w, x) if block == "mamba3" else (w, x, 4, 2)
        out = {"identical y": plain_block(*args)}
        if backward:
            grads = plain_block(*args, dy=dy)
            out |= {f"identical {key}": value for key, value in grads.items()}
        return out

    return run, model


def mamba3_forward(draw, kind):
    return _block(draw, kind, "mamba3", int(draw.choice([1, 7, 66])), ("identical",), backward=False)


def mamba3_backward(draw, kind):
    return _block(draw, kind, "mamba3", int(draw.integers(1, 7)), ("identical", "deterministic"), backward=True)


def attention(draw, kind):
    return _block(draw, kind, "attention", int(draw.choice([1, 6, 40])), ("identical",), backward=True)


def mamba3_chunks(draw, kind):
    return _block(draw, kind, "mamba3", 130, ("identical", "deterministic"), backward=True)[0], None


def mamba3_chunks_model(draw, kind):
    return _block(draw, kind, "mamba3", 66, ("identical",), backward=True)


def decoding(draw, kind):
    """Steps of a model in each weight format against its forward, which the other families check."""
    config = SambaConfig(40, 32, ("mamba3", "attention"), n_heads=4, n_kv_heads=2, intermediate=40)
    scale = FLOAT(0.3 if kind in ("normal", "ties", "border") else 1.0)
    # beyond 1e38 a low-bit code may stand for infinity
    weights = {name: np.clip(hostile(draw, shape, kind) * scale, -1e38, 1e38) for name, shape in config.registry()}
    for name in weights:
        if "norm" in name:
            weights[name] = np.abs(hostile(draw, weights[name].shape, "normal")) + FLOAT(0.5)
    fmt = str(draw.choice(["float32", "bfloat16", "int8"]))
    ids = draw.integers(0, 40, (2, 9)).astype(np.int32)

    def run(name, threads):
        with instruction_set(name):
            mojolearn.set_num_threads(threads)
            model = SambaInference(config, lowbit.pack(weights, fmt))
            state = model.allocate_state(2, 9)
            try:
                want = model.forward(ids)
            except mojolearn.NonFiniteError as error:
                return {"refused": np.frombuffer(str(error).encode(), np.uint8)}
            steps = [model.step(ids[:, t], state) for t in range(9)]
            assert differences(np.stack(steps, 1), want) == 0
            return {"logits": want}

    return run, None


FAMILIES = {
    family.__name__: family
    for family in (products, packed, norms, losses, draws, updates, mamba3_forward, mamba3_backward, attention)
}
WITHOUT_MODEL = {family.__name__: family for family in (mamba3_chunks, decoding)}
SAMPLES = {"mamba3_forward": 1, "mamba3_backward": 1, "attention": 1, "mamba3_chunks": 1}


@pytest.fixture(autouse=True)
def keep_threads():
    before = mojolearn.get_num_threads()
    yield
    mojolearn.set_num_threads(before)


def check(family, seed, kind):
    draw = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        run, model = family(draw, kind)
        reference = run(RUN_HERE[0], 1)
        for name in RUN_HERE:
            for threads in THREADS:
                _compare(f"{name} with {threads} threads", run(name, threads), reference)
        if model is not None:
            _compare("the plain model", model(), reference)


def _compare(what, got, reference):
    wrong = [key for key, value in got.items() if differences(np.asarray(value), reference[key])]
    assert not wrong, f"{what} differs in {wrong}"


ALL = {**FAMILIES, **WITHOUT_MODEL}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_sample(name, kind):
    """The same inputs in every run."""
    for seed in range(SAMPLES.get(name, 3)):
        check(ALL[name], seed, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*ALL, "mamba3_chunks_model"])
def test_search(name, kind):
    """New inputs in every run."""
    family = {**ALL, "mamba3_chunks_model": mamba3_chunks_model}[name]
    for _ in range(1 if name == "mamba3_chunks_model" else 10 * SAMPLES.get(name, 3)):
        seed = int(np.random.default_rng().integers(2**63))
        try:
            check(family, seed, kind)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize(
    ("name", "kind", "seed"),
    [
        # an infinity in a chunk, and the tokens before it in the same register tile
        ("mamba3_chunks", "edges", 4574666638500453084),
        # a score beyond the largest float, of a key that the query does not see
        ("attention", "edges", 5064414760632640260),
        # an angle beyond the integers
        ("mamba3_forward", "spread", 2315964282482515750),
    ],
)
def test_found(name, kind, seed):
    """What the search has found once."""
    check(ALL[name], seed, kind)


def test_the_search_sees_one_bit():
    def off(name, threads):
        return {"y": np.nextafter(np.float32(1), np.float32(2))[None]}

    with pytest.raises(AssertionError, match="differs in \\['y'\\]"):
        check(lambda draw, kind: (off, functools.partial(dict, y=np.float32([1]))), 0, "normal")
