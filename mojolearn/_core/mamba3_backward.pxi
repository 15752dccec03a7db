# Mamba-3 backward (numerics, training 4.2) of a forward from the zero state; steps in brackets are those of the text.
#
# Phases, each over its own units of work:
#   adjoint      (row, head)         gate and skip [2], then the adjoint of the state, last chunk first [6]
#   chunk        groups of chunks    one serial chain per chunk over its whole state [7, `add`]; many chunks as lanes
#                (chunk, row, head)  then everything inside a chunk [2-5, 7-11]
#   angle        (row, chunk)        angles and dt, summed over heads [12, 13]
#   norm         tokens              B and C norms [14]
# The chains of steps 4, 5 and 7 belong to the profile of mode identical. The other modes take matrix products instead:
# chains over the chunk's rows, channels or state rows, the same for every thread count and instruction set. They walk
# the chunks of a (row, head) once, with the adjoint in scratch, in place of the first three phases.

cdef struct BackwardJob:
    Shape shape
    # saved by the forward
    const float* proj
    const float* B
    const float* C
    const float* rate
    const float* B_rstd
    const float* C_rstd
    const float* dt
    const float* sig
    const float* adt
    const float* h
    const float* cosine
    const float* sine
    const float* skip
    # weights
    const float* dt_bias
    const float* B_norm
    const float* C_norm
    const float* B_bias
    const float* C_bias
    const float* D
    const float* dgate           # (B * L, inner)
    # results
    float* pack                  # (B * L, width): gradient of the projection
    float* dD                    # (B * L, H): one row a token
    float* dB                    # (B * L, H * 128)
    float* dC
    float* dB_norm               # (B * L, 128)
    float* dC_norm
    # between the phases; item = (row * heads + head) * chunks + chunk
    float* dy                    # (items, 64, 64), exact order only, like the next two
    float* dh                    # (items, 128, 64): adjoint of the state that leaves the chunk, not for the last chunk
    float* state_sum             # (items)
    float* dscale                # planes (B, H, plane)
    float* ddt
    float* dtrap
    float* ddt_adt
    float* dtheta                # (items, 64, 32)
    float* dtheta_total          # (items, 32)
    float* scratch
    Py_ssize_t scratch_size
    float* sums_scratch
    bint exact_order             # the profile's orders
    Py_ssize_t counter
    Py_ssize_t sums_counter
    Py_ssize_t sums_done


cdef inline Py_ssize_t real_tokens(Shape* shape, Py_ssize_t chunk) noexcept nogil:
    cdef Py_ssize_t real = shape.tokens - chunk * CHUNK
    return real if real < CHUNK else CHUNK


# ---- adjoint -------------------------------------------------------------------------------------------------------

cdef void gate_backward(BackwardJob* job, Py_ssize_t row, Py_ssize_t head, Py_ssize_t chunk, float* dy) noexcept nogil:
    """dy (64, 64) of the skip sum, rows after the last token +0; the gradient of z goes to the pack."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t i, p, token, at, real = real_tokens(shape, chunk)
    cdef vf z, below, gradient, sig, inner
    for i in range(real):
        token = row * shape.length + chunk * CHUNK + i
        at = token * shape.inner + head * HEAD
        if i + 3 < real:
            p = 0
            while p < HEAD:      # the pieces of later rows are too far apart for the processor to guess
                prefetch(job.proj + (token + 3) * shape.width + head * HEAD + p)
                prefetch(job.dgate + at + 3 * shape.inner + p)
                prefetch(job.skip + at + 3 * shape.inner + p)
                p += 16
        p = 0
        while p < HEAD:
            z = vflush(vload(job.proj + token * shape.width + head * HEAD + p))
            gradient = vload(job.dgate + at + p)
            below = vadd(vexp(vneg(z)), vset(1.0))
            vstore(dy + i * HEAD + p, vmul(gradient, vdiv(z, below)))
            sig = vdiv(vset(1.0), below)
            inner = vfma(z, vsub(vset(1.0), sig), vset(1.0))
            vstore(job.pack + token * shape.width + head * HEAD + p,
                   vmul(vmul(gradient, vload(job.skip + at + p)), vmul(sig, inner)))
            p += vlanes
    memset(dy + real * HEAD, 0, (CHUNK - real) * HEAD * sizeof(float))


cdef void rotated_rows(const float* x, const float* bias, const float* cosine, const float* sine, const float* by,
                       Py_ssize_t first, Py_ssize_t count, float* out, Py_ssize_t out_row) noexcept nogil:
    """Biased and rotated queries or keys (128, ``count``), every token times ``by``, of tokens from ``first`` on."""
    cdef Py_ssize_t n, t = 0
    cdef vf x0, x1, c, s, factor
    while t < count:
        factor = vload(by + first + t)
        for n in range(ANGLES):
            x0 = vadd(vload(x + 2 * n * CHUNK + first + t), vset(bias[2 * n]))
            x1 = vadd(vload(x + (2 * n + 1) * CHUNK + first + t), vset(bias[2 * n + 1]))
            c = vload(cosine + n * CHUNK + first + t)
            s = vload(sine + n * CHUNK + first + t)
            vstore(out + 2 * n * out_row + t, vmul(vsub(vmul(x0, c), vmul(x1, s)), factor))
            vstore(out + (2 * n + 1) * out_row + t, vmul(vadd(vmul(x0, s), vmul(x1, c)), factor))
        for n in range(2 * ANGLES, STATE):
            vstore(out + n * out_row + t, vmul(vadd(vload(x + n * CHUNK + first + t), vset(bias[n])), factor))
        t += vlanes


cdef enum:
    ADJOINT_SCRATCH = 2 * TALL + 3 * CHUNK


cdef void adjoint_chunk(BackwardJob* job, Py_ssize_t line, Py_ssize_t chunk, const float* dy, const float* carry,
                        float* out, float* scratch) noexcept nogil:
    """Adjoint of the state that enters a chunk: its own reads, and ``carry``, the adjoint of the state that leaves it,
    through the decay; ``carry`` is NULL for the last chunk, and may be ``out``."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t item = line * shape.chunks + chunk, head = line % shape.heads, n = 0
    cdef Py_ssize_t real = real_tokens(shape, chunk)
    cdef float* q = scratch
    cdef float* direct = scratch + TALL
    cdef float* total = scratch + 2 * TALL
    cdef vf decay, x
    running_decay(job.adt + line * shape.plane + chunk * CHUNK, real, total, total + CHUNK, total + 2 * CHUNK)
    rotated_rows(job.C + (line // shape.heads * shape.chunks + chunk) * TALL, job.C_bias + head * STATE,
                 job.cosine + item * (TALL // 4), job.sine + item * (TALL // 4), total + CHUNK, 0, CHUNK, q, CHUNK)
    product_nn(q, dy, STATE, real, direct)
    decay = vset(sexp(total[CHUNK - 1]))
    while n < TALL:
        x = vzero() if carry == NULL else vmul(vload(carry + n), decay)
        vstore(out + n, vadd(vload(direct + n), x))
        n += vlanes


cdef void adjoint_job(void* arg, int thread) noexcept nogil:
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t line, chunk, item
    while True:
        line = next_unit_in_turn(&job.counter)
        if line >= shape.batch * shape.heads:
            return
        for chunk in range(shape.chunks - 1, -1, -1):
            item = line * shape.chunks + chunk
            gate_backward(job, line // shape.heads, line % shape.heads, chunk, job.dy + item * SQUARE)
            if chunk:
                adjoint_chunk(job, line, chunk, job.dy + item * SQUARE,
                              NULL if chunk == shape.chunks - 1 else job.dh + item * TALL, job.dh + (item - 1) * TALL,
                              job.scratch + thread * job.scratch_size)


# ---- the serial sums over a chunk's state --------------------------------------------------------------------------

cdef inline void gather_lanes(const float** rows, Py_ssize_t at, Py_ssize_t ahead, float* out,
                              Py_ssize_t out_row) noexcept nogil:
    """vlanes values from ``at`` on of each of STATE_LANES arrays, turned: out[c * out_row + lane]. What stands
    ``ahead`` of them is fetched: the processor does not follow so many arrays."""
    cdef vf block[vlanes]
    cdef Py_ssize_t lane = 0, r
    while lane < STATE_LANES:
        for r in range(vlanes):
            prefetch(rows[lane + r] + at + ahead)
            block[r] = vload(rows[lane + r] + at)
        vtranspose(block)
        for r in range(vlanes):
            vstore(out + r * out_row + lane, block[r])
        lane += vlanes


cdef enum:
    STATE_BAND = STATE * STATE_LANES         # all state rows of a token or channel
    STATE_SUMS_SCRATCH = (TALL + 2 * STATE_BLOCK + HEAD * vlanes + 2 * CHUNK) * STATE_LANES + 3 * CHUNK


cdef void state_sums_group(BackwardJob* job, Py_ssize_t first, Py_ssize_t count, float* scratch) noexcept nogil:
    """The chains of STATE_LANES chunks side by side: sum over j, p, n of dh (v_j ks_j) to_end_j, then over p, n of
    dh (h exp(total)), in that order. Lanes beyond ``count`` repeat the first chunk and are thrown away.

    Only dh is read again for every token and turned as a whole; the rest passes by in blocks of vlanes tokens or
    channels, so that all stays in the second-level cache."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t per_line = shape.chunks - 1, lane, unit, item, line, chunk, head, j, p, n, at
    cdef const float* dh[STATE_LANES]
    cdef const float* h[STATE_LANES]
    cdef const float* ks[STATE_LANES]
    cdef const float* v[STATE_LANES]
    cdef float* dh_lanes = scratch                               # (p, n, lane)
    cdef float* ks_chunks = dh_lanes + TALL * STATE_LANES        # (lane, n, j) of a block
    cdef float* lanes = ks_chunks + STATE_BLOCK * STATE_LANES    # of a block: (j, n, lane) of ks or (p, n, lane) of h
    cdef float* v_lanes = lanes + STATE_BLOCK * STATE_LANES      # (j, p, lane) of a block
    cdef float* end_lanes = v_lanes + HEAD * vlanes * STATE_LANES    # (j, lane)
    cdef float* scales = end_lanes + CHUNK * STATE_LANES         # (lane, j)
    cdef float* total = scales + CHUNK * STATE_LANES
    cdef float* from_start = total + CHUNK
    cdef float* to_end = total + 2 * CHUNK
    cdef float last[STATE_LANES]
    cdef float sums[STATE_LANES]
    cdef bint vanish = False, finite = False, skip = False
    memset(sums, 0, sizeof(sums))
    for lane in range(STATE_LANES):
        unit = first + (lane if lane < count else 0)
        line = unit // per_line
        chunk = unit % per_line
        item = line * shape.chunks + chunk
        dh[lane] = job.dh + item * TALL
        h[lane] = job.h + item * TALL
        ks[lane] = ks_chunks + lane * STATE_BLOCK
        v[lane] = (job.proj + (line // shape.heads * shape.length + chunk * CHUNK) * shape.width + shape.inner
                   + line % shape.heads * HEAD)
        p = line * shape.plane + chunk * CHUNK
        running_decay(job.adt + p, CHUNK, total, from_start, to_end)
        for j in range(CHUNK):
            end_lanes[j * STATE_LANES + lane] = to_end[j]
        vanish |= to_end[0] == 0.0       # they grow with j
        last[lane] = from_start[CHUNK - 1]
        key_scales(job.dt + p, job.sig + p, total, scales + lane * CHUNK)
    p = 0
    while p < HEAD:
        for n in range(STATE):
            gather_lanes(dh, n * HEAD + p, 2 * HEAD, dh_lanes + p * STATE_BAND + n * STATE_LANES, STATE_BAND)
        p += vlanes
    if vanish:
        finite = all_lanes_finite(dh_lanes, TALL * STATE_LANES)
    at = 0
    while at < CHUNK:
        for lane in range(STATE_LANES):
            unit = first + (lane if lane < count else 0)
            line = unit // per_line
            chunk = unit % per_line
            head = line % shape.heads
            item = line * shape.chunks + chunk
            rotated_rows(job.B + (line // shape.heads * shape.chunks + chunk) * TALL, job.B_bias + head * STATE,
                         job.cosine + item * (TALL // 4), job.sine + item * (TALL // 4), scales + lane * CHUNK, at,
                         vlanes, ks_chunks + lane * STATE_BLOCK, vlanes)
        for n in range(STATE):
            gather_lanes(ks, n * vlanes, vlanes, lanes + n * STATE_LANES, STATE_BAND)
        for j in range(vlanes):
            p = 0
            while p < HEAD:
                gather_lanes(v, (at + j) * shape.width + p, shape.width, v_lanes + (j * HEAD + p) * STATE_LANES,
                             STATE_LANES)
                p += vlanes
        if finite:
            skip = (largest_magnitude(v_lanes, 0, 1, HEAD * vlanes * STATE_LANES)
                    * largest_magnitude(lanes, 0, 1, STATE_BLOCK * STATE_LANES) <= LARGEST)
        for j in range(vlanes):
            add_token(dh_lanes, lanes + j * STATE_BAND, v_lanes + j * HEAD * STATE_LANES,
                      end_lanes + (at + j) * STATE_LANES, skip, sums)
        at += vlanes
    p = 0
    while p < HEAD:
        for n in range(STATE):
            gather_lanes(h, n * HEAD + p, 2 * HEAD, lanes + n * STATE_LANES, STATE_BAND)
        add_states(dh_lanes + p * STATE_BAND, lanes, last, sums)
        p += vlanes
    for lane in range(count):
        unit = first + lane
        job.state_sum[unit // per_line * shape.chunks + unit % per_line] = sums[lane]


cdef Py_ssize_t state_sums_groups(Py_ssize_t lines, Py_ssize_t chunks) noexcept nogil:
    return (lines * (chunks - 1) + STATE_LANES - 1) // STATE_LANES


cdef void state_sums_job(void* arg, int thread) noexcept nogil:
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef Py_ssize_t first, total = job.shape.batch * job.shape.heads * (job.shape.chunks - 1)
    while True:
        first = next_unit_in_turn(&job.sums_counter) * STATE_LANES
        if first >= total:
            return
        state_sums_group(job, first, total - first if total - first < STATE_LANES else STATE_LANES,
                         job.sums_scratch + thread * STATE_SUMS_SCRATCH)
        unit_done(&job.sums_done)


# ---- one chunk of one head -----------------------------------------------------------------------------------------

cdef struct ChunkScratch:
    float* qrot                  # [n][i]
    float* krot
    float* ks
    float* ks_rows               # [j][n]
    float* q_rows                # [i][n]
    float* decayed               # one row's factors, [j][n]
    float* rows                  # a gradient by rows, [i][n]
    float* dq                    # [n][i]
    float* dk
    float* read                  # [n][i]
    float* decay
    float* scores
    float* weights
    float* v                     # [i][p]
    float* v_turned              # [p][i]
    float* dy_turned
    float* dv                    # [i][p]
    float* dv_state              # [p][i]
    float* pairs                 # [i][j]
    float* pairs_turned
    float* dtheta                # [r][i]
    float* at                    # columns of 64 scalars
    bint scalable                # the chains of step 4 can be walked in the scaled domain,
    bint care                    # and one has underflowed


cdef enum:
    CHUNK_SCRATCH = 10 * TALL + 11 * SQUARE + TALL // 4 + 12 * CHUNK


cdef void chunk_scratch(float* memory, ChunkScratch* s) noexcept nogil:
    s.qrot = take(&memory, TALL)
    s.krot = take(&memory, TALL)
    s.ks = take(&memory, TALL)
    s.ks_rows = take(&memory, TALL)
    s.q_rows = take(&memory, TALL)
    s.decayed = take(&memory, TALL)
    s.rows = take(&memory, TALL)
    s.dq = take(&memory, TALL)
    s.dk = take(&memory, TALL)
    s.read = take(&memory, TALL)
    s.decay = take(&memory, SQUARE)
    s.scores = take(&memory, SQUARE)
    s.weights = take(&memory, SQUARE)
    s.v = take(&memory, SQUARE)
    s.v_turned = take(&memory, SQUARE)
    s.dy_turned = take(&memory, SQUARE)
    s.dv = take(&memory, SQUARE)
    s.dv_state = take(&memory, SQUARE)
    s.pairs = take(&memory, SQUARE)
    s.pairs_turned = take(&memory, SQUARE)
    s.dtheta = take(&memory, TALL // 4)
    s.at = take(&memory, 12 * CHUNK)


cdef enum Size:
    # of the terms of a chunk's chains
    VANISHING = 0        # all are flushed to zero: FTZ does that for nothing, and sums stay zeros
    FAINT = 1            # many are around the smallest normal number: FTZ, and a look for doubtful results
    PLAIN = 2            # only decays that run out make subnormal products: these are guarded


cdef inline void intra_row(bint keys, ChunkScratch* s, Size size, bint strip, const float* x, const float* decay,
                           const float* floor, float least, Py_ssize_t first, Py_ssize_t last, const float* outer,
                           const float* inner, float* out) noexcept nogil:
    """Step 4, one row of dq16, or of dk16 with ``keys``: rows first..last of ``x`` by their decays, ``inner`` from column
    ``first`` on. What `find_tiny` takes tells which products may be subnormal."""
    cdef Py_ssize_t low = 0, high = 0
    cdef int status = -1
    find_tiny(decay, floor, least, strip, &first, &last, &low, &high)
    low -= first
    high -= first
    inner += first
    cdef Py_ssize_t count = last - first
    if size == PLAIN:
        if high > low:
            scale_rows(x, decay, first, last, s.decayed)
            scale_up_rows(s.decayed + low * STATE, high - low)
            if serial_chain_guarded(keys, s.decayed, low, high, count, outer, inner, out):
                return
        serial_chain_decayed(keys, x + first * STATE, decay + first, s.decayed, count, outer, inner, out)
        return
    scale_rows(x, decay, first, last, s.decayed)
    fp_fast()
    if size == FAINT and s.care:
        scale_chain_rows(s.decayed, count)
        status = serial_chain_scaled(keys, s.decayed, low, high, count, outer, inner, out)
        fp_exact()
        if status == 0:
            return
        scale_rows(x, decay, first, last, s.decayed)
        fp_fast()
    serial_chain(keys, s.decayed, count, outer, inner, out)
    if size == FAINT and status < 0 and fp_underflowed():
        s.care = s.scalable
        if serial_chain_doubtful(keys, s.decayed, count, outer, inner):
            fp_exact()
            serial_chain(keys, s.decayed, count, outer, inner, out)
    fp_exact()


cdef void query_row(ChunkScratch* s, Size size, bint strip, const float* floor, const float* dy, Py_ssize_t i,
                    float* out) noexcept nogil:
    """Step 4, dq16 of row i."""
    intra_row(False, s, size, strip, s.ks_rows, s.decay + i * CHUNK, floor, 1.0, 0, i, dy + i * HEAD, s.v_turned, out)


cdef void key_row(ChunkScratch* s, Size size, bint strip, const float* floor, float least, Py_ssize_t j,
                  Py_ssize_t real, float* out) noexcept nogil:
    """Step 4, dk16 of row j; ``least`` is the smallest nonzero size in v_j."""
    intra_row(True, s, size, strip, s.q_rows, s.pairs_turned + j * CHUNK, floor, least, j + 1, real, s.v + j * HEAD,
              s.dy_turned, out)


cdef void intra_chunk_chains(const float* dy, Py_ssize_t real, ChunkScratch* s, float* dadt) noexcept nogil:
    """Steps 4 and 5 in the profile's order: s.dq, s.dk, and the decay's part of dadt."""
    cdef float k_floor[CHUNK]
    cdef float q_floor[CHUNK]
    cdef float v_least[CHUNK]
    cdef Py_ssize_t i = 0
    cdef double k_size = largest_magnitude(s.ks, 0, 1, TALL), q_size = largest_magnitude(s.qrot, 0, 1, TALL)
    cdef double v_size = largest_magnitude(s.v, 0, 1, SQUARE)
    cdef double most = largest_magnitude(dy, 0, 1, SQUARE) * v_size * max(k_size, q_size, 128 * k_size * q_size)
    cdef Size size = PLAIN
    s.scalable = s.care = False
    cdef bint strip = isfinite(most)     # a decay of zero makes zeros of what is finite, and NaN of the rest
    if most < SMALLEST / 2:
        size = VANISHING
    elif most < SMALLEST * FAINT_RANGE:
        size = FAINT
        # finite are the other operands, too, as their product is; their scaled products have to be
        s.scalable = (MOJO_ISA >= 2 and max(k_size, q_size) * max(v_size, 1.0) < SCALED_MOST
                      and all_lanes_finite(s.decay, SQUARE))
    smallest(s.v_turned, HEAD, v_least)
    smallest(s.ks, STATE, k_floor)
    smallest(s.qrot, STATE, q_floor)
    while i < CHUNK:
        vstore(k_floor + i, vdiv(vdiv(vbits(0x01800000), vload(k_floor + i)), vload(v_least + i)))    # 2^-124
        vstore(q_floor + i, vdiv(vbits(0x01800000), vload(q_floor + i)))
        i += vlanes
    transpose(s.decay, CHUNK, CHUNK, CHUNK, s.pairs_turned, CHUNK)
    transpose(s.ks, CHUNK, STATE, CHUNK, s.ks_rows, STATE)
    transpose(s.qrot, CHUNK, STATE, CHUNK, s.q_rows, STATE)
    for i in range(real):
        query_row(s, size, strip, k_floor, dy, i, s.rows + i * STATE)
    transpose(s.rows, STATE, CHUNK, STATE, s.dq, CHUNK)
    for i in range(real):
        key_row(s, size, strip, q_floor, v_least[i], i, real, s.rows + i * STATE)
    transpose(s.rows, STATE, CHUNK, STATE, s.dk, CHUNK)
    if size == VANISHING:
        fp_fast()
    pair_chains(s.scores, dy, s.v_turned, real, s.pairs)
    fp_exact()
    decay_chains(s.pairs, s.decay, real, dadt)


cdef void intra_chunk_products(Py_ssize_t real, ChunkScratch* s, float* dadt) noexcept nogil:
    """The same gradients as matrix products: with P = (dy v^T) decay below the diagonal, dq = P ks and dk = P^T q."""
    cdef Py_ssize_t n
    product_tn_lower(s.dy_turned, s.v_turned, 0, real, HEAD, s.pairs)
    mask_scores(s.pairs, s.decay, 0, real, s.pairs)
    transpose(s.pairs, CHUNK, CHUNK, CHUNK, s.pairs_turned, CHUNK)
    product_nn_upper(s.ks, s.pairs_turned, STATE, real, s.dq)
    product_nn_below(s.qrot, s.pairs, STATE, real, s.dk)
    n = 0
    while n < real * CHUNK:
        vstore(s.pairs + n, vselect(veq(vload(s.pairs + n), vzero()), vzero(),
                                    vmul(vload(s.pairs + n), vload(s.scores + n))))
        n += vlanes
    decay_sums(s.pairs, real, s.rows, dadt)


cdef void chunk_backward(BackwardJob* job, Py_ssize_t line, Py_ssize_t chunk, const float* dy, const float* dh,
                         ChunkScratch* s) noexcept nogil:
    """Gradients of one chunk from those of its skip sum, ``dy``, and of the state that leaves it, ``dh``."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t row = line // shape.heads, head = line % shape.heads
    cdef Py_ssize_t item = line * shape.chunks + chunk, real = real_tokens(shape, chunk)
    cdef Py_ssize_t token = row * shape.length + chunk * CHUNK, plane = line * shape.plane + chunk * CHUNK
    cdef Py_ssize_t panel = (row * shape.chunks + chunk) * TALL, i, n, p, t
    cdef bint last = chunk == shape.chunks - 1
    cdef const float* dt = job.dt + plane
    cdef const float* sig = job.sig + plane
    cdef const float* adt = job.adt + plane
    cdef const float* B = job.B + panel
    cdef const float* C = job.C + panel
    cdef const float* B_bias = job.B_bias + head * STATE
    cdef const float* C_bias = job.C_bias + head * STATE
    cdef float* total = s.at
    cdef float* from_start = s.at + CHUNK
    cdef float* to_end = s.at + 2 * CHUNK
    cdef float* dadt = s.at + 3 * CHUNK
    cdef float* through = s.at + 4 * CHUNK       # gradient of the diagonal q.k
    cdef float* common = s.at + 5 * CHUNK        # through * gamma
    cdef float* dread = s.at + 6 * CHUNK
    cdef float* recall = s.at + 7 * CHUNK
    cdef float* raw = s.at + 8 * CHUNK
    cdef float* skip_by = s.at + 9 * CHUNK       # D + gamma q.k
    cdef float* gamma = s.at + 10 * CHUNK
    cdef float* scale = s.at + 11 * CHUNK
    cdef vf x, q0, q1, k0, k1, cosine, sine, acc, gate, one = vset(1.0), step, rate, by
    cdef vf dq0, dk0, r0, r1, angle, dscale, g0, g1
    cdef float carry = 0.0

    for i in range(real):
        memcpy(s.v + i * HEAD, job.proj + (token + i) * shape.width + shape.inner + head * HEAD, HEAD * sizeof(float))
    memset(s.v + real * HEAD, 0, (CHUNK - real) * HEAD * sizeof(float))
    transpose(s.v, HEAD, CHUNK, HEAD, s.v_turned, CHUNK)
    transpose(dy, HEAD, CHUNK, HEAD, s.dy_turned, CHUNK)
    running_decay(adt, real, total, from_start, to_end)
    decay_matrix(adt, 0, real, s.decay)
    key_scales(dt, sig, gamma, scale)
    rotate_chunk(B, C, B_bias, C_bias, job.cosine + item * (TALL // 4), job.sine + item * (TALL // 4), scale, 0, real,
                 s.qrot, s.krot, s.ks, skip_by)
    product_tn_lower(s.qrot, s.ks, 0, real, STATE, s.scores)
    mask_scores(s.scores, s.decay, 0, real, s.weights)

    # [2, 3] skip connection and diagonal q.k
    t = 0
    while t < CHUNK:
        acc = vzero()
        for p in range(HEAD):
            acc = vfma(vload(s.dy_turned + p * CHUNK + t), vload(s.v_turned + p * CHUNK + t), acc)
        gate = vload(sig + t)
        step = vload(dt + t)
        x = vload(skip_by + t)
        vstore(through + t, acc)
        vstore(common + t, vmul(acc, vload(gamma + t)))
        vstore(skip_by + t, vadd(vset(job.D[head]), vmul(x, vload(gamma + t))))
        x = vmul(acc, x)
        vstore(job.ddt + plane + t, vmul(x, gate))
        vstore(job.dtrap + plane + t, vmul(vmul(vmul(x, step), gate), vsub(one, gate)))
        t += vlanes
    for i in range(real):
        job.dD[(token + i) * shape.heads + head] = through[i]

    # [4, 5] inside the chunk
    if job.exact_order:
        intra_chunk_chains(dy, real, s, dadt)
    else:
        intra_chunk_products(real, s, dadt)
    product_tn_upper(s.weights, dy, real, s.dv)

    # [7] through the state that enters the chunk, and into the one that leaves it
    product_nn(job.h + item * TALL, s.dy_turned, STATE, HEAD, s.read)
    if last:
        memset(s.rows, 0, TALL * sizeof(float))
        memset(s.dv_state, 0, SQUARE * sizeof(float))
    else:
        product_nn(dh, s.v_turned, STATE, HEAD, s.rows)
        product_tn(dh, s.ks, 0, HEAD, STATE, s.dv_state)
    t = 0
    while t < CHUNK:
        x = vload(from_start + t)
        acc = vzero()
        for n in range(STATE):
            q0 = vload(s.read + n * CHUNK + t)
            acc = vfma(vload(s.qrot + n * CHUNK + t), q0, acc)
            vstore(s.dq + n * CHUNK + t, vadd(vload(s.dq + n * CHUNK + t), vmul(q0, x)))
        vstore(dread + t, vmul(acc, x))
        x = vload(to_end + t)
        for n in range(STATE):
            vstore(s.dk + n * CHUNK + t, vadd(vload(s.dk + n * CHUNK + t), vmul(vload(s.rows + n * CHUNK + t), x)))
        acc = vzero()
        for p in range(HEAD):
            q0 = vmul(vload(s.dv_state + p * CHUNK + t), x)
            vstore(s.dv_state + p * CHUNK + t, q0)
            acc = vfma(q0, vload(s.v_turned + p * CHUNK + t), acc)
        vstore(recall + t, vneg(acc))
        t += vlanes
    if last:
        recall[real - 1] = sadd(recall[real - 1], 0.0)
    else:
        if job.exact_order:
            wait_until(&job.sums_done, state_sums_groups(shape.batch * shape.heads, shape.chunks))
        recall[real - 1] = sadd(recall[real - 1], job.state_sum[item] if job.exact_order
                                else state_product(dh, job.h + (item + 1) * TALL))

    # [8] values
    transpose(s.dv_state, CHUNK, HEAD, CHUNK, s.pairs, HEAD)
    for i in range(real):
        x = vset(skip_by[i])
        p = 0
        while p < HEAD:
            acc = vadd(vmul(vload(dy + i * HEAD + p), x), vload(s.dv + i * HEAD + p))
            vstore(job.pack + (token + i) * shape.width + shape.inner + head * HEAD + p,
                   vadd(acc, vload(s.pairs + i * HEAD + p)))
            p += vlanes

    # [9] scale of k, rotation; the joined gradients of the biased rows take the place of dq and dk
    t = 0
    while t < CHUNK:
        by = vload(scale + t)
        x = vload(common + t)
        dscale = vzero()
        n = 0
        while n < STATE:
            q0 = vload(s.qrot + n * CHUNK + t)
            q1 = vload(s.qrot + (n + 1) * CHUNK + t)
            k0 = vload(s.krot + n * CHUNK + t)
            k1 = vload(s.krot + (n + 1) * CHUNK + t)
            r0 = vload(s.dq + n * CHUNK + t)
            r1 = vload(s.dq + (n + 1) * CHUNK + t)
            g0 = vload(s.dk + n * CHUNK + t)
            g1 = vload(s.dk + (n + 1) * CHUNK + t)
            dscale = vfma(g1, k1, vfma(g0, k0, dscale))
            g0 = vmul(g0, by)
            g1 = vmul(g1, by)
            if n < 2 * ANGLES:
                angle = vfma(g0, vneg(k1), vfma(r1, q0, vfma(r0, vneg(q1), vzero())))
                vstore(s.dtheta + n // 2 * CHUNK + t, vfma(g1, k0, angle))
                cosine = vload(job.cosine + item * (TALL // 4) + n // 2 * CHUNK + t)
                sine = vload(job.sine + item * (TALL // 4) + n // 2 * CHUNK + t)
                dq0 = vadd(vmul(r0, cosine), vmul(r1, sine))
                r1 = vsub(vmul(r1, cosine), vmul(r0, sine))
                r0 = dq0
                dk0 = vadd(vmul(g0, cosine), vmul(g1, sine))
                g1 = vsub(vmul(g1, cosine), vmul(g0, sine))
                g0 = dk0
                q0 = vadd(vload(C + n * CHUNK + t), vset(C_bias[n]))
                q1 = vadd(vload(C + (n + 1) * CHUNK + t), vset(C_bias[n + 1]))
                k0 = vadd(vload(B + n * CHUNK + t), vset(B_bias[n]))
                k1 = vadd(vload(B + (n + 1) * CHUNK + t), vset(B_bias[n + 1]))
            vstore(s.dq + n * CHUNK + t, vadd(vmul(x, k0), r0))
            vstore(s.dq + (n + 1) * CHUNK + t, vadd(vmul(x, k1), r1))
            vstore(s.dk + n * CHUNK + t, vadd(vmul(x, q0), g0))
            vstore(s.dk + (n + 1) * CHUNK + t, vadd(vmul(x, q1), g1))
            n += 2
        vstore(job.dscale + plane + t, dscale)
        # [11] the part of this token's own scale
        gate = vload(sig + t)
        step = vload(dt + t)
        vstore(job.ddt + plane + t, vadd(vload(job.ddt + plane + t), vmul(dscale, gate)))
        vstore(job.dtrap + plane + t, vadd(vload(job.dtrap + plane + t),
                                           vmul(vmul(vmul(dscale, step), gate), vsub(one, gate))))
        t += vlanes
    n = token * shape.inner * 2 + head * STATE
    state_rows(s.dq, 0, real, job.dC + n, shape.heads * STATE, True)
    state_rows(s.dk, 0, real, job.dB + n, shape.heads * STATE, True)
    transpose(s.dtheta, CHUNK, ANGLES, CHUNK, job.dtheta + item * (TALL // 4), ANGLES)
    p = 0
    while p < ANGLES:
        acc = vzero()
        for i in range(real - 1, -1, -1):
            acc = vadd(acc, vload(job.dtheta + item * (TALL // 4) + i * ANGLES + p))
        vstore(job.dtheta_total + item * ANGLES + p, acc)
        p += vlanes

    # [10] log decays
    for i in range(real - 1, -1, -1):
        carry = sadd(carry, sadd(dread[i], recall[i]))
        dadt[i] = sadd(dadt[i], carry)
    n = 2 * shape.inner + 2 * STATE + shape.heads + head
    for i in range(CHUNK):
        raw[i] = job.proj[(token + i) * shape.width + n] if i < real else 0.0
    t = 0
    while t < CHUNK:
        x = vload(raw + t)
        rate = heavy_tail(x)
        vstore(job.ddt_adt + plane + t, vmul(vload(dadt + t), decay_rate(x)))
        acc = vmul(vload(dadt + t), vload(dt + t))
        acc = vneg(vmul(acc, vselect(vge(x, vzero()), one, vmul(rate, rate))))
        vstore(raw + t, vselect(vgt(vneg(rate), vset(-A_FLOOR)), vzero(), acc))
        t += vlanes
    for i in range(real):
        job.pack[(token + i) * shape.width + n] = raw[i]


cdef void chunk_job(void* arg, int thread) noexcept nogil:
    """The serial sums, then the chunks, last ones first: they need no sum that another thread may be busy with."""
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef Py_ssize_t unit, line, chunk, item, lines = job.shape.batch * job.shape.heads
    cdef ChunkScratch s
    state_sums_job(arg, thread)
    chunk_scratch(job.scratch + thread * job.scratch_size, &s)
    while True:
        unit = next_unit_in_turn(&job.counter)
        if unit >= lines * job.shape.chunks:
            return
        line = unit % lines
        chunk = job.shape.chunks - 1 - unit // lines
        item = line * job.shape.chunks + chunk
        chunk_backward(job, line, chunk, job.dy + item * SQUARE, job.dh + item * TALL, &s)


cdef enum:
    HEAD_SCRATCH = CHUNK_SCRATCH + ADJOINT_SCRATCH + SQUARE + TALL


cdef void head_job(void* arg, int thread) noexcept nogil:
    """All chunks of a (row, head), last to first, for the orders that need no sums across heads."""
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef Shape* shape = &job.shape
    cdef ChunkScratch s
    cdef Py_ssize_t line, chunk
    cdef float* adjoint = job.scratch + thread * job.scratch_size + CHUNK_SCRATCH
    cdef float* dy = adjoint + ADJOINT_SCRATCH
    cdef float* dh = dy + SQUARE
    chunk_scratch(job.scratch + thread * job.scratch_size, &s)
    while True:
        line = next_unit_in_turn(&job.counter)
        if line >= shape.batch * shape.heads:
            return
        for chunk in range(shape.chunks - 1, -1, -1):
            gate_backward(job, line // shape.heads, line % shape.heads, chunk, dy)
            chunk_backward(job, line, chunk, dy, dh, &s)
            if chunk:
                adjoint_chunk(job, line, chunk, dy, NULL if chunk == shape.chunks - 1 else dh, dh, adjoint)


# ---- sums over heads -----------------------------------------------------------------------------------------------

cdef enum:
    ANGLE_SCRATCH = 5 * CHUNK * ANGLES + 4 * CHUNK


cdef void angle_chunk(BackwardJob* job, Py_ssize_t row, Py_ssize_t chunk, float* scratch) noexcept nogil:
    """Angles and dt of one chunk. The running sums of dtheta go backwards in blocks of 64 tokens: first the totals of
    the later blocks, last to first, then the block's own tokens."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t real = real_tokens(shape, chunk), token = row * shape.length + chunk * CHUNK
    cdef Py_ssize_t head, item, line, plane, t, r, c, column = 2 * shape.inner + 2 * STATE
    cdef float* carries = scratch                        # [t][r]
    cdef float* carries_turned = carries + CHUNK * ANGLES
    cdef float* rates = carries + 2 * CHUNK * ANGLES     # [r][t]
    cdef float* sums = carries + 3 * CHUNK * ANGLES      # [t][r], over heads
    cdef float* spare = carries + 4 * CHUNK * ANGLES
    cdef float* before = carries + 5 * CHUNK * ANGLES    # dscale of the token before
    cdef float* raw = before + CHUNK
    cdef float* trap = before + 2 * CHUNK
    cdef vf run, acc, gate, step, other, ddt, dtrap, one = vset(1.0), b, pre, slope
    memset(sums, 0, CHUNK * ANGLES * sizeof(float))
    memset(spare, 0, CHUNK * ANGLES * sizeof(float))
    memset(carries, 0, CHUNK * ANGLES * sizeof(float))
    memcpy(spare, job.rate + token * ANGLES, real * ANGLES * sizeof(float))
    transpose(spare, ANGLES, CHUNK, ANGLES, rates, CHUNK)
    for head in range(shape.heads):
        line = row * shape.heads + head
        item = line * shape.chunks + chunk
        plane = line * shape.plane + chunk * CHUNK
        r = 0
        while r < ANGLES:
            run = vzero()
            for c in range(shape.chunks - 1, chunk, -1):
                run = vadd(run, vload(job.dtheta_total + (line * shape.chunks + c) * ANGLES + r))
            for t in range(real - 1, -1, -1):
                run = vadd(run, vload(job.dtheta + item * (TALL // 4) + t * ANGLES + r))
                vstore(carries + t * ANGLES + r, run)
                vstore(sums + t * ANGLES + r, vadd(vload(sums + t * ANGLES + r), vmul(run, vset(job.dt[plane + t]))))
            r += vlanes
        transpose(carries, ANGLES, CHUNK, ANGLES, carries_turned, CHUNK)
        before[0] = job.dscale[plane - 1] if chunk else 0.0
        memcpy(before + 1, job.dscale + plane, (CHUNK - 1) * sizeof(float))
        for t in range(real):
            raw[t] = job.proj[(token + t) * shape.width + column + head]
        t = 0
        while t < real:
            acc = vzero()
            for r in range(ANGLES):
                acc = vfma(vload(carries_turned + r * CHUNK + t), vload(rates + r * CHUNK + t), acc)
            gate = vload(job.sig + plane + t)
            step = vload(job.dt + plane + t)
            other = vsub(one, gate)
            b = vload(before + t)
            ddt = vload(job.ddt + plane + t)
            dtrap = vload(job.dtrap + plane + t)
            pre = vadd(ddt, vmul(b, other))
            slope = vadd(dtrap, vmul(vmul(vneg(vmul(b, step)), gate), other))
            if chunk == 0 and t == 0:        # the first token has none before it
                ddt = vselect(lanes_below(1), ddt, pre)
                dtrap = vselect(lanes_below(1), dtrap, slope)
            else:
                ddt = pre
                dtrap = slope
            ddt = vadd(vadd(ddt, vload(job.ddt_adt + plane + t)), acc)
            pre = vadd(vload(raw + t), vset(job.dt_bias[head]))
            vstore(raw + t, vmul(ddt, vselect(vle(pre, vset(20.0)), vsigmoid(vflush(pre)), one)))
            vstore(trap + t, dtrap)
            t += vlanes
        for t in range(real):
            job.pack[(token + t) * shape.width + column + head] = raw[t]
            job.pack[(token + t) * shape.width + column + 2 * shape.heads + head] = trap[t]
    column += 3 * shape.heads
    for t in range(real):
        r = 0
        while r < ANGLES:
            run = vtanh(vload(job.proj + (token + t) * shape.width + column + r))
            slope = vmul(vset(PI), vsub(one, vmul(run, run)))
            vstore(job.pack + (token + t) * shape.width + column + r, vmul(vload(sums + t * ANGLES + r), slope))
            r += vlanes


cdef void angle_job(void* arg, int thread) noexcept nogil:
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef Py_ssize_t unit
    while True:
        unit = next_unit_in_turn(&job.counter)
        if unit >= job.shape.batch * job.shape.chunks:
            return
        angle_chunk(job, unit // job.shape.chunks, unit % job.shape.chunks, job.scratch + thread * job.scratch_size)


cdef void norm_tokens_backward(BackwardJob* job, const float* gradient, const float* weight, const float* rstd_panel,
                               Py_ssize_t column, Py_ssize_t first, Py_ssize_t count, float* rows,
                               float* g) noexcept nogil:
    """Gradient of an inner norm for ``count`` <= vlanes tokens: the sum over heads, then the collapsed backward."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t t, h, n, r, token
    cdef vf sums[STATE_VECTORS]
    cdef vf turned[vlanes]
    cdef vf block[vlanes]
    cdef vf dot = vzero(), rstd, shift, x, by
    cdef float rstds[vlanes]
    cdef float shifts[vlanes]
    for t in range(vlanes):
        for n in range(STATE_VECTORS):
            sums[n] = vzero()
        if t < count:
            for h in range(shape.heads):
                for n in range(STATE_VECTORS):
                    sums[n] = vadd(sums[n], vload(gradient + ((first + t) * shape.heads + h) * STATE + n * vlanes))
        for n in range(STATE_VECTORS):
            vstore(g + t * STATE + n * vlanes, sums[n])
        token = first + t
        rstds[t] = 0.0
        if t < count:
            rstds[t] = rstd_panel[token // shape.length * shape.chunks * CHUNK + token % shape.length]
    n = 0
    while n < STATE:
        load_tokens(block, job.proj + first * shape.width + column + n, shape.width, 0, count)
        for r in range(vlanes):
            turned[r] = vload(g + r * STATE + n)
        vtranspose(turned)
        for r in range(vlanes):
            dot = vfma(vmul(turned[r], vset(weight[n + r])), block[r], dot)
        n += vlanes
    rstd = vload(rstds)
    vstore(shifts, vmul(vmul(rstd, rstd), vdiv(dot, vset(<float> STATE))))
    for t in range(count):
        rstd = vset(rstds[t])
        shift = vset(shifts[t])
        token = first + t
        n = 0
        while n < STATE:
            x = vload(job.proj + token * shape.width + column + n)
            by = vload(g + t * STATE + n)
            vstore(rows + token * STATE + n, vmul(by, vmul(x, rstd)))
            vstore(job.pack + token * shape.width + column + n,
                   vmul(rstd, vsub(vmul(by, vload(weight + n)), vmul(x, shift))))
            n += vlanes


cdef void norm_job(void* arg, int thread) noexcept nogil:
    cdef BackwardJob* job = <BackwardJob*> arg
    cdef Py_ssize_t first, total = job.shape.batch * job.shape.length, count, column = 2 * job.shape.inner
    cdef float* g = job.scratch + thread * job.scratch_size
    while True:
        first = next_unit_in_turn(&job.counter) * vlanes
        if first >= total:
            return
        count = total - first if total - first < vlanes else vlanes
        norm_tokens_backward(job, job.dB, job.B_norm, job.B_rstd, column, first, count, job.dB_norm, g)
        norm_tokens_backward(job, job.dC, job.C_norm, job.C_rstd, column + STATE, first, count, job.dC_norm, g)
