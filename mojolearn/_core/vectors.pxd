"""Arrays as vectors: the last one may have fewer elements than there are lanes."""
from libc.stdint cimport INT32_MAX, int32_t
from libc.string cimport memcpy

from mojolearn._core.simd cimport *


cdef inline vf load_lanes(const float* p, Py_ssize_t n) noexcept nogil:
    """The next vector of an array that has n > 0 elements left; lanes beyond the end are zero."""
    return vload(p) if n >= vlanes else vloadn(p, n)


cdef inline void store_lanes(float* p, vf x, Py_ssize_t n) noexcept nogil:
    if n >= vlanes:
        vstore(p, x)
    else:
        vstoren(p, x, n)


cdef inline bint all_lanes_finite(const float* x, Py_ssize_t n) noexcept nogil:
    """Whether n elements hold neither NaN nor infinity."""
    cdef vi largest = viset(0x7F7FFFFF), seen = viset(0)
    cdef Py_ssize_t i = 0
    while i < n:
        seen = vior(seen, vigt(vasint(vabs(load_lanes(x + i, n - i))), largest))
        i += vlanes
    return not vany(seen)


cdef inline double largest_magnitude(const float* x, Py_ssize_t stride, Py_ssize_t rows, Py_ssize_t n) noexcept nogil:
    """Largest magnitude in rows of n floats; NaN if one is (as bits, NaNs are larger than infinity)."""
    cdef vi most = viset(0), magnitude = viset(INT32_MAX)
    cdef int32_t lanes[vlanes]
    cdef int32_t bits = 0
    cdef float result
    cdef Py_ssize_t r, i
    for r in range(rows):
        i = 0
        while i < n:
            most = vimax(most, viand(vasint(load_lanes(x + r * stride + i, n - i)), magnitude))
            i += vlanes
    vistore(lanes, most)
    for i in range(vlanes):
        bits = max(bits, lanes[i])
    memcpy(&result, &bits, sizeof(float))
    return result
