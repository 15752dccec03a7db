"""A slow model of the profile's sums in float64, with a correct fused multiply-add: oracle of the matrix products."""

import functools

import numpy as np

EXPONENT, SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)


def flush(x):
    """F(x): a subnormal becomes the zero of its sign."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return np.where(bits & EXPONENT == 0, bits & SIGN, bits).view(np.float32)


def fused(a, b, c):
    """a * b + c, rounded once.

    The product is exact in float64. The sum is rounded to odd there (its last bit says whether anything was lost),
    after which the rounding to float32 cannot go wrong.
    """
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = np.asarray(total).view(np.int64)
    away = (error > 0) == (total > 0)
    inexact = (error != 0) & np.isfinite(total)
    odd = np.where(inexact & (bits & 1 == 0), bits + np.where(away, 1, -1), bits).view(np.float64)
    return odd.astype(np.float32)


def fma(a, b, c):
    """F(a * b + c), rounded once."""
    return flush(fused(flush(a), flush(b), flush(c)))


def leaf_of(steps):
    if steps <= 128:
        return steps
    return 128 if -(-steps // 128) <= 1024 else -(-steps // 1024)


def fold(parts):
    """Adjacent pairs, level by level; an odd last one moves up."""
    while len(parts) > 1:
        pairs = [flush(parts[i] + parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def chains(a, b):
    """Sums over axis 1 of a (leaves, steps, m) times b (leaves, steps, n), each in order."""
    total = np.zeros((len(a), a.shape[2], b.shape[2]), np.float32)
    for p in range(a.shape[1]):
        total = fma(a[:, p, :, None], b[:, p, None, :], total)
    return list(total)


def matmul(a, b, leaf=None):
    """a (m, k) times the transpose of b (n, k), in leaves and tree."""
    steps = a.shape[1]
    leaf = leaf or leaf_of(steps)
    whole = steps // leaf * leaf
    with np.errstate(all="ignore"):
        parts = chains(*(x[:, :whole].T.reshape(-1, leaf, len(x)) for x in (a, b)))
        if whole < steps:
            parts += chains(*(x[:, whole:].T[None] for x in (a, b)))
        return fold(parts)


def colsum(rows, leaf=None):
    """Sum of rows (t, d) over t, in leaves and tree."""
    return matmul(np.ones((1, len(rows)), np.float32), rows.T, leaf)[0]


def same_bits(a, b):
    """Equal shapes and bytes."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def numbers(draw, shape, kind):
    """Operands of several kinds.

    normal; tiny: products around 1e-38, where sums drift through the underflow range; vanishing: every product
    underflows; subnormal: half of the values are; wide: 50 binary orders of magnitude around the root of the smallest
    normal number; border: few significant bits, so that exact results hit the edge of the normal numbers.
    """
    scale = {"normal": 1, "tiny": 1.1e-19, "vanishing": 1e-20, "subnormal": 1e-38}
    if kind in scale:
        return (draw.standard_normal(shape) * scale[kind]).astype(np.float32)
    sign = draw.integers(0, 2, shape, dtype=np.uint32) << 31
    if kind == "wide":
        exponent, mantissa = (
            draw.integers(40, 90, shape, dtype=np.uint32),
            draw.integers(0, 1 << 23, shape, dtype=np.uint32),
        )
    else:
        exponent, mantissa = (
            draw.integers(62, 66, shape, dtype=np.uint32),
            draw.integers(0, 4, shape, dtype=np.uint32) * 0x1FFFFF,
        )
    return (sign | exponent << 23 | mantissa).view(np.float32)


@functools.cache
def case(m, n, k, kind):
    """Operands (m, k) and (n, k), read-only, and their product; the same for all builds that are tested."""
    draw = np.random.default_rng(m + n + k)
    a, b = numbers(draw, (m, k), kind), numbers(draw, (n, k), kind)
    expected = matmul(a, b)
    for x in (a, b, expected):
        x.flags.writeable = False
    return a, b, expected
