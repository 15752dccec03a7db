/* Vectors of W floats, scalars with the same rounding, and the floating-point control word.
 *
 * This header holds what Cython cannot say. It is compiled once for each instruction set; MOJO_ISA tells which:
 * 0 plain C, 1 baseline x86-64 (SSE2, no fused multiply-add instruction), 2 AVX2 + FMA, 3 AVX-512.
 *
 * Arithmetic follows section 1 of the numerics page: every operand is flushed (a subnormal counts as a zero of its
 * sign), every operation rounds once, a fused multiply-add rounds once. On x86-64 the control word does the flushing
 * of operands ("exact mode": DAZ set, FTZ clear); elsewhere each operation flushes its operands and its result. A
 * result that is stored for the outside, or whose bits are looked at, is flushed with vflush or sflush.
 */
#ifndef MOJOLEARN_SIMD_H
#define MOJOLEARN_SIMD_H

#if !defined(__GNUC__)
#error "mojolearn needs GCC or Clang (on Windows: clang-cl or MinGW)"
#endif

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef MOJO_ISA
#define MOJO_ISA 0
#endif
#if MOJO_ISA > 0
#include <immintrin.h>
#endif

#if MOJO_ISA == 3
#define W 16
#elif MOJO_ISA == 2
#define W 8
#else
#define W 4
#endif

#define MOJO_INLINE static inline __attribute__((always_inline, unused))
#define MOJO_NOINLINE static __attribute__((noinline, unused))
#define vlanes W

typedef float vf __attribute__((vector_size(4 * W), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

/* ---- moving ------------------------------------------------------------------------------------------------- */
MOJO_INLINE vf vzero(void) { return (vf){0}; }
/* x - (+0) keeps the sign of a zero, which x + 0 would not; the compiler makes a broadcast of it. */
MOJO_INLINE vf vset(float x) { return x - (vf){0}; }
MOJO_INLINE vi viset(int32_t x) { return x - (vi){0}; }
MOJO_INLINE vf vasfloat(vi x) { return (vf)x; }
MOJO_INLINE vi vasint(vf x) { return (vi)x; }
MOJO_INLINE vf vbits(uint32_t bits) { return (vf)viset((int32_t)bits); }
MOJO_INLINE vf vload(const float *p) { return *(const vf_unaligned *)p; }
MOJO_INLINE void vstore(float *p, vf x) { *(vf_unaligned *)p = x; }
/* to an address that is a multiple of the vector's size, past the caches: for results that are not read soon. A later
 * atomic operation of the thread, such as next_unit, makes them visible to others. */
MOJO_INLINE void vstream(float *p, vf x) {
#if MOJO_ISA == 3
    _mm512_stream_ps(p, (__m512)x);
#elif MOJO_ISA == 2
    _mm256_stream_ps(p, (__m256)x);
#elif MOJO_ISA == 1
    _mm_stream_ps(p, (__m128)x);
#else
    vstore(p, x);
#endif
}
MOJO_INLINE vi viload(const int32_t *p) { return *(const vi_unaligned *)p; }
MOJO_INLINE void vistore(int32_t *p, vi x) { *(vi_unaligned *)p = x; }
/* the first n lanes, 0 <= n <= W; the others read as +0 and are not written */
MOJO_INLINE vf vloadn(const float *p, ptrdiff_t n) {
#if MOJO_ISA == 3
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
    vf x = {0};
    for (ptrdiff_t i = 0; i < n; i++) x[i] = p[i];
    return x;
#endif
}
MOJO_INLINE void vstoren(float *p, vf x, ptrdiff_t n) {
#if MOJO_ISA == 3
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)x);
#else
    for (ptrdiff_t i = 0; i < n; i++) p[i] = x[i];
#endif
}
MOJO_INLINE float vget(vf x, ptrdiff_t i) { return x[i]; }
MOJO_INLINE vf vput(vf x, ptrdiff_t i, float value) { x[i] = value; return x; }

/* ---- integers and masks (a mask lane is 0 or -1) --------------------------------------------------------------- */
MOJO_INLINE vi viadd(vi a, vi b) { return a + b; }
MOJO_INLINE vi visub(vi a, vi b) { return a - b; }
MOJO_INLINE vi viand(vi a, vi b) { return a & b; }
MOJO_INLINE vi vior(vi a, vi b) { return a | b; }
MOJO_INLINE vi vixor(vi a, vi b) { return a ^ b; }
MOJO_INLINE vi vinot(vi a) { return ~a; }
MOJO_INLINE vi vishl(vi a, int n) { return a << n; }
MOJO_INLINE vi vishr(vi a, int n) { return a >> n; }
MOJO_INLINE vi vieq(vi a, vi b) { return a == b; }
MOJO_INLINE vi vigt(vi a, vi b) { return a > b; }
MOJO_INLINE vi vlt(vf a, vf b) { return a < b; }
MOJO_INLINE vi vle(vf a, vf b) { return a <= b; }
MOJO_INLINE vi vgt(vf a, vf b) { return a > b; }
MOJO_INLINE vi vge(vf a, vf b) { return a >= b; }
MOJO_INLINE vi veq(vf a, vf b) { return a == b; }
MOJO_INLINE vf vselect(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
MOJO_INLINE vi vimin(vi a, vi b) {
#if MOJO_ISA == 3
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif MOJO_ISA == 2
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    vi less = a < b;
    return (less & a) | (~less & b);
#endif
}
MOJO_INLINE vi vimax(vi a, vi b) {
#if MOJO_ISA == 3
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif MOJO_ISA == 2
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    vi more = a > b;
    return (more & a) | (~more & b);
#endif
}
MOJO_INLINE vi viselect(vi mask, vi yes, vi no) { return (mask & yes) | (~mask & no); }
MOJO_INLINE vi vilanes(void) {
    vi x;
    for (int i = 0; i < W; i++) x[i] = i;
    return x;
}
MOJO_INLINE int vany(vi mask) {
#if MOJO_ISA == 3
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif MOJO_ISA == 2
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif MOJO_ISA == 1
    return _mm_movemask_ps((__m128)mask) != 0 || _mm_movemask_epi8(_mm_cmpeq_epi32((__m128i)mask, _mm_setzero_si128())) != 0xffff;
#else
    int32_t any = 0;
    for (int i = 0; i < W; i++) any |= mask[i];
    return any != 0;
#endif
}
MOJO_INLINE vf vneg(vf x) { return (vf)((vi)x ^ viset(INT32_MIN)); }
MOJO_INLINE vf vabs(vf x) { return (vf)((vi)x & viset(INT32_MAX)); }

/* F(x): a subnormal becomes the zero of its sign */
MOJO_INLINE vf vflush(vf x) {
    vi bits = (vi)x, tiny = (bits & 0x7f800000) == 0;
    return (vf)(bits & ~(tiny & 0x7fffffff));
}
MOJO_INLINE float sflush(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- arithmetic ------------------------------------------------------------------------------------------------ */
#if MOJO_ISA > 0
MOJO_INLINE vf vadd(vf a, vf b) { return a + b; }
MOJO_INLINE vf vsub(vf a, vf b) { return a - b; }
MOJO_INLINE vf vmul(vf a, vf b) { return a * b; }
MOJO_INLINE vf vdiv(vf a, vf b) { return a / b; }
MOJO_INLINE float sadd(float a, float b) { return a + b; }
MOJO_INLINE float ssub(float a, float b) { return a - b; }
MOJO_INLINE float smul(float a, float b) { return a * b; }
MOJO_INLINE float sdiv(float a, float b) { return a / b; }
#else
MOJO_INLINE vf vadd(vf a, vf b) { return vflush(vflush(a) + vflush(b)); }
MOJO_INLINE vf vsub(vf a, vf b) { return vflush(vflush(a) - vflush(b)); }
MOJO_INLINE vf vmul(vf a, vf b) { return vflush(vflush(a) * vflush(b)); }
MOJO_INLINE vf vdiv(vf a, vf b) { return vflush(vflush(a) / vflush(b)); }
MOJO_INLINE float sadd(float a, float b) { return sflush(sflush(a) + sflush(b)); }
MOJO_INLINE float ssub(float a, float b) { return sflush(sflush(a) - sflush(b)); }
MOJO_INLINE float smul(float a, float b) { return sflush(sflush(a) * sflush(b)); }
MOJO_INLINE float sdiv(float a, float b) { return sflush(sflush(a) / sflush(b)); }
#endif

/* fma: one rounding. (An element loop is left scalar by some compilers, so the instruction is named.) */
#if MOJO_ISA == 3
MOJO_INLINE vf vfma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
MOJO_INLINE float sfma(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
#elif MOJO_ISA == 2
MOJO_INLINE vf vfma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
MOJO_INLINE float sfma(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
#elif MOJO_ISA == 1
/* Without the instruction: the product of two floats is exact in double; the sum is rounded to odd at 53 bits, which
 * makes the second rounding, to 24 bits or fewer, give the fused result. */
typedef double mojo_double2 __attribute__((vector_size(16)));
typedef int64_t mojo_long2 __attribute__((vector_size(16)));
MOJO_INLINE __m128d mojo_fma_odd(__m128d a, __m128d b, __m128d c) {
    mojo_double2 product = (mojo_double2)a * (mojo_double2)b, addend = (mojo_double2)c, sum = product + addend;
    mojo_double2 back = sum - product;
    mojo_double2 error = (product - (sum - back)) + (addend - back);
    mojo_long2 bits = (mojo_long2)sum;
    mojo_long2 inexact = (mojo_long2)(error != 0.0) & (mojo_long2)(sum - sum == 0.0); /* infinities stay */
    mojo_long2 even = (bits & 1) - 1;
    /* the error has the sign of the sum: |sum| is too small, step away from zero; otherwise towards it. (The sign of
     * a 64-bit lane is spread from its upper half, since this instruction set has no 64-bit arithmetic shift.) */
    __m128i sign = _mm_srai_epi32(_mm_shuffle_epi32((__m128i)((mojo_long2)error ^ bits), 0xf5), 31);
    mojo_long2 step = (mojo_long2)sign | 1;
    return (__m128d)(bits + (step & inexact & even));
}
MOJO_INLINE vf vfma(vf a, vf b, vf c) {
    __m128 x = (__m128)a, y = (__m128)b, z = (__m128)c;
    __m128d low = mojo_fma_odd(_mm_cvtps_pd(x), _mm_cvtps_pd(y), _mm_cvtps_pd(z));
    __m128d high = mojo_fma_odd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y)),
                                _mm_cvtps_pd(_mm_movehl_ps(z, z)));
    return (vf)_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
}
MOJO_INLINE float sfma(float a, float b, float c) {
    __m128d r = mojo_fma_odd(_mm_cvtss_sd(_mm_setzero_pd(), _mm_set_ss(a)), _mm_cvtss_sd(_mm_setzero_pd(), _mm_set_ss(b)),
                             _mm_cvtss_sd(_mm_setzero_pd(), _mm_set_ss(c)));
    return _mm_cvtss_f32(_mm_cvtsd_ss(_mm_setzero_ps(), r));
}
#else
MOJO_INLINE float sfma(float a, float b, float c) { return sflush(fmaf(sflush(a), sflush(b), sflush(c))); }
MOJO_INLINE vf vfma(vf a, vf b, vf c) {
    vf r;
    for (int i = 0; i < W; i++) r[i] = sfma(a[i], b[i], c[i]);
    return r;
}
#endif

/* sqrt of the profile: |x| < 2^-126 gives +0 (of either sign), a negative x the NaN 7FC00000 */
MOJO_INLINE vf vsqrt(vf x) {
#if MOJO_ISA == 3
    vf root = (vf)_mm512_sqrt_ps((__m512)x);
#elif MOJO_ISA == 2
    vf root = (vf)_mm256_sqrt_ps((__m256)x);
#elif MOJO_ISA == 1
    vf root = (vf)_mm_sqrt_ps((__m128)x);
#else
    vf root;
    for (int i = 0; i < W; i++) root[i] = sqrtf(x[i]);
#endif
    vi tiny = ((vi)x & 0x7f800000) == 0;
    root = vselect(tiny, vzero(), root);
    return vselect(~tiny & ((vi)x < 0) & ((vi)(x == x)), vbits(0x7fc00000u), root);
}
/* floor; keeps the sign of a zero */
MOJO_INLINE vf vfloor(vf x) {
#if MOJO_ISA == 3
    return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif MOJO_ISA == 2
    return (vf)_mm256_floor_ps((__m256)x);
#else
#if MOJO_ISA == 0
    x = vflush(x);
#endif
    vi small = (vi)(vabs(x) < 8388608.0f);
    vf whole = __builtin_convertvector(__builtin_convertvector(vselect(small, x, vzero()), vi), vf);
    whole = whole - (vf)((vi)(whole > x) & (vi)vset(1.0f));
    whole = (vf)((vi)whole | ((vi)x & INT32_MIN));
    return vselect(small, whole, x);
#endif
}
MOJO_INLINE vi vtoint(vf x) { /* truncation; |x| < 2^31 */
#if MOJO_ISA == 3
    return (vi)_mm512_cvttps_epi32((__m512)x);
#elif MOJO_ISA == 2
    return (vi)_mm256_cvttps_epi32((__m256)x);
#elif MOJO_ISA == 1
    return (vi)_mm_cvttps_epi32((__m128)x);
#else
    return __builtin_convertvector(x, vi);
#endif
}
MOJO_INLINE vf vtofloat(vi x) { return __builtin_convertvector(x, vf); }
/* the smaller and the larger by comparison; on equal or unordered lanes the second operand, as SSE does */
MOJO_INLINE vf vmin(vf a, vf b) { return vselect(a < b, a, b); }
MOJO_INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }

/* transpose of W rows of W floats, in place: log2 W rounds of interleaving rows i and i + W/2 */
MOJO_INLINE void vtranspose(vf *x) {
#if MOJO_ISA == 3
    const vi lo = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const vi hi = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#define MOJO_ROUNDS 4
#define MOJO_INTERLEAVE(a, b, which) (vf)_mm512_permutex2var_ps((__m512)(a), (__m512i)(which), (__m512)(b))
#elif MOJO_ISA == 2
    const vi lo = {0, 8, 1, 9, 2, 10, 3, 11}, hi = {4, 12, 5, 13, 6, 14, 7, 15};
#define MOJO_ROUNDS 3
#define MOJO_INTERLEAVE(a, b, which) __builtin_shuffle(a, b, which)
#else
    const vi lo = {0, 4, 1, 5}, hi = {2, 6, 3, 7};
#define MOJO_ROUNDS 2
#define MOJO_INTERLEAVE(a, b, which) __builtin_shuffle(a, b, which)
#endif
    vf y[W];
#pragma GCC unroll 4
    for (int round = 0; round < MOJO_ROUNDS; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = MOJO_INTERLEAVE(x[i], x[i + W / 2], lo);
            y[2 * i + 1] = MOJO_INTERLEAVE(x[i], x[i + W / 2], hi);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
#undef MOJO_INTERLEAVE
}

/* ---- the control word ------------------------------------------------------------------------------------------ */
/* fp_enter: exact mode, whatever the caller had set; returns what fp_leave restores, sticky flags included. */
#define MOJO_BARRIER() __asm__ volatile("" ::: "memory")
#if MOJO_ISA > 0
#define MOJO_EXACT 0x1fc0u /* all exceptions masked, flags clear, to nearest, DAZ */
#define MOJO_FAST 0x9fc0u  /* and FTZ */
MOJO_INLINE uint64_t fp_enter(void) {
    uint64_t saved = _mm_getcsr();
    _mm_setcsr(MOJO_EXACT);
    MOJO_BARRIER();
    return saved;
}
MOJO_INLINE void fp_leave(uint64_t saved) { MOJO_BARRIER(); _mm_setcsr((unsigned)saved); MOJO_BARRIER(); }
MOJO_INLINE void fp_exact(void) { MOJO_BARRIER(); _mm_setcsr(MOJO_EXACT); MOJO_BARRIER(); }
MOJO_INLINE void fp_fast(void) { MOJO_BARRIER(); _mm_setcsr(MOJO_FAST); MOJO_BARRIER(); }
MOJO_INLINE int fp_underflowed(void) { MOJO_BARRIER(); return (_mm_getcsr() & 0x10u) != 0; }
/* the default environment (to nearest, nothing flushed, nothing trapped), for Python code between kernels */
MOJO_INLINE uint64_t fp_default(void) {
    uint64_t saved = _mm_getcsr();
    _mm_setcsr(0x1f80u);
    MOJO_BARRIER();
    return saved;
}
#elif defined(__aarch64__)
MOJO_INLINE uint64_t fp_enter(void) {
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
    return saved;
}
MOJO_INLINE void fp_leave(uint64_t saved) { __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory"); }
MOJO_INLINE void fp_exact(void) {}
MOJO_INLINE void fp_fast(void) {}
MOJO_INLINE int fp_underflowed(void) { return 0; }
MOJO_INLINE uint64_t fp_default(void) { return fp_enter(); }
#else
#include <fenv.h>
MOJO_INLINE uint64_t fp_enter(void) { int saved = fegetround(); fesetround(FE_TONEAREST); return (uint64_t)saved; }
MOJO_INLINE void fp_leave(uint64_t saved) { fesetround((int)saved); }
MOJO_INLINE void fp_exact(void) {}
MOJO_INLINE void fp_fast(void) {}
MOJO_INLINE int fp_underflowed(void) { return 0; }
MOJO_INLINE uint64_t fp_default(void) { return fp_enter(); }
#endif

/* ---- work and memory ------------------------------------------------------------------------------------------- */
MOJO_INLINE ptrdiff_t next_unit(ptrdiff_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
MOJO_INLINE ptrdiff_t next_units(ptrdiff_t *counter, ptrdiff_t n) { return __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }
MOJO_INLINE void unit_done(ptrdiff_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE); }
MOJO_INLINE ptrdiff_t units_done(ptrdiff_t *counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
MOJO_INLINE void cpu_relax(void) {
#if MOJO_ISA > 0
    _mm_pause();
#else
    MOJO_BARRIER();
#endif
}
/* Until `target` units are done: by threads that have taken them, so not for long, unless one of them has been put
 * aside by the system. */
#if !defined(_WIN32)
#include <sched.h>
#endif
MOJO_INLINE void wait_until(ptrdiff_t *done, ptrdiff_t target) {
    for (int spins = 0; units_done(done) < target; spins++) {
        if (spins < 2000) cpu_relax();
#if !defined(_WIN32)
        else sched_yield();
#endif
    }
}
#define prefetch(address) __builtin_prefetch(address)
#define prefetch_far(address) __builtin_prefetch(address, 0, 2) /* into the second-level cache */

/* ---- 32 x 32 -> 64 bits, unsigned, in two vectors --------------------------------------------------------------- */
MOJO_INLINE void vimul_wide(vi a, uint32_t factor, vi *low, vi *high) {
#if MOJO_ISA == 3
    __m512i f = _mm512_set1_epi32((int32_t)factor);
    __m512i even = _mm512_mul_epu32((__m512i)a, f), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), f);
    *low = (vi)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *high = (vi)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif MOJO_ISA == 2
    __m256i f = _mm256_set1_epi32((int32_t)factor);
    __m256i even = _mm256_mul_epu32((__m256i)a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), f);
    *low = (vi)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = (vi)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#elif MOJO_ISA == 1
    __m128i f = _mm_set1_epi32((int32_t)factor), lower = _mm_set1_epi64x(0xffffffffLL);
    __m128i even = _mm_mul_epu32((__m128i)a, f), odd = _mm_mul_epu32(_mm_srli_epi64((__m128i)a, 32), f);
    *low = (vi)_mm_or_si128(_mm_and_si128(even, lower), _mm_slli_epi64(odd, 32));
    *high = (vi)_mm_or_si128(_mm_srli_epi64(even, 32), _mm_andnot_si128(lower, odd));
#else
    for (int i = 0; i < W; i++) {
        uint64_t product = (uint64_t)(uint32_t)a[i] * factor;
        (*low)[i] = (int32_t)(uint32_t)product;
        (*high)[i] = (int32_t)(uint32_t)(product >> 32);
    }
#endif
}
#endif
