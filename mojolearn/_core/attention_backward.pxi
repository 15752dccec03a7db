"""Backward of causal attention (training page, section 4.1, steps 6 and 7); included by attention.pxi.

The weights are made again from the saved maxima and denominators, a tile of queries at a time. A unit of work is one
key-value head: its key and value gradients are one serial chain over the heads of the group and, inside, the queries,
so tiles of queries pass in that order and add to rows that stay in scratch.

Hidden keys have weight +0, and every chain of the profile walks them too. A term of +-0 matters to one kind of sum
only, one that underflowed to -0: it becomes +0 at the first term that is +0. So the tiles skip what is hidden, and
the ``settle`` functions walk the signs of skipped terms for the few sums that stand at -0. Where something may be
infinite or NaN, a hidden term may be NaN: then nothing is skipped.
"""


cdef double FAR_FROM_INFINITY = 2.0 ** 120


cdef struct BackwardJob:
    Attention a
    const float* dout
    float* dqueries
    float* dkeys
    float* dvalues
    Py_ssize_t dout_stride, dqueries_stride, dkeys_stride, dvalues_stride
    float* scratch
    Py_ssize_t scratch_stride, counter


# the scratch of one thread
cdef struct BackwardScratch:
    float* columns      # (width, CHAIN_LANES): queries of the tile, and
    float* dcolumns     # the gradients of their outputs, both also
    float* rows         # (CHAIN_LANES, width)
    float* drows
    float* dqueries     # (CHAIN_LANES, width)
    float* weights      # (view, CHAIN_LANES), and
    float* dweights     # their gradients
    float* dscores      # (KEY_BLOCK, CHAIN_LANES): gradients of score cells
    float* dkeys        # (span rows, width), continued by every tile of the unit
    float* dvalues
    float* sums         # (L): sum of weight times its gradient, of the present head
    bint whole          # nothing is skipped
    int care[5]         # whether a chain of the tile has underflowed: scores, gradients of weights, dq, dk, dv


cdef Py_ssize_t backward_scratch(const Attention* a, float* start, BackwardScratch* s) noexcept nogil:
    """Lay the scratch out from ``start``; returns its size."""
    cdef Py_ssize_t tile = a.width * CHAIN_LANES, view = (a.length + CHAIN_ROWS) * CHAIN_LANES
    s.columns = start
    s.dcolumns = s.columns + tile
    s.rows = s.dcolumns + tile
    s.drows = s.rows + tile
    s.dqueries = s.drows + tile
    s.weights = s.dqueries + tile
    s.dweights = s.weights + view
    s.dscores = s.dweights + view
    s.dkeys = s.dscores + KEY_BLOCK * CHAIN_LANES
    s.dvalues = s.dkeys + a.span_rows * a.width
    s.sums = s.dvalues + a.span_rows * a.width
    return (s.sums - start) + a.length + CHAIN_LANES


cdef inline bint is_negative(float x) noexcept nogil:
    cdef uint32_t bits
    memcpy(&bits, &x, 4)
    return bits >> 31


cdef inline bint is_negative_zero(float x) noexcept nogil:
    """Also of a subnormal, which counts as a zero."""
    cdef uint32_t bits
    memcpy(&bits, &x, 4)
    return bits >> 23 == 0x100


cdef bint any_negative_zero(const float* row, Py_ssize_t n) noexcept nogil:
    cdef vi found = viset(0)
    cdef Py_ssize_t i = 0
    while i < n:
        found = vior(found, vieq(vasint(vflush(load_lanes(row + i, n - i))), viset(<int32_t> 0x80000000)))
        i += vlanes
    return vany(found)


cdef float one_cell(const float* a, const float* b, Py_ssize_t depth) noexcept nogil:
    """The product cell of two rows: a chain per leaf, leaves folded in pairs."""
    cdef float levels[16]
    cdef Py_ssize_t sizes[16]
    cdef Py_ssize_t top = 0, d, i, size
    cdef float total = 0.0
    d = 0
    while d < depth:
        total = 0.0
        for i in range(d, min(d + <Py_ssize_t> LEAF, depth)):
            total = sfma(a[i], b[i], total)
        d += LEAF
        size = 1
        while top and (sizes[top - 1] == size or d >= depth):
            top -= 1
            size += sizes[top]
            total = sadd(levels[top], total)
        levels[top] = total
        sizes[top] = size
        top += 1
    return sflush(total)


cdef inline void copy_rows(const float* x, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t n, Py_ssize_t width,
                           float* out) noexcept nogil:
    """Rows of n floats into rows of ``width``, zero elsewhere."""
    cdef Py_ssize_t r
    for r in range(count):
        memcpy(out + r * width, x + r * stride, n * sizeof(float))
        memset(out + r * width + n, 0, (width - n) * sizeof(float))
    memset(out + count * width, 0, (CHAIN_LANES - count) * width * sizeof(float))


cdef void settle_sum(BackwardJob* job, const float* dout, const float* values, Py_ssize_t low, float* total) noexcept nogil:
    """The hidden tail, from key ``low`` on, of the sum over keys of weight times gradient of the weight."""
    cdef Py_ssize_t key
    for key in range(low, job.a.length):
        if not is_negative(one_cell(dout, values + key * job.a.width, job.a.head_dim)):
            total[0] = 0.0
            return


cdef void settle_query(BackwardJob* job, const float* dout, const float* keys, const float* values, Py_ssize_t low,
                       float total, float* dquery) noexcept nogil:
    """The hidden tail of a query's gradient."""
    cdef Py_ssize_t key, d, hd = job.a.head_dim
    cdef bint negative
    for key in range(low, job.a.length):
        if not any_negative_zero(dquery, hd):
            return
        negative = is_negative(sflush(ssub(one_cell(dout, values + key * job.a.width, hd), total)))
        for d in range(hd):
            if is_negative_zero(dquery[d]) and negative == is_negative(keys[key * job.a.width + d]):
                dquery[d] = 0.0


cdef void settle_key(BackwardJob* job, Py_ssize_t b, Py_ssize_t h, Py_ssize_t low, Py_ssize_t high, const float* value,
                     const float* sums, float* dkey, float* dvalue) noexcept nogil:
    """The terms of the queries [low, high) of one head, none of which sees the key."""
    cdef const Attention* a = &job.a
    cdef Py_ssize_t q, d, hd = a.head_dim
    cdef const float* query
    cdef const float* dout
    cdef bint negative
    for q in range(low, high):
        if not (any_negative_zero(dkey, hd) or any_negative_zero(dvalue, hd)):
            return
        query = a.queries + (b * a.length + q) * a.query_stride + h * hd
        dout = job.dout + (b * a.length + q) * job.dout_stride + h * hd
        negative = is_negative(sflush(ssub(one_cell(dout, value, hd), sums[q])))
        for d in range(hd):
            if is_negative_zero(dkey[d]) and negative == is_negative(query[d]):
                dkey[d] = 0.0
            if is_negative_zero(dvalue[d]) and not is_negative(dout[d]):
                dvalue[d] = 0.0


cdef void backward_weights(BackwardJob* job, BackwardScratch* s, Py_ssize_t b, Py_ssize_t h, Py_ssize_t row,
                           Py_ssize_t count, Py_ssize_t low, Py_ssize_t high, const float* keys,
                           const float* values) noexcept nogil:
    """Weights and their gradients of a tile for the keys [low, high), and the sums of their products."""
    cdef Attention* a = &job.a
    cdef float* weight
    cdef float* dweight
    cdef Py_ssize_t j, i, lane, saved = (b * a.heads + h) * a.length + row
    cdef vf top[2]
    cdef vf total[2]
    cdef vf reciprocal[2]
    cdef vf scale = vset(a.scale), e
    cdef bint edge
    for i in range(2):
        lane = max(0, min(vlanes, count - i * vlanes))
        top[i] = vloadn(a.maxima + saved + i * vlanes, lane)
        total[i] = vloadn(a.denominators + saved + i * vlanes, lane)
        reciprocal[i] = vdiv(vset(1.0), total[i])
    weight = s.weights
    j = low
    while j < high:
        weight = s.weights + (j - low) * CHAIN_LANES
        score_cells(keys + j * a.width, a.width, s.columns, a.head_dim, weight, &s.care[0])
        score_cells(values + j * a.width, a.width, s.dcolumns, a.head_dim, s.dweights + (j - low) * CHAIN_LANES,
                    &s.care[1])
        edge = j + CHAIN_ROWS - 1 > row or (a.window and j < row + CHAIN_LANES - a.window)
        for i in range(j, min(j + CHAIN_ROWS, high)):
            for lane in range(2):
                e = exponential(visible_cell(a, vload(weight), row, lane * vlanes, i, edge), scale, top[lane])
                e = weight_of(e, total[lane], reciprocal[lane])
                if s.whole:      # the maximum or the denominator may be NaN
                    e = vselect(hidden_from(a, row, lane * vlanes, i), vzero(), e)
                vstore(weight, e)
                weight += vlanes
        if fp_underflowed():
            fp_fast()
        j += CHAIN_ROWS
    # rows that fill the last group of keys: hidden from the whole tile
    for i in range(high, j):
        vstore(weight, vzero())
        vstore(weight + vlanes, vzero())
        weight += CHAIN_LANES
    sum_weight_gradients(s, high - low, s.sums + row)
    if any_negative_zero(s.sums + row, count):
        fp_exact()
        for i in range(count):
            if is_negative_zero(s.sums[row + i]):
                settle_sum(job, s.drows + i * a.width, values, high, s.sums + row + i)
        fp_fast()


cdef void sum_weight_gradients(BackwardScratch* s, Py_ssize_t keys, float* out) noexcept nogil:
    """out = the serial sums over keys of weight times its gradient."""
    cdef Py_ssize_t j
    cdef float* weight = s.weights
    cdef float* dweight = s.dweights
    cdef vf sum0 = vzero(), sum1 = vzero()
    for j in range(keys):
        sum0 = vfma(vload(dweight), vload(weight), sum0)
        sum1 = vfma(vload(dweight + vlanes), vload(weight + vlanes), sum1)
        weight += CHAIN_LANES
        dweight += CHAIN_LANES
    vstore(out, sum0)
    vstore(out + vlanes, sum1)
    if fp_underflowed():
        sum0 = vzero()
        sum1 = vzero()
        for j in range(keys):
            weight = s.weights + j * CHAIN_LANES
            dweight = s.dweights + j * CHAIN_LANES
            sum0 = vfma_flushed(vload(dweight), vload(weight), sum0)
            sum1 = vfma_flushed(vload(dweight + vlanes), vload(weight + vlanes), sum1)
        vstore(out, sum0)
        vstore(out + vlanes, sum1)
        fp_fast()


cdef void score_gradients(const float* weight, const float* dweight, const float* sums, float scale, Py_ssize_t keys,
                          float* out) noexcept nogil:
    """out = (weight * (dweight - sum)) * scale, (keys, CHAIN_LANES)."""
    cdef Py_ssize_t i, n = keys * CHAIN_LANES
    cdef vf factor = vset(scale), sum0 = vload(sums), sum1 = vload(sums + vlanes)
    i = 0
    while i < n:
        vstore(out + i, vmul(vmul(vload(weight + i), vsub(vload(dweight + i), sum0)), factor))
        i += vlanes
        vstore(out + i, vmul(vmul(vload(weight + i), vsub(vload(dweight + i), sum1)), factor))
        i += vlanes
    if fp_underflowed():
        i = 0
        while i < n:
            vstore(out + i, vmul_flushed(factor, vmul_flushed(vload(weight + i), vsub(vload(dweight + i), sum0))))
            i += vlanes
            vstore(out + i, vmul_flushed(factor, vmul_flushed(vload(weight + i), vsub(vload(dweight + i), sum1))))
            i += vlanes
        fp_fast()


cdef void backward_tile(BackwardJob* job, BackwardScratch* s, Py_ssize_t b, Py_ssize_t h,
                        Py_ssize_t row) noexcept nogil:
    cdef Attention* a = &job.a
    cdef Py_ssize_t width = a.width, hd = a.head_dim, group = a.heads // a.kv_heads, kv = h // group
    cdef Py_ssize_t count = min(<Py_ssize_t> CHAIN_LANES, a.length - row)
    cdef Py_ssize_t low = 0 if s.whole else first_visible(a, row), high = a.length if s.whole else row + count
    cdef Py_ssize_t end, j, i, d, r, block_end
    cdef const float* keys = a.keys + (b * a.kv_heads + kv) * a.span_rows * width
    cdef const float* values = a.values + (b * a.kv_heads + kv) * a.span_rows * width
    cdef const float* queries = a.queries + (b * a.length + row) * a.query_stride + h * hd
    cdef const float* dout = job.dout + (b * a.length + row) * job.dout_stride + h * hd
    cdef float* weight

    memset(s.care, 0, sizeof(s.care))
    fp_fast()
    pack_queries(queries, a.query_stride, count, hd, width, s.columns)
    pack_queries(dout, job.dout_stride, count, hd, width, s.dcolumns)
    copy_rows(queries, a.query_stride, count, hd, width, s.rows)
    copy_rows(dout, job.dout_stride, count, hd, width, s.drows)
    backward_weights(job, s, b, h, row, count, low, high, keys, values)
    end = low + (high - low + CHAIN_ROWS - 1) // CHAIN_ROWS * CHAIN_ROWS
    if row and h % group and not s.whole:
        # keys that no earlier query of this head has seen, whose sums come from earlier heads
        fp_exact()
        for j in range(row, min(end, a.length)):
            settle_key(job, b, h, 0, row, values + j * width, s.sums, s.dkeys + j * width, s.dvalues + j * width)
        fp_fast()

    memset(s.dqueries, 0, CHAIN_LANES * width * sizeof(float))
    j = low
    while j < end:
        block_end = min(j + <Py_ssize_t> KEY_BLOCK, end)
        weight = s.weights + (j - low) * CHAIN_LANES
        score_gradients(weight, s.dweights + (j - low) * CHAIN_LANES, s.sums + row, a.scale, block_end - j, s.dscores)
        d = 0
        while d < width:
            r = 0
            while r < count:
                chain_columns(s.dscores + r, keys + j * width + d, width, s.dqueries + r * width + d, width,
                              min(block_end, high) - j, &s.care[2])
                r += CHAIN_ROWS
            i = j
            while i < block_end:
                chain_lanes(s.dscores + (i - j) * CHAIN_LANES, s.rows + d, width, s.dkeys + i * width + d, width,
                            count, &s.care[3])
                chain_lanes(weight + (i - j) * CHAIN_LANES, s.drows + d, width, s.dvalues + i * width + d, width,
                            count, &s.care[4])
                i += CHAIN_ROWS
            d += CHAIN_LANES
        j = block_end
    fp_exact()
    for r in range(count):
        settle_query(job, s.drows + r * width, keys, values, high, s.sums[row + r], s.dqueries + r * width)
        store_head(s.dqueries + r * width, job.dqueries + (b * a.length + row + r) * job.dqueries_stride + h * hd, hd)


cdef bint may_overflow(BackwardJob* job, Py_ssize_t b, Py_ssize_t kv, const float* keys,
                       const float* values) noexcept nogil:
    """Whether a score, a gradient of a weight or the sum of one may be infinite or NaN, hidden or not."""
    cdef const Attention* a = &job.a
    cdef Py_ssize_t hd = a.head_dim, group = a.heads // a.kv_heads, first = kv * group * hd, row = b * a.length
    cdef double scores = largest_magnitude(a.queries + row * a.query_stride + first, a.query_stride, a.length, group * hd)
    cdef double gradients = largest_magnitude(job.dout + row * job.dout_stride + first, job.dout_stride, a.length, group * hd)
    scores *= largest_magnitude(keys, a.width, a.length, hd) * hd
    gradients *= largest_magnitude(values, a.width, a.length, hd) * hd
    return not (scores < FAR_FROM_INFINITY and gradients < FAR_FROM_INFINITY)


cdef void backward_head(BackwardJob* job, BackwardScratch* s, Py_ssize_t b, Py_ssize_t kv) noexcept nogil:
    """All gradients that one key-value head takes part in."""
    cdef Attention* a = &job.a
    cdef Py_ssize_t width = a.width, hd = a.head_dim, group = a.heads // a.kv_heads, h, row, j
    cdef const float* keys = a.keys + (b * a.kv_heads + kv) * a.span_rows * width
    cdef const float* values = a.values + (b * a.kv_heads + kv) * a.span_rows * width
    s.whole = may_overflow(job, b, kv, keys, values)
    memset(s.dkeys, 0, a.span_rows * width * sizeof(float))
    memset(s.dvalues, 0, a.span_rows * width * sizeof(float))
    for h in range(kv * group, (kv + 1) * group):
        row = 0
        while row < a.length:
            backward_tile(job, s, b, h, row)
            row += CHAIN_LANES
        if a.window and not s.whole:
            # queries past the window of a key
            for j in range(a.length - a.window):
                settle_key(job, b, h, j + a.window, a.length, values + j * width, s.sums, s.dkeys + j * width,
                           s.dvalues + j * width)
    for j in range(a.length):
        row = b * a.length + j
        store_head(s.dkeys + j * width, job.dkeys + row * job.dkeys_stride + kv * hd, hd)
        store_head(s.dvalues + j * width, job.dvalues + row * job.dvalues_stride + kv * hd, hd)


cdef void backward_job(void* arg, int thread) noexcept nogil:
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef BackwardScratch s
    cdef Py_ssize_t unit
    backward_scratch(&job.a, job.scratch + thread * job.scratch_stride, &s)
    while True:
        unit = next_unit_in_turn(&job.counter)
        if unit >= job.a.batch * job.a.kv_heads:
            break
        backward_head(job, &s, unit // job.a.kv_heads, unit % job.a.kv_heads)


def attention_backward(const float[:, :] dout, const float[:, :] queries, const float[:, :, :, ::1] keys,
                       const float[:, :, :, ::1] values, float[:, :, ::1] maxima, float[:, :, ::1] denominators,
                       float[:, :] dqueries, float[:, :] dkeys, float[:, :] dvalues, Py_ssize_t head_dim,
                       Py_ssize_t window, workspace, int threads):
    """Gradients for that of `attention_forward`'s output, of a call with ``first`` and ``base`` 0.

    ``dout``, ``queries``, ``dqueries`` are (B * L, H * hd); ``dkeys``, ``dvalues`` (B * L, KV * hd); the queries' and
    keys' are those of the rotated ones.
    """
    cdef BackwardJob job
    cdef BackwardScratch layout
    fill_attention(&job.a, queries, keys, values, queries.shape[1] // head_dim, head_dim, 0, 0, window)
    job.a.maxima = &maxima[0, 0, 0]
    job.a.denominators = &denominators[0, 0, 0]
    job.dout = &dout[0, 0]
    job.dout_stride = row_stride(dout)
    job.dqueries = &dqueries[0, 0]
    job.dqueries_stride = row_stride(dqueries)
    job.dkeys = &dkeys[0, 0]
    job.dkeys_stride = row_stride(dkeys)
    job.dvalues = &dvalues[0, 0]
    job.dvalues_stride = row_stride(dvalues)
    mark = workspace.mark()
    # rounded up so that the scratch of every thread starts on a cache line
    job.scratch_stride = (backward_scratch(&job.a, NULL, &layout) + 15) // 16 * 16
    cdef float[:, ::1] scratch = workspace.empty((threads, job.scratch_stride))
    job.scratch = &scratch[0, 0]
    job.counter = 0
    with nogil:
        run_in_turns(backward_job, &job, threads)
    workspace.release(mark)
