/* Register tiles of chains: several rows of outputs, two vectors wide, every output one serial fused sum.
 *
 * c[r][lane] (+)= sum over p of a[r * a_row + p * a_step] * b[p * b_step + lane], p ascending. Unrolling over rows keeps
 * the sums in registers, which a loop in Cython cannot ask for. An output continues from what c holds, so a long sum
 * may be cut anywhere without moving a bit.
 */
#ifndef MOJOLEARN_CHAINS_H
#define MOJOLEARN_CHAINS_H
#include "simd.h"

#if MOJO_ISA == 3
#define CHAIN_ROWS 8 /* 16 sums in flight hide the latency of two multiply-add units */
#else
#define CHAIN_ROWS 4
#endif
#define CHAIN_LANES (2 * W)

MOJO_INLINE void chain_tile(const int rows, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
                            ptrdiff_t b_step, float *c, ptrdiff_t c_row, ptrdiff_t steps, const int fresh) {
    vf sums[CHAIN_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        sums[r][0] = fresh ? vzero() : vload(c + r * c_row);
        sums[r][1] = fresh ? vzero() : vload(c + r * c_row + W);
    }
#pragma GCC unroll 1
    for (ptrdiff_t p = 0; p < steps; p++) {
        vf b0 = vload(b), b1 = vload(b + W);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = vset(a[r * a_row]);
            sums[r][0] = vfma(x, b0, sums[r][0]);
            sums[r][1] = vfma(x, b1, sums[r][1]);
        }
        a += a_step;
        b += b_step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vstore(c + r * c_row, sums[r][0]);
        vstore(c + r * c_row + W, sums[r][1]);
    }
}

/* a: CHAIN_ROWS rows of a row-major matrix; b and c: rows of CHAIN_LANES floats. c is overwritten. */
MOJO_NOINLINE void chain_rows(const float *a, ptrdiff_t a_row, const float *b, float *c, ptrdiff_t steps) {
    chain_tile(CHAIN_ROWS, a, a_row, 1, b, CHAIN_LANES, c, CHAIN_LANES, steps, 1);
}
/* a: a matrix of CHAIN_LANES columns, read down CHAIN_ROWS adjacent columns; continues c. */
MOJO_NOINLINE void chain_columns(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                                 ptrdiff_t steps) {
    chain_tile(CHAIN_ROWS, a, 1, CHAIN_LANES, b, b_step, c, c_row, steps, 0);
}
/* the same down one column */
MOJO_NOINLINE void chain_column(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t steps) {
    chain_tile(1, a, 0, CHAIN_LANES, b, b_step, c, 0, steps, 0);
}
/* a: CHAIN_ROWS rows of CHAIN_LANES floats, read along the rows; continues c. */
MOJO_NOINLINE void chain_lanes(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                               ptrdiff_t steps) {
    chain_tile(CHAIN_ROWS, a, CHAIN_LANES, 1, b, b_step, c, c_row, steps, 0);
}
#endif
