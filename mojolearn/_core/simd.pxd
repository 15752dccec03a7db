"""Vectors of ``vlanes`` floats and matching scalars (see simd.h).

Cython takes ``vf`` for a float and ``vi`` for an int; never mix them with scalars or use operators on them, call the
functions.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "simd.h" nogil:
    enum:
        vlanes
        MOJO_ISA
    ctypedef float vf
    ctypedef int vi

    vf vzero()
    vf vset(float x)
    vi viset(int32_t x)
    vf vbits(uint32_t bits)
    vf vasfloat(vi x)
    vi vasint(vf x)
    vf vload(const float* p)
    void vstore(float* p, vf x)
    void vstream(float* p, vf x)
    vi viload(const int32_t* p)
    void vistore(int32_t* p, vi x)
    vf vloadn(const float* p, Py_ssize_t n)
    void vstoren(float* p, vf x, Py_ssize_t n)
    float vget(vf x, Py_ssize_t i)
    vf vput(vf x, Py_ssize_t i, float value)

    vi viadd(vi a, vi b)
    vi visub(vi a, vi b)
    vi viand(vi a, vi b)
    vi vior(vi a, vi b)
    vi vixor(vi a, vi b)
    vi vinot(vi a)
    vi vishl(vi a, int n)
    vi vishr(vi a, int n)
    vi vieq(vi a, vi b)
    vi vigt(vi a, vi b)
    vi vilanes()
    vi vimin(vi a, vi b)
    vi vimax(vi a, vi b)
    vi vlt(vf a, vf b)
    vi vle(vf a, vf b)
    vi vgt(vf a, vf b)
    vi vge(vf a, vf b)
    vi veq(vf a, vf b)
    vf vselect(vi mask, vf yes, vf no)
    vi viselect(vi mask, vi yes, vi no)
    bint vany(vi mask)
    vf vneg(vf x)
    vf vabs(vf x)
    vf vflush(vf x)
    float sflush(float x)

    vf vadd(vf a, vf b)
    vf vsub(vf a, vf b)
    vf vmul(vf a, vf b)
    vf vdiv(vf a, vf b)
    vf vfma(vf a, vf b, vf c)
    vf vsqrt(vf x)
    vf vfloor(vf x)
    vi vtoint(vf x)
    vf vtofloat(vi x)
    vf vmin(vf a, vf b)
    vf vmax(vf a, vf b)
    float sadd(float a, float b)
    float ssub(float a, float b)
    float smul(float a, float b)
    float sdiv(float a, float b)
    float sfma(float a, float b, float c)
    void vtranspose(vf* x)

    uint64_t fp_enter()
    void fp_leave(uint64_t saved)
    void fp_exact()
    void fp_fast()
    bint fp_underflowed()
    uint64_t fp_default()

    Py_ssize_t next_unit(Py_ssize_t* counter)
    Py_ssize_t next_units(Py_ssize_t* counter, Py_ssize_t n)
    void unit_done(Py_ssize_t* counter)
    Py_ssize_t units_done(Py_ssize_t* counter)
    void cpu_relax()
    void wait_until(Py_ssize_t* done, Py_ssize_t target)
    void prefetch(const void* address)
    void prefetch_far(const void* address)

    void vimul_wide(vi a, uint32_t factor, vi* low, vi* high)      # 32 x 32 -> 64 bits, unsigned
