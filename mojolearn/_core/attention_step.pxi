"""Attention for one new token: rotation, and the queries of a group of heads against the slots of a cache.

Plain functions on pointers, shared by the transformer block and the whole-step decoder; the orders are those of
attention.pxi. One call serves one batch row and key-value head. Keys are transposed in registers, a vector of keys at
a time, so that lanes go across keys and the cache keeps its documented layout.
"""
from libc.string cimport memcpy

cdef void rotate(float* x, const float* cosines, const float* sines, Py_ssize_t half, bint inverse) noexcept nogil:
    """Rotate one head in place; element i pairs with element i + half. ``inverse`` rotates the other way."""
    cdef Py_ssize_t i = 0, n
    cdef vf a, b, c, s, y0, y1
    while i < half:
        n = half - i
        a = load_lanes(x + i, n)
        b = load_lanes(x + half + i, n)
        c = load_lanes(cosines + i, n)
        s = load_lanes(sines + i, n)
        if inverse:
            y0 = vadd(vmul(a, c), vmul(b, s))
            y1 = vsub(vmul(b, c), vmul(a, s))
        else:
            y0 = vsub(vmul(a, c), vmul(b, s))
            y1 = vadd(vmul(b, c), vmul(a, s))
        store_lanes(x + i, vflush(y0), n)
        store_lanes(x + half + i, vflush(y1), n)
        i += vlanes


# What one row and key-value head see: ``cached`` keys in slots from ``first_slot`` on, wrapping round, and the new
# token. queries and out are (group, head_dim), contiguous.
cdef struct TokenAttention:
    const float* queries
    const float* new_key
    const float* new_value
    const float* keys       # (slots, head_dim)
    const float* values
    const float* next_keys  # fetched in the end: the first slot of the head that comes next
    float* out
    Py_ssize_t group, head_dim, slots, first_slot, cached
    float scale


cdef Py_ssize_t attend_token_scratch(Py_ssize_t group, Py_ssize_t keys) noexcept nogil:
    """Floats of scratch for ``keys`` visible keys, the new one included."""
    # weights of every head in whole vectors, and 17 vectors a head for the partial sums of wide heads
    return group * ((keys + vlanes - 1) // vlanes * vlanes + 17 * vlanes)


cdef inline const float* token_row(const TokenAttention* t, const float* cache, const float* new_row,
                                   Py_ssize_t key) noexcept nogil:
    cdef Py_ssize_t slot = t.first_slot + key
    if key == t.cached:
        return new_row
    return cache + (slot - t.slots if slot >= t.slots else slot) * t.head_dim


cdef void token_scores(const TokenAttention* t, Py_ssize_t key, Py_ssize_t count, float* sums, float* levels,
                       Py_ssize_t* sizes) noexcept nogil:
    """``sums`` (group, vlanes) = the product cells of ``count`` keys from ``key`` on; later lanes repeat the last one."""
    cdef const float* rows[vlanes]
    cdef const float* values[vlanes]
    cdef const float* ahead[vlanes]
    cdef vf block[vlanes]
    cdef vf total
    cdef const float* query
    cdef Py_ssize_t i, d, n, h, leaf, leaf_end, size, top = 0
    for i in range(vlanes):
        rows[i] = token_row(t, t.keys, t.new_key, key + min(i, count - 1))
        values[i] = token_row(t, t.values, t.new_value, key + min(i, count - 1))
        ahead[i] = rows[i] + vlanes * t.head_dim if key + count < t.cached else t.next_keys + i * t.head_dim
    leaf = 0
    while leaf < t.head_dim:
        leaf_end = min(leaf + <Py_ssize_t> LEAF, t.head_dim)
        for h in range(t.group):
            vstore(sums + h * vlanes, vzero())
        d = leaf
        while d < leaf_end:
            n = leaf_end - d
            for i in range(vlanes):
                prefetch(ahead[i] + d)                          # of the next block of keys
                prefetch_far(values[i] + d)                     # needed when all scores are known
                block[i] = load_lanes(rows[i] + d, n)
            vtranspose(block)
            for h in range(t.group):
                query = t.queries + h * t.head_dim + d
                total = vload(sums + h * vlanes)
                if n >= vlanes:
                    for i in range(vlanes):
                        total = vfma(vset(query[i]), block[i], total)
                else:
                    for i in range(n):
                        total = vfma(vset(query[i]), block[i], total)
                vstore(sums + h * vlanes, total)
            d += vlanes
        leaf = leaf_end
        # leaves fold in pairs, as a binary counter
        size = 1
        while top and (sizes[top - 1] == size or leaf == t.head_dim):
            top -= 1
            size += sizes[top]
            for h in range(t.group):
                vstore(sums + h * vlanes,
                       vadd(vload(levels + (top * t.group + h) * vlanes), vload(sums + h * vlanes)))
        if leaf < t.head_dim:
            memcpy(levels + top * t.group * vlanes, sums, t.group * vlanes * sizeof(float))
            sizes[top] = size
            top += 1


cdef inline void add_values(const float* row, float weight, Py_ssize_t count, vf* sums) noexcept nogil:
    """Add one key's values, ``count`` vectors of them."""
    cdef Py_ssize_t i
    for i in range(count):
        sums[i] = vfma(vset(weight), vload(row + i * vlanes), sums[i])


cdef void token_values(const TokenAttention* t, const float* weights, Py_ssize_t stride) noexcept nogil:
    """The weighted sums of values of all heads."""
    cdef Py_ssize_t h, d, n, key, i, slot
    cdef const float* weight
    cdef float* out
    cdef vf sums[4]
    for h in range(t.group):
        weight = weights + h * stride
        out = t.out + h * t.head_dim
        d = 0
        while d + 4 * vlanes <= t.head_dim:
            for i in range(4):
                sums[i] = vzero()
            slot = t.first_slot
            for key in range(t.cached):
                add_values(t.values + slot * t.head_dim + d, weight[key], 4, sums)
                slot = slot + 1 if slot + 1 < t.slots else 0
            add_values(t.new_value + d, weight[t.cached], 4, sums)
            for i in range(4):
                vstore(out + d + i * vlanes, vflush(sums[i]))
            d += 4 * vlanes
        while d < t.head_dim:
            n = t.head_dim - d
            sums[0] = vzero()
            for key in range(t.cached + 1):
                sums[0] = vfma(vset(weight[key]), load_lanes(token_row(t, t.values, t.new_value, key) + d, n), sums[0])
            store_lanes(out + d, vflush(sums[0]), n)
            d += vlanes


cdef bint cache_is_finite(const TokenAttention* t) noexcept nogil:
    """Whether all cached keys and values are."""
    cdef Py_ssize_t key
    for key in range(t.cached):
        if not (all_lanes_finite(token_row(t, t.keys, t.new_key, key), t.head_dim)
                and all_lanes_finite(token_row(t, t.values, t.new_value, key), t.head_dim)):
            return False
    return True


cdef bint attend_token(const TokenAttention* t, float* scratch) noexcept nogil:
    """Attention of the new token's heads in one group; returns whether what is cached is finite."""
    cdef Py_ssize_t keys = t.cached + 1, stride = (keys + vlanes - 1) // vlanes * vlanes, key, h, i, count
    cdef float* weights = scratch
    cdef float* sums = weights + t.group * stride
    cdef float* levels = sums + t.group * vlanes
    cdef float* weight
    cdef Py_ssize_t sizes[16]
    cdef vi infinite = viset(0)
    cdef vf score, top, hidden = vbits(0xFF800000)
    cdef float largest, total
    key = 0
    while key < keys:
        count = min(vlanes, keys - key)
        token_scores(t, key, count, sums, levels, sizes)
        for h in range(t.group):
            # the mask's + 0 turns a -0 into +0
            score = vadd(vmul(vload(sums + h * vlanes), vset(t.scale)), vzero())
            infinite = vior(infinite, vigt(vasint(vabs(score)), viset(0x7F7FFFFF)))
            if count < vlanes:
                score = vselect(vigt(viset(<int32_t> count), vilanes()), score, hidden)
            vstore(weights + h * stride + key, score)
        key += vlanes
    for h in range(t.group):
        weight = weights + h * stride
        top = hidden
        key = 0
        while key < keys:
            top = vmax(vload(weight + key), top)
            key += vlanes
        largest = vget(top, 0)
        for i in range(1, vlanes):
            largest = max(largest, vget(top, i))
        key = 0
        while key < keys:
            vstore(weight + key, vexp_negative(vsub(vload(weight + key), vset(largest))))
            key += vlanes
        total = 0.0
        for key in range(keys):
            total = sadd(total, weight[key])
        key = 0
        while key < keys:
            vstore(weight + key, vdiv(vload(weight + key), vset(total)))
            key += vlanes
    token_values(t, weights, stride)
    # a key that is not finite has no finite score, and such a value no finite sum, not even with a weight of zero
    if vany(infinite) or not all_lanes_finite(t.out, t.group * t.head_dim):
        return cache_is_finite(t)
    return True
