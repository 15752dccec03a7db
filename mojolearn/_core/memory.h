/* Large aligned allocations. Huge pages, where the system grants them, are worth 5 to 20 % when weights of hundreds of
 * megabytes are read once per token. */
#ifndef MOJOLEARN_MEMORY_H
#define MOJOLEARN_MEMORY_H
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define HUGE_PAGE ((size_t)1 << 21)

#if defined(_WIN32)
#include <malloc.h>
static inline void *huge_alloc(size_t nbytes) { return _aligned_malloc(nbytes ? nbytes : 64, 64); }
static inline void huge_free(void *data) { _aligned_free(data); }
#else
static inline void *huge_alloc(size_t nbytes) {
    size_t alignment = nbytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t rounded = (nbytes + 63) & ~(size_t)63;
    void *data = NULL;
    if (rounded == 0) rounded = 64;
    if (posix_memalign(&data, alignment, rounded)) return NULL;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == HUGE_PAGE) madvise(data, rounded & ~(HUGE_PAGE - 1), MADV_HUGEPAGE);
#endif
    return data;
}
static inline void huge_free(void *data) { free(data); }
#endif
#endif
