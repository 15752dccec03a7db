/* Byte planes of little-endian elements. The pointers do not overlap, which Cython cannot say and without which the
   compiler would not vectorise the loops. */
#ifndef MOJO_PLANES_H
#define MOJO_PLANES_H

#include <stddef.h>
#include <stdint.h>

static inline void split_halves(const uint8_t *restrict data, uint8_t *restrict p0, uint8_t *restrict p1, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        p0[i] = data[2 * i];
        p1[i] = data[2 * i + 1];
    }
}

static inline void join_halves(uint8_t *restrict data, const uint8_t *restrict p0, const uint8_t *restrict p1,
                               ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        data[2 * i] = p0[i];
        data[2 * i + 1] = p1[i];
    }
}

static inline void split_words(const uint8_t *restrict data, uint8_t *restrict p0, uint8_t *restrict p1,
                               uint8_t *restrict p2, uint8_t *restrict p3, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        p0[i] = data[4 * i];
        p1[i] = data[4 * i + 1];
        p2[i] = data[4 * i + 2];
        p3[i] = data[4 * i + 3];
    }
}

static inline void join_words(uint8_t *restrict data, const uint8_t *restrict p0, const uint8_t *restrict p1,
                              const uint8_t *restrict p2, const uint8_t *restrict p3, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        data[4 * i] = p0[i];
        data[4 * i + 1] = p1[i];
        data[4 * i + 2] = p2[i];
        data[4 * i + 3] = p3[i];
    }
}

#endif
