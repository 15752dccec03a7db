/* Products of a few rows with a weight matrix that stays packed in memory.
 *
 * A weight (n, k) lies in panels of PANEL rows of it, k-major, so that lanes go across outputs. bfloat16 and int8 stay
 * packed and are widened in registers, exactly: the results are those of the unpacked float32 weights.
 */
#ifndef MOJOLEARN_PANEL_H
#define MOJOLEARN_PANEL_H
#include "tile.h"

#define PANEL_FLOAT32 0
#define PANEL_BFLOAT16 1
#define PANEL_INT8 2
#define PANEL_INT8_PLAIN 3 /* a scale is too near the limits of float32 for the shorter widening of PANEL_INT8 */

/* The loops below count vectors, streams and rows with compile-time bounds. */
#define UNROLLED(i, bound) _Pragma("GCC unroll 8") for (int i = 0; i < bound; i++)

/* The PANEL columns of one step. Layouts: float32 [step][32]; bfloat16 [step][16] words, column i below column i + 16;
 * int8 [step / 2][16] words of u = code + 128 in the bytes (step, i), (step, i + 16), (step + 1, i) and
 * (step + 1, i + 16). */
MOJO_INLINE void panel_load(const int format, const char *panel, const float *scales, ptrdiff_t step, vf *columns) {
    if (format == PANEL_FLOAT32) {
        const float *at = (const float *)panel + step * PANEL;
        UNROLLED(q, PANEL_VECTORS) columns[q] = vload(at + q * W);
    } else if (format == PANEL_BFLOAT16) {
        const int32_t *at = (const int32_t *)panel + step * (PANEL / 2);
        UNROLLED(q, PANEL_VECTORS / 2) {
            vi words = viload(at + q * W);
            columns[q] = vasfloat(vishl(words, 16));
            columns[q + PANEL_VECTORS / 2] = vasfloat(viand(words, viset((int32_t)0xffff0000u)));
        }
    } else {
        const int32_t *at = (const int32_t *)panel + (step / 2) * (PANEL / 2);
        int shift = step & 1 ? 16 : 0;
        UNROLLED(q, PANEL_VECTORS / 2) {
            vi words = vishr(viload(at + q * W), shift);
            vi low = viand(words, viset(0xff)), high = viand(vishr(words, 8), viset(0xff));
            columns[q] = vmul(vtofloat(visub(low, viset(128))), vload(scales + q * W));
            columns[q + PANEL_VECTORS / 2] = vmul(vtofloat(visub(high, viset(128))), vload(scales + PANEL / 2 + q * W));
        }
    }
}

/* Two steps of int8 from one word: a byte put in the mantissa of 2^23 (or, a byte higher, of 2^15) reads as 2^23 + u,
 * and one fused multiply-add takes the offset away and scales, exactly: (2^23 + u) s - (2^23 + 128) s = code * s. */
#define INT8_LOW 8388736.0f /* 2^23 + 128 */
#define INT8_HIGH 32896.0f  /* 2^15 + 128 */
MOJO_INLINE void int8_widen(vi words, vf low_scale, vf low_offset, vf high_scale, vf high_offset, vf *low, vf *high) {
    *low = vfma(vasfloat(vior(viand(words, viset(0xff)), viset(0x4b000000))), low_scale, low_offset);
    *high = vfma(vasfloat(vior(viand(words, viset(0xff00)), viset(0x47000000))), high_scale, high_offset);
}

/* Steps [first, last) of `streams` neighbouring panels times `rows` rows; the sums go to out[stream][row][PANEL].
 * Several streams, because memory is read faster in several places at a time. With many rows a step takes so long that
 * what comes after these steps is fetched meanwhile: `ahead_bytes` from `ahead` on in every panel, for each step.
 * `resume`: the chains go on from the sums in `out`. In the end `older` subtrees of the same sums are added in front. */
#define PREFETCH_BYTES 1024
#define MATVEC_LEVELS 11 /* of the fold: at most 1024 leaves */
typedef struct {
    const float *sums[MATVEC_LEVELS];
    ptrdiff_t count;
} OlderSums;

MOJO_INLINE void matvec_body(const int format, const int streams, const int rows, const char *panels,
                             ptrdiff_t panel_bytes, const float *scales, ptrdiff_t first, ptrdiff_t last,
                             const float *const *x, const char *ahead, ptrdiff_t ahead_bytes, int resume,
                             const OlderSums *older, float *out) {
    vf acc[4][8][PANEL_VECTORS], w[PANEL_VECTORS];
    UNROLLED(z, streams) UNROLLED(r, rows) UNROLLED(q, PANEL_VECTORS)
        acc[z][r][q] = resume ? vload(out + ((z * rows + r) * PANEL_VECTORS + q) * W) : vzero();
    ptrdiff_t p = first;
    if (format == PANEL_INT8) {
        vf offsets[4][PANEL_VECTORS];
        UNROLLED(z, streams) UNROLLED(q, PANEL_VECTORS)
            offsets[z][q] = vmul(vload(scales + z * PANEL + q * W),
                                 vset(q < PANEL_VECTORS / 2 ? -INT8_LOW : -INT8_HIGH));
        for (; p + 1 < last && !(p & 1); p += 2) {
            UNROLLED(z, streams) {
                const int32_t *at = (const int32_t *)(panels + z * panel_bytes) + (p / 2) * (PANEL / 2);
                prefetch((const char *)at + 2 * PREFETCH_BYTES);
                UNROLLED(q, PANEL_VECTORS / 2) {
                    const int h = q + PANEL_VECTORS / 2;
                    vi words = viload(at + q * W);
                    vf low_scale = vload(scales + z * PANEL + q * W), high_scale = vload(scales + z * PANEL + h * W);
                    vf low, high;
                    int8_widen(words, low_scale, offsets[z][q], high_scale, offsets[z][h], &low, &high);
                    UNROLLED(r, rows) {
                        acc[z][r][q] = vfma(vset(x[r][p]), low, acc[z][r][q]);
                        acc[z][r][h] = vfma(vset(x[r][p]), high, acc[z][r][h]);
                    }
                    int8_widen(vishr(words, 16), low_scale, offsets[z][q], high_scale, offsets[z][h], &low, &high);
                    UNROLLED(r, rows) {
                        acc[z][r][q] = vfma(vset(x[r][p + 1]), low, acc[z][r][q]);
                        acc[z][r][h] = vfma(vset(x[r][p + 1]), high, acc[z][r][h]);
                    }
                }
            }
        }
    }
#pragma GCC unroll 1
    for (; p < last; p++) {
        UNROLLED(z, streams) {
            const char *panel = panels + z * panel_bytes;
            if (rows >= 4 && format <= PANEL_BFLOAT16)
                for (ptrdiff_t line = 0; line < ahead_bytes; line += 64)
                    prefetch_far(ahead + z * panel_bytes + (p - first) * ahead_bytes + line);
            else if (format == PANEL_FLOAT32) {
                prefetch(panel + p * 128 + PREFETCH_BYTES);
                prefetch(panel + p * 128 + PREFETCH_BYTES + 64);
            } else if (format == PANEL_BFLOAT16)
                prefetch(panel + p * 64 + 2 * PREFETCH_BYTES);
            panel_load(format, panel, scales + z * PANEL, p, w);
            UNROLLED(r, rows) UNROLLED(q, PANEL_VECTORS) acc[z][r][q] = vfma(vset(x[r][p]), w[q], acc[z][r][q]);
        }
    }
#pragma GCC unroll 1
    for (ptrdiff_t i = 0; i < older->count; i++) {
        UNROLLED(z, streams) UNROLLED(r, rows) UNROLLED(q, PANEL_VECTORS)
            acc[z][r][q] = vadd(vload(older->sums[i] + ((z * rows + r) * PANEL_VECTORS + q) * W), acc[z][r][q]);
    }
    UNROLLED(z, streams) UNROLLED(r, rows) UNROLLED(q, PANEL_VECTORS)
        vstore(out + ((z * rows + r) * PANEL_VECTORS + q) * W, acc[z][r][q]);
}

#if MOJO_ISA == 1
/* One row times half of a panel, as tile_sums_double does it. Returns whether the sums are in doubt. */
MOJO_INLINE int matvec_half_double(const int format, const int half, const char *panel, const float *scales,
                                   ptrdiff_t first, ptrdiff_t last, const float *x, float *out) {
    __m128d low[PANEL_VECTORS / 2], high[PANEL_VECTORS / 2];
    __m128i doubt = _mm_setzero_si128();
    vf w[PANEL_VECTORS];
    UNROLLED(q, PANEL_VECTORS / 2) low[q] = high[q] = _mm_setzero_pd();
#pragma GCC unroll 1
    for (ptrdiff_t p = first; p < last; p++) {
        __m128d factor = _mm_cvtps_pd(_mm_set1_ps(x[p]));
        panel_load(format, panel, scales, p, w);
        UNROLLED(q, PANEL_VECTORS / 2) {
            __m128d w_low, w_high;
            widen(w[half * (PANEL_VECTORS / 2) + q], &w_low, &w_high);
            low[q] = double_step(factor, w_low, low[q], &doubt);
            high[q] = double_step(factor, w_high, high[q], &doubt);
        }
    }
    UNROLLED(q, PANEL_VECTORS / 2) vstore(out + (half * (PANEL_VECTORS / 2) + q) * W, narrow(low[q], high[q]));
    return doubtful(doubt);
}
MOJO_INLINE int matvec_double(const int format, const char *panel, const float *scales, ptrdiff_t first,
                              ptrdiff_t last, const float *x, float *out) {
    return matvec_half_double(format, 0, panel, scales, first, last, x, out) ||
           matvec_half_double(format, 1, panel, scales, first, last, x, out);
}
#endif

typedef void (*MatvecKernel)(const char *, ptrdiff_t, const float *, ptrdiff_t, ptrdiff_t, const float *const *,
                             const char *, ptrdiff_t, const OlderSums *, float *);
#if MOJO_ISA == 1
#define MATVEC_SHORTCUT(format)                                               \
    if (!matvec_double(format, panels, scales, first, last, *x, out)) {       \
        for (ptrdiff_t i = 0; i < older->count; i++)                          \
            for (ptrdiff_t c = 0; c < PANEL; c += W)                          \
                vstore(out + c, vadd(vload(older->sums[i] + c), vload(out + c))); \
        return;                                                               \
    }
#else
#define MATVEC_SHORTCUT(format)
#endif
#define MOJO_MATVEC(format, streams, rows)                                                                            \
    MOJO_NOINLINE void matvec_##format##_##streams##_##rows(const char *panels, ptrdiff_t panel_bytes,                \
                                                            const float *scales, ptrdiff_t first, ptrdiff_t last,     \
                                                            const float *const *x, const char *ahead,                 \
                                                            ptrdiff_t ahead_bytes, const OlderSums *older,            \
                                                            float *out) {                                             \
        MATVEC_SHORTCUT(format)                                                                                       \
        matvec_body(format, streams, rows, panels, panel_bytes, scales, first, last, x, ahead, ahead_bytes, 0, older, \
                    out);                                                                                             \
    }
#define MOJO_MATVEC_FORMATS(streams, rows)    \
    MOJO_MATVEC(0, streams, rows)             \
    MOJO_MATVEC(1, streams, rows)             \
    MOJO_MATVEC(2, streams, rows)             \
    MOJO_MATVEC(3, streams, rows)
#define MOJO_MATVEC_ENTRIES(streams, rows)                                                                    \
    {matvec_0_##streams##_##rows, matvec_1_##streams##_##rows, matvec_2_##streams##_##rows, matvec_3_##streams##_##rows}

/* How many rows go at a time, and how many panels then fit the registers. Eight rows leave room for one panel only, and
 * the memory is faster when it is read in two places; but int8 is widened once instead of twice. */
#if MOJO_ISA == 3
MOJO_MATVEC_FORMATS(1, 1) MOJO_MATVEC_FORMATS(4, 1) MOJO_MATVEC_FORMATS(1, 2) MOJO_MATVEC_FORMATS(4, 2)
MOJO_MATVEC_FORMATS(1, 4) MOJO_MATVEC_FORMATS(2, 4) MOJO_MATVEC(2, 1, 8) MOJO_MATVEC(3, 1, 8)
static const int matvec_streams[4] = {4, 4, 2, 1};
static const MatvecKernel matvec_kernels[4][2][4] = {
    {MOJO_MATVEC_ENTRIES(1, 1), MOJO_MATVEC_ENTRIES(4, 1)},
    {MOJO_MATVEC_ENTRIES(1, 2), MOJO_MATVEC_ENTRIES(4, 2)},
    {MOJO_MATVEC_ENTRIES(1, 4), MOJO_MATVEC_ENTRIES(2, 4)},
    {{NULL, NULL, matvec_2_1_8, matvec_3_1_8}},
};
MOJO_INLINE int matvec_rows(int format) { return format < PANEL_INT8 ? 4 : 8; }
#elif MOJO_ISA == 2
/* The registers hold the sums of two panels, and memory is faster when it is read in four places: two panels and two more
 * by turns of a few steps. */
#define TURN_STEPS 16
#define MOJO_MATVEC_TURNS(format)                                                                                     \
    MOJO_NOINLINE void matvec_##format##_4_1(const char *panels, ptrdiff_t panel_bytes, const float *scales,          \
                                             ptrdiff_t first, ptrdiff_t last, const float *const *x,                  \
                                             const char *ahead, ptrdiff_t ahead_bytes, const OlderSums *older,        \
                                             float *out) {                                                            \
        const OlderSums none = {.count = 0};                                                                          \
        OlderSums others[2] = {*older, *older};                                                                       \
        for (ptrdiff_t i = 0; i < older->count; i++) others[1].sums[i] += 2 * PANEL;                                  \
        for (ptrdiff_t p = first; p < last; p += TURN_STEPS)                                                          \
            for (int z = 0; z < 4; z += 2)                                                                            \
                matvec_body(format, 2, 1, panels + z * panel_bytes, panel_bytes, scales + z * PANEL, p,               \
                            p + TURN_STEPS < last ? p + TURN_STEPS : last, x, ahead, ahead_bytes, p > first,          \
                            p + TURN_STEPS < last ? &none : others + z / 2, out + z * PANEL);                         \
    }
MOJO_MATVEC_FORMATS(1, 1) MOJO_MATVEC_FORMATS(1, 2)
MOJO_MATVEC_TURNS(0) MOJO_MATVEC_TURNS(1) MOJO_MATVEC_TURNS(2) MOJO_MATVEC_TURNS(3)
static const int matvec_streams[2] = {4, 1};
static const MatvecKernel matvec_kernels[2][2][4] = {
    {MOJO_MATVEC_ENTRIES(1, 1), MOJO_MATVEC_ENTRIES(4, 1)},
    {MOJO_MATVEC_ENTRIES(1, 2), MOJO_MATVEC_ENTRIES(1, 2)},
};
MOJO_INLINE int matvec_rows(int format) { return 2; }
#else
MOJO_MATVEC_FORMATS(1, 1)
static const int matvec_streams[1] = {1};
static const MatvecKernel matvec_kernels[1][2][4] = {{MOJO_MATVEC_ENTRIES(1, 1), MOJO_MATVEC_ENTRIES(1, 1)}};
MOJO_INLINE int matvec_rows(int format) { return 1; }
#endif
#define MATVEC_FLOATS (16 * PANEL) /* rows, in groups, x streams x PANEL, at most */

/* `several`: the panels that fit the registers with 2^log2_rows rows, matvec_streams[log2_rows]; otherwise one. */
MOJO_INLINE void matvec_run(int format, int log2_rows, int several, const char *panels, ptrdiff_t panel_bytes,
                            const float *scales, ptrdiff_t first, ptrdiff_t last, const float *const *x,
                            const char *ahead, ptrdiff_t ahead_bytes, const OlderSums *older, float *out) {
    matvec_kernels[log2_rows][several][format](panels, panel_bytes, scales, first, last, x, ahead, ahead_bytes, older,
                                               out);
}

/* One row, one panel, exactly in spite of underflow. */
MOJO_INLINE void exact_matvec_body(const int format, const char *panel, const float *scales, ptrdiff_t first,
                                   ptrdiff_t last, const float *x, float *out) {
    vf acc[PANEL_VECTORS], saved[PANEL_VECTORS], w[PANEL_VECTORS];
    UNROLLED(q, PANEL_VECTORS) acc[q] = vzero();
    for (ptrdiff_t end; first < last; first = end) {
        vi nearest = viset(INT32_MAX);
        end = last - first < WATCHED_STEPS ? last : first + WATCHED_STEPS;
        UNROLLED(q, PANEL_VECTORS) saved[q] = acc[q];
        for (ptrdiff_t p = first; p < end; p++) {
            panel_load(format, panel, scales, p, w);
            watched_step(PANEL_VECTORS, x + p, w, acc, &nearest);
        }
        if (vany(vieq(nearest, viset(0)))) {
            vf again[PANEL_VECTORS];
            for (ptrdiff_t p = first; p < end; p++) {
                panel_load(format, panel, scales, p, again);
                gradual_step(x[p], again, saved, PANEL_VECTORS);
            }
            UNROLLED(q, PANEL_VECTORS) acc[q] = saved[q];
        }
    }
    UNROLLED(q, PANEL_VECTORS) vstore(out + q * W, acc[q]);
}
MOJO_NOINLINE void exact_matvec(int format, const char *panel, const float *scales, ptrdiff_t first, ptrdiff_t last,
                                const float *x, float *out) {
    if (format == PANEL_FLOAT32) exact_matvec_body(PANEL_FLOAT32, panel, scales, first, last, x, out);
    else if (format == PANEL_BFLOAT16) exact_matvec_body(PANEL_BFLOAT16, panel, scales, first, last, x, out);
    else exact_matvec_body(PANEL_INT8_PLAIN, panel, scales, first, last, x, out);
}

/* Steps [first, last) of a panel as float32 [step][PANEL] */
MOJO_NOINLINE void panel_widen(int format, const char *panel, const float *scales, ptrdiff_t first, ptrdiff_t last,
                               float *out) {
    vf w[PANEL_VECTORS];
    for (ptrdiff_t p = first; p < last; p++) {
        if (format == PANEL_FLOAT32) panel_load(PANEL_FLOAT32, panel, scales, p, w);
        else if (format == PANEL_BFLOAT16) panel_load(PANEL_BFLOAT16, panel, scales, p, w);
        else panel_load(PANEL_INT8_PLAIN, panel, scales, p, w);
        UNROLLED(q, PANEL_VECTORS) vstore(out + q * W, w[q]);
        out += PANEL;
    }
}

/* ---- packing ---- */
typedef uint16_t mojo_halves __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef int8_t mojo_bytes __attribute__((vector_size(W), aligned(1), may_alias));
MOJO_INLINE vi load_halves(const uint16_t *p) { return __builtin_convertvector(*(const mojo_halves *)p, vi); }
/* (the compiler's conversion from bytes goes lane by lane) */
MOJO_INLINE vi load_bytes(const int8_t *p) {
#if MOJO_ISA == 3
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif MOJO_ISA == 2
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const mojo_bytes *)p, vi);
#endif
}
/* the low 16 or 8 bits of every lane */
MOJO_INLINE void store_halves(uint16_t *p, vi x) { *(mojo_halves *)p = __builtin_convertvector(x, mojo_halves); }
MOJO_INLINE void store_bytes(int8_t *p, vi x) {
#if MOJO_ISA == 3
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    *(mojo_bytes *)p = __builtin_convertvector(x, mojo_bytes);
#endif
}

/* W steps of bfloat16 (or W pairs of steps of int8) of the columns [q W, q W + W) and those 16 further. Columns of the
 * panel from `columns` on do not exist and read as 0. */
MOJO_INLINE void pack_halves(int int8, const char *rows, ptrdiff_t row_bytes, ptrdiff_t columns, int q, int32_t *out) {
    vf square[W];
    UNROLLED(h, W / 4) UNROLLED(l, 4) {
        int i = h * 4 + l;
        ptrdiff_t low_column = q * W + i, high_column = low_column + PANEL / 2;
        vi low = viset(0), high = viset(0);
        if (low_column < columns) low = load_halves((const uint16_t *)(rows + low_column * row_bytes));
        if (high_column < columns) high = load_halves((const uint16_t *)(rows + high_column * row_bytes));
        if (int8) {
            low = vior(viand(low, viset(0xff)), vishl(viand(low, viset(0xff00)), 8));
            high = vior(viand(high, viset(0xff)), vishl(viand(high, viset(0xff00)), 8));
            square[i] = vasfloat(vixor(vior(low, vishl(high, 8)), viset((int32_t)0x80808080u)));
        } else
            square[i] = vasfloat(vior(low, vishl(high, 16)));
    }
    vtranspose(square);
    UNROLLED(h, W / 4) UNROLLED(l, 4) vistore(out + (h * 4 + l) * (PANEL / 2), vasint(square[h * 4 + l]));
}
#endif
