"""Attention for one new token: rotation and one query per head against the slots of the cache.

Plain functions on pointers, shared by the transformer block and the whole-step decoder.
"""


cdef inline vf load_lanes(const float* p, Py_ssize_t n) noexcept nogil:
    """A vector, of which the first n > 0 lanes are there."""
    return vload(p) if n >= vlanes else vloadn(p, n)


cdef inline void store_lanes(float* p, vf x, Py_ssize_t n) noexcept nogil:
    if n >= vlanes:
        vstore(p, x)
    else:
        vstoren(p, x, n)


cdef void rotate(float* x, const float* cosines, const float* sines, Py_ssize_t half, bint inverse) noexcept nogil:
    """Rotate one head in place; element i pairs with element i + half. ``inverse`` rotates the other way."""
    cdef Py_ssize_t i = 0, n
    cdef vf a, b, c, s, y0, y1
    while i < half:
        n = half - i
        a = load_lanes(x + i, n)
        b = load_lanes(x + half + i, n)
        c = load_lanes(cosines + i, n)
        s = load_lanes(sines + i, n)
        if inverse:
            y0 = vadd(vmul(a, c), vmul(b, s))
            y1 = vsub(vmul(b, c), vmul(a, s))
        else:
            y0 = vsub(vmul(a, c), vmul(b, s))
            y1 = vadd(vmul(b, c), vmul(a, s))
        store_lanes(x + i, vflush(y0), n)
        store_lanes(x + half + i, vflush(y1), n)
        i += vlanes
