/* Register tiles of chains: several rows of outputs, two vectors wide, every output one serial fused sum.
 *
 * c[r][lane] (+)= sum over p of a[r * a_row + p * a_step] * b[p * b_step + lane], p ascending. Unrolling over rows keeps
 * the sums in registers, which a loop in Cython cannot ask for. An output continues from what c holds, so a long sum
 * may be cut anywhere without moving a bit.
 *
 * The tiles run in fast mode (FTZ and DAZ) with the underflow flag clear, and leave it so. Flushing in hardware differs
 * from F only where the exact result lies in [2^-126 - 2^-150, 2^-126 - 2^-151): F keeps what rounds up to 2^-126. A
 * tile that saw no underflow cannot have been there. One that did throws its sums away and goes on row by row with
 * `vfma_flushed`, which finds results near that border in a domain scaled by 2^64, where nothing is subnormal.
 * (Gradual underflow throughout would be simpler, but costs a hundred cycles per subnormal result.)
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

/* ---- exact results in fast mode -------------------------------------------------------------------------------- */
#define UP64 0x1p64f
#define BELOW_BORDER_BITS 0x207fffff /* the largest float below 2^-126 * 2^64 */

/* In memory, so that the operation stays between the two changes of mode. abc: three operands, c NULL for a product */
MOJO_NOINLINE void gradual_operation(const vf *a, const vf *b, const vf *c, vf *out) {
    fp_exact();
    *out = vflush(c ? vfma(*a, *b, *c) : vmul(*a, *b));
    fp_fast();
}
MOJO_INLINE int any_below_border(vf scaled) {
    return vany(vieq(viand(vasint(scaled), viset(INT32_MAX)), viset(BELOW_BORDER_BITS)));
}
/* F(a * b + c). The scaled result is infinite where a or c is 2^64 or more: such a sum does not end near the border,
 * its terms are too coarse. */
MOJO_INLINE vf vfma_flushed(vf a, vf b, vf c) {
    vf result = vfma(a, b, c);
    if (__builtin_expect(any_below_border(vfma(vmul(a, vset(UP64)), b, vmul(c, vset(UP64)))), 0))
        gradual_operation(&a, &b, &c, &result);
    return result;
}
/* F(a * b), for a below 2^64 */
MOJO_INLINE vf vmul_flushed(vf a, vf b) {
    vf result = vmul(a, b);
    if (__builtin_expect(any_below_border(vmul(vmul(a, vset(UP64)), b)), 0)) gradual_operation(&a, &b, NULL, &result);
    return result;
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */
/* The tile in fast mode; 0, with c as it was, if a result underflowed. */
MOJO_INLINE int chain_tile(const int rows, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
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
    if (__builtin_expect(fp_underflowed(), 0)) return 0;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vstore(c + r * c_row, sums[r][0]);
        vstore(c + r * c_row + W, sums[r][1]);
    }
    return 1;
}

MOJO_NOINLINE void chain_flushed(int rows, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
                                 ptrdiff_t b_step, float *c, ptrdiff_t c_row, ptrdiff_t steps, int fresh) {
    for (int r = 0; r < rows; r++) {
        vf sum0 = fresh ? vzero() : vload(c + r * c_row), sum1 = fresh ? vzero() : vload(c + r * c_row + W);
        for (ptrdiff_t p = 0; p < steps; p++) {
            vf x = vset(a[r * a_row + p * a_step]);
            sum0 = vfma_flushed(x, vload(b + p * b_step), sum0);
            sum1 = vfma_flushed(x, vload(b + p * b_step + W), sum1);
        }
        vstore(c + r * c_row, sum0);
        vstore(c + r * c_row + W, sum1);
    }
    fp_fast();
}

#define CHAIN(...) \
    if (!chain_tile(__VA_ARGS__)) chain_flushed(__VA_ARGS__)

/* a: CHAIN_ROWS rows of a row-major matrix; b and c: rows of CHAIN_LANES floats. c is overwritten. */
MOJO_NOINLINE void chain_rows(const float *a, ptrdiff_t a_row, const float *b, float *c, ptrdiff_t steps) {
    CHAIN(CHAIN_ROWS, a, a_row, 1, b, CHAIN_LANES, c, CHAIN_LANES, steps, 1);
}
/* a: a matrix of CHAIN_LANES columns, read down CHAIN_ROWS adjacent columns; continues c. */
MOJO_NOINLINE void chain_columns(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                                 ptrdiff_t steps) {
    CHAIN(CHAIN_ROWS, a, 1, CHAIN_LANES, b, b_step, c, c_row, steps, 0);
}
/* the same down one column */
MOJO_NOINLINE void chain_column(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t steps) {
    CHAIN(1, a, 0, CHAIN_LANES, b, b_step, c, 0, steps, 0);
}
/* a: CHAIN_ROWS rows of CHAIN_LANES floats, read along the rows; continues c. */
MOJO_NOINLINE void chain_lanes(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                               ptrdiff_t steps) {
    CHAIN(CHAIN_ROWS, a, CHAIN_LANES, 1, b, b_step, c, c_row, steps, 0);
}
#undef CHAIN
#endif
