"""Row-wise kernels of the transformer block: rotary positions, packing by head, the gated feed-forward.

Included by attention.pxi.
"""


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
            if not all_lanes_finite(out, hd):
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
        t = next_unit_in_turn(&job.counter)
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
        t = next_unit_in_turn(&job.counter)
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
        run_in_turns(swiglu_forward_job, &job, threads)


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
        run_in_turns(swiglu_backward_job, &job, threads)
