"""A plain model of the fp32 profile in NumPy: every operation in the order of the numerics pages, one after another.

It has no tiles, threads, packing or vector widths, and shares no code with the kernels. An array operation here is the
same scalar operation for each of its cells; sums are loops. `docs/numerics` is its specification, whose section
numbers the comments give. NumPy rounds float32 sums, products, quotients and roots once; `fused` makes the rest.
"""

import math
import struct

import numpy as np
from exact_sums import colsum, flush, fma, fused, matmul

F = flush
ZERO, ONE = np.float32(0), np.float32(1)


def N(bits):
    """The float with these bits."""
    return np.uint32(bits).view(np.float32)


PI, TWO_PI = N(0x40490FDB), N(0x40C90FDB)


def quiet(function):
    """Decorator: overflow and NaN are results like any other."""
    return np.errstate(all="ignore")(function)


def add(a, b):
    return F(F(a) + F(b))


def sub(a, b):
    return F(F(a) - F(b))


def mul(a, b):
    return F(F(a) * F(b))


def div(a, b):
    return F(F(a) / F(b))


def neg(a):
    return (np.asarray(a, np.float32).view(np.uint32) ^ np.uint32(0x80000000)).view(np.float32)


def chain(a, b, start=None):
    """Sum over the last axis of a * b: one fused chain a cell."""
    a, b = np.broadcast_arrays(a, b)
    total = np.zeros(a.shape[:-1], np.float32) if start is None else start
    for p in range(a.shape[-1]):
        total = fma(a[..., p], b[..., p], total)
    return total


def long_chain(a, b):
    """`chain` of two long flushed vectors, faster: the rounding to odd of `fused` where the next rounding needs it."""
    total = 0.0
    for x, y in zip(a.tolist(), b.tolist()):
        product = x * y
        exact = product + total
        rounded = float(np.float32(exact))
        back = exact - product
        error = (product - (exact - back)) + (total - back)
        if error:
            on_a_tie = struct.unpack("<q", struct.pack("<d", exact))[0] & 0x1FFFFFFF == 0x10000000
            if on_a_tie or abs(exact) < 2.0**-100:
                rounded = float(fused(x, y, total))
        total = math.copysign(0.0, rounded) if abs(rounded) < 2.0**-126 else rounded
    return np.float32(total)


def running(values):
    """Running sums along the last axis; the first value is copied."""
    out = np.empty_like(values)
    out[..., 0] = F(values[..., 0])
    for i in range(1, values.shape[-1]):
        out[..., i] = add(out[..., i - 1], values[..., i])
    return out


# ---- elementary functions: forward 2 -----------------------------------------------------------------------------


def floor_int(x):
    """floor of small values, as float32 and as integers."""
    z = np.floor(x).astype(np.float32)
    return z, np.where(np.abs(z) < 2**30, z, 0).astype(np.int32)


def polynomial(x, *bits):
    value = np.broadcast_to(N(bits[0]), np.shape(x)).astype(np.float32)
    for constant in bits[1:]:
        value = fused(value, x, N(constant))
    return value


def power_of_two(k):
    return ((k + 127).astype(np.uint32) << np.uint32(23)).view(np.float32)


def exp(x):
    x = np.asarray(x, np.float32)
    inside = (x <= N(0x42B17217)) & (x >= N(0xC2AEAC50))
    a = np.where(inside, x, ZERO)
    z, k = floor_int(fused(a, N(0x3FB8AA3B), np.float32(0.5)))
    r = fused(z, N(0xBF318000), a)
    r = fused(z, N(0x395E8083), r)
    q = polynomial(r, 0x39506967, 0x3AB743CE, 0x3C088908, 0x3D2AA9C1, 0x3E2AAAAA, 0x3F000000)
    y = fused(q, r * r, r) + ONE
    half = k >> 1
    y = y * power_of_two(half) * power_of_two(k - half)
    y = np.where(y < N(0x00800000), ZERO, y)
    y = np.where(x > N(0x42B17217), np.float32(np.inf), np.where(x < N(0xC2AEAC50), ZERO, y))
    return np.where(np.isnan(x), x, y)


def log_core(t, e):
    z = t * t
    p = polynomial(
        t, 0x3D9021BB, 0xBDEBD1B8, 0x3DEF251A, 0xBDFE5D4F, 0x3E11E9BF, 0xBE2AAE50, 0x3E4CCEAC, 0xBE7FFFFC, 0x3EAAAAAA
    )
    y = (t * z) * p
    y = fused(e, N(0xB95E8083), y)
    y = fused(np.float32(-0.5), z, y)
    return fused(e, N(0x3F318000), t + y)


def log(x):
    x = F(x)
    bits = x.view(np.uint32)
    e = ((bits >> 23) & 0xFF).astype(np.int32) - 126
    m = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F000000)).view(np.float32)
    low = m < N(0x3F3504F3)
    e, m = np.where(low, e - 1, e), np.where(low, m + m, m)
    y = log_core(m - ONE, e.astype(np.float32))
    y = np.where(x == 0, np.float32(-np.inf), np.where(x < 0, N(0x7FC00000), y))
    return np.where(np.isnan(x) | (x == np.inf), x, y)


def log1p(x):
    x = F(x)
    near = (x >= N(0xBE95F61A)) & (x <= N(0x3ED413CD))
    y = np.where(near, log_core(np.where(near, x, ZERO), ZERO), log(x + ONE))
    return np.where((x == 0) | np.isnan(x) | (x == np.inf), x, y)


def sqrt(x):
    x = np.asarray(x, np.float32)
    y = np.sqrt(np.where(x < 0, ZERO, x))
    return np.where(np.abs(x) < N(0x00800000), ZERO, np.where(x < 0, N(0x7FC00000), y))


def rsqrt(x):
    return div(ONE, sqrt(F(x)))


def sigmoid(x):
    return div(ONE, exp(neg(x)) + ONE)


def silu(x):
    return div(x, exp(neg(x)) + ONE)


def softplus(x):
    x = np.asarray(x, np.float32)
    return np.where(x <= 20, log1p(exp(x)), x)


def tanh(x):
    x = F(x)
    a = np.abs(x)
    z = a * a
    small = fused(polynomial(z, 0xBBBAF0EA, 0x3CA9134E, 0xBD5C1E2D, 0x3E088393, 0xBEAAAA99) * z, x, x)
    large = np.copysign(ONE - div(np.float32(2), exp(a + a) + ONE), x)
    y = np.where(a > N(0x42317218), np.copysign(ONE, x), np.where(a >= N(0x3F200000), large, small))
    return np.where(x == 0, x, y)


def sincos(x):
    x = F(x)
    a = np.abs(x)
    yj, j = floor_int(a * N(0x3FA2F983))
    odd = j & 1 == 1
    j, yj = np.where(odd, j + 1, j) & 7, np.where(odd, yj + ONE, yj)
    for constant in (0xBF490000, 0xB97DA000, 0xB3222169):
        a = fused(yj, N(constant), a)
    sine_sign, cosine_sign = np.where(np.signbit(x), -ONE, ONE), np.ones_like(x)
    flip = j > 3
    j = np.where(flip, j - 4, j)
    sine_sign, cosine_sign = np.where(flip, -sine_sign, sine_sign), np.where(flip, -cosine_sign, cosine_sign)
    cosine_sign = np.where(j > 1, -cosine_sign, cosine_sign)
    z = a * a
    by_sine = fused(a * z, polynomial(z, 0xB94CA1F9, 0x3C08839E, 0xBE2AAAA3), a)
    by_cosine = fused(z * z, polynomial(z, 0x37CCF5CE, 0xBAB6061A, 0x3D2AAAA5), fused(np.float32(-0.5), z, ONE))
    swapped = (j == 1) | (j == 2)
    return sine_sign * np.where(swapped, by_cosine, by_sine), cosine_sign * np.where(swapped, by_sine, by_cosine)


def total_order_max(x, axis=-1):
    """Largest of flushed values, +0 above -0; NaN if there is one."""
    x = F(x)
    bits = x.view(np.int32).astype(np.int64)
    key = np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    best = np.take_along_axis(x, np.expand_dims(key.argmax(axis), axis), axis).squeeze(axis)
    return np.where(np.isnan(x).any(axis), N(0x7FC00000), best)


# ---- norms and small operations: forward 4, training 3 -----------------------------------------------------------


def sum_of_squares(x, lanes=False):
    if not lanes:
        return chain(x, x)
    sums = chain(*[np.moveaxis(x.reshape(*x.shape[:-1], -1, 32), -2, -1)] * 2)
    while sums.shape[-1] > 1:
        sums = add(sums[..., 0::2], sums[..., 1::2])
    return sums[..., 0]


def norm_scale(squares, width, eps):
    return F(rsqrt(add(div(squares, np.float32(width)), np.float32(eps))))


def rms_norm(x, w, eps, lanes=False):
    r = norm_scale(sum_of_squares(x, lanes), x.shape[-1], eps)
    return mul(w, mul(x, r[..., None]))


def rms_norm_backward(dy, x, w, eps):
    """The graph form: dx and the rows of the weight's gradient."""
    width = np.float32(x.shape[-1])
    r = norm_scale(sum_of_squares(x), x.shape[-1], eps)
    dh = mul(dy, w)
    t = chain(dh, x)
    da = mul(np.float32(-0.5), mul(t, mul(mul(r, r), r)))
    dv = div(da, width)
    dx = add(mul(dh, r[..., None]), mul(dv[..., None], mul(np.float32(2), x)))
    return dx, mul(dy, mul(x, r[..., None]))


def rms_norm_backward_collapsed(g, x, w, eps, lanes=False):
    """The collapsed form: dx (without a residual) and the rows."""
    r = norm_scale(sum_of_squares(x, lanes), x.shape[-1], eps)
    gw = mul(g, w)
    corr = mul(mul(r, r), div(chain(gw, x), np.float32(x.shape[-1])))
    dx = mul(r[..., None], F(gw - mul(x, corr[..., None])))
    return dx, mul(g, mul(x, r[..., None]))


def embedding_backward(dy, ids, vocab):
    table = np.zeros((vocab, dy.shape[1]), np.float32)
    for row, place in zip(dy, ids):
        table[place] = add(table[place], row)
    return table


def plain_fold(values):
    """Sum of a vector in leaves and tree."""
    return matmul(np.ones((1, len(values)), np.float32), np.asarray(values, np.float32)[None])[0, 0]


# ---- loss: training 2 --------------------------------------------------------------------------------------------


@quiet
def cross_entropy_rows(logits, targets, ignore, smoothing, divisor):
    """Row losses and the gradient of the logits."""
    vocab = logits.shape[1]
    smoothing, divisor = np.float32(smoothing), np.float32(divisor)
    losses, grad = np.zeros(len(logits), np.float32), np.zeros_like(logits)
    for i, target in enumerate(targets):
        if target == ignore:
            continue
        s = sub(logits[i], total_order_max(logits[i]))
        e = exp(s)
        den = plain_fold(e)
        ld = F(log(den))
        losses[i] = neg(sub(s[target], ld))
        t = np.zeros(vocab, np.float32)
        t[target] = ONE
        if smoothing:
            sm = neg(div(plain_fold(sub(s, ld)), np.float32(vocab)))
            keep = F(ONE - smoothing)
            losses[i] = add(mul(keep, losses[i]), mul(F(smoothing), sm))
            t[:] = div(smoothing, np.float32(vocab))
            t[target] = add(keep, t[target])
        grad[i] = div(sub(div(e, den), t), divisor)
    return losses, grad


# ---- random draws: training 1 ------------------------------------------------------------------------------------


def philox(seed, stream, blocks):
    """Four words for each block number, (n, 4)."""
    blocks = np.asarray(blocks, np.uint64)
    low = np.uint64(0xFFFFFFFF)
    words = [blocks & low, blocks >> np.uint64(32), np.full_like(blocks, stream), np.zeros_like(blocks)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, third = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (third >> np.uint64(32)) ^ words[1] ^ np.uint64(keys[0]),
            third & low,
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(keys[1]),
            first & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, axis=-1)


def units(seed, stream, first, count):
    """Uniform numbers in [0, 1) of the positions from `first` on."""
    places = np.arange(first, first + count)
    words = philox(seed, stream, places // 4)[np.arange(count), places % 4]
    return (words >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)


def normals(seed, stream, first, count, mean, std):
    places = np.arange(first, first + count)
    words = philox(seed, stream, places // 2)
    pair = 2 * (places % 2)
    u1 = ((words[np.arange(count), pair] >> np.uint64(8)) + np.uint64(1)).astype(np.float32) * np.float32(2**-24)
    u2 = (words[np.arange(count), pair + 1] >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
    r = F(sqrt(F(np.float32(-2) * log(u1))))
    return fma(np.float32(std), mul(r, F(sincos(F(TWO_PI * u2))[1])), np.float32(mean))


def dropout(x, p, scale, seed, stream, first):
    u = units(seed, stream, first, x.size).reshape(x.shape)
    return np.where(u >= np.float32(p), mul(x, np.float32(scale)), ZERO)


# ---- optimizer: training 6 ---------------------------------------------------------------------------------------


@quiet
def gradient_norm(gradients):
    norms = [F(sqrt(matmul(g.reshape(1, -1), g.reshape(1, -1))[0, 0])) for g in gradients]
    norms = np.array(norms, np.float32)[None]
    return F(sqrt(matmul(norms, norms)[0, 0]))


@quiet
def clip_coefficient(max_norm, total):
    return np.minimum(div(np.float32(max_norm), F(total + N(0x358637BD))), ONE)


def whole_power(base, n):
    value = ONE
    while n:
        if n & 1:
            value = mul(value, base)
        base, n = mul(base, base), n >> 1
    return value


@quiet
def adam_step(p, g, m, v, t, lr, b1, b2, eps, decay, decoupled):
    lr, b1, b2, eps, decay = (np.float32(x) for x in (lr, b1, b2, eps, decay))
    step = div(lr, F(ONE - whole_power(b1, t)))
    rb = F(sqrt(F(ONE - whole_power(b2, t))))
    p = F(p)
    if decay:
        if decoupled:
            p = mul(F(ONE - mul(lr, decay)), p)
        else:
            g = fma(decay, p, g)
    m = fma(F(ONE - b1), g, mul(b1, m))
    v = fma(F(ONE - b2), mul(g, g), mul(b2, v))
    q = div(m, add(div(F(sqrt(v)), rb), eps))
    return fma(neg(step), q, p), m, v


@quiet
def sgd_step(p, g, buffer, started, lr, momentum, dampening, decay):
    """With Nesterov momentum."""
    lr, momentum, dampening, decay = (np.float32(x) for x in (lr, momentum, dampening, decay))
    p = F(p)
    g = fma(decay, p, g)
    later = fma(F(ONE - dampening), g, mul(momentum, buffer))
    buffer = np.where(started, later, g)
    return fma(neg(lr), fma(momentum, buffer, g), p), buffer


# ---- low-bit weights: forward 9 ----------------------------------------------------------------------------------


def to_bfloat16(x):
    bits = F(x).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (np.where(np.isnan(x), bits | np.uint32(0x400000), rounded) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def exact_power(k):
    """2**k: infinite above 2**127, zero below 2**-126."""
    k = np.asarray(k)
    return np.where(k > 127, np.float32(np.inf), np.where(k < -126, ZERO, power_of_two(np.clip(k, -126, 127))))


@quiet
def to_int8(x):
    """Codes (n, k) and exponents (n,) of finite rows."""
    x = F(x)
    largest = np.abs(x).max(axis=1)
    exponents = np.where(largest == 0, 0, (largest.view(np.uint32) >> 23).astype(np.int32) - 127 - 6)
    scaled = F(x * exact_power(-exponents)[:, None])
    codes = np.clip(np.rint(np.where(np.isnan(scaled), ZERO, scaled)), -127, 127)
    return codes.astype(np.int8), exponents.astype(np.int32)


def from_int8(codes, exponents):
    return F(codes.astype(np.float32) * exact_power(exponents)[:, None])


# ---- transformer block: forward 6, training 4.1 ------------------------------------------------------------------

ATTENTION_EPS = N(0x358637BD)


def rope_table(length, width, theta=10000.0):
    twice = np.arange(0, width, 2).astype(np.float32)
    inv = div(ONE, np.where(twice == 0, ONE, exp(div(twice, np.float32(width)) * log(np.float32(theta)))))
    s, c = sincos(mul(np.arange(length, dtype=np.float32)[:, None], inv))
    return F(c), F(s)


def rope(x, c, s, inverse=False):
    """Rotate (B, L, heads, hd)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = c[None, :, None], s[None, :, None]
    turned = (b, neg(a)) if inverse else (neg(b), a)
    return np.concatenate([add(mul(a, c), mul(turned[0], s)), add(mul(b, c), mul(turned[1], s))], axis=-1)


@quiet
def transformer_block(w, x, heads, kv_heads, dy=None):
    """Output of the block, or its gradients ("x" and every weight's name) for `dy`. x (B, L, D)."""
    batch, length, width = x.shape
    hd, group, tokens = width // heads, heads // kv_heads, batch * length
    flat = x.reshape(tokens, width)
    n1 = rms_norm(flat, w["input_layernorm.weight"], ATTENTION_EPS)
    q, k, v = (matmul(n1, w[f"{name}_proj.weight"]) for name in "qkv")
    q = q.reshape(batch, length, heads, hd)
    k, v = (y.reshape(batch, length, kv_heads, hd) for y in (k, v))
    c, s = rope_table(length, hd)
    q, k = rope(q, c, s), rope(k, c, s)
    scale = F(rsqrt(np.float32(hd)))
    visible = np.arange(length)[:, None] >= np.arange(length)
    weights = np.zeros((batch, heads, length, length), np.float32)
    ctx = np.zeros((batch, length, heads, hd), np.float32)
    for b in range(batch):
        for h in range(heads):
            key, value = k[b, :, h // group], v[b, :, h // group]
            # hidden keys count as the mask makes them while scores are finite; others must not reach a token either
            score = np.where(visible, mul(matmul(q[b, :, h], key), scale) + ZERO, -np.float32(np.inf))
            e = exp(sub(score, total_order_max(score)[:, None]))
            e = np.where(visible, e, ZERO)
            den = np.zeros(length, np.float32)
            for j in range(length):
                den = add(den, e[:, j])
            weights[b, h] = np.where(visible, div(e, den[:, None]), ZERO)
            for t in range(length):
                ctx[b, t, h] = chain(weights[b, h, t, : t + 1], value[: t + 1].T)
    ctx = ctx.reshape(tokens, width)
    r1 = add(flat, matmul(ctx, w["o_proj.weight"]))
    n2 = rms_norm(r1, w["post_attention_layernorm.weight"], ATTENTION_EPS)
    g, u = matmul(n2, w["gate_proj.weight"]), matmul(n2, w["up_proj.weight"])
    sl = F(silu(F(g)))
    act = mul(sl, u)
    if dy is None:
        return add(r1, matmul(act, w["down_proj.weight"])).reshape(x.shape)

    dy = dy.reshape(tokens, width)
    grads = {"down_proj.weight": matmul(dy.T, act.T)}
    dact = matmul(dy, w["down_proj.weight"].T)
    ds, du = mul(dact, u), mul(dact, sl)
    sg = F(sigmoid(F(g)))
    dg = mul(ds, mul(sg, add(ONE, mul(g, sub(ONE, sg)))))
    grads["gate_proj.weight"], grads["up_proj.weight"] = matmul(dg.T, n2.T), matmul(du.T, n2.T)
    dn2 = add(matmul(dg, w["gate_proj.weight"].T), matmul(du, w["up_proj.weight"].T))
    dx2, rows = rms_norm_backward(dn2, r1, w["post_attention_layernorm.weight"], ATTENTION_EPS)
    grads["post_attention_layernorm.weight"] = colsum(rows)
    dr1 = add(dx2, dy)
    grads["o_proj.weight"] = matmul(dr1.T, ctx.T)
    dctx = matmul(dr1, w["o_proj.weight"].T).reshape(batch, length, heads, hd)
    dq = np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            da = matmul(dctx[b, :, h], v[b, :, kv])
            z = np.zeros(length, np.float32)
            for j in range(length):
                z = fma(da[:, j], weights[b, h, :, j], z)
            dqk = mul(mul(weights[b, h], sub(da, z[:, None])), scale)
            for j in range(length):
                dq[b, :, h] = fma(dqk[:, j, None], k[b, j, kv], dq[b, :, h])
            for t in range(length):
                dk[b, :, kv] = fma(dqk[t, :, None], q[b, t, h], dk[b, :, kv])
                dv[b, :, kv] = fma(weights[b, h, t, :, None], dctx[b, t, h], dv[b, :, kv])
    dq, dk = rope(dq, c, s, inverse=True), rope(dk, c, s, inverse=True)
    dn1 = None
    for name, gradient in (("q", dq), ("k", dk), ("v", dv)):
        gradient = gradient.reshape(tokens, -1)
        grads[f"{name}_proj.weight"] = matmul(gradient.T, n1.T)
        term = matmul(gradient, w[f"{name}_proj.weight"].T)
        dn1 = term if dn1 is None else add(dn1, term)
    dx1, rows = rms_norm_backward(dn1, flat, w["input_layernorm.weight"], ATTENTION_EPS)
    grads["input_layernorm.weight"] = colsum(rows)
    grads["x"] = add(dx1, dr1).reshape(x.shape)
    return grads


# ---- Mamba-3 block: forward 5, training 4.2 ----------------------------------------------------------------------

STATE, HEAD, CHUNK, ANGLES = 128, 64, 64, 32
MAMBA_EPS, FLOOR = N(0x3727C5AC), N(0x38D1B717)


def turn(x, c, s):
    """Rotate the first 32 pairs of (..., 128) by (..., 32)."""
    even, odd = x[..., 0:64:2], x[..., 1:64:2]
    out = x.copy()
    out[..., 0:64:2] = F(mul(even, c) - mul(odd, s))
    out[..., 1:64:2] = F(mul(even, s) + mul(odd, c))
    return out


def turn_back(d, c, s):
    even, odd = d[..., 0:64:2], d[..., 1:64:2]
    out = d.copy()
    out[..., 0:64:2] = add(mul(even, c), mul(odd, s))
    out[..., 1:64:2] = sub(mul(odd, c), mul(even, s))
    return out


class Mamba3Line:
    """One head of one row of a Mamba-3 layer: the chunks of the sequence forward, and backward."""

    def __init__(self, rq, ks, v, adt):
        self.rq, self.ks, self.v, self.adt = rq, ks, v, adt
        self.length = len(adt)
        self.chunks = [slice(a, min(a + CHUNK, self.length)) for a in range(0, self.length, CHUNK)]
        self.states, self.dacs, self.last, self.segments = [], [], [], []

    def forward(self):
        """ys + yi of every token, (L, 64)."""
        h, out = np.zeros((HEAD, STATE), np.float32), np.empty((self.length, HEAD), np.float32)
        for part in self.chunks:
            rq, ks, v, adt = (x[part] for x in (self.rq, self.ks, self.v, self.adt))
            real = len(adt)
            dacs = running(adt)
            last = dacs[-1]
            seg = np.zeros((real, real), np.float32)
            total = np.zeros(real, np.float32)
            for i in range(real):
                total[:i] = add(total[:i], adt[i])
                seg[i, :i] = F(exp(total[:i]))
            m = np.tril(mul(matmul(rq, ks), seg), -1)
            yi = np.zeros((real, HEAD), np.float32)
            for j in range(real):
                # nothing reaches a token from later ones: not even NaN
                yi[j + 1 :] = fma(m[j + 1 :, j, None], v[j], yi[j + 1 :])
            if real < CHUNK:
                yi = yi + ZERO
            ys = mul(matmul(rq, h), F(exp(dacs))[:, None])
            out[part] = F(ys + yi)
            self.states.append(h)
            self.dacs.append(dacs)
            self.last.append(last)
            self.segments.append(seg)
            vs = mul(v, F(exp(F(last - dacs)))[:, None])
            inc = np.zeros((HEAD, STATE), np.float32)
            for i in range(real):
                inc = fma(vs[i, :, None], ks[i], inc)
            if real < CHUNK:
                inc = inc + ZERO
            h = fma(F(exp(last)), h, inc)
        return out

    def backward(self, dy):
        """dq16 + dq17, dk16 + dk17, dv16, dv17, dadt of the segments, ddacs; training 4.2, steps 4 to 7."""
        length = self.length
        dq, dk = np.empty((length, STATE), np.float32), np.empty((length, STATE), np.float32)
        dv16, dv17 = np.empty((length, HEAD), np.float32), np.empty((length, HEAD), np.float32)
        dadt, ddacs = np.empty(length, np.float32), np.empty(length, np.float32)
        carry = np.zeros((HEAD, STATE), np.float32)
        adjoints = [None] * len(self.chunks)
        for c in reversed(range(len(self.chunks))):
            adjoints[c] = carry
            part, ev = self.chunks[c], F(exp(self.dacs[c]))
            direct = np.zeros((HEAD, STATE), np.float32)
            for i, row in enumerate(range(part.start, part.stop)):
                direct = fma(dy[row, :, None], mul(self.rq[row], ev[i]), direct)
            carry = F(direct + mul(carry, F(exp(self.last[c]))))
        for c, part in enumerate(self.chunks):
            rq, ks, v, g = (x[part] for x in (self.rq, self.ks, self.v, dy))
            seg, state, dacs, last = self.segments[c], self.states[c], self.dacs[c], self.last[c]
            dq16, dk16, dv16[part] = self._inside(rq, ks, v, g, seg)
            dadt[part] = self._segments(rq, ks, v, g, seg)
            # step 7
            dec, ev, nx = F(exp(F(last - dacs))), F(exp(dacs)), adjoints[c]
            d = np.zeros((len(g), STATE), np.float32)
            for p in range(HEAD):
                d = fma(g[:, p, None], state[p], d)
            dread = mul(chain(rq, d), ev)
            dk17, dv17_part = np.zeros((len(g), STATE), np.float32), np.zeros((len(g), HEAD), np.float32)
            for p in range(HEAD):
                dk17 = fma(nx[p], v[:, p, None], dk17)
            for n in range(STATE):
                dv17_part = fma(nx[:, n], ks[:, n, None], dv17_part)
            dk17, dv17_part = mul(dk17, dec[:, None]), mul(dv17_part, dec[:, None])
            dr = neg(chain(dv17_part, v))
            if c + 1 < len(self.chunks):
                dr[-1] = F(dr[-1] + self._state_sum(nx, v, ks, dec, state, last))
            else:
                dr[-1] = F(dr[-1] + ZERO)
            dq[part], dk[part], dv17[part] = add(dq16, mul(d, ev[:, None])), add(dk16, dk17), dv17_part
            ddacs[part] = add(dread, dr)
        return dq, dk, dv16, dv17, dadt, ddacs

    @staticmethod
    def _inside(rq, ks, v, g, seg):
        """Step 4."""
        real = len(g)
        below = np.tril(np.ones((real, real), bool), -1)
        dq, dk = np.zeros((real, STATE), np.float32), np.zeros((real, STATE), np.float32)
        for p in range(HEAD):
            for j in range(real):
                later, earlier = below[:, j], below[j]
                if later.any():
                    term = mul(mul(ks[j], seg[later, j, None]), v[j, p])
                    dq[later] = fma(g[later, p, None], term, dq[later])
                if earlier.any():
                    term = mul(mul(rq[j], seg[j, earlier, None]), v[earlier, p, None])
                    dk[earlier] = fma(g[j, p], term, dk[earlier])
        dv = np.zeros((real, HEAD), np.float32)
        dots = chain(rq[:, None], ks[None])
        for i in range(real):
            earlier = below[i]
            if earlier.any():
                dv[earlier] = fma(g[i], mul(dots[i, earlier], seg[i, earlier])[:, None], dv[earlier])
        return dq, dk, dv

    @staticmethod
    def _segments(rq, ks, v, g, seg):
        """Step 5."""
        real = len(g)
        dots = chain(rq[:, None], ks[None])
        dseg = np.zeros((real, real), np.float32)
        for p in range(HEAD):
            dseg = fma(g[:, p, None], mul(dots, v[:, p]), dseg)
        out = np.zeros(real, np.float32)
        for i in range(real):
            for j in range(i):
                # terms (i, j) belong to the sums s with j < s <= i
                out[j + 1 : i + 1] = fma(dseg[i, j], seg[i, j], out[j + 1 : i + 1])
        return out

    @staticmethod
    def _state_sum(nx, v, ks, dec, state, last):
        """The long chain of step 7."""
        terms = mul(mul(v[:, :, None], ks[:, None, :]), dec[:, None, None])
        terms = np.concatenate([terms.ravel(), mul(state, F(exp(last))).ravel()])
        return long_chain(np.tile(F(nx).ravel(), len(v) + 1), F(terms))


@quiet
def mamba3_block(w, x, dy=None):
    """Output of the block from a fresh state, or its gradients ("x" and every weight's name) for `dy`. x (B, L, D)."""
    batch, length, width = x.shape
    inner, heads, tokens = 2 * width, width // 32, batch * length
    flat = x.reshape(tokens, width)
    normed = rms_norm(flat, w["block_norm.weight"], MAMBA_EPS, lanes=True)
    proj = matmul(normed, w["in_proj.weight"]).reshape(batch, length, -1)
    cuts = np.cumsum([inner, inner, STATE, STATE, heads, heads, heads])
    z, v, raw_b, raw_c, raw_dt, raw_a, raw_trap, raw_angle = np.split(proj, cuts, axis=-1)
    z, v = (y.reshape(batch, length, heads, HEAD) for y in (z, v))
    bn, cn = rms_norm(raw_b, w["B_norm.weight"], MAMBA_EPS), rms_norm(raw_c, w["C_norm.weight"], MAMBA_EPS)
    a = F(raw_a)
    tail = np.where(a >= 0, F(ONE + a), div(ONE, F(ONE - np.minimum(a, ZERO))))
    rate = np.where(neg(tail) > neg(FLOOR), neg(FLOOR), neg(tail))
    pre = add(raw_dt, w["dt_bias"])
    dt = F(softplus(pre))
    adt = mul(rate, dt)
    sig = F(sigmoid(F(raw_trap)))
    rest = F(ONE - sig)
    gamma = mul(dt, sig)
    beta = np.zeros_like(dt)
    beta[:, :-1] = mul(dt[:, 1:], rest[:, 1:])
    scale = F(gamma + beta)
    slope = mul(tanh(F(raw_angle)), PI)
    theta = np.zeros((batch, length, heads, ANGLES), np.float32)
    th = np.zeros((batch, heads, ANGLES), np.float32)
    for t in range(length):
        th = F(th + mul(slope[:, t, None], dt[:, t, :, None]))
        th = fma(neg(TWO_PI), np.floor(div(th, TWO_PI)), th)
        theta[:, t] = th
    s, c = (F(y) for y in sincos(theta))
    q, k = add(cn[:, :, None], w["C_bias"]), add(bn[:, :, None], w["B_bias"])
    dot = chain(q, k)
    qk = mul(dot, gamma)
    rq, rk = turn(q, c, s), turn(k, c, s)
    ks = mul(rk, scale[..., None])
    y0 = np.empty((batch, length, heads, HEAD), np.float32)
    lines = {}
    for b in range(batch):
        for h in range(heads):
            line = Mamba3Line(rq[b, :, h], ks[b, :, h], v[b, :, h], adt[b, :, h])
            y0[b, :, h] = line.forward()
            lines[b, h] = line
    through = F(F(w["D"]) + qk)
    skip = F(y0 + mul(through[..., None], v))
    sz = F(silu(F(z)))
    gate = mul(skip, sz).reshape(tokens, inner)
    if dy is None:
        return add(flat, matmul(gate, w["out_proj.weight"])).reshape(x.shape)

    dout = dy.reshape(tokens, width)
    grads = {"out_proj.weight": matmul(dout.T, gate.T)}
    dgate = matmul(dout, w["out_proj.weight"].T).reshape(z.shape)
    # step 2
    g = mul(dgate, sz)
    sg = F(sigmoid(F(z)))
    dz = mul(mul(dgate, skip), mul(sg, fma(z, F(ONE - sg), ONE)))
    dv0 = mul(g, through[..., None])
    dqk = chain(g, v)
    grads["D"] = colsum(dqk.reshape(tokens, heads))
    # step 3
    com = mul(dqk, gamma)
    db0, dc0 = mul(com[..., None], q), mul(com[..., None], k)
    dg = mul(dqk, dot)
    ddt0 = mul(dg, sig)
    dtrap0 = mul(mul(mul(dg, dt), sig), rest)
    # steps 4 to 8
    dq, dk = np.empty_like(q), np.empty_like(k)
    dv, dadt, ddacs = np.empty_like(v), np.empty_like(dt), np.empty_like(dt)
    for (b, h), line in lines.items():
        dq[b, :, h], dk[b, :, h], dv16, dv17, dadt[b, :, h], ddacs[b, :, h] = line.backward(g[b, :, h])
        dv[b, :, h] = add(add(dv0[b, :, h], dv16), dv17)
    # step 9
    dkrot = mul(dk, scale[..., None])
    dscale = chain(dk, rk)
    dtheta = np.zeros_like(theta)
    for d, u in ((dq, q), (dkrot, k)):
        u0, u1 = u[..., 0:64:2], u[..., 1:64:2]
        dtheta = fma(d[..., 0:64:2], F(neg(mul(u0, s)) - mul(u1, c)), dtheta)
        dtheta = fma(d[..., 1:64:2], F(mul(u0, c) - mul(u1, s)), dtheta)
    db, dc = add(db0, turn_back(dkrot, c, s)), add(dc0, turn_back(dq, c, s))
    # step 10
    for first in range(0, length, CHUNK):
        carry = np.zeros((batch, heads), np.float32)
        for t in reversed(range(first, min(first + CHUNK, length))):
            carry = F(carry + ddacs[:, t])
            dadt[:, t] = add(dadt[:, t], carry)
    drate, ddt_adt = mul(dadt, dt), mul(dadt, rate)
    prime = np.where(a >= 0, ONE, mul(tail, tail))
    da_raw = np.where(neg(tail) > neg(FLOOR), ZERO, neg(mul(drate, prime)))
    # step 11
    ddt = add(ddt0, mul(dscale, sig))
    dtrap = F(dtrap0 + mul(mul(mul(dscale, dt), sig), rest))
    before = dscale[:, :-1]
    ddt[:, 1:] = F(ddt[:, 1:] + mul(before, rest[:, 1:]))
    dtrap[:, 1:] = F(dtrap[:, 1:] + mul(mul(neg(mul(before, dt[:, 1:])), sig[:, 1:]), rest[:, 1:]))
    # step 12
    carried = np.empty_like(dtheta)
    totals = []
    for first in reversed(range(0, length, CHUNK)):
        start = np.zeros((batch, heads, ANGLES), np.float32)
        for total in totals:
            start = F(start + total)
        total = np.zeros_like(start)
        for t in reversed(range(first, min(first + CHUNK, length))):
            start, total = F(start + dtheta[:, t]), F(total + dtheta[:, t])
            carried[:, t] = start
        totals.append(total)
    ddt_angle = chain(carried, np.broadcast_to(slope[:, :, None], carried.shape))
    dang = np.zeros((batch, length, ANGLES), np.float32)
    for h in range(heads):
        dang = F(dang + mul(carried[:, :, h], dt[:, :, h, None]))
    ta = tanh(F(raw_angle))
    dang = mul(dang, mul(PI, F(ONE - mul(ta, ta))))
    # step 13
    total = add(add(ddt, ddt_adt), ddt_angle)
    dt_raw = mul(total, np.where(pre <= 20, F(sigmoid(pre)), ONE))
    grads["dt_bias"] = colsum(dt_raw.reshape(tokens, heads))
    # step 14
    packed = [dz.reshape(tokens, inner), dv.reshape(tokens, inner)]
    for name, d, raw in (("B", db, raw_b), ("C", dc, raw_c)):
        grads[f"{name}_bias"] = colsum(d.reshape(tokens, -1)).reshape(heads, STATE)
        over_heads = np.zeros((batch, length, STATE), np.float32)
        for h in range(heads):
            over_heads = F(over_heads + d[:, :, h])
        dx, rows = rms_norm_backward_collapsed(over_heads, raw, w[f"{name}_norm.weight"], MAMBA_EPS)
        grads[f"{name}_norm.weight"] = colsum(rows.reshape(tokens, STATE))
        packed.append(dx.reshape(tokens, STATE))
    # steps 15 and 16
    packed = F(np.concatenate([*packed, *(y.reshape(tokens, -1) for y in (dt_raw, da_raw, dtrap, dang))], axis=1))
    grads["in_proj.weight"] = matmul(packed.T, normed.T)
    dn = matmul(packed, w["in_proj.weight"].T)
    dx, rows = rms_norm_backward_collapsed(dn, flat, w["block_norm.weight"], MAMBA_EPS, lanes=True)
    grads["block_norm.weight"] = colsum(rows)
    grads["x"] = add(dx, dout).reshape(x.shape)
    return grads
