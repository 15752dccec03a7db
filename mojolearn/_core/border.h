/* Exact sums next to the smallest normal number, without gradual underflow.
 *
 * F flushes what rounds below 2^-126. Hardware flushing differs where the exact result lies in
 * [2^-126 - 2^-150, 2^-126 - 2^-151), which F keeps as 2^-126. So a chain is walked in a domain scaled by 2^76: nothing
 * is subnormal there, and a result t has to be flushed if it is below 2^-50. The fused c - t t, with c next to the
 * square of the largest float b below 2^-50, says everything at once: it is positive below b, negative from 2^-50 on, and
 * subnormal for t = +-b alone, where the flush is doubtful. The sticky underflow flag collects that, for nothing.
 *
 * Operands and sums have to be small enough for the scaling. A sum that is flushed becomes +0 instead of a zero of its
 * sign, which the next term hides unless it is a zero itself: the caller asks about that at the end of the chain. Where
 * no flush was doubtful, hardware flushing gives the right sign.
 */
#ifndef MOJOLEARN_BORDER_H
#define MOJOLEARN_BORDER_H
#include "simd.h"

#if MOJO_ISA >= 2
#define SCALED_CHAINS 1
#define SCALE_UP 0x1p76f
#define SCALE_DOWN 0x1p-76f
#define SCALED_MOST 0x1p40 /* of an operand that is scaled, and of a product: sums stay far from infinity */
#define BORDER_SQUARE (0x1p-100f - 0x1p-123f)

/* the scaled a * b + c, before the flush */
MOJO_INLINE vf scaled_fma(vf a, vf b, vf c) {
#if MOJO_ISA == 3 /* no flag, though it may be tiny even here */
    return (vf)_mm512_fmadd_round_ps((__m512)a, (__m512)b, (__m512)c, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return vfma(a, b, c);
#endif
}
/* positive if t is to be flushed; sets the flag if that is doubtful */
MOJO_INLINE vf border_side(vf t) { return vfma(-t, t, vset(BORDER_SQUARE)); }
/* t, or +0; infinities stay, and with AVX-512 NaNs */
MOJO_INLINE vf scaled_flush(vf t) {
    vf side = border_side(t);
#if MOJO_ISA == 3
    return (vf)_mm512_fixupimm_ps((__m512)t, (__m512)side, _mm512_set1_epi32((int32_t)0x80000000u), 0); /* positive: +0 */
#else
    return (vf)((vi)t & ((vi)side >> 31));
#endif
}
/* t as the last of a chain, scaled back: flushed with its sign, which is unsure where `t` is a zero. */
MOJO_INLINE vf scaled_result(vf t) {
    vf side = border_side(t);
    return (vf)((vi)t & (((vi)side >> 31) | INT32_MIN)) * vset(SCALE_DOWN);
}
/* x is ready before what follows looks at the flag */
#define SETTLE(x) __asm__ volatile("" : "+v"(x))
#else
#define SCALED_CHAINS 0
/* never run */
#define SCALE_UP 1.0f
#define SCALED_MOST 0.0f
MOJO_INLINE vf scaled_fma(vf a, vf b, vf c) { return vfma(a, b, c); }
MOJO_INLINE vf scaled_flush(vf t) { return t; }
MOJO_INLINE vf scaled_result(vf t) { return t; }
#define SETTLE(x)
#endif
MOJO_INLINE vf scale_chain(vf x) { return vmul(x, vset(SCALE_UP)); }
MOJO_INLINE void settle(vf *x) { SETTLE(*x); }
#endif
