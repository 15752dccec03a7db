/* Register tiles of chains: several rows of outputs, two vectors wide, every output one serial fused sum.
 *
 * c[r][lane] (+)= sum over p of a[r * a_row + p * a_step] * b[p * b_step + lane], p ascending. Unrolling over rows keeps
 * the sums in registers, which a loop in Cython cannot ask for. An output continues from what c holds, so a long sum
 * may be cut anywhere without moving a bit.
 *
 * The tiles run in fast mode (FTZ and DAZ) with the underflow flag clear, and leave it so. Flushing in hardware differs
 * from F only where the exact result lies in [2^-126 - 2^-150, 2^-126 - 2^-151): F keeps what rounds up to 2^-126. A
 * tile that saw no underflow cannot have been there. One that did throws its sums away and walks the chains in a scaled
 * domain (border.h), which the next tiles then do at once: the caller's `care` tells them. Rows that are in doubt even
 * then go on with `vfma_flushed`, which finds results near that border by themselves.
 * (Gradual underflow throughout would be simpler, but costs a hundred cycles per subnormal result.)
 */
#ifndef MOJOLEARN_CHAINS_H
#define MOJOLEARN_CHAINS_H
#include "border.h"

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
MOJO_INLINE int all_finite_vector(vf x) { return !vany(vigt(viand(vasint(x), viset(INT32_MAX)), viset(0x7f7fffff))); }

/* The tile in fast mode; 0, with c as it was, if a result underflowed and that matters, -1 if moreover some sum is not
 * finite. */
MOJO_INLINE int chain_tile(const int rows, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
                           ptrdiff_t b_step, float *c, ptrdiff_t c_row, ptrdiff_t steps, const int fresh,
                           const int matters) {
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
    if (matters && __builtin_expect(fp_underflowed(), 0)) {
        int finite = 1;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) finite &= all_finite_vector(sums[r][0]) & all_finite_vector(sums[r][1]);
        return finite ? 0 : -1;
    }
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

#if SCALED_CHAINS
/* The tile in the scaled domain; -1 if a flush is doubtful or a sum not finite (a NaN among the operands has to be known
 * otherwise, but with AVX-512). Else, a bit for every row whose c is as it was: some zero may have the wrong sign. */
MOJO_INLINE int chain_scaled(const int rows, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
                                  ptrdiff_t b_step, float *c, ptrdiff_t c_row, ptrdiff_t steps, const int fresh) {
    vf sums[CHAIN_ROWS][2];
    vi unsure[CHAIN_ROWS], large = viset(0);
    int zeros = 0;
    const vf up = vset(SCALE_UP);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        sums[r][0] = fresh ? vzero() : vmul(vload(c + r * c_row), up);
        sums[r][1] = fresh ? vzero() : vmul(vload(c + r * c_row + W), up);
    }
#pragma GCC unroll 1
    for (ptrdiff_t p = 1; p < steps; p++) {
        vf b0 = vmul(vload(b), up), b1 = vmul(vload(b + W), up);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = vset(a[r * a_row]);
            sums[r][0] = scaled_flush(scaled_fma(x, b0, sums[r][0]));
            sums[r][1] = scaled_flush(scaled_fma(x, b1, sums[r][1]));
        }
        a += a_step;
        b += b_step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vf x = vset(a[r * a_row]);
        vf sum0 = scaled_fma(x, vmul(vload(b), up), sums[r][0]);
        vf sum1 = scaled_fma(x, vmul(vload(b + W), up), sums[r][1]);
        vi size0 = viand(vasint(sum0), viset(INT32_MAX)), size1 = viand(vasint(sum1), viset(INT32_MAX));
        unsure[r] = vior(vieq(size0, viset(0)), vieq(size1, viset(0)));
        large = vimax(large, vimax(size0, size1));
        sums[r][0] = scaled_result(sum0);
        sums[r][1] = scaled_result(sum1);
        SETTLE(sums[r][0]);
        SETTLE(sums[r][1]);
    }
    if (fp_underflowed() || vany(vigt(large, viset(0x7f7fffff)))) return -1;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        if (vany(unsure[r])) {
            zeros |= 1 << r;
            continue;
        }
        vstore(c + r * c_row, sums[r][0]);
        vstore(c + r * c_row + W, sums[r][1]);
    }
    return zeros;
}
#else
#define chain_scaled(...) -1
#endif
/* Whether chains from +0 have only products below 2^-127: all are flushed, rightly in fast mode. */
MOJO_INLINE int chain_vanishes(const int rows, const float *a, ptrdiff_t a_row, const float *b, ptrdiff_t steps) {
    vf most_a = vzero(), most_b = vzero();
    float size_a = 0, size_b = 0;
    for (ptrdiff_t p = 0; p < steps; p++) {
        most_b = vmax(vabs(vload(b + p * CHAIN_LANES)), most_b);
        most_b = vmax(vabs(vload(b + p * CHAIN_LANES + W)), most_b);
    }
    for (int i = 0; i < W; i++) size_b = most_b[i] > size_b ? most_b[i] : size_b;
    for (int r = 0; r < rows; r++) {
        ptrdiff_t p = 0;
        for (; p + W <= steps; p += W) most_a = vmax(vabs(vload(a + r * a_row + p)), most_a);
        for (; p < steps; p++) size_a = fabsf(a[r * a_row + p]) > size_a ? fabsf(a[r * a_row + p]) : size_a;
    }
    for (int i = 0; i < W; i++) size_a = most_a[i] > size_a ? most_a[i] : size_a;
    return (double)size_a * size_b < 0x1p-127;
}

/* `care`: whether a tile of the caller has underflowed. */
MOJO_INLINE void chain(const int rows, const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b,
                       ptrdiff_t b_step, float *c, ptrdiff_t c_row, ptrdiff_t steps, const int fresh, int *care) {
    int zeros = -1, finite = 1;
    if (!*care || MOJO_ISA < 3) {
        int done = chain_tile(rows, a, a_row, a_step, b, b_step, c, c_row, steps, fresh, 1);
        if (done > 0) return;
        finite = done == 0;
        fp_fast();
        *care = 1;
    }
    if (finite && steps > 0) zeros = chain_scaled(rows, a, a_row, a_step, b, b_step, c, c_row, steps, fresh);
    if (!zeros) return;
    fp_fast();
    if (zeros < 0) {
        chain_flushed(rows, a, a_row, a_step, b, b_step, c, c_row, steps, fresh);
        return;
    }
    for (int r = 0; r < rows; r++)
        if (zeros >> r & 1) chain_tile(1, a + r * a_row, a_row, a_step, b, b_step, c + r * c_row, c_row, steps, fresh, 0);
    fp_fast();
}

/* a: CHAIN_ROWS rows of a row-major matrix; b and c: rows of CHAIN_LANES floats. c is overwritten. */
MOJO_NOINLINE void chain_rows(const float *a, ptrdiff_t a_row, const float *b, float *c, ptrdiff_t steps, int *care) {
    if (*care && chain_vanishes(CHAIN_ROWS, a, a_row, b, steps)) {
        chain_tile(CHAIN_ROWS, a, a_row, 1, b, CHAIN_LANES, c, CHAIN_LANES, steps, 1, 0);
        fp_fast();
        return;
    }
    chain(CHAIN_ROWS, a, a_row, 1, b, CHAIN_LANES, c, CHAIN_LANES, steps, 1, care);
}
/* a: a matrix of CHAIN_LANES columns, read down CHAIN_ROWS adjacent columns; continues c. */
MOJO_NOINLINE void chain_columns(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                                 ptrdiff_t steps, int *care) {
    chain(CHAIN_ROWS, a, 1, CHAIN_LANES, b, b_step, c, c_row, steps, 0, care);
}
/* the same down one column */
MOJO_NOINLINE void chain_column(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t steps,
                                int *care) {
    chain(1, a, 0, CHAIN_LANES, b, b_step, c, 0, steps, 0, care);
}
/* a: CHAIN_ROWS rows of CHAIN_LANES floats, read along the rows; continues c. */
MOJO_NOINLINE void chain_lanes(const float *a, const float *b, ptrdiff_t b_step, float *c, ptrdiff_t c_row,
                               ptrdiff_t steps, int *care) {
    chain(CHAIN_ROWS, a, CHAIN_LANES, 1, b, b_step, c, c_row, steps, 0, care);
}
/* CHAIN_ROWS rows from +0 in the scaled domain alone; the result is that of chain_scaled. Without AVX-512 `c` holds the
 * sums of fast mode before, to tell of NaNs. */
MOJO_NOINLINE int chain_verified(const float *a, ptrdiff_t a_row, ptrdiff_t a_step, const float *b, ptrdiff_t b_step,
                                 float *c, ptrdiff_t c_row, ptrdiff_t steps) {
#if MOJO_ISA < 3
    for (int r = 0; r < CHAIN_ROWS; r++)
        if (!all_finite_vector(vload(c + r * c_row)) || !all_finite_vector(vload(c + r * c_row + W))) return -1;
#endif
    return steps > 0 ? chain_scaled(CHAIN_ROWS, a, a_row, a_step, b, b_step, c, c_row, steps, 1) : -1;
}
#endif
