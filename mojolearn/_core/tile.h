/* Register tiles of the matrix products: what Cython cannot unroll.
 *
 * Lanes go across output columns; every output walks its own sum in ascending order, in leaves that are folded by a
 * binary counter (numerics page, section 3). Operands come packed: a row panel holds `rows` rows as [step][rows], a
 * column panel PANEL columns as [step][PANEL].
 *
 * The tiles run with FTZ and DAZ set. Flushing in hardware differs from F only where the exact result lies in
 * [2^-126 - 2^-150, 2^-126 - 2^-151): F keeps what rounds up to 2^-126, FTZ does not. No operation of a tile without
 * the sticky underflow flag can have been there. With the flag, the rows are computed again and watched, in a
 * domain where nothing is subnormal, for results next to that border (border.h); where there is one, or where operands
 * are too large for that, row by row, and only steps next to the border are done with gradual underflow, which costs a
 * hundred cycles each. The adds of the fold need no such care: a sum of two
 * floats is a multiple of 2^-149 and never lies inside the interval.
 */
#ifndef MOJOLEARN_TILE_H
#define MOJOLEARN_TILE_H
#include "border.h"
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#define PANEL 32
#define PANEL_VECTORS (PANEL / W)

/* Accumulators that the register file holds, less the operands; rows never exceed W, which the packing relies on. */
#if MOJO_ISA == 3
#define TILE_ROWS 14
#define TILE_VECTORS 2
#elif MOJO_ISA == 2
#define TILE_ROWS 6
#define TILE_VECTORS 2
#elif MOJO_ISA == 1
#define TILE_ROWS 2
#define TILE_VECTORS 2
#else
#define TILE_ROWS 4
#define TILE_VECTORS 4
#endif
#define TILE_COLUMNS (W * TILE_VECTORS)

/* One leaf of the sums of a tile, and what is added in front of it. */
typedef struct {
    const float *data;
    ptrdiff_t stride;
} Partial;

typedef struct {
    ptrdiff_t steps;
    ptrdiff_t columns;    /* of the tile that count */
    const float *ahead;   /* NULL, or what a later tile needs: a cache line is fetched with every step */
    const float *seed;    /* NULL, or [rows][TILE_COLUMNS] that the chains go on from */
    const Partial *older; /* earlier subtrees of the same outputs, the newest first */
    ptrdiff_t merges;
    float *out; /* none of the above */
    ptrdiff_t out_stride;
} Leaf;

/* ---- one row, exactly, in spite of underflow ---- */
/* F(fma(x, w, sum)) under gradual underflow, in memory so that it stays between the two changes of mode */
MOJO_NOINLINE void gradual_step(float x, const vf *w, vf *sum, ptrdiff_t vectors) {
    fp_exact();
    for (ptrdiff_t q = 0; q < vectors; q++) sum[q] = vflush(vfma(vset(x), w[q], sum[q]));
    fp_fast();
}

#define BELOW_BORDER 0x207fffff /* the largest float below 2^-126 * 2^64 */

/* zero where |x| is next to the border */
MOJO_INLINE vi border_distance(vf x) {
#if MOJO_ISA == 3
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX), border = _mm512_set1_epi32(BELOW_BORDER);
    return (vi)_mm512_ternarylogic_epi32((__m512i)x, magnitude, border, 0x6a); /* (x & magnitude) ^ border */
#else
    return vixor(viand(vasint(x), viset(INT32_MAX)), viset(BELOW_BORDER));
#endif
}

/* One step under FTZ; `nearest` becomes zero in lanes where some result was next to the border. */
MOJO_INLINE void watched_step(const int vectors, const float *x, const vf *w, vf *sum, vi *nearest) {
    vf factor = vset(*x);
#if MOJO_ISA == 3
    __asm__("" : "+v"(factor)); /* broadcast once, by the load: the compiler would rather multiply scalars first */
#endif
    vf scaled = vmul(factor, vset(0x1p64f));
#pragma GCC unroll 8
    for (int q = 0; q < vectors; q++) {
        /* Infinite where an operand is 2^64 or more: no such sum ends near the border, both terms are too coarse. */
        vf wide = vfma(scaled, w[q], vmul(sum[q], vset(0x1p64f)));
        sum[q] = vfma(factor, w[q], sum[q]);
        *nearest = vimin(*nearest, border_distance(wide));
    }
}

#define WATCHED_STEPS 8 /* are done again, under gradual underflow, when one of them was next to the border */

/* Row `row` of a tile; the elements of x are x_step apart. */
MOJO_NOINLINE void exact_tile_row(const float *x, ptrdiff_t x_step, const float *columns, ptrdiff_t row,
                                  const Leaf *leaf) {
    vf acc[TILE_VECTORS], saved[TILE_VECTORS], w[TILE_VECTORS];
    for (int q = 0; q < TILE_VECTORS; q++)
        acc[q] = leaf->seed ? vload(leaf->seed + row * TILE_COLUMNS + q * W) : vzero();
    for (ptrdiff_t first = 0; first < leaf->steps; first += WATCHED_STEPS) {
        ptrdiff_t last = leaf->steps - first < WATCHED_STEPS ? leaf->steps : first + WATCHED_STEPS;
        vi nearest = viset(INT32_MAX);
        for (int q = 0; q < TILE_VECTORS; q++) saved[q] = acc[q];
        for (ptrdiff_t p = first; p < last; p++) {
            for (int q = 0; q < TILE_VECTORS; q++) w[q] = vload(columns + p * PANEL + q * W);
            watched_step(TILE_VECTORS, x + p * x_step, w, acc, &nearest);
        }
        if (vany(vieq(nearest, viset(0)))) {
            vf again[TILE_VECTORS];
            for (ptrdiff_t p = first; p < last; p++) {
                for (int q = 0; q < TILE_VECTORS; q++) again[q] = vload(columns + p * PANEL + q * W);
                gradual_step(x[p * x_step], again, saved, TILE_VECTORS);
            }
            for (int q = 0; q < TILE_VECTORS; q++) acc[q] = saved[q];
        }
    }
    for (ptrdiff_t i = 0; i < leaf->merges; i++)
        for (int q = 0; q < TILE_VECTORS; q++)
            acc[q] = vadd(vload(leaf->older[i].data + row * leaf->older[i].stride + q * W), acc[q]);
    for (int q = 0; q < TILE_VECTORS; q++) vstore(leaf->out + row * leaf->out_stride + q * W, acc[q]);
}

/* Rows [first, first + SCALED_ROWS) of a tile of `rows` rows in the scaled domain; 0 if something is in doubt. */
#if SCALED_CHAINS
#define SCALED_ROWS (TILE_ROWS / 2)
MOJO_NOINLINE int scaled_tile_rows(ptrdiff_t rows, ptrdiff_t first, const float *a, const float *b, const Leaf *leaf) {
    vf acc[SCALED_ROWS][TILE_VECTORS];
    ptrdiff_t row[SCALED_ROWS]; /* the last one repeats where there are fewer */
    vi unsure = viset(0);
#pragma GCC unroll 16
    for (int r = 0; r < SCALED_ROWS; r++) {
        row[r] = first + r < rows ? first + r : rows - 1;
#pragma GCC unroll 4
        for (int q = 0; q < TILE_VECTORS; q++)
            acc[r][q] = vmul(leaf->seed ? vload(leaf->seed + row[r] * TILE_COLUMNS + q * W) : vzero(), vset(SCALE_UP));
    }
    const ptrdiff_t last = leaf->steps - 1;
#pragma GCC unroll 1
    for (ptrdiff_t p = 0; p < last; p++) {
        vf columns[TILE_VECTORS];
#pragma GCC unroll 4
        for (int q = 0; q < TILE_VECTORS; q++) columns[q] = vload(b + p * PANEL + q * W) * vset(SCALE_UP);
#pragma GCC unroll 16
        for (int r = 0; r < SCALED_ROWS; r++) {
            vf x = vset(a[p * rows + row[r]]);
#pragma GCC unroll 4
            for (int q = 0; q < TILE_VECTORS; q++) acc[r][q] = scaled_flush(scaled_fma(x, columns[q], acc[r][q]));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < SCALED_ROWS; r++) {
        vf x = vset(a[last * rows + row[r]]);
#pragma GCC unroll 4
        for (int q = 0; q < TILE_VECTORS; q++) {
            vf sum = scaled_fma(x, vload(b + last * PANEL + q * W) * vset(SCALE_UP), acc[r][q]);
            unsure |= (((vi)sum & INT32_MAX) == 0) & (vilanes() < (int32_t)(leaf->columns - q * W));
            vstore(leaf->out + row[r] * leaf->out_stride + q * W, scaled_result(sum));
        }
    }
    if (fp_underflowed() || vany(unsure)) return 0;
    for (ptrdiff_t i = 0; i < leaf->merges; i++)
        for (ptrdiff_t r = first; r < rows && r < first + SCALED_ROWS; r++)
            for (int q = 0; q < TILE_VECTORS; q++) {
                float *out = leaf->out + r * leaf->out_stride + q * W;
                vstore(out, vadd(vload(leaf->older[i].data + r * leaf->older[i].stride + q * W), vload(out)));
            }
    return 1;
}
#else
#define SCALED_ROWS TILE_ROWS
MOJO_INLINE int scaled_tile_rows(ptrdiff_t rows, ptrdiff_t first, const float *a, const float *b, const Leaf *leaf) {
    return 0;
}
#endif

/* ---- the tile of the products of many rows ---- */
/* Every loop over the accumulators is unrolled, or they would live in memory. */
#define FOR_TILE(rows, r, q)                                 \
    _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) \
        _Pragma("GCC unroll 4") for (int q = 0; q < TILE_VECTORS; q++)

MOJO_INLINE void tile_steps(const int rows, const int fetch, const float *a, const float *b, const Leaf *leaf,
                            vf acc[TILE_ROWS][TILE_VECTORS]) {
    const char *ahead = (const char *)leaf->ahead;
#pragma GCC unroll 1
    for (ptrdiff_t p = leaf->steps; p > 0; p--) {
        vf columns[TILE_VECTORS];
        if (fetch) {
            prefetch_far(ahead);
            ahead += 64;
        }
#pragma GCC unroll 4
        for (int q = 0; q < TILE_VECTORS; q++) columns[q] = vload(b + q * W);
        FOR_TILE(rows, r, q) acc[r][q] = vfma(vset(a[r]), columns[q], acc[r][q]);
        a += rows;
        b += PANEL;
    }
}

MOJO_INLINE void tile_sums(const int rows, const float *a, const float *b, const Leaf *leaf,
                           vf acc[TILE_ROWS][TILE_VECTORS]) {
    FOR_TILE(rows, r, q) acc[r][q] = vzero();
    if (leaf->seed) {
        FOR_TILE(rows, r, q) acc[r][q] = vload(leaf->seed + r * TILE_COLUMNS + q * W);
    }
    if (leaf->ahead)
        tile_steps(rows, 1, a, b, leaf, acc);
    else
        tile_steps(rows, 0, a, b, leaf, acc);
}

#if MOJO_ISA == 1
/* Without a fused multiply-add: an exact product in double, added in double, rounded to float. The two roundings differ
 * from one only where the sum in double lies half-way between two floats; `doubt` gathers that. */
MOJO_INLINE __m128d double_step(__m128d x, __m128d w, __m128d sum, __m128i *doubt) {
    __m128d total = _mm_add_pd(_mm_mul_pd(x, w), sum);
    __m128i below = _mm_and_si128(_mm_castpd_si128(total), _mm_set1_epi32(0x1fffffff)); /* the low half counts */
    *doubt = _mm_or_si128(*doubt, _mm_cmpeq_epi32(below, _mm_set1_epi32(0x10000000)));
    return _mm_cvtps_pd(_mm_cvtpd_ps(total));
}
MOJO_INLINE int doubtful(__m128i doubt) { return (_mm_movemask_epi8(doubt) & 0x0f0f) != 0; }
MOJO_INLINE void widen(vf x, __m128d *low, __m128d *high) {
    *low = _mm_cvtps_pd((__m128)x);
    *high = _mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x));
}
MOJO_INLINE vf narrow(__m128d low, __m128d high) { return (vf)_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high)); }

/* The same sums, at more than twice the speed. Returns whether they are in doubt. */
MOJO_INLINE int tile_sums_double(const int rows, const float *a, const float *b, const Leaf *leaf,
                                 vf acc[TILE_ROWS][TILE_VECTORS]) {
    __m128d low[TILE_ROWS][TILE_VECTORS], high[TILE_ROWS][TILE_VECTORS];
    __m128i doubt = _mm_setzero_si128();
    FOR_TILE(rows, r, q)
        widen(leaf->seed ? vload(leaf->seed + r * TILE_COLUMNS + q * W) : vzero(), &low[r][q], &high[r][q]);
#pragma GCC unroll 1
    for (ptrdiff_t p = leaf->steps; p > 0; p--) {
#pragma GCC unroll 4
        for (int q = 0; q < TILE_VECTORS; q++) {
            __m128d w_low, w_high;
            widen(vload(b + q * W), &w_low, &w_high);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                __m128d x = _mm_cvtps_pd(_mm_set1_ps(a[r]));
                low[r][q] = double_step(x, w_low, low[r][q], &doubt);
                high[r][q] = double_step(x, w_high, high[r][q], &doubt);
            }
        }
        a += rows;
        b += PANEL;
    }
    FOR_TILE(rows, r, q) acc[r][q] = narrow(low[r][q], high[r][q]);
    return doubtful(doubt);
}
#endif

/* `streamed`: out is aligned and written past the caches. */
MOJO_INLINE void tile_body(const int rows, const int streamed, const float *a, const float *b, const Leaf *leaf) {
    vf acc[TILE_ROWS][TILE_VECTORS];
    float *out = leaf->out;
    ptrdiff_t out_stride = leaf->out_stride;
    if (!streamed) {
        FOR_TILE(rows, r, q) __builtin_prefetch(out + r * out_stride + q * W, 1);
    }
#if MOJO_ISA == 1
    if (tile_sums_double(rows, a, b, leaf, acc))
#endif
        tile_sums(rows, a, b, leaf, acc);
#pragma GCC unroll 1
    for (ptrdiff_t i = 0; i < leaf->merges; i++) {
        const float *older = leaf->older[i].data;
        ptrdiff_t stride = leaf->older[i].stride;
        FOR_TILE(rows, r, q) acc[r][q] = vadd(vload(older + r * stride + q * W), acc[r][q]);
    }
    FOR_TILE(rows, r, q) {
        if (streamed) vstream(out + r * out_stride + q * W, acc[r][q]);
        else vstore(out + r * out_stride + q * W, acc[r][q]);
    }
}

typedef void (*TileKernel)(const float *, const float *, const Leaf *);
#define MOJO_TILE(rows) \
    MOJO_NOINLINE void tile_##rows(const float *a, const float *b, const Leaf *leaf) { \
        tile_body(rows, 0, a, b, leaf);                                                 \
    }                                                                                   \
    MOJO_NOINLINE void stream_##rows(const float *a, const float *b, const Leaf *leaf) { \
        tile_body(rows, 1, a, b, leaf);                                                 \
    }
MOJO_TILE(1)
MOJO_TILE(2)
#if TILE_ROWS > 2
MOJO_TILE(3)
MOJO_TILE(4)
#endif
#if TILE_ROWS > 4
MOJO_TILE(5)
MOJO_TILE(6)
#endif
#if TILE_ROWS > 6
MOJO_TILE(7)
MOJO_TILE(8)
MOJO_TILE(9)
MOJO_TILE(10)
MOJO_TILE(11)
MOJO_TILE(12)
MOJO_TILE(13)
MOJO_TILE(14)
#endif
#define TILE_KERNELS_2(name) NULL, name##_1, name##_2
#define TILE_KERNELS_4(name) TILE_KERNELS_2(name), name##_3, name##_4
#define TILE_KERNELS_6(name) TILE_KERNELS_4(name), name##_5, name##_6
#define TILE_KERNELS_14(name) \
    TILE_KERNELS_6(name), name##_7, name##_8, name##_9, name##_10, name##_11, name##_12, name##_13, name##_14
#define TILE_KERNELS__(rows, name) TILE_KERNELS_##rows(name)
#define TILE_KERNELS_(rows, name) TILE_KERNELS__(rows, name)
static const TileKernel tile_kernels[2][TILE_ROWS + 1] = {
    {TILE_KERNELS_(TILE_ROWS, tile)},
    {TILE_KERNELS_(TILE_ROWS, stream)},
};

MOJO_INLINE void tile_run(int streamed, ptrdiff_t rows, const float *a, const float *b, const Leaf *leaf) {
    tile_kernels[streamed][rows](a, b, leaf);
}

/* Size of a core's second-level cache, or a guess. */
MOJO_INLINE ptrdiff_t second_level_bytes(void) {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (found > 0) return found;
#endif
    return 1 << 20;
}

/* ---- packing ---- */
/* W steps of up to W rows, transposed: out[p * out_stride + i] = rows[i * stride + p]; rows from `count` on read as 0.
 * Writes W floats for every step. */
MOJO_INLINE void transpose_block(const float *rows, ptrdiff_t stride, ptrdiff_t count, float *out,
                                 ptrdiff_t out_stride) {
    vf square[W];
    if (count >= W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) square[i] = vload(rows + i * stride);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i < count) square[i] = vload(rows + i * stride);
            else square[i] = vzero();
        }
    }
    vtranspose(square);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) vstore(out + i * out_stride, square[i]);
}
#endif
