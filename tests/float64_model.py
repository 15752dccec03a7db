"""The model in plain NumPy float64, written from its equations: an oracle that shares nothing with the kernels.

The Mamba-3 layer is written as a recurrence over tokens, not in chunks; attention as whole matrices. Nothing here is
fast or careful about the order of sums.
"""

import numpy as np

STATE, HEAD, ANGLES = 128, 64, 32


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate_pairs(x, angle):
    """Rotate the first 32 pairs (2j, 2j + 1) of x (..., N) by angle (..., 32)."""
    out = x.copy()
    even, odd = x[..., 0 : 2 * ANGLES : 2], x[..., 1 : 2 * ANGLES : 2]
    out[..., 0 : 2 * ANGLES : 2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1 : 2 * ANGLES : 2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def mamba3_block(w, x):
    """Output of a Mamba-3 layer for x (B, L, D), residual included."""
    batch, length, d_model = x.shape
    inner = 2 * d_model
    heads = inner // HEAD
    projected = rms_norm(x, w["block_norm.weight"], 1e-5) @ w["in_proj.weight"].T
    sizes = (inner, inner, STATE, STATE, heads, heads, heads, ANGLES)
    z, v, b, c, dt, a, trap, angle = np.split(projected, np.cumsum(sizes)[:-1], axis=-1)
    z, v = (part.reshape(batch, length, heads, HEAD) for part in (z, v))
    k = rms_norm(b, w["B_norm.weight"], 1e-5)[:, :, None] + w["B_bias"]
    q = rms_norm(c, w["C_norm.weight"], 1e-5)[:, :, None] + w["C_bias"]
    a = np.minimum(np.where(a >= 0, -(1.0 + a), -1.0 / (1.0 - np.minimum(a, 0.0))), -1e-4)
    dt = np.log1p(np.exp(dt + w["dt_bias"]))
    share = sigmoid(trap)
    theta = np.cumsum(np.tanh(angle)[:, :, None] * np.pi * dt[..., None], axis=1)
    gamma = dt * share
    beta = np.zeros_like(gamma)
    beta[:, :-1] = (dt * (1.0 - share))[:, 1:]
    direct = w["D"] + (q * k).sum(-1) * gamma
    q, k = rotate_pairs(q, theta), rotate_pairs(k, theta)
    k = k * (gamma + beta)[..., None]
    decay = np.exp(a * dt)
    state = np.zeros((batch, heads, HEAD, STATE))
    mixed = np.empty_like(v)
    for t in range(length):
        state = state * decay[:, t, :, None, None]
        mixed[:, t] = np.einsum("bhpn,bhn->bhp", state, q[:, t]) + direct[:, t, :, None] * v[:, t]
        state = state + v[:, t][..., None] * k[:, t][:, :, None]
    gated = (mixed * silu(z)).reshape(batch, length, inner)
    return x + gated @ w["out_proj.weight"].T


def rotate_halves(x, base=10000.0):
    """Rotary embedding of x (B, L, heads, head_dim), positions from 0."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = np.arange(length)[:, None] * base ** (-2.0 * np.arange(half) / (2 * half))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def attention_block(w, x, n_heads, n_kv_heads, window=0):
    """Output of an attention layer for x (B, L, D), residuals included."""
    batch, length, _ = x.shape
    normed = rms_norm(x, w["input_layernorm.weight"], 1e-6)
    q, k, v = (
        (normed @ w[f"{name}_proj.weight"].T).reshape(batch, length, heads, -1)
        for name, heads in (("q", n_heads), ("k", n_kv_heads), ("v", n_kv_heads))
    )
    q, k = rotate_halves(q), rotate_halves(k)
    k, v = (np.repeat(part, n_heads // n_kv_heads, axis=2) for part in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    age = np.arange(length)[:, None] - np.arange(length)
    visible = (age >= 0) & ((age < window) if window else True)
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    weights = scores / scores.sum(-1, keepdims=True)
    context = np.einsum("bhij,bjhd->bihd", weights, v).reshape(batch, length, -1)
    x = x + context @ w["o_proj.weight"].T
    normed = rms_norm(x, w["post_attention_layernorm.weight"], 1e-6)
    gated = silu(normed @ w["gate_proj.weight"].T) * (normed @ w["up_proj.weight"].T)
    return x + gated @ w["down_proj.weight"].T


BLOCKS = {"mamba3": mamba3_block, "attention": attention_block}


def logits(config, weights, ids):
    """Logits (B, L, vocab) of a model, `weights` float64 by registry name."""
    x = weights["embed.weight"][ids]
    for i, kind in enumerate(config.layers):
        prefix = f"layers.{i}."
        layer = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
        heads = () if kind == "mamba3" else (config.n_heads, config.n_kv_heads)
        x = BLOCKS[kind](layer, x, *heads)
    head = weights["embed.weight" if config.tie_embeddings else "lm_head.weight"]
    return rms_norm(x, weights["norm_f.weight"], config.norm_eps) @ head.T


def cross_entropy(scores, targets, ignore=-100):
    """Mean cross-entropy over the targets that are not `ignore`."""
    scores, targets = scores.reshape(-1, scores.shape[-1]), np.asarray(targets).reshape(-1)
    real = targets != ignore
    scores, targets = scores[real], targets[real]
    top = scores.max(-1, keepdims=True)
    norm = np.log(np.exp(scores - top).sum(-1)) + top[:, 0]
    return (norm - scores[np.arange(len(targets)), targets]).mean()


def slope(function, weights, name, direction, step=1e-5):
    """Central difference of a scalar function of the weights along a direction of one tensor."""
    plus = {**weights, name: weights[name] + step * direction}
    minus = {**weights, name: weights[name] - step * direction}
    return (function(plus) - function(minus)) / (2 * step)
