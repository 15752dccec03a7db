"""Elementary functions of the profile, in vectors (numerics page, section 2).

The C library's functions differ from machine to machine, so none is called. Operations come in the order of the
profile. The scalar forms run the vector form on one lane, so that there is one implementation.
"""
from mojolearn._core.simd cimport *


cdef inline vf vexp(vf x) noexcept nogil:
    """exp. The argument is clamped first, so that lanes out of range raise no underflow on the way."""
    cdef vf high = vbits(0x42B17217), low = vbits(0xC2AEAC50)
    cdef vf inside = vmax(vmin(x, high), low)
    cdef vf z = vfloor(vfma(inside, vbits(0x3FB8AA3B), vset(0.5)))
    cdef vi k = vtoint(z)
    cdef vf r = vfma(z, vbits(0xBF318000), inside)
    r = vfma(z, vbits(0x395E8083), r)
    cdef vf q = vfma(vbits(0x39506967), r, vbits(0x3AB743CE))
    q = vfma(q, r, vbits(0x3C088908))
    q = vfma(q, r, vbits(0x3D2AA9C1))
    q = vfma(q, r, vbits(0x3E2AAAAA))
    q = vfma(q, r, vbits(0x3F000000))
    cdef vf y = vadd(vfma(q, vmul(r, r), r), vset(1.0))
    # two exact powers of two: their product may lie beyond the largest one
    cdef vi k1 = vishr(k, 1)
    y = vmul(y, vasfloat(vishl(viadd(k1, viset(127)), 23)))
    y = vmul(y, vasfloat(vishl(viadd(visub(k, k1), viset(127)), 23)))
    y = vselect(vigt(viset(0x00800000), vasint(y)), vzero(), y)
    y = vselect(vgt(x, high), vbits(0x7F800000), y)
    y = vselect(vlt(x, low), vzero(), y)
    return vselect(veq(x, x), y, x)


cdef inline vf vexp_negative(vf x) noexcept nogil:
    """exp for x <= 0, -inf and NaN included: the bits of ``vexp`` in fewer operations (softmax)."""
    cdef vf z = vfloor(vfma(x, vbits(0x3FB8AA3B), vset(0.5)))
    cdef vf r = vfma(z, vbits(0xBF318000), x)
    r = vfma(z, vbits(0x395E8083), r)
    cdef vf q = vfma(vbits(0x39506967), r, vbits(0x3AB743CE))
    q = vfma(q, r, vbits(0x3C088908))
    q = vfma(q, r, vbits(0x3D2AA9C1))
    q = vfma(q, r, vbits(0x3E2AAAAA))
    q = vfma(q, r, vbits(0x3F000000))
    cdef vf y = vadd(vfma(q, vmul(r, r), r), vset(1.0))
    # times 2^k on the exponent bits. Far below the range k and y are junk, and are thrown away
    y = vasfloat(viadd(vasint(y), vishl(vtoint(z), 23)))
    return vselect(vior(vlt(x, vbits(0xC2AEAC50)), vlt(y, vbits(0x00800000))), vzero(), y)


cdef inline vf _log_core(vf t, vf e) noexcept nogil:
    cdef vf z = vmul(t, t)
    cdef vf p = vfma(vbits(0x3D9021BB), t, vbits(0xBDEBD1B8))
    p = vfma(p, t, vbits(0x3DEF251A))
    p = vfma(p, t, vbits(0xBDFE5D4F))
    p = vfma(p, t, vbits(0x3E11E9BF))
    p = vfma(p, t, vbits(0xBE2AAE50))
    p = vfma(p, t, vbits(0x3E4CCEAC))
    p = vfma(p, t, vbits(0xBE7FFFFC))
    p = vfma(p, t, vbits(0x3EAAAAAA))
    cdef vf y = vmul(vmul(t, z), p)
    y = vfma(e, vbits(0xB95E8083), y)
    y = vfma(vset(-0.5), z, y)
    return vfma(e, vbits(0x3F318000), vadd(t, y))


cdef inline vf vlog(vf x) noexcept nogil:
    x = vflush(x)
    cdef vi bits = vasint(x)
    cdef vi e = visub(viand(vishr(bits, 23), viset(0xFF)), viset(126))
    cdef vf m = vasfloat(vior(viand(bits, viset(0x007FFFFF)), viset(0x3F000000)))
    cdef vi small = vlt(m, vbits(0x3F3504F3))
    e = viadd(e, small)
    m = vselect(small, vadd(m, m), m)
    cdef vf y = _log_core(vsub(m, vset(1.0)), vtofloat(e))
    y = vselect(veq(x, vbits(0x7F800000)), x, y)
    y = vselect(vlt(x, vzero()), vbits(0x7FC00000), y)
    y = vselect(veq(x, vzero()), vbits(0xFF800000), y)
    return vselect(veq(x, x), y, x)


cdef inline vf vlog1p(vf x) noexcept nogil:
    x = vflush(x)
    cdef vi near = viand(vge(x, vbits(0xBE95F61A)), vle(x, vbits(0x3ED413CD)))
    cdef vf y = vselect(near, _log_core(vselect(near, x, vzero()), vzero()), vlog(vadd(x, vset(1.0))))
    y = vselect(vlt(x, vset(-1.0)), vbits(0x7FC00000), y)
    y = vselect(veq(x, vset(-1.0)), vbits(0xFF800000), y)
    cdef vi same = vior(veq(x, vzero()), veq(x, vbits(0x7F800000)))
    y = vselect(same, x, y)
    return vselect(veq(x, x), y, x)


cdef inline vf vrsqrt(vf x) noexcept nogil:
    """1 / sqrt(x), two roundings: +inf at zeros, +0 at +inf."""
    return vdiv(vset(1.0), vsqrt(x))


cdef inline vf vsigmoid(vf x) noexcept nogil:
    return vdiv(vset(1.0), vadd(vexp(vneg(x)), vset(1.0)))


cdef inline vf vsilu(vf x) noexcept nogil:
    """x * sigmoid(x) in one division."""
    return vdiv(x, vadd(vexp(vneg(x)), vset(1.0)))


cdef inline vf vsoftplus(vf x) noexcept nogil:
    return vselect(vle(x, vset(20.0)), vlog1p(vexp(x)), x)


cdef inline vf vtanh(vf x) noexcept nogil:
    x = vflush(x)
    cdef vf a = vabs(x)
    cdef vi sign = viand(vasint(x), viset(<int> 0x80000000))
    cdef vf large = vsub(vset(1.0), vdiv(vset(2.0), vadd(vexp(vadd(a, a)), vset(1.0))))
    large = vselect(vgt(a, vbits(0x42317218)), vset(1.0), large)
    large = vasfloat(vior(vasint(large), sign))
    # small arguments only below: a large one would overflow, harmlessly, and be thrown away
    cdef vf z = vmul(x, x)
    cdef vf p = vfma(vbits(0xBBBAF0EA), z, vbits(0x3CA9134E))
    p = vfma(p, z, vbits(0xBD5C1E2D))
    p = vfma(p, z, vbits(0x3E088393))
    p = vfma(p, z, vbits(0xBEAAAA99))
    cdef vf small = vfma(vmul(p, z), x, x)
    cdef vf y = vselect(vge(a, vset(0.625)), large, small)
    y = vselect(veq(x, vzero()), x, y)
    return vselect(veq(x, x), y, x)


cdef inline void vsincos(vf x, vf* sine, vf* cosine) noexcept nogil:
    """sin and cos for abs(x) < 8192. The same formula beyond, where octants from 2^30 on, all multiples of 8, need not
    fit an integer."""
    x = vflush(x)
    cdef vf a = vabs(x)
    cdef vi negative = viand(vasint(x), viset(<int> 0x80000000))
    cdef vf yj = vfloor(vmul(a, vbits(0x3FA2F983)))
    cdef vi j = vtoint(vmin(yj, vbits(0x4E800000)))
    cdef vi odd = viand(j, viset(1))
    yj = vadd(yj, vtofloat(odd))
    j = viand(viadd(j, odd), viset(7))
    a = vfma(yj, vbits(0xBF490000), a)
    a = vfma(yj, vbits(0xB97DA000), a)
    a = vfma(yj, vbits(0xB3222169), a)
    cdef vi upper = vigt(j, viset(3))
    cdef vi flip = viand(upper, viset(<int> 0x80000000))
    j = visub(j, viand(upper, viset(4)))
    cdef vi flip_cosine = vixor(flip, viand(vigt(j, viset(1)), viset(<int> 0x80000000)))
    cdef vi swapped = vior(vieq(j, viset(1)), vieq(j, viset(2)))
    cdef vf z = vmul(a, a)
    cdef vf p = vfma(vbits(0xB94CA1F9), z, vbits(0x3C08839E))
    p = vfma(p, z, vbits(0xBE2AAAA3))
    cdef vf by_sine = vfma(vmul(a, z), p, a)
    p = vfma(vbits(0x37CCF5CE), z, vbits(0xBAB6061A))
    p = vfma(p, z, vbits(0x3D2AAAA5))
    cdef vf by_cosine = vfma(vmul(z, z), p, vfma(vset(-0.5), z, vset(1.0)))
    # the profile multiplies by a sign of +-1, which flips the sign bit
    sine[0] = vasfloat(vixor(vasint(vselect(swapped, by_cosine, by_sine)), vixor(flip, negative)))
    cosine[0] = vasfloat(vixor(vasint(vselect(swapped, by_sine, by_cosine)), flip_cosine))


cdef inline float sexp(float x) noexcept nogil:
    return vget(vexp(vset(x)), 0)


cdef inline float slog(float x) noexcept nogil:
    return vget(vlog(vset(x)), 0)


cdef inline float ssqrt(float x) noexcept nogil:
    return vget(vsqrt(vset(x)), 0)


cdef inline float srsqrt(float x) noexcept nogil:
    return vget(vrsqrt(vset(x)), 0)


cdef inline float ssigmoid(float x) noexcept nogil:
    return vget(vsigmoid(vset(x)), 0)


cdef inline float ssoftplus(float x) noexcept nogil:
    return vget(vsoftplus(vset(x)), 0)


cdef inline float spow(float x, float p) noexcept nogil:
    """x ** p for x > 0 (rotary frequencies only): exp(p * log(x)), the product rounded."""
    if p == 0.0:
        return 1.0
    return sexp(smul(p, slog(x)))
