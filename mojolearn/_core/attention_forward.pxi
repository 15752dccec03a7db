"""Forward of causal attention for many tokens, and for one (numerics page, section 6, step 4).

Included by attention.pxi.
"""


cdef void weigh_values(const Attention* a, const float* weights, const float* values, float* contexts,
                       Py_ssize_t first, Py_ssize_t count, Py_ssize_t low, Py_ssize_t high, int* care) noexcept nogil:
    """Continue the sums of values of a tile's queries over the keys [low, high).

    A sum ends at its own query: a +0 weight further on could still turn a sum that underflowed to -0 into +0. So
    CHAIN_ROWS rows run together only over the keys that all of them see, and each alone over the others. ``weights``
    and ``values`` are those of position 0.
    """
    cdef Py_ssize_t width = a.width, d, r, lane, end, seen_low, seen_high, together_low, together_high
    d = 0
    while d < width:
        r = 0
        while r < count:
            end = min(r + <Py_ssize_t> CHAIN_ROWS, count)
            seen_low = first_visible(a, first + r + CHAIN_ROWS - 1)
            seen_high = max(seen_low, first + r + 1)
            for lane in range(r, end):
                weigh_values_of_one(weights + lane, values + d, contexts + lane * width + d, width,
                                    max(low, first_visible(a, first + lane)),
                                    min(high, min(seen_low, first + lane + 1)), care)
            together_low = max(low, seen_low)
            together_high = min(high, seen_high)
            if together_low < together_high:
                chain_columns(weights + together_low * CHAIN_LANES + r, values + together_low * width + d, width,
                              contexts + r * width + d, width, together_high - together_low, care)
            for lane in range(r, end):
                weigh_values_of_one(weights + lane, values + d, contexts + lane * width + d, width,
                                    max(low, seen_high), min(high, first + lane + 1), care)
            r += CHAIN_ROWS
        d += CHAIN_LANES


cdef inline void weigh_values_of_one(const float* weights, const float* values, float* context, Py_ssize_t width,
                                     Py_ssize_t low, Py_ssize_t high, int* care) noexcept nogil:
    if low < high:
        chain_column(weights + low * CHAIN_LANES, values + low * width, width, context, high - low, care)


cdef struct ForwardJob:
    Attention a
    float* out
    Py_ssize_t out_stride
    float* scratch
    Py_ssize_t scratch_stride, counter


cdef void forward_tile(ForwardJob* job, Py_ssize_t b, Py_ssize_t h, Py_ssize_t tile, float* scratch) noexcept nogil:
    cdef Attention* a = &job.a
    cdef Py_ssize_t width = a.width, hd = a.head_dim
    cdef Py_ssize_t row = tile * CHAIN_LANES, count = min(CHAIN_LANES, a.length - row)
    cdef Py_ssize_t first = a.first + row, kv = h // (a.heads // a.kv_heads)
    cdef Py_ssize_t low = first_visible(a, first), high = first + count
    cdef const float* keys = a.keys + (b * a.kv_heads + kv) * a.span_rows * width
    cdef const float* values = a.values + (b * a.kv_heads + kv) * a.span_rows * width
    cdef const float* queries = a.queries + (b * a.length + row) * a.query_stride + h * hd
    cdef float* columns = scratch
    cdef float* contexts = columns + width * CHAIN_LANES
    cdef float* weights = contexts + width * CHAIN_LANES
    cdef float* weight
    cdef Py_ssize_t j, i, r, block_end
    cdef vf scale = vset(a.scale), top0, top1, sum0, sum1, reciprocal0, reciprocal1, e
    cdef bint edge
    cdef int score_care = 0, value_care = 0

    fp_fast()
    pack_queries(queries, a.query_stride, count, hd, width, columns)
    # product cells and their maximum over the visible keys; the scale, being positive, may wait
    top0 = vbits(0xFF800000)
    top1 = top0
    j = low
    while j < high:
        weight = weights + (j - low) * CHAIN_LANES
        score_cells(keys + (j - a.base) * width, width, columns, hd, weight, &score_care)
        edge = j + CHAIN_ROWS - 1 > first or (a.window and j < first + CHAIN_LANES - a.window)
        for i in range(j, min(j + CHAIN_ROWS, high)):
            e = visible_cell(a, vload(weight), first, 0, i, edge)
            vstore(weight, e)
            top0 = vmax(e, top0)
            e = visible_cell(a, vload(weight + vlanes), first, vlanes, i, edge)
            vstore(weight + vlanes, e)
            top1 = vmax(e, top1)
            weight += CHAIN_LANES
        j += CHAIN_ROWS
    # the + 0 of the mask on visible keys turns a -0 into +0
    top0 = vadd(vmul(top0, scale), vzero())
    top1 = vadd(vmul(top1, scale), vzero())
    # exponentials and their serial sum; a hidden key adds +0
    sum0 = vzero()
    sum1 = vzero()
    weight = weights
    for j in range(low, high):
        e = exponential(vload(weight), scale, top0)
        sum0 = vadd(sum0, e)
        vstore(weight, e)
        e = exponential(vload(weight + vlanes), scale, top1)
        sum1 = vadd(sum1, e)
        vstore(weight + vlanes, e)
        weight += CHAIN_LANES
    fp_fast()
    if a.maxima != NULL:
        i = (b * a.heads + h) * a.length + row
        vstoren(a.maxima + i, top0, min(count, vlanes))
        vstoren(a.denominators + i, sum0, min(count, vlanes))
        if count > vlanes:
            vstoren(a.maxima + i + vlanes, top1, count - vlanes)
            vstoren(a.denominators + i + vlanes, sum1, count - vlanes)
    # weights and the weighted sums of values
    reciprocal0 = vdiv(vset(1.0), sum0)
    reciprocal1 = vdiv(vset(1.0), sum1)
    memset(contexts, 0, CHAIN_LANES * width * sizeof(float))
    j = low
    while j < high:
        block_end = min(j + <Py_ssize_t> KEY_BLOCK, high)
        weight = weights + (j - low) * CHAIN_LANES
        for i in range(j, block_end):
            vstore(weight, weight_of(vload(weight), sum0, reciprocal0))
            vstore(weight + vlanes, weight_of(vload(weight + vlanes), sum1, reciprocal1))
            weight += CHAIN_LANES
        weigh_values(a, weights - low * CHAIN_LANES, values - a.base * width, contexts, first, count, j, block_end,
                     &value_care)
        j = block_end
    fp_exact()
    for r in range(count):
        store_head(contexts + r * width, job.out + (b * a.length + row + r) * job.out_stride + h * hd, hd)


cdef void forward_job(void* arg, int thread) noexcept nogil:
    cdef ForwardJob* job = <ForwardJob*> arg
    cdef Py_ssize_t pairs = job.a.batch * job.a.heads
    cdef Py_ssize_t tiles = (job.a.length + CHAIN_LANES - 1) // CHAIN_LANES, unit
    cdef float* scratch = job.scratch + thread * job.scratch_stride
    while True:
        unit = next_unit_in_turn(&job.counter)
        if unit >= pairs * tiles:
            break
        # the last tiles see the most keys: they go first
        forward_tile(job, unit % pairs // job.a.heads, unit % pairs % job.a.heads, tiles - 1 - unit // pairs, scratch)


def attention_forward(const float[:, :] queries, const float[:, :, :, ::1] keys, const float[:, :, :, ::1] values,
                      float[:, :] out, float[:, :, ::1] maxima, float[:, :, ::1] denominators, Py_ssize_t head_dim,
                      Py_ssize_t first, Py_ssize_t base, Py_ssize_t window, workspace, int threads):
    """Causal attention of ``queries`` (B * L, H * hd), rotated, over packed ``keys`` and ``values``.

    ``out`` is (B * L, H * hd). Query i of a batch row is at position ``first`` + i and sees the positions up to its
    own, the last ``window`` of them if that is not 0. Row 0 of the packed arrays is position ``base``. ``maxima`` and
    ``denominators`` (B, H, L), or None, receive what the backward needs to make the weights again.
    """
    cdef ForwardJob job
    fill_attention(&job.a, queries, keys, values, queries.shape[1] // head_dim, head_dim, first, base, window)
    if maxima is not None:
        job.a.maxima = &maxima[0, 0, 0]
        job.a.denominators = &denominators[0, 0, 0]
    job.out = &out[0, 0]
    job.out_stride = row_stride(out)
    job.scratch_stride = (2 * job.a.width + longest_view(&job.a)) * CHAIN_LANES
    mark = workspace.mark()
    cdef float[:, ::1] scratch = workspace.empty((threads, job.scratch_stride))
    job.scratch = &scratch[0, 0]
    job.counter = 0
    with nogil:
        run_in_turns(forward_job, &job, threads)
    workspace.release(mark)


# ---- one token -------------------------------------------------------------------------------------------------------
cdef struct StepJob:
    TokenAttention shape
    Py_ssize_t batch, kv_heads, query_stride, new_stride, out_stride
    float* scratch
    Py_ssize_t scratch_stride, counter
    bint nonfinite


cdef void step_job(void* arg, int thread) noexcept nogil:
    cdef StepJob* job = <StepJob*> arg
    cdef TokenAttention t = job.shape
    cdef Py_ssize_t unit, b, kv, hd = t.head_dim
    while True:
        unit = next_unit(&job.counter)
        if unit >= job.batch * job.kv_heads:
            break
        b = unit // job.kv_heads
        kv = unit % job.kv_heads
        t.queries = job.shape.queries + b * job.query_stride + kv * t.group * hd
        t.new_key = job.shape.new_key + b * job.new_stride + kv * hd
        t.new_value = job.shape.new_value + b * job.new_stride + kv * hd
        t.keys = job.shape.keys + unit * t.slots * hd
        t.values = job.shape.values + unit * t.slots * hd
        t.next_keys = t.keys
        t.out = job.shape.out + b * job.out_stride + kv * t.group * hd
        if not attend_token(&t, job.scratch + thread * job.scratch_stride):
            job.nonfinite = True


def attention_step(const float[:, :] queries, const float[:, :] new_keys, const float[:, :] new_values,
                   const float[:, :, :, ::1] k_cache, const float[:, :, :, ::1] v_cache, float[:, :] out,
                   Py_ssize_t cached, Py_ssize_t window, workspace, int threads):
    """Attention of one new token per row, at position ``cached``: `attention_forward` without packing.

    ``queries`` and ``out`` are (B, H * hd), ``new_keys`` and ``new_values`` (B, KV * hd) with one row stride; queries
    and keys are rotated. The caches are (B, KV, slots, hd). Returns whether what was read of them is finite.
    """
    cdef StepJob job
    cdef Py_ssize_t hd = k_cache.shape[3]
    job.batch = k_cache.shape[0]
    job.kv_heads = k_cache.shape[1]
    job.query_stride = row_stride(queries)
    job.new_stride = row_stride(new_keys)
    job.out_stride = row_stride(out)
    job.shape.queries = &queries[0, 0]
    job.shape.new_key = &new_keys[0, 0]
    job.shape.new_value = &new_values[0, 0]
    job.shape.keys = &k_cache[0, 0, 0, 0]
    job.shape.values = &v_cache[0, 0, 0, 0]
    job.shape.out = &out[0, 0]
    job.shape.head_dim = hd
    job.shape.slots = k_cache.shape[2]
    job.shape.group = queries.shape[1] // hd // job.kv_heads
    job.shape.cached = min(cached, window - 1) if window else cached
    job.shape.first_slot = (cached - job.shape.cached) % job.shape.slots
    job.shape.scale = score_scale(hd)
    job.scratch_stride = attend_token_scratch(job.shape.group, job.shape.cached + 1)
    mark = workspace.mark()
    cdef float[:, ::1] scratch = workspace.empty((threads, job.scratch_stride))
    job.scratch = &scratch[0, 0]
    job.nonfinite = False
    job.counter = 0
    with nogil:
        parallel_run(step_job, &job, threads)
    workspace.release(mark)
    return not job.nonfinite
