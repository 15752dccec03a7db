/* Register tiles of the matrix products: what Cython cannot unroll.
 *
 * Lanes go across output columns; every output walks its own sum in ascending order, in leaves that are folded by a
 * binary counter (numerics page, section 3). Operands come packed: a row panel holds `rows` rows as [step][rows], a
 * column panel PANEL columns as [step][PANEL].
 *
 * The tiles run with FTZ and DAZ set. Flushing in hardware differs from F only where the exact result lies in
 * [2^-126 - 2^-150, 2^-126 - 2^-151): F keeps what rounds up to 2^-126, FTZ does not. No operation of a tile without
 * the sticky underflow flag can have been there. With the flag, `exact_row` computes a row again and looks, in a
 * domain scaled by 2^64 where nothing is subnormal, for results next to that border; only those few steps are done
 * with gradual underflow, which costs a hundred cycles each. The adds of the fold need no such care: a sum of two
 * floats is a multiple of 2^-149 and never lies inside the interval.
 */
#ifndef MOJOLEARN_TILE_H
#define MOJOLEARN_TILE_H
#include "simd.h"

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

/* At most 1024 leaves are folded, so eleven partial sums wait at a time. */
#define FOLD_LEVELS 12

typedef struct {
    ptrdiff_t steps, leaf;     /* length of the sums, and of one leaf */
    const float *seed;         /* NULL, or [rows][TILE_COLUMNS] to start from (then there is one leaf) */
    const float *const *older; /* `merges` earlier subtrees of the same outputs, newest first, to be added in front */
    ptrdiff_t merges, older_offset, older_stride;
} TileSum;

/* ---- one row, exactly, in spite of underflow -------------------------------------------------------------------- */
#define PANEL_FLOAT32 0
#define PANEL_BFLOAT16 1
#define PANEL_INT8 2
#define PANEL_INT8_PLAIN 3 /* some row's exponent is too near the limits for the shorter widening */

/* W columns of one step of a panel. Layouts: float32 [step][32]; bfloat16 [step][16] words of column i below column
 * i + 16; int8 [step / 2][16] words of u = code + 128 with the bytes (step, i), (step, i + 16), (step + 1, i),
 * (step + 1, i + 16). */
MOJO_INLINE void panel_load(const int format, const char *panel, const float *scales, ptrdiff_t step, vf *columns) {
    if (format == PANEL_FLOAT32) {
        const float *at = (const float *)panel + step * PANEL;
#pragma GCC unroll 8
        for (int q = 0; q < PANEL_VECTORS; q++) columns[q] = vload(at + q * W);
    } else if (format == PANEL_BFLOAT16) {
        const int32_t *at = (const int32_t *)panel + step * (PANEL / 2);
#pragma GCC unroll 4
        for (int q = 0; q < PANEL_VECTORS / 2; q++) {
            vi words = viload(at + q * W);
            columns[q] = vasfloat(vishl(words, 16));
            columns[q + PANEL_VECTORS / 2] = vasfloat(viand(words, viset((int32_t)0xffff0000u)));
        }
    } else {
        const int32_t *at = (const int32_t *)panel + (step / 2) * (PANEL / 2);
#pragma GCC unroll 4
        for (int q = 0; q < PANEL_VECTORS / 2; q++) {
            vi words = viload(at + q * W);
            if (step & 1) words = viand(vishr(words, 16), viset(0xffff));
            vi low = viand(words, viset(0xff)), high = viand(vishr(words, 8), viset(0xff));
            columns[q] = vmul(vtofloat(visub(low, viset(128))), vload(scales + q * W));
            columns[q + PANEL_VECTORS / 2] = vmul(vtofloat(visub(high, viset(128))), vload(scales + PANEL / 2 + q * W));
        }
    }
}

/* F(fma(x, w, sum)) under gradual underflow, in memory so that it stays between the two changes of mode */
MOJO_NOINLINE void gradual_step(const vf *x, const vf *w, vf *sum, ptrdiff_t vectors) {
    fp_exact();
    for (ptrdiff_t q = 0; q < vectors; q++) sum[q] = vflush(vfma(*x, w[q], sum[q]));
    fp_fast();
}

#define BELOW_BORDER 0x207fffff /* the largest float below 2^-126 * 2^64 */

MOJO_INLINE void exact_step(const int vectors, float x, const vf *w, vf *sum) {
    vf factor = vset(x), scaled = vmul(factor, vset(0x1p64f)), next[PANEL_VECTORS];
    vi doubtful = viset(0);
#pragma GCC unroll 8
    for (int q = 0; q < vectors; q++) {
        next[q] = vfma(factor, w[q], sum[q]);
        /* Infinite where an operand is 2^64 or more: no such sum ends near the border, both terms are too coarse. */
        vf wide = vfma(scaled, w[q], vmul(sum[q], vset(0x1p64f)));
        doubtful = vior(doubtful, vieq(viand(vasint(wide), viset(INT32_MAX)), viset(BELOW_BORDER)));
    }
    if (vany(doubtful)) {
#pragma GCC unroll 8
        for (int q = 0; q < vectors; q++) next[q] = sum[q];
        gradual_step(&factor, w, next, vectors);
    }
#pragma GCC unroll 8
    for (int q = 0; q < vectors; q++) sum[q] = next[q];
}

/* One row of x (elements x_step apart) times a packed panel (format >= 0) or times `vectors` vectors of columns of a
 * float32 panel that begins at `panel`. */
MOJO_INLINE void exact_row_body(const int format, const int vectors, const float *x, ptrdiff_t x_step,
                                const char *panel, const float *scales, float *out, ptrdiff_t row, const TileSum *sum) {
    vf stack[FOLD_LEVELS][PANEL_VECTORS], acc[PANEL_VECTORS], w[PANEL_VECTORS];
    ptrdiff_t counts[FOLD_LEVELS], depth = 0, start = 0;
    for (;;) {
        ptrdiff_t end = sum->steps - start < sum->leaf ? sum->steps : start + sum->leaf, count = 1;
        for (int q = 0; q < vectors; q++)
            acc[q] = sum->seed ? vload(sum->seed + row * TILE_COLUMNS + q * W) : vzero();
        for (ptrdiff_t p = start; p < end; p++) {
            if (format == PANEL_FLOAT32)
                for (int q = 0; q < vectors; q++) w[q] = vload((const float *)panel + p * PANEL + q * W);
            else
                panel_load(format, panel, scales, p, w);
            exact_step(vectors, x[p * x_step], w, acc);
        }
        int last = end == sum->steps;
        while (depth && (last || counts[depth - 1] == count)) {
            depth--;
            for (int q = 0; q < vectors; q++) acc[q] = vadd(stack[depth][q], acc[q]);
            count *= 2;
        }
        if (last) break;
        for (int q = 0; q < vectors; q++) stack[depth][q] = acc[q];
        counts[depth++] = count;
        start = end;
    }
    for (ptrdiff_t i = 0; i < sum->merges; i++)
        for (int q = 0; q < vectors; q++)
            acc[q] = vadd(vload(sum->older[i] + sum->older_offset + row * sum->older_stride + q * W), acc[q]);
    for (int q = 0; q < vectors; q++) vstore(out + q * W, acc[q]);
}

MOJO_NOINLINE void exact_tile_row(const float *x, ptrdiff_t x_step, const float *columns, float *out, ptrdiff_t row,
                                  const TileSum *sum) {
    exact_row_body(PANEL_FLOAT32, TILE_VECTORS, x, x_step, (const char *)columns, NULL, out, row, sum);
}

MOJO_NOINLINE void exact_panel_row(int format, const float *x, const char *panel, const float *scales, float *out,
                                   const TileSum *sum) {
    if (format == PANEL_FLOAT32) exact_row_body(PANEL_FLOAT32, PANEL_VECTORS, x, 1, panel, scales, out, 0, sum);
    else if (format == PANEL_BFLOAT16) exact_row_body(PANEL_BFLOAT16, PANEL_VECTORS, x, 1, panel, scales, out, 0, sum);
    else exact_row_body(PANEL_INT8, PANEL_VECTORS, x, 1, panel, scales, out, 0, sum);
}

/* ---- the tile of the products of many rows ------------------------------------------------------------------------ */
MOJO_INLINE void tile_body(const int rows, const float *a, const float *b, float *out, ptrdiff_t out_stride,
                           const TileSum *sum) {
    vf stack[FOLD_LEVELS][TILE_ROWS][TILE_VECTORS], acc[TILE_ROWS][TILE_VECTORS];
    ptrdiff_t counts[FOLD_LEVELS], depth = 0, left = sum->steps;
    for (;;) {
        ptrdiff_t steps = left < sum->leaf ? left : sum->leaf, count = 1;
        if (sum->seed) {
            for (int r = 0; r < rows; r++)
                for (int q = 0; q < TILE_VECTORS; q++) acc[r][q] = vload(sum->seed + r * TILE_COLUMNS + q * W);
        } else {
            for (int r = 0; r < rows; r++)
                for (int q = 0; q < TILE_VECTORS; q++) acc[r][q] = vzero();
        }
#pragma GCC unroll 1
        for (ptrdiff_t p = 0; p < steps; p++) {
            vf columns[TILE_VECTORS];
            for (int q = 0; q < TILE_VECTORS; q++) columns[q] = vload(b + q * W);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf x = vset(a[r]);
#pragma GCC unroll 4
                for (int q = 0; q < TILE_VECTORS; q++) acc[r][q] = vfma(x, columns[q], acc[r][q]);
            }
            a += rows;
            b += PANEL;
        }
        left -= steps;
        while (depth && (left == 0 || counts[depth - 1] == count)) {
            depth--;
            for (int r = 0; r < rows; r++)
                for (int q = 0; q < TILE_VECTORS; q++) acc[r][q] = vadd(stack[depth][r][q], acc[r][q]);
            count *= 2;
        }
        if (left == 0) break;
        for (int r = 0; r < rows; r++)
            for (int q = 0; q < TILE_VECTORS; q++) stack[depth][r][q] = acc[r][q];
        counts[depth++] = count;
    }
    for (ptrdiff_t i = 0; i < sum->merges; i++) {
        const float *older = sum->older[i] + sum->older_offset;
        for (int r = 0; r < rows; r++)
            for (int q = 0; q < TILE_VECTORS; q++)
                acc[r][q] = vadd(vload(older + r * sum->older_stride + q * W), acc[r][q]);
    }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < TILE_VECTORS; q++) vstore(out + r * out_stride + q * W, acc[r][q]);
}

typedef void (*TileKernel)(const float *, const float *, float *, ptrdiff_t, const TileSum *);
#define MOJO_TILE(rows)                                                                                          \
    MOJO_NOINLINE void tile_##rows(const float *a, const float *b, float *out, ptrdiff_t stride, const TileSum *s) { \
        tile_body(rows, a, b, out, stride, s);                                                                   \
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
static const TileKernel tile_kernels[TILE_ROWS + 1] = {
    NULL, tile_1, tile_2,
#if TILE_ROWS > 2
    tile_3, tile_4,
#endif
#if TILE_ROWS > 4
    tile_5, tile_6,
#endif
#if TILE_ROWS > 6
    tile_7, tile_8, tile_9, tile_10, tile_11, tile_12, tile_13, tile_14,
#endif
};

MOJO_INLINE void tile_run(ptrdiff_t rows, const float *a, const float *b, float *out, ptrdiff_t out_stride,
                          const TileSum *sum) {
    tile_kernels[rows](a, b, out, out_stride, sum);
}

/* ---- packing ------------------------------------------------------------------------------------------------------ */
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
