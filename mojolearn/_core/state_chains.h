/* What one new token of a Mamba-3 head takes from the state: chains over its 128 rows, one after another in row order
 * (numerics page, forward 5).
 *
 *   scores[t]  = sum over n of qrot[n] * ks[n][t]     the open chunk's tokens, t < newest
 *   carried[p] = sum over n of qrot[n] * h[n][p]      all 64 channels
 *   dot        = sum over n of q[n] * k[n]
 *
 * ks lies in blocks of KS_COLUMNS tokens, [block][n][token], so that only the blocks that are in use are read.
 *
 * On the way two columns of ks are written, as its lines are at hand: `previous` (unless NULL) becomes column
 * newest - 1 before it is used, `fresh` becomes column newest afterwards.
 */
#ifndef MOJOLEARN_STATE_CHAINS_H
#define MOJOLEARN_STATE_CHAINS_H
#include "simd.h"

#define STATE_ROWS 128
#define KS_COLUMNS 16 /* a cache line */

typedef struct {
    const float *qrot, *q, *k; /* (128,) */
    float *ks;                 /* (4, 128, 16) */
    const float *h;            /* (128, 64) */
    const float *previous, *fresh;
    const float *next_ks, *next_h; /* those of the head that comes next: fetched meanwhile */
    ptrdiff_t newest;
    vf scores[CHUNK_VECTORS], carried[CHUNK_VECTORS];
    float dot;
} state_token;

/* where the first row of a token's column lies */
MOJO_INLINE ptrdiff_t ks_column(ptrdiff_t token) {
    return token / KS_COLUMNS * (STATE_ROWS * KS_COLUMNS) + token % KS_COLUMNS;
}
MOJO_INLINE void put_column(float *ks, ptrdiff_t token, const float *values) {
    ks += ks_column(token);
    for (ptrdiff_t n = 0; n < STATE_ROWS; n++) ks[n * KS_COLUMNS] = values[n];
}

/* Chains of `own` vectors of ks and `states` vectors of h, from vector `first` of each on. `blend`: the last vector of ks
 * takes the new columns. */
MOJO_INLINE void state_chains_body(const int own, const int states, const int with_dot, const int blend,
                                   const ptrdiff_t first, state_token *t) {
    vf score[8], carry[8];
    float total = 0;
    float *ks = t->ks + ks_column(first * W);
    const float *h = t->h + first * W;
    const ptrdiff_t lane = (t->newest - 1) % W;
    const vi old_lane = vieq(vilanes(), viset((int32_t)lane)), new_lane = vieq(vilanes(), viset((int32_t)lane + 1));
    const float *ahead_ks = t->next_ks + ks_column(first * W), *ahead_h = t->next_h + first * W;
    for (int j = 0; j < own; j++) score[j] = vzero();
    for (int j = 0; j < states; j++) carry[j] = vzero();
#pragma GCC unroll 1
    for (ptrdiff_t n = 0; n < STATE_ROWS; n++) {
        vf x = vset(t->qrot[n]);
        if (with_dot) total = sfma(t->q[n], t->k[n], total);
#pragma GCC unroll 8
        for (int j = 0; j < own; j++) {
            const ptrdiff_t at = ks_column(j * W);
            vf column = vload(ks + at);
            if (j * W % KS_COLUMNS == 0) prefetch_far(ahead_ks + at);
            if (blend && j == own - 1) {
                column = vselect(old_lane, vset(t->previous[n]), column);
                vstore(ks + at, vselect(new_lane, vset(t->fresh[n]), column));
            }
            score[j] = vfma(x, column, score[j]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < states; j++) {
            if (j * W % 16 == 0) prefetch_far(ahead_h + j * W);
            carry[j] = vfma(x, vload(h + n * 64 + j * W), carry[j]);
        }
        ks += KS_COLUMNS;
        ahead_ks += KS_COLUMNS;
        ahead_h += 64;
    }
    for (int j = 0; j < own; j++) t->scores[first + j] = score[j];
    for (int j = 0; j < states; j++) t->carried[first + j] = carry[j];
    if (with_dot) t->dot = total;
}

MOJO_NOINLINE void state_chains(state_token *t) {
    const ptrdiff_t tokens = (t->newest + W - 1) / W;
#if MOJO_ISA == 3
    switch (t->previous ? tokens : 0) { /* as many chains at once as hide the latency of each other */
    case 0: state_chains_body(0, 4, 1, 0, 0, t); break;
    case 1: state_chains_body(1, 4, 1, 1, 0, t); break;
    case 2: state_chains_body(2, 4, 1, 1, 0, t); break;
    case 3: state_chains_body(3, 4, 1, 1, 0, t); break;
    default: state_chains_body(4, 4, 1, 1, 0, t);
    }
    if (t->newest % W == 0) put_column(t->ks, t->newest, t->fresh);
#else
    /* as many as the registers hold: 8 vectors of h, then 4 of ks at a time */
    if (t->previous) put_column(t->ks, t->newest - 1, t->previous);
    state_chains_body(0, 8, 1, 0, 0, t);
    for (ptrdiff_t first = 8; first < CHUNK_VECTORS; first += 8) state_chains_body(0, 8, 0, 0, first, t);
    for (ptrdiff_t first = 0; first < tokens; first += 4) state_chains_body(4, 0, 0, 0, first, t);
    put_column(t->ks, t->newest, t->fresh);
#endif
}
#endif
