# Sums of the Mamba-3 backward inside a chunk (numerics, training 4.2, steps 4, 5 and 7), without the bookkeeping.
#
# First the profile's serial chains, then the orders of the other modes.

# ---- step 4 --------------------------------------------------------------------------------------------------------

cdef inline vf watched_step(vf through, vf x, vf by, vf acc, vi* doubtful) noexcept nogil:
    """acc + through (x by) under FTZ; notes results next to the border."""
    cdef vf product = vmul(x, by)
    doubtful[0] = vior(doubtful[0], beside_border(vmul(scale_up(x), by)))
    doubtful[0] = vior(doubtful[0], beside_border(vfma(scale_up(through), product, scale_up(acc))))
    return vfma(through, product, acc)


cdef void scale_rows(const float* x, const float* by, Py_ssize_t first, Py_ssize_t last, float* out) noexcept nogil:
    """out[j - first] = x[j] by[j] for rows of 128, first <= j < last."""
    cdef Py_ssize_t j, n
    cdef vf factor
    for j in range(first, last):
        factor = vset(by[j])
        n = 0
        while n < STATE:
            vstore(out + n, vmul(vload(x + j * STATE + n), factor))
            n += vlanes
        out += STATE


# A chain of step 4 runs over 64 ``outer`` factors, one for a channel p, and inside over ``count`` tokens j, with factors
# inner[p, j] and a row of 128 decayed keys or queries each. ``keys`` is constant where these functions are called, so that
# one text makes both kinds:
#
#   dq16   outer = dy, inner = v    term = outer (rows inner)
#   dk16   outer = v, inner = dy    term = inner (rows outer), ``keys``

cdef inline void serial_terms(bint keys, const float* rows, Py_ssize_t first, Py_ssize_t count, const float* outer,
                              const float* inner, vf* acc) noexcept nogil:
    """Continue CHAIN_VECTORS sums with the terms of p >= ``first``."""
    cdef vf x, y
    cdef Py_ssize_t p, j, c
    cdef const float* row
    for p in range(first, HEAD):
        x = vset(outer[p])
        row = rows
        for j in range(count):
            y = vset(inner[p * CHUNK + j])
            for c in range(CHAIN_VECTORS):
                acc[c] = vfma(y if keys else x, vmul(vload(row + c * vlanes), x if keys else y), acc[c])
            row += STATE


cdef inline void serial_chain(bint keys, const float* rows, Py_ssize_t count, const float* outer, const float* inner,
                              float* out) noexcept nogil:
    """out[n] = the chain of all terms, 128 sums."""
    cdef vf acc[CHAIN_VECTORS]
    cdef Py_ssize_t n = 0, c
    while n < STATE:
        for c in range(CHAIN_VECTORS):
            acc[c] = vzero()
        serial_terms(keys, rows + n, 0, count, outer, inner, acc)
        for c in range(CHAIN_VECTORS):
            vstore(out + n + c * vlanes, acc[c])
        n += CHAIN_VECTORS * vlanes


cdef inline void serial_chain_decayed(bint keys, const float* x, const float* decay, float* rows, Py_ssize_t count,
                                      const float* outer, const float* inner, float* out) noexcept nogil:
    """`serial_chain` of rows[j] = x[j] decay[j], which are made on the way."""
    cdef vf acc[CHAIN_VECTORS]
    cdef vf first = vset(outer[0]), y, factor, row
    cdef Py_ssize_t n = 0, j, c
    while n < STATE:
        for c in range(CHAIN_VECTORS):
            acc[c] = vzero()
        for j in range(count):
            y = vset(inner[j])
            factor = vset(decay[j])
            for c in range(CHAIN_VECTORS):
                row = vmul(vload(x + j * STATE + n + c * vlanes), factor)
                vstore(rows + j * STATE + n + c * vlanes, row)
                acc[c] = vfma(y if keys else first, vmul(row, first if keys else y), acc[c])
        serial_terms(keys, rows + n, 1, count, outer, inner, acc)
        for c in range(CHAIN_VECTORS):
            vstore(out + n + c * vlanes, acc[c])
        n += CHAIN_VECTORS * vlanes


cdef inline bint serial_chain_guarded(bint keys, const float* rows, Py_ssize_t low, Py_ssize_t high, Py_ssize_t count,
                                      const float* outer, const float* inner, float* out) noexcept nogil:
    """As `serial_chain`, rows low..high scaled up; False if a product is doubtful."""
    cdef vf acc[CHAIN_VECTORS]
    cdef vf x, y
    cdef vi doubtful = viset(0)
    cdef Py_ssize_t n = 0, p, j, c
    cdef const float* row
    while n < STATE:
        for c in range(CHAIN_VECTORS):
            acc[c] = vzero()
        for p in range(HEAD):
            x = vset(outer[p])
            row = rows + n
            for j in range(low):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = vfma(y if keys else x, vmul(vload(row + c * vlanes), x if keys else y), acc[c])
                row += STATE
            for j in range(low, high):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = vfma(y if keys else x,
                                  guarded_product(vload(row + c * vlanes), x if keys else y, &doubtful), acc[c])
                row += STATE
            for j in range(high, count):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = vfma(y if keys else x, vmul(vload(row + c * vlanes), x if keys else y), acc[c])
                row += STATE
        for c in range(CHAIN_VECTORS):
            vstore(out + n + c * vlanes, acc[c])
        n += CHAIN_VECTORS * vlanes
    return not vany(doubtful)


cdef inline bint serial_chain_doubtful(bint keys, const float* rows, Py_ssize_t count, const float* outer,
                                       const float* inner) noexcept nogil:
    """Whether a result of `serial_chain` is next to the border."""
    cdef vf acc[CHAIN_VECTORS]
    cdef vf x, y
    cdef vi doubtful = viset(0)
    cdef Py_ssize_t n = 0, p, j, c
    cdef const float* row
    while n < STATE:
        for c in range(CHAIN_VECTORS):
            acc[c] = vzero()
        for p in range(HEAD):
            x = vset(outer[p])
            row = rows + n
            for j in range(count):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = watched_step(y if keys else x, vload(row + c * vlanes), x if keys else y, acc[c], &doubtful)
                row += STATE
        n += CHAIN_VECTORS * vlanes
    return vany(doubtful)


cdef int scaled_chains(vf* acc, float* out) noexcept nogil:
    """Store the last sums, unflushed, of chains in the scaled domain. 0: all is well; 1: but for signs of zeros, which are
    right in the plain chain; -1: a flush is doubtful, or something overflowed by the scaling."""
    cdef vi zero = viset(0), large = viset(0), size
    cdef vf result
    cdef Py_ssize_t c
    for c in range(CHAIN_VECTORS):
        size = viand(vasint(acc[c]), viset(INT32_MAX))
        zero = vior(zero, vieq(size, viset(0)))
        large = vimax(large, size)
        result = scaled_result(acc[c])
        settle(&result)
        vstore(out + c * vlanes, result)
    if fp_underflowed() or vany(vigt(large, viset(0x7F7FFFFF))):
        return -1
    return 1 if vany(zero) else 0


cdef inline vf scaled_step(vf through, vf x, vf by, vf acc, bint guarded) noexcept nogil:
    """acc + through (x by), unflushed, in the scaled domain, where x is; ``guarded``: the product may be subnormal."""
    cdef vf product = vmul(x, by)
    if guarded:
        product = scaled_flush(product)
    return scaled_fma(through, product, scaled_flush(acc))


cdef inline int serial_chain_scaled(bint keys, const float* rows, Py_ssize_t low, Py_ssize_t high, Py_ssize_t count,
                                    const float* outer, const float* inner, float* out) noexcept nogil:
    """As `serial_chain` for rows in the scaled domain, products of low..high guarded; the result of `scaled_chains`."""
    cdef vf acc[CHAIN_VECTORS]
    cdef vf x, y
    cdef Py_ssize_t n = 0, p, j, c
    cdef const float* row
    cdef int found = 0, status
    while n < STATE:
        for c in range(CHAIN_VECTORS):
            acc[c] = vzero()
        for p in range(HEAD):
            x = vset(outer[p])
            row = rows + n
            for j in range(low):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = scaled_step(y if keys else x, vload(row + c * vlanes), x if keys else y, acc[c], False)
                row += STATE
            for j in range(low, high):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = scaled_step(y if keys else x, vload(row + c * vlanes), x if keys else y, acc[c], True)
                row += STATE
            for j in range(high, count):
                y = vset(inner[p * CHUNK + j])
                for c in range(CHAIN_VECTORS):
                    acc[c] = scaled_step(y if keys else x, vload(row + c * vlanes), x if keys else y, acc[c], False)
                row += STATE
        status = scaled_chains(acc, out + n)
        if status < 0:
            return status
        found |= status
        n += CHAIN_VECTORS * vlanes
    return found


cdef void smallest(const float* x, Py_ssize_t rows, float* out) noexcept nogil:
    """out[t] = the smallest size of a nonzero x[:, t], +inf if there is none; x (rows, 64)."""
    cdef vf least, size
    cdef Py_ssize_t n, t = 0
    while t < CHUNK:
        least = vbits(0x7F800000)
        for n in range(rows):
            size = vabs(vload(x + n * CHUNK + t))
            least = vselect(vgt(size, vzero()), vmin(size, least), least)
        vstore(out + t, least)
        t += vlanes


cdef void find_tiny(const float* decay, const float* floor, float least, bint strip, Py_ssize_t* first,
                    Py_ssize_t* last, Py_ssize_t* low, Py_ssize_t* high) noexcept nogil:
    """Of the decays first..last, strip zeros from both ends if told, then set low..high to the span of those that can
    make a subnormal product: less than 2^-124 / (least * smallest factor), with floor = 2^-124 / (smallest factor)."""
    cdef Py_ssize_t j
    cdef vi found = viset(0)
    cdef vf size = vset(least)
    low[0] = high[0] = first[0]
    j = first[0] - first[0] % vlanes
    while j < last[0]:
        found = vior(found, vlt(vload(decay + j), vdiv(vload(floor + j), size)))
        j += vlanes
    if not vany(found):
        return
    while strip and first[0] < last[0] and decay[first[0]] == 0.0:
        first[0] += 1
    while strip and first[0] < last[0] and decay[last[0] - 1] == 0.0:
        last[0] -= 1
    low[0] = high[0] = first[0]
    for j in range(first[0], last[0]):
        if decay[j] < sdiv(floor[j], least):
            if high[0] == first[0]:
                low[0] = j
            high[0] = j + 1


cdef void scale_chain_rows(float* rows, Py_ssize_t count) noexcept nogil:
    """Into the scaled domain of chains."""
    cdef Py_ssize_t n = 0
    while n < count * STATE:
        vstore(rows + n, scale_chain(vload(rows + n)))
        n += vlanes


cdef inline void scale_up_rows(float* rows, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t n = 0
    while n < count * STATE:
        vstore(rows + n, scale_up(vload(rows + n)))
        n += vlanes


# ---- step 5 --------------------------------------------------------------------------------------------------------

cdef void pair_chains(const float* scores, const float* dy, const float* v, Py_ssize_t real, float* out) noexcept nogil:
    """out[i, j] = chain over p of dy[i, p] (scores[i, j] v[p, j]), in the tiles that reach below the diagonal."""
    cdef vf acc[4][2]
    cdef vf score[4][2]
    cdef vf v0, v1, through
    cdef Py_ssize_t i = 0, j, p, r
    while i < real:
        j = 0
        while j < i + 3:
            for r in range(4):
                acc[r][0] = vzero()
                acc[r][1] = vzero()
                score[r][0] = vload(scores + (i + r) * CHUNK + j)
                score[r][1] = vload(scores + (i + r) * CHUNK + j + vlanes)
            for p in range(HEAD):
                v0 = vload(v + p * CHUNK + j)
                v1 = vload(v + p * CHUNK + j + vlanes)
                for r in range(4):
                    through = vset(dy[(i + r) * HEAD + p])
                    acc[r][0] = vfma(through, vmul(score[r][0], v0), acc[r][0])
                    acc[r][1] = vfma(through, vmul(score[r][1], v1), acc[r][1])
            for r in range(4):
                vstore(out + (i + r) * CHUNK + j, acc[r][0])
                vstore(out + (i + r) * CHUNK + j + vlanes, acc[r][1])
            j += MIX_COLUMNS
        i += 4


cdef void decay_chains(const float* pairs, const float* decay, Py_ssize_t real, float* out) noexcept nogil:
    """out[s] = chain over i >= s, then j < s, of pairs[i, j] decay[i, j]: the profile's order, a lane for every s."""
    cdef vf total[CHUNK_VECTORS]
    cdef vi lane[CHUNK_VECTORS]
    cdef vi upto[CHUNK_VECTORS]
    cdef vf x, by
    cdef Py_ssize_t i, j, c
    for c in range(CHUNK_VECTORS):
        total[c] = vzero()
        lane[c] = viadd(vilanes(), viset(<int32_t> (c * vlanes)))
    for i in range(1, real):
        for c in range(CHUNK_VECTORS):
            upto[c] = vigt(viset(<int32_t> i + 1), lane[c])
        for j in range(i):
            x = vset(pairs[i * CHUNK + j])
            by = vset(decay[i * CHUNK + j])
            for c in range(CHUNK_VECTORS):
                if (c + 1) * vlanes > j + 1 and c * vlanes <= i:
                    total[c] = vselect(viand(upto[c], vigt(lane[c], viset(<int32_t> j))), vfma(x, by, total[c]), total[c])
    for c in range(CHUNK_VECTORS):
        vstore(out + c * vlanes, total[c])


# ---- step 7, the sum over a chunk's state --------------------------------------------------------------------------

cdef inline void add_token_chain(const float* dh, const float* ks, const float* v, const float* end,
                                 float* sums) noexcept nogil:
    cdef vf acc0 = vload(sums), acc1 = vload(sums + vlanes), v0, v1, end0 = vload(end), end1 = vload(end + vlanes)
    cdef Py_ssize_t p, n
    cdef const float* k
    for p in range(HEAD):
        v0 = vload(v + p * STATE_LANES)
        v1 = vload(v + p * STATE_LANES + vlanes)
        k = ks
        for n in range(STATE):
            acc0 = vfma(vload(dh), vmul(vmul(v0, vload(k)), end0), acc0)
            acc1 = vfma(vload(dh + vlanes), vmul(vmul(v1, vload(k + vlanes)), end1), acc1)
            dh += STATE_LANES
            k += STATE_LANES
    vstore(sums, acc0)
    vstore(sums + vlanes, acc1)


cdef inline bint add_token_guarded(const float* dh, const float* ks, const float* v, const float* end,
                                   float* sums) noexcept nogil:
    """As `add_token_chain` where ``end`` is tiny; False and no change if a product is doubtful."""
    cdef vf acc0 = vload(sums), acc1 = vload(sums + vlanes), v0, v1
    cdef vf end0 = scale_up(vload(end)), end1 = scale_up(vload(end + vlanes))
    cdef vi doubtful = viset(0)
    cdef Py_ssize_t p, n
    cdef const float* k
    for p in range(HEAD):
        v0 = vload(v + p * STATE_LANES)
        v1 = vload(v + p * STATE_LANES + vlanes)
        k = ks
        for n in range(STATE):
            acc0 = vfma(vload(dh), guarded_product(end0, vmul(v0, vload(k)), &doubtful), acc0)
            acc1 = vfma(vload(dh + vlanes), guarded_product(end1, vmul(v1, vload(k + vlanes)), &doubtful), acc1)
            dh += STATE_LANES
            k += STATE_LANES
    if vany(doubtful):
        return False
    vstore(sums, acc0)
    vstore(sums + vlanes, acc1)
    return True


cdef void add_token(const float* dh, const float* ks, const float* v, const float* end, bint skip,
                    float* sums) noexcept nogil:
    """Add dh (v ks) end over p, then n, to the sums of STATE_LANES chunks: one token's part. ``skip``: where ``end`` is
    zero the part is."""
    cdef vf end0 = vload(end), end1 = vload(end + vlanes), tiny = vbits(0x1F800000)
    if skip and not vany(vinot(viand(veq(end0, vzero()), veq(end1, vzero())))):
        return
    if vany(vior(vlt(end0, tiny), vlt(end1, tiny))) and add_token_guarded(dh, ks, v, end, sums):
        return
    add_token_chain(dh, ks, v, end, sums)


cdef void add_states(const float* dh, const float* h, const float* end, float* sums) noexcept nogil:
    """Add dh (h end) over vlanes channels, then n, to the sums of STATE_LANES chunks."""
    cdef vf acc0 = vload(sums), acc1 = vload(sums + vlanes), end0 = vload(end), end1 = vload(end + vlanes)
    cdef Py_ssize_t n
    for n in range(vlanes * STATE):
        acc0 = vfma(vload(dh), vmul(vload(h), end0), acc0)
        acc1 = vfma(vload(dh + vlanes), vmul(vload(h + vlanes), end1), acc1)
        dh += STATE_LANES
        h += STATE_LANES
    vstore(sums, acc0)
    vstore(sums + vlanes, acc1)


# ---- orders of the other modes -------------------------------------------------------------------------------------

cdef void decay_sums(const float* weighted, Py_ssize_t real, float* columns, float* out) noexcept nogil:
    """out[s] = sum over j < s of (sum over i >= s of weighted[i, j]): the inner sums from the last row up, the outer
    ones by ascending j. ``columns`` is scratch for a matrix."""
    cdef Py_ssize_t i, j, s
    cdef vf total
    j = 0
    while j < CHUNK:
        total = vzero()
        for i in range(CHUNK - 1, -1, -1):
            if i < real:
                total = vadd(total, vload(weighted + i * CHUNK + j))
            vstore(columns + i * CHUNK + j, total)
        j += vlanes
    transpose(columns, CHUNK, CHUNK, CHUNK, columns + SQUARE, CHUNK)
    s = 0
    while s < CHUNK:
        total = vzero()
        for j in range(s + vlanes - 1):
            total = vselect(lanes_below(j + 1 - s), total, vadd(total, vload(columns + SQUARE + j * CHUNK + s)))
        vstore(out + s, total)
        s += vlanes


cdef float state_product(const float* dh, const float* h) noexcept nogil:
    """Sum of dh * h over (128, 64): a chain over the state rows for every channel, then neighbours in pairs."""
    cdef float sums[HEAD]
    cdef vf acc
    cdef Py_ssize_t n, p = 0
    while p < HEAD:
        acc = vzero()
        for n in range(STATE):
            acc = vfma(vload(dh + n * HEAD + p), vload(h + n * HEAD + p), acc)
        vstore(sums + p, acc)
        p += vlanes
    n = HEAD
    while n > 1:
        n = n // 2
        for p in range(n):
            sums[p] = sadd(sums[2 * p], sums[2 * p + 1])
    return sums[0]
