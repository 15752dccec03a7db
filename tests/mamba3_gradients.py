"""Gradients of a Mamba-3 layer in NumPy float64, by hand, from its recurrence over tokens.

The state before token t is G_t = exp(a_t) (G_{t-1} + v_{t-1} ks_{t-1}^T); the layer reads G_t q_t, and past it
(D + gamma q.k) v_t. Nothing here knows of chunks or of the kernels' orders.
"""

import numpy as np

STATE, HEAD, ANGLES = 128, 64, 32
EPS = 1e-5


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def norm(x):
    scale = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return x * scale, scale


def norm_backward(dy, x, scale):
    """Gradient of ``x * scale`` with respect to x."""
    return scale * (dy - x * scale * (dy * x * scale).mean(-1, keepdims=True))


def rotate(x, angle, direction=1.0):
    """Turn the first 32 pairs of x (..., 128) by +-angle (..., 32)."""
    even, odd = x[..., 0 : 2 * ANGLES : 2], x[..., 1 : 2 * ANGLES : 2]
    cosine, sine = np.cos(angle), np.sin(angle) * direction
    out = x.copy()
    out[..., 0 : 2 * ANGLES : 2] = even * cosine - odd * sine
    out[..., 1 : 2 * ANGLES : 2] = even * sine + odd * cosine
    return out


def angle_gradient(dturned, turned):
    """Gradient with respect to the angle of a rotation with result ``turned``."""
    even, odd = slice(0, 2 * ANGLES, 2), slice(1, 2 * ANGLES, 2)
    return dturned[..., odd] * turned[..., even] - dturned[..., even] * turned[..., odd]


def mamba3_gradients(weights, x, dy):
    """Output of the layer and a dict of gradients: "x" and every weight's name. x, dy: (B, L, D)."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x, dout = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    batch, length, d_model = x.shape
    inner, heads = 2 * d_model, d_model // 32
    sizes = (inner, inner, STATE, STATE, heads, heads, heads, ANGLES)
    cuts = np.cumsum(sizes)[:-1]

    unit, unit_scale = norm(x)
    normed = unit * w["block_norm.weight"]
    z, v, raw_b, raw_c, raw_dt, raw_a, raw_trap, raw_angle = np.split(normed @ w["in_proj.weight"].T, cuts, axis=-1)
    z, v = (part.reshape(batch, length, heads, HEAD) for part in (z, v))
    unit_b, scale_b = norm(raw_b)
    unit_c, scale_c = norm(raw_c)
    k = (unit_b * w["B_norm.weight"])[:, :, None] + w["B_bias"]
    q = (unit_c * w["C_norm.weight"])[:, :, None] + w["C_bias"]
    tail = np.where(raw_a >= 0, 1.0 + raw_a, 1.0 / (1.0 - np.minimum(raw_a, 0.0)))
    rate = np.minimum(-tail, -1e-4)
    dt = np.logaddexp(0.0, raw_dt + w["dt_bias"])
    decay = np.exp(rate * dt)
    gate = sigmoid(raw_trap)
    gamma = dt * gate
    scale = gamma.copy()
    scale[:, :-1] += dt[:, 1:] * (1.0 - gate[:, 1:])
    turn = np.tanh(raw_angle) * np.pi
    theta = np.cumsum(turn[:, :, None] * dt[..., None], axis=1)
    rq, rk = rotate(q, theta), rotate(k, theta)
    ks = rk * scale[..., None]
    diagonal = (q * k).sum(-1)

    states = np.zeros((length, batch, heads, HEAD, STATE))
    read = np.zeros_like(v)
    for t in range(length):
        if t:
            states[t] = decay[:, t, :, None, None] * (
                states[t - 1] + v[:, t - 1, :, :, None] * ks[:, t - 1, :, None, :]
            )
        read[:, t] = np.einsum("bhpn,bhn->bhp", states[t], rq[:, t])
    through = w["D"] + gamma * diagonal
    total = read + through[..., None] * v
    silu = z * sigmoid(z)
    gated = (total * silu).reshape(batch, length, inner)
    y = x + gated @ w["out_proj.weight"].T

    def over_tokens(a, b):
        return np.einsum("bti,btj->ij", a, b)

    g = {"out_proj.weight": over_tokens(dout, gated)}
    dgated = (dout @ w["out_proj.weight"]).reshape(total.shape)
    dtotal = dgated * silu
    dz = dgated * total * sigmoid(z) * (1.0 + z * (1.0 - sigmoid(z)))
    dv = dtotal * through[..., None]
    dthrough = (dtotal * v).sum(-1)
    g["D"] = dthrough.sum((0, 1))
    dgamma = dthrough * diagonal
    dq = (dthrough * gamma)[..., None] * k
    dk = (dthrough * gamma)[..., None] * q
    drq, drk, dlog = np.zeros_like(q), np.zeros_like(k), np.zeros_like(dt)
    dstate = np.zeros((batch, heads, HEAD, STATE))
    for t in range(length - 1, -1, -1):
        # dstate: gradient of G_{t+1} with its decay already applied, that is of G_t + v_t ks_t^T
        dv[:, t] += np.einsum("bhpn,bhn->bhp", dstate, ks[:, t])
        drk[:, t] = np.einsum("bhpn,bhp->bhn", dstate, v[:, t])
        drq[:, t] = np.einsum("bhpn,bhp->bhn", states[t], dtotal[:, t])
        dstate = dstate + dtotal[:, t, :, :, None] * rq[:, t, :, None, :]
        dlog[:, t] = (dstate * states[t]).sum((-2, -1))
        dstate = dstate * decay[:, t, :, None, None]
    dscale = (drk * rk).sum(-1)
    drk = drk * scale[..., None]
    dgamma += dscale
    ddt, dgate = np.zeros_like(dt), np.zeros_like(dt)
    ddt[:, 1:] += dscale[:, :-1] * (1.0 - gate[:, 1:])
    dgate[:, 1:] -= dscale[:, :-1] * dt[:, 1:]
    ddt += dgamma * gate
    dgate += dgamma * dt
    dtheta = angle_gradient(drq, rq) + angle_gradient(drk, rk)
    dq += rotate(drq, theta, -1.0)
    dk += rotate(drk, theta, -1.0)
    dincrement = np.cumsum(dtheta[:, ::-1], axis=1)[:, ::-1]
    ddt += (dincrement * turn[:, :, None]).sum(-1)
    dturn = (dincrement * dt[..., None]).sum(2)
    ddt += dlog * rate
    drate = dlog * dt
    draw_a = np.where(-tail > -1e-4, 0.0, -drate * np.where(raw_a >= 0, 1.0, tail * tail))
    draw_dt = ddt * sigmoid(raw_dt + w["dt_bias"])
    g["dt_bias"] = draw_dt.sum((0, 1))
    g["B_bias"], g["C_bias"] = dk.sum((0, 1)), dq.sum((0, 1))
    db, dc = dk.sum(2), dq.sum(2)
    g["B_norm.weight"], g["C_norm.weight"] = (db * unit_b).sum((0, 1)), (dc * unit_c).sum((0, 1))
    dpacked = np.concatenate(
        [
            dz.reshape(batch, length, inner),
            dv.reshape(batch, length, inner),
            norm_backward(db * w["B_norm.weight"], raw_b, scale_b),
            norm_backward(dc * w["C_norm.weight"], raw_c, scale_c),
            draw_dt,
            draw_a,
            dgate * gate * (1.0 - gate),
            dturn * np.pi * (1.0 - np.tanh(raw_angle) ** 2),
        ],
        axis=-1,
    )
    g["in_proj.weight"] = over_tokens(dpacked, normed)
    dnormed = dpacked @ w["in_proj.weight"]
    g["block_norm.weight"] = (dnormed * unit).sum((0, 1))
    g["x"] = dout + norm_backward(dnormed * w["block_norm.weight"], x, unit_scale)
    return y, g
