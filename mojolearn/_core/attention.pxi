"""Kernels of the transformer block: rotary positions, the gated feed-forward, causal attention and its backward.

Summation orders (numerics page, sections 6 and 4.1). A score is one product cell over the head width (leaves of 128).
The maximum runs over the visible keys; exponentials, their serial sum, one division per weight, and the weighted sum
of values, one serial chain over the visible keys, follow. Only lanes across outputs are used: queries for scores and
sums over keys, head columns for the weighted sums. So neither tile shapes nor thread counts can move a bit.

No L x L matrix exists. A tile of ``CHAIN_LANES`` queries keeps its weights for all keys that it sees, (keys, queries)
with queries in lanes, in the scratch of its thread. Keys and values come packed by head, (B, KV, span, width), with
rows padded to whole tiles; positions of packed rows count from ``base``.

Glossary: b batch row, h query head, kv key-value head, hd head width, width hd padded to whole tiles, q query,
j key, span number of packed keys.
"""
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy, memset
import numpy as np

from mojolearn._core.simd cimport *
from mojolearn._core.elementary cimport *
from mojolearn._core._pool cimport parallel_run

cdef extern from "chains.h" nogil:
    enum:
        CHAIN_ROWS
        CHAIN_LANES
    void chain_rows(const float* a, Py_ssize_t a_row, const float* b, float* c, Py_ssize_t steps)
    void chain_columns(const float* a, const float* b, Py_ssize_t b_step, float* c, Py_ssize_t c_row, Py_ssize_t steps)
    void chain_column(const float* a, const float* b, Py_ssize_t b_step, float* c, Py_ssize_t steps)
    void chain_lanes(const float* a, const float* b, Py_ssize_t b_step, float* c, Py_ssize_t c_row, Py_ssize_t steps)
    vf vfma_flushed(vf a, vf b, vf c)
    vf vmul_flushed(vf a, vf b)

cdef enum:
    # keys whose weights and values stay in the first-level cache while every query of a tile uses them
    KEY_BLOCK = 64

include "attention_step.pxi"

# packed rows are padded to a multiple of this on every instruction set, so that buffers have one layout
HEAD_ALIGNMENT = 32
QUERY_TILE = CHAIN_LANES


def head_width(Py_ssize_t head_dim):
    """Floats of a packed row: ``head_dim`` rounded up to whole tiles."""
    return -(-head_dim // HEAD_ALIGNMENT) * HEAD_ALIGNMENT


def packed_rows(Py_ssize_t span):
    """Rows to allocate for ``span`` packed keys: tiles read whole groups of rows."""
    return span + CHAIN_ROWS


cdef inline Py_ssize_t row_stride(const float[:, :] rows) noexcept:
    return rows.strides[0] // <Py_ssize_t> sizeof(float)


# ---- rotary positions ------------------------------------------------------------------------------------------------
def rope_table(float[:, ::1] cosines, float[:, ::1] sines, Py_ssize_t head_dim, float theta):
    """cos and sin of position times frequency, (positions, head_dim / 2) each (numerics page, section 6, step 2)."""
    cdef Py_ssize_t half = cosines.shape[1], i, t, n
    cdef float[::1] frequencies = np.empty(half, np.float32)
    cdef uint64_t saved = fp_enter()
    cdef vf sine, cosine
    with nogil:
        for i in range(half):
            frequencies[i] = sflush(sdiv(1.0, spow(theta, sflush(sdiv(<float> (2 * i), <float> head_dim)))))
        for t in range(cosines.shape[0]):
            i = 0
            while i < half:
                n = half - i
                vsincos(vmul(vset(<float> t), load_lanes(&frequencies[i], n)), &sine, &cosine)
                store_lanes(&cosines[t, i], vflush(cosine), n)
                store_lanes(&sines[t, i], vflush(sine), n)
                i += vlanes
        fp_leave(saved)


cdef struct RopeJob:
    float* x
    Py_ssize_t stride, tokens, length, first, heads, head_dim, counter
    const float* cosines
    const float* sines
    bint inverse


cdef void rope_job(void* arg, int thread) noexcept nogil:
    cdef RopeJob* job = <RopeJob*> arg
    cdef Py_ssize_t half = job.head_dim // 2, unit, t, end, h, position
    while True:
        unit = next_unit(&job.counter) * 16
        if unit >= job.tokens:
            break
        end = min(unit + 16, job.tokens)
        for t in range(unit, end):
            position = job.first + t % job.length
            for h in range(job.heads):
                rotate(job.x + t * job.stride + h * job.head_dim, job.cosines + position * half,
                       job.sines + position * half, half, job.inverse)


def rope(float[:, :] x, const float[:, ::1] cosines, const float[:, ::1] sines, Py_ssize_t length, Py_ssize_t first,
         Py_ssize_t head_dim, bint inverse, int threads):
    """Rotate the heads of ``x`` (B * length, heads * head_dim) in place by their positions, ``first`` on in each row;
    ``inverse`` rotates back, which is the gradient."""
    cdef RopeJob job
    job.x = &x[0, 0]
    job.stride = row_stride(x)
    job.tokens = x.shape[0]
    job.length = length
    job.first = first
    job.heads = x.shape[1] // head_dim
    job.head_dim = head_dim
    job.cosines = &cosines[0, 0]
    job.sines = &sines[0, 0]
    job.inverse = inverse
    job.counter = 0
    with nogil:
        parallel_run(rope_job, &job, threads)


# ---- packing by head -------------------------------------------------------------------------------------------------
cdef struct PackJob:
    const float* rows
    Py_ssize_t stride
    const float* cache
    Py_ssize_t slots
    float* out
    Py_ssize_t batch, length, cached, first_cached, kv_heads, head_dim, width, span_rows, counter
    bint nonfinite


cdef bint finite_row(const float* x, Py_ssize_t n) noexcept nogil:
    cdef vi largest = viset(0x7F7FFFFF), seen = viset(0)
    cdef Py_ssize_t i = 0
    while i < n:
        seen = vior(seen, vigt(vasint(vabs(load_lanes(x + i, n - i))), largest))
        i += vlanes
    return not vany(seen)


cdef void pack_job(void* arg, int thread) noexcept nogil:
    cdef PackJob* job = <PackJob*> arg
    cdef Py_ssize_t unit, b, kv, j, position, hd = job.head_dim
    cdef float* out
    while True:
        unit = next_unit(&job.counter)
        if unit >= job.batch * job.kv_heads:
            break
        b = unit // job.kv_heads
        kv = unit % job.kv_heads
        out = job.out + unit * job.span_rows * job.width
        for j in range(job.cached):
            position = job.first_cached + j
            memcpy(out, job.cache + (unit * job.slots + position % job.slots) * hd, hd * sizeof(float))
            if not finite_row(out, hd):
                job.nonfinite = True
            memset(out + hd, 0, (job.width - hd) * sizeof(float))
            out += job.width
        for j in range(job.length):
            memcpy(out, job.rows + (b * job.length + j) * job.stride + kv * hd, hd * sizeof(float))
            memset(out + hd, 0, (job.width - hd) * sizeof(float))
            out += job.width
        memset(out, 0, (job.span_rows - job.cached - job.length) * job.width * sizeof(float))


def pack_heads(const float[:, :] rows, float[:, :, :, ::1] out, Py_ssize_t head_dim, const float[:, :, :, ::1] cache,
               Py_ssize_t first_cached, Py_ssize_t cached, int threads):
    """Copy ``cached`` positions of ``cache`` (B, KV, slots, hd; slot = position mod slots) and then ``rows``
    (B * L, KV * hd) into ``out`` (B, KV, packed rows, width), zero elsewhere. ``cache`` may be None.

    Returns whether all that came from the cache is finite."""
    cdef PackJob job
    job.rows = &rows[0, 0]
    job.stride = row_stride(rows)
    job.cache = NULL
    job.slots = 1
    if cache is not None:
        job.cache = &cache[0, 0, 0, 0]
        job.slots = cache.shape[2]
    job.out = &out[0, 0, 0, 0]
    job.batch = out.shape[0]
    job.length = rows.shape[0] // job.batch
    job.cached = cached
    job.first_cached = first_cached
    job.kv_heads = out.shape[1]
    job.head_dim = head_dim
    job.width = out.shape[3]
    job.span_rows = out.shape[2]
    job.nonfinite = False
    job.counter = 0
    with nogil:
        parallel_run(pack_job, &job, threads)
    return not job.nonfinite


# ---- gated feed-forward ----------------------------------------------------------------------------------------------
cdef struct SwigluJob:
    const float* dact
    const float* gate
    const float* up
    float* act
    float* dgate
    float* dup
    Py_ssize_t dact_stride, gate_stride, up_stride, act_stride, dgate_stride, dup_stride, tokens, columns, counter


cdef void swiglu_forward_job(void* arg, int thread) noexcept nogil:
    cdef SwigluJob* job = <SwigluJob*> arg
    cdef Py_ssize_t t, i, n
    cdef const float* g
    cdef const float* u
    cdef float* out
    while True:
        t = next_unit(&job.counter)
        if t >= job.tokens:
            break
        g = job.gate + t * job.gate_stride
        u = job.up + t * job.up_stride
        out = job.act + t * job.act_stride
        i = 0
        while i < job.columns:
            n = job.columns - i
            store_lanes(out + i, vflush(vmul(vsilu(load_lanes(g + i, n)), load_lanes(u + i, n))), n)
            i += vlanes


cdef inline void swiglu_backward_lanes(vf d, vf g, vf u, vf* act, vf* dgate, vf* dup) noexcept nogil:
    """Training page, section 4.1, steps 1 and 2; every product and sum rounds on its own."""
    cdef vf one = vset(1.0)
    cdef vf denominator = vadd(vexp(vneg(g)), one)
    cdef vf sigmoid = vdiv(one, denominator)
    cdef vf silu = vdiv(g, denominator)
    cdef vf slope = vmul(sigmoid, vadd(one, vmul(g, vsub(one, sigmoid))))
    act[0] = vflush(vmul(silu, u))
    dgate[0] = vflush(vmul(vmul(d, u), slope))
    dup[0] = vflush(vmul(d, silu))


cdef void swiglu_backward_job(void* arg, int thread) noexcept nogil:
    cdef SwigluJob* job = <SwigluJob*> arg
    cdef Py_ssize_t t, i, n
    cdef const float* d
    cdef const float* g
    cdef const float* u
    cdef float* act
    cdef float* dgate
    cdef float* dup
    cdef vf a, dg, du
    while True:
        t = next_unit(&job.counter)
        if t >= job.tokens:
            break
        d = job.dact + t * job.dact_stride
        g = job.gate + t * job.gate_stride
        u = job.up + t * job.up_stride
        act = job.act + t * job.act_stride
        dgate = job.dgate + t * job.dgate_stride
        dup = job.dup + t * job.dup_stride
        i = 0
        while i < job.columns:
            n = job.columns - i
            swiglu_backward_lanes(load_lanes(d + i, n), load_lanes(g + i, n), load_lanes(u + i, n), &a, &dg, &du)
            store_lanes(act + i, a, n)
            store_lanes(dgate + i, dg, n)
            store_lanes(dup + i, du, n)
            i += vlanes


def swiglu_forward(const float[:, :] gate, const float[:, :] up, float[:, :] act, int threads):
    """act = silu(gate) * up, all (T, intermediate)."""
    cdef SwigluJob job
    job.gate = &gate[0, 0]
    job.up = &up[0, 0]
    job.act = &act[0, 0]
    job.gate_stride = row_stride(gate)
    job.up_stride = row_stride(up)
    job.act_stride = row_stride(act)
    job.tokens = gate.shape[0]
    job.columns = gate.shape[1]
    job.counter = 0
    with nogil:
        parallel_run(swiglu_forward_job, &job, threads)


def swiglu_backward(const float[:, :] dact, const float[:, :] gate, const float[:, :] up, float[:, :] act,
                    float[:, :] dgate, float[:, :] dup, int threads):
    """Gradients of gate and up for that of act, and act once more, all (T, intermediate). ``dup`` may be ``dact``."""
    cdef SwigluJob job
    job.dact = &dact[0, 0]
    job.gate = &gate[0, 0]
    job.up = &up[0, 0]
    job.act = &act[0, 0]
    job.dgate = &dgate[0, 0]
    job.dup = &dup[0, 0]
    job.dact_stride = row_stride(dact)
    job.gate_stride = row_stride(gate)
    job.up_stride = row_stride(up)
    job.act_stride = row_stride(act)
    job.dgate_stride = row_stride(dgate)
    job.dup_stride = row_stride(dup)
    job.tokens = gate.shape[0]
    job.columns = gate.shape[1]
    job.counter = 0
    with nogil:
        parallel_run(swiglu_backward_job, &job, threads)


# ---- tiles of queries ------------------------------------------------------------------------------------------------
cdef struct Attention:
    # shapes shared by forward and backward; query row i of a batch row is at position first + i
    Py_ssize_t batch, length, heads, kv_heads, head_dim, width, first, base, span_rows, window
    float scale
    const float* queries
    Py_ssize_t query_stride
    const float* keys
    const float* values
    float* maxima
    float* denominators


cdef inline Py_ssize_t first_visible(const Attention* a, Py_ssize_t position) noexcept nogil:
    """The first key position that a query sees; the last one is its own."""
    return max(a.base, position - a.window + 1) if a.window else a.base


cdef void pack_queries(const float* rows, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t head_dim, Py_ssize_t width,
                       float* columns) noexcept nogil:
    """Transpose ``count`` rows of ``head_dim`` into columns (width, CHAIN_LANES); lanes without a row are +0."""
    cdef vf block[vlanes]
    cdef Py_ssize_t d, i, lane, n
    lane = 0
    while lane < CHAIN_LANES:
        d = 0
        while d < width:
            n = head_dim - d
            for i in range(vlanes):
                block[i] = load_lanes(rows + (lane + i) * stride + d, n) if n > 0 and lane + i < count else vzero()
            vtranspose(block)
            for i in range(vlanes):
                vstore(columns + (d + i) * CHAIN_LANES + lane, block[i])
            d += vlanes
        lane += vlanes


cdef void score_cells(const float* rows, Py_ssize_t width, const float* columns, Py_ssize_t depth,
                      float* out) noexcept nogil:
    """Product cells of CHAIN_ROWS rows with CHAIN_LANES columns: a chain per leaf, leaves folded in pairs."""
    if depth <= SCORE_LEAF:
        chain_rows(rows, width, columns, out, depth)
        return
    # a binary counter of finished leaves; 16 levels hold 2^15 leaves, more than any head has
    cdef float levels[16 * CHAIN_ROWS * CHAIN_LANES]
    cdef Py_ssize_t sizes[16]
    cdef Py_ssize_t top = 0, d, i, size, steps
    cdef float* older
    d = 0
    while d < depth:
        steps = min(<Py_ssize_t> SCORE_LEAF, depth - d)
        chain_rows(rows + d, width, columns + d * CHAIN_LANES, out, steps)
        size = 1
        while top and (sizes[top - 1] == size or d + steps == depth):
            top -= 1
            size += sizes[top]
            older = levels + top * CHAIN_ROWS * CHAIN_LANES
            i = 0
            while i < CHAIN_ROWS * CHAIN_LANES:
                vstore(out + i, vadd(vload(older + i), vload(out + i)))
                i += vlanes
        if d + steps < depth:
            memcpy(levels + top * CHAIN_ROWS * CHAIN_LANES, out, CHAIN_ROWS * CHAIN_LANES * sizeof(float))
            sizes[top] = size
            top += 1
        d += SCORE_LEAF


cdef inline vf visible_cell(const Attention* a, vf cell, Py_ssize_t first_query, Py_ssize_t lane, Py_ssize_t key,
                            bint edge) noexcept nogil:
    """Score cells of one key for a vector of queries; -inf where the query does not see the key."""
    cdef vi position, hidden
    if edge:
        position = viadd(vilanes(), viset(<int32_t> (first_query + lane - key)))
        hidden = vigt(viset(0), position)
        if a.window:
            hidden = vior(hidden, vigt(position, viset(<int32_t> (a.window - 1))))
        cell = vselect(hidden, vbits(0xFF800000), cell)
    return cell


cdef inline vf exponential(vf cell, vf scale, vf top) noexcept nogil:
    """exp(score - maximum). What fast mode flushes on the way is too small to move an exponential from 1."""
    return vexp_negative(vsub(vmul(cell, scale), top))


cdef inline vf weight_of(vf e, vf total, vf reciprocal) noexcept nogil:
    """F(e / total), for 0 <= e <= 1 <= total and ``reciprocal`` the rounded 1 / total, in either mode.

    Two corrections of e * reciprocal give the rounded quotient: the first brings it within one unit in the last
    place, from where the second rounds right since its remainder is exact (Markstein 1990). That needs remainders
    above the subnormals; smaller e take the division, which is slower on vectors, of e scaled by 2^64."""
    cdef vf quotient, scaled
    cdef vi border
    if MOJO_ISA < 2 or vany(viand(vlt(e, vbits(0x17800000)), vgt(e, vzero()))):
        scaled = vmul(e, vbits(0x5F800000))
        quotient = vdiv(scaled, total)
        # below 2^-126 it is a zero, but for what rounds up to 2^-126: its neighbour with a remainder that is not negative
        border = viand(vieq(vasint(quotient), viset(0x207FFFFF)), vge(vfma(vneg(total), quotient, scaled), vzero()))
        quotient = vselect(border, vbits(0x20800000), quotient)
        return vmul(vselect(vlt(quotient, vbits(0x20800000)), vzero(), quotient), vbits(0x1F800000))
    quotient = vmul(e, reciprocal)
    quotient = vfma(vfma(vneg(total), quotient, e), reciprocal, quotient)
    return vfma(vfma(vneg(total), quotient, e), reciprocal, quotient)


# ---- forward ---------------------------------------------------------------------------------------------------------
cdef void weigh_values(const Attention* a, const float* weights, const float* values, float* contexts,
                       Py_ssize_t first, Py_ssize_t count, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
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
                                    min(high, min(seen_low, first + lane + 1)))
            together_low = max(low, seen_low)
            together_high = min(high, seen_high)
            if together_low < together_high:
                chain_columns(weights + together_low * CHAIN_LANES + r, values + together_low * width + d, width,
                              contexts + r * width + d, width, together_high - together_low)
            for lane in range(r, end):
                weigh_values_of_one(weights + lane, values + d, contexts + lane * width + d, width,
                                    max(low, seen_high), min(high, first + lane + 1))
            r += CHAIN_ROWS
        d += CHAIN_LANES


cdef inline void weigh_values_of_one(const float* weights, const float* values, float* context, Py_ssize_t width,
                                     Py_ssize_t low, Py_ssize_t high) noexcept nogil:
    if low < high:
        chain_column(weights + low * CHAIN_LANES, values + low * width, width, context, high - low)


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

    fp_fast()
    pack_queries(queries, a.query_stride, count, hd, width, columns)
    # product cells and their maximum over the visible keys; the scale, being positive, may wait
    top0 = vbits(0xFF800000)
    top1 = top0
    j = low
    while j < high:
        weight = weights + (j - low) * CHAIN_LANES
        score_cells(keys + (j - a.base) * width, width, columns, hd, weight)
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
        weigh_values(a, weights - low * CHAIN_LANES, values - a.base * width, contexts, first, count, j, block_end)
        j = block_end
    fp_exact()
    for r in range(count):
        store_head(contexts + r * width, job.out + (b * a.length + row + r) * job.out_stride + h * hd, hd)


cdef inline void store_head(const float* row, float* out, Py_ssize_t head_dim) noexcept nogil:
    """Copy a finished padded row out, flushed."""
    cdef Py_ssize_t d = 0
    while d < head_dim:
        store_lanes(out + d, vflush(vload(row + d)), head_dim - d)
        d += vlanes


cdef void forward_job(void* arg, int thread) noexcept nogil:
    cdef ForwardJob* job = <ForwardJob*> arg
    cdef Py_ssize_t pairs = job.a.batch * job.a.heads
    cdef Py_ssize_t tiles = (job.a.length + CHAIN_LANES - 1) // CHAIN_LANES, unit
    cdef float* scratch = job.scratch + thread * job.scratch_stride
    while True:
        unit = next_unit(&job.counter)
        if unit >= pairs * tiles:
            break
        # the last tiles see the most keys: they go first
        forward_tile(job, unit % pairs // job.a.heads, unit % pairs % job.a.heads, tiles - 1 - unit // pairs, scratch)


cdef Py_ssize_t longest_view(const Attention* a) noexcept nogil:
    """Rows of weights that a tile of queries needs."""
    cdef Py_ssize_t span = a.first + a.length - a.base
    if a.window:
        span = min(span, a.window + CHAIN_LANES)
    return span + CHAIN_ROWS


cdef float score_scale(Py_ssize_t head_dim) noexcept:
    cdef uint64_t saved = fp_enter()
    cdef float scale = srsqrt(<float> head_dim)
    fp_leave(saved)
    return scale


cdef void fill_attention(Attention* a, const float[:, :] queries, const float[:, :, :, ::1] keys,
                         const float[:, :, :, ::1] values, Py_ssize_t heads, Py_ssize_t head_dim, Py_ssize_t first,
                         Py_ssize_t base, Py_ssize_t window) noexcept:
    a.scale = score_scale(head_dim)
    a.batch = keys.shape[0]
    a.length = queries.shape[0] // a.batch
    a.heads = heads
    a.kv_heads = keys.shape[1]
    a.head_dim = head_dim
    a.width = keys.shape[3]
    a.first = first
    a.base = base
    a.span_rows = keys.shape[2]
    # a window that covers every position is no window
    a.window = window if window < first + a.length else 0
    a.queries = &queries[0, 0]
    a.query_stride = row_stride(queries)
    a.keys = &keys[0, 0, 0, 0]
    a.values = &values[0, 0, 0, 0]
    a.maxima = NULL
    a.denominators = NULL


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
        parallel_run(forward_job, &job, threads)
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


include "attention_backward.pxi"
