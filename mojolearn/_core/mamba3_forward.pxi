# Mamba-3 forward (numerics, forward 5): from the rows of the input projection to the rows that enter the output
# projection, for new tokens that follow up to 64 buffered ones.
#
# Two phases. `prepare` takes what does not depend on the state: the B and C norms, turned so that tokens lie along the
# lanes, the angle rates, and the per-head scalars dt, sigma and A dt as planes (row, head, token). `mix` then walks the
# chunks of one (row, head) at a time with everything else in cache-sized scratch.

cdef struct Shape:
    Py_ssize_t batch, length, heads
    Py_ssize_t width             # row length of the projection
    Py_ssize_t inner             # heads * 64
    Py_ssize_t buffered          # tokens of the open chunk that came with the state
    Py_ssize_t tokens            # buffered + length
    Py_ssize_t chunks
    Py_ssize_t plane             # row length of the planes of scalars


cdef struct State:
    # the state as it came (all NULL without one); nothing is written here
    const float* theta           # (B, H, 32)
    const float* h               # (B, H, 64, 128)
    const float* krot            # (B, 64, H, 128)
    const float* v               # (B, 64, H, 64)
    const float* dt              # (B, 64, H)
    const float* sig
    const float* adt
    const float* pending_k       # (B, H, 128), NULL unless pending
    const float* pending_v       # (B, H, 64)


cdef struct PrepareJob:
    Shape shape
    State state
    const float* proj            # (B * L, width)
    const float* dt_bias
    const float* B_norm
    const float* C_norm
    float* B                     # (B, chunks, 128, 64)
    float* C
    float* rate                  # (B * L, 32)
    float* B_rstd                # (B, chunks * 64)
    float* C_rstd
    float* dt                    # planes (B, H, plane)
    float* sig
    float* adt
    float* scratch               # (threads, scratch_size)
    Py_ssize_t scratch_size
    Py_ssize_t counter


cdef Shape make_shape(Py_ssize_t batch, Py_ssize_t length, Py_ssize_t heads, Py_ssize_t buffered) noexcept nogil:
    cdef Shape shape
    shape.batch = batch
    shape.length = length
    shape.heads = heads
    shape.inner = heads * HEAD
    shape.width = 2 * shape.inner + 2 * STATE + 3 * heads + ANGLES
    shape.buffered = buffered
    shape.tokens = buffered + length
    shape.chunks = (shape.tokens + CHUNK - 1) // CHUNK
    shape.plane = shape.chunks * CHUNK + PLANE_PAD
    return shape


cdef inline void load_tokens(vf* block, const float* first, Py_ssize_t width, Py_ssize_t low,
                             Py_ssize_t high) noexcept nogil:
    """A block of vlanes columns of token rows, turned; rows outside low..high count as +0."""
    cdef Py_ssize_t r
    for r in range(vlanes):
        if low <= r < high:
            block[r] = vload(first + r * width)
        else:
            block[r] = vzero()
    vtranspose(block)


cdef vf norm_tokens(const float* first, Py_ssize_t width, Py_ssize_t low, Py_ssize_t high, const float* weight,
                    float* out) noexcept nogil:
    """RMS norm of 128 columns of vlanes token rows into out (128, 64), a column a token; returns 1 / rms."""
    cdef vf block[vlanes]
    cdef vf squares = vzero(), rstd
    cdef Py_ssize_t n = 0, r
    while n < STATE:
        load_tokens(block, first + n, width, low, high)
        for r in range(vlanes):
            squares = vfma(block[r], block[r], squares)
            vstore(out + (n + r) * CHUNK, block[r])
        n += vlanes
    rstd = vflush(vrsqrt(vflush(vadd(vdiv(squares, vset(<float> STATE)), vset(NORM_EPS)))))
    for n in range(STATE):
        vstore(out + n * CHUNK, vmul(vset(weight[n]), vmul(vload(out + n * CHUNK), rstd)))
    return rstd


cdef inline vf heavy_tail(vf raw) noexcept nogil:
    """1 + a for a >= 0, else 1 / (1 - a)."""
    return vselect(vge(raw, vzero()), vadd(vset(1.0), raw), vdiv(vset(1.0), vsub(vset(1.0), raw)))


cdef inline vf decay_rate(vf raw) noexcept nogil:
    """A of a raw column: minus the heavy tail, at most -1e-4."""
    cdef vf rate = vneg(heavy_tail(raw))
    return vselect(vgt(rate, vset(-A_FLOOR)), vset(-A_FLOOR), rate)


cdef void prepare_tokens(PrepareJob* job, Py_ssize_t row, Py_ssize_t chunk, Py_ssize_t column,
                         float* scratch) noexcept nogil:
    """vlanes tokens from ``column`` of a chunk on."""
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t heads = shape.heads, width = shape.width
    cdef Py_ssize_t token = chunk * CHUNK + column - shape.buffered       # of this call; may lie outside it
    cdef Py_ssize_t low = -token if token < 0 else 0
    cdef Py_ssize_t high = shape.length - token, h, r, n, at
    cdef const float* first = job.proj + (row * shape.length + token) * width
    cdef Py_ssize_t panel = (row * shape.chunks + chunk) * TALL + column
    cdef Py_ssize_t place = row * shape.chunks * CHUNK + chunk * CHUNK + column
    cdef vf block[vlanes]
    cdef vf dt, sig, adt, rstd
    cdef vi real
    if high > vlanes:
        high = vlanes
    first += 2 * shape.inner
    rstd = norm_tokens(first, width, low, high, job.B_norm, job.B + panel)
    vstore(job.B_rstd + place, rstd)
    rstd = norm_tokens(first + STATE, width, low, high, job.C_norm, job.C + panel)
    vstore(job.C_rstd + place, rstd)
    first += 2 * STATE
    n = 0
    while n < 3 * heads:         # the last block may read a few of the angle columns, which are not used here
        load_tokens(block, first + n, width, low, high)
        for r in range(vlanes):
            vstore(scratch + (n + r) * vlanes, block[r])
        n += vlanes
    real = viand(lanes_below(high), vinot(lanes_below(low)))
    for h in range(heads):
        at = (row * heads + h) * shape.plane + chunk * CHUNK + column
        dt = vflush(vsoftplus(vadd(vload(scratch + h * vlanes), vset(job.dt_bias[h]))))
        adt = vflush(vmul(decay_rate(vload(scratch + (heads + h) * vlanes)), dt))
        sig = vflush(vsigmoid(vload(scratch + (2 * heads + h) * vlanes)))
        vstore(job.dt + at, vselect(real, dt, vzero()))
        vstore(job.adt + at, vselect(real, adt, vzero()))
        vstore(job.sig + at, vselect(real, sig, vzero()))
    first += 3 * heads
    for r in range(low, high):
        n = 0
        while n < ANGLES:
            vstore(job.rate + (row * shape.length + token + r) * ANGLES + n,
                   vmul(vtanh(vload(first + r * width + n)), vset(PI)))
            n += vlanes


cdef void prepare_job(void* arg, int thread) noexcept nogil:
    cdef PrepareJob* job = <PrepareJob*> arg
    cdef Shape* shape = &job.shape
    cdef float* scratch = job.scratch + thread * job.scratch_size
    cdef Py_ssize_t unit, row, chunk, column, h, t, at
    while True:
        unit = next_unit_in_turn(&job.counter)
        if unit >= shape.batch * shape.chunks:
            return
        row = unit // shape.chunks
        chunk = unit % shape.chunks
        column = 0
        while column < CHUNK:
            prepare_tokens(job, row, chunk, column, scratch)
            column += vlanes
        for h in range(shape.heads):
            at = (row * shape.heads + h) * shape.plane
            if chunk == 0:
                for t in range(shape.buffered):
                    job.dt[at + t] = job.state.dt[(row * CHUNK + t) * shape.heads + h]
                    job.sig[at + t] = job.state.sig[(row * CHUNK + t) * shape.heads + h]
                    job.adt[at + t] = job.state.adt[(row * CHUNK + t) * shape.heads + h]
            if chunk == shape.chunks - 1:
                memset(job.dt + at + shape.chunks * CHUNK, 0, PLANE_PAD * sizeof(float))
                memset(job.sig + at + shape.chunks * CHUNK, 0, PLANE_PAD * sizeof(float))
                memset(job.adt + at + shape.chunks * CHUNK, 0, PLANE_PAD * sizeof(float))


# ---- one (row, head) -----------------------------------------------------------------------------------------------

cdef struct MixJob:
    Shape shape
    State state
    const float* proj
    const float* B
    const float* C
    const float* rate
    const float* dt
    const float* sig
    const float* adt
    const float* B_bias          # (H, 128)
    const float* C_bias
    const float* D
    float* gate                  # (B * L, inner)
    # new values of a carried state; NULL without one
    float* new_theta             # (B, H, 32)
    float* new_h                 # (B, H, 64, 128); NULL when the open chunk stays open
    float* new_qrot              # (B, kept, H, 128): rows that this call adds to the last chunk
    float* new_krot
    float* new_v                 # (B, kept, H, 64)
    float* new_dt                # (B, kept, H)
    float* new_sig
    float* new_adt
    # reports of a direct call, or NULL
    float* h_last
    float* k_last
    float* v_last
    # what backward needs, or NULL; item = (row * heads + head) * chunks + chunk
    float* tape_h                # the state that enters the chunk, (items, 128, 64)
    float* tape_cos              # (items, 32, 64)
    float* tape_sin
    float* skip                  # (B * L, inner)
    float* scratch
    Py_ssize_t counter


cdef struct MixScratch:
    float* qrot
    float* krot
    float* ks
    float* h                     # [n][p]
    float* increment
    float* cosine
    float* sine
    float* theta                 # [t][32], then [32][t]
    float* scores
    float* decay
    float* v
    float* vs
    float* inner
    float* carried
    float* gamma
    float* scale
    float* total
    float* from_start
    float* to_end
    float* diagonal              # q . k before rotation

cdef enum:
    MIX_SCRATCH = 5 * TALL + 9 * SQUARE + 6 * CHUNK


cdef inline float* take(float** at, Py_ssize_t n) noexcept nogil:
    cdef float* taken = at[0]
    at[0] = taken + n
    return taken


cdef void mix_scratch(float* memory, MixScratch* s) noexcept nogil:
    s.qrot = take(&memory, TALL)
    s.krot = take(&memory, TALL)
    s.ks = take(&memory, TALL)
    s.h = take(&memory, TALL)
    s.increment = take(&memory, TALL)
    s.cosine = take(&memory, SQUARE // 2)
    s.sine = take(&memory, SQUARE // 2)
    s.theta = take(&memory, 2 * SQUARE)
    s.scores = take(&memory, SQUARE)
    s.decay = take(&memory, SQUARE)
    s.v = take(&memory, SQUARE)
    s.vs = take(&memory, SQUARE)
    s.inner = take(&memory, SQUARE)
    s.carried = take(&memory, SQUARE)
    s.gamma = take(&memory, CHUNK)
    s.scale = take(&memory, CHUNK)
    s.total = take(&memory, CHUNK)
    s.from_start = take(&memory, CHUNK)
    s.to_end = take(&memory, CHUNK)
    s.diagonal = take(&memory, CHUNK)


cdef inline vf wrap_angle(vf theta) noexcept nogil:
    """theta - 2 pi floor(theta / 2 pi), the product and the difference fused."""
    return vfma(vset(-TWO_PI), vfloor(vdiv(theta, vset(TWO_PI))), theta)


cdef void turn_angles(const float* rate, const float* dt, Py_ssize_t first, Py_ssize_t real, float* theta, float* rows,
                      float* cosine, float* sine) noexcept nogil:
    """Advance theta (32) over the new tokens of a chunk; cosine and sine (32, 64) of every step.

    ``rate`` is the row of token ``first``. ``rows`` is scratch for 2 * 64 * 64 floats.
    """
    cdef Py_ssize_t t, r
    cdef vf run[ANGLE_VECTORS]
    cdef vf sine_of, cosine_of
    cdef float* turned = rows + SQUARE
    for r in range(ANGLE_VECTORS):
        run[r] = vload(theta + r * vlanes)
    memset(rows, 0, CHUNK * ANGLES * sizeof(float))
    for t in range(first, real):
        for r in range(ANGLE_VECTORS):
            run[r] = wrap_angle(vadd(run[r], vmul(vload(rate + (t - first) * ANGLES + r * vlanes), vset(dt[t]))))
            vstore(rows + t * ANGLES + r * vlanes, run[r])
    for r in range(ANGLE_VECTORS):
        vstore(theta + r * vlanes, run[r])
    transpose(rows, ANGLES, CHUNK, ANGLES, turned, CHUNK)
    for r in range(ANGLES):
        t = first - first % vlanes
        while t < real:
            vsincos(vload(turned + r * CHUNK + t), &sine_of, &cosine_of)
            vstore(sine + r * CHUNK + t, vflush(sine_of))
            vstore(cosine + r * CHUNK + t, vflush(cosine_of))
            t += vlanes


cdef void key_scales(const float* dt, const float* sig, float* gamma, float* scale) noexcept nogil:
    """gamma = dt sigma and the scale of k, gamma + the next token's dt (1 - sigma), for the 64 tokens of a chunk.

    The planes go on with zeros, so the last token of all adds +0.
    """
    cdef Py_ssize_t t = 0
    cdef vf own
    while t < CHUNK:
        own = vmul(vload(dt + t), vload(sig + t))
        vstore(gamma + t, own)
        vstore(scale + t, vadd(own, vmul(vload(dt + t + 1), vsub(vset(1.0), vload(sig + t + 1)))))
        t += vlanes


cdef void rotate_chunk(const float* B, const float* C, const float* B_bias, const float* C_bias, const float* cosine,
                       const float* sine, const float* scale, Py_ssize_t first, Py_ssize_t real,
                       float* qrot, float* krot, float* ks, float* diagonal) noexcept nogil:
    """Biased and rotated q, k, scaled k, and q . k before rotation, for the lanes of tokens first..real."""
    cdef Py_ssize_t low = first - first % vlanes, t, n = 0
    cdef vf q0, q1, k0, k1, cosine_of, sine_of, dot, by, x, B0, B1, C0, C1
    memset(diagonal, 0, CHUNK * sizeof(float))
    while n < STATE:
        B0 = vset(B_bias[n])
        B1 = vset(B_bias[n + 1])
        C0 = vset(C_bias[n])
        C1 = vset(C_bias[n + 1])
        t = low
        while t < real:
            q0 = vadd(vload(C + n * CHUNK + t), C0)
            q1 = vadd(vload(C + (n + 1) * CHUNK + t), C1)
            k0 = vadd(vload(B + n * CHUNK + t), B0)
            k1 = vadd(vload(B + (n + 1) * CHUNK + t), B1)
            dot = vfma(q0, k0, vload(diagonal + t))
            vstore(diagonal + t, vfma(q1, k1, dot))
            if n < 2 * ANGLES:
                cosine_of = vload(cosine + n // 2 * CHUNK + t)
                sine_of = vload(sine + n // 2 * CHUNK + t)
                x = vsub(vmul(q0, cosine_of), vmul(q1, sine_of))
                q1 = vadd(vmul(q0, sine_of), vmul(q1, cosine_of))
                q0 = x
                x = vsub(vmul(k0, cosine_of), vmul(k1, sine_of))
                k1 = vadd(vmul(k0, sine_of), vmul(k1, cosine_of))
                k0 = x
            by = vload(scale + t)
            vstore(qrot + n * CHUNK + t, q0)
            vstore(qrot + (n + 1) * CHUNK + t, q1)
            vstore(krot + n * CHUNK + t, k0)
            vstore(krot + (n + 1) * CHUNK + t, k1)
            vstore(ks + n * CHUNK + t, vmul(k0, by))
            vstore(ks + (n + 1) * CHUNK + t, vmul(k1, by))
            t += vlanes
        n += 2


cdef void load_buffered(MixJob* job, Py_ssize_t row, Py_ssize_t head, MixScratch* s) noexcept nogil:
    """v and the scaled rotated k of the buffered tokens, which open chunk 0."""
    cdef Py_ssize_t heads = job.shape.heads, buffered = job.shape.buffered, at = row * CHUNK * heads + head, t, n
    cdef float* k = s.increment
    for t in range(buffered):
        memcpy(s.v + t * HEAD, job.state.v + (at + t * heads) * HEAD, HEAD * sizeof(float))
    transpose(job.state.krot + at * STATE, heads * STATE, CHUNK, STATE, k, CHUNK)
    for n in range(STATE):
        t = 0
        while t < buffered:
            vstore(s.ks + n * CHUNK + t, vselect(lanes_below(buffered - t),
                                                 vmul(vload(k + n * CHUNK + t), vload(s.scale + t)),
                                                 vload(s.ks + n * CHUNK + t)))
            t += vlanes


cdef void apply_pending(MixJob* job, Py_ssize_t row, Py_ssize_t head, const float* dt, const float* sig,
                        float* h) noexcept nogil:
    """h += (v k) dt (1 - sigma) with the pending k and v of the state and the first token's dt and sigma."""
    cdef const float* k = job.state.pending_k + (row * job.shape.heads + head) * STATE
    cdef const float* v = job.state.pending_v + (row * job.shape.heads + head) * HEAD
    cdef vf by = vset(smul(dt[0], ssub(1.0, sig[0])))
    cdef Py_ssize_t n, p
    for n in range(STATE):
        p = 0
        while p < HEAD:
            vstore(h + n * HEAD + p, vadd(vload(h + n * HEAD + p), vmul(vmul(vload(v + p), vset(k[n])), by)))
            p += vlanes


cdef void carry_state(const float* h, const float* ks, const float* v, const float* to_end, float decay,
                      Py_ssize_t real, float* vs, float* increment, float* out) noexcept nogil:
    """out = decay h + sum over tokens of ks (v to_end); ``out`` may be ``h``. A short chunk counts rows of +0."""
    cdef Py_ssize_t i, p, n
    cdef vf by = vset(decay), x
    for i in range(real):
        p = 0
        while p < HEAD:
            vstore(vs + i * HEAD + p, vmul(vload(v + i * HEAD + p), vset(to_end[i])))
            p += vlanes
    product_nn(ks, vs, STATE, real, increment)
    n = 0
    while n < TALL:
        x = vload(increment + n)
        if real < CHUNK:
            x = vadd(x, vzero())
        vstore(out + n, vfma(by, vload(h + n), x))
        n += vlanes


cdef void gate_rows(MixJob* job, Py_ssize_t row, Py_ssize_t head, Py_ssize_t start, Py_ssize_t first, Py_ssize_t real,
                    MixScratch* s) noexcept nogil:
    """Skip connection and gate of the new tokens of a chunk; ``start`` is the call's token of column 0."""
    cdef Py_ssize_t i, p, token
    cdef vf through, total
    cdef const float* z
    for i in range(first, real):
        token = row * job.shape.length + start + i
        z = job.proj + token * job.shape.width + head * HEAD
        through = vset(sadd(job.D[head], smul(s.diagonal[i], s.gamma[i])))
        if start + i + CHUNK < job.shape.length:
            p = 0
            while p < HEAD:      # the same row of the next chunk
                prefetch(z + CHUNK * job.shape.width + p)
                prefetch(z + CHUNK * job.shape.width + job.shape.inner + p)
                p += 16
        p = 0
        while p < HEAD:
            total = vadd(vmul(vload(s.carried + i * HEAD + p), vset(s.from_start[i])), vload(s.inner + i * HEAD + p))
            total = vadd(total, vmul(through, vload(s.v + i * HEAD + p)))
            if job.skip != NULL:
                vstream(job.skip + token * job.shape.inner + head * HEAD + p, total)
            vstore(job.gate + token * job.shape.inner + head * HEAD + p, vmul(total, vsilu(vflush(vload(z + p)))))
            p += vlanes


cdef void keep_rows(MixJob* job, Py_ssize_t row, Py_ssize_t head, Py_ssize_t first, Py_ssize_t real, const float* dt,
                    const float* sig, const float* adt, MixScratch* s) noexcept nogil:
    """The rows that this call adds to the last chunk, and the reports of its last token."""
    cdef Py_ssize_t heads = job.shape.heads, kept = real - first, t, at
    if job.new_qrot != NULL:
        at = (row * kept * heads + head) * STATE
        state_rows(s.qrot, first, real, job.new_qrot + at, heads * STATE, False)
        state_rows(s.krot, first, real, job.new_krot + at, heads * STATE, False)
        for t in range(first, real):
            at = (row * kept + t - first) * heads + head
            flush_all(job.new_qrot + at * STATE, STATE)
            flush_all(job.new_krot + at * STATE, STATE)
            memcpy(job.new_v + at * HEAD, s.v + t * HEAD, HEAD * sizeof(float))
            job.new_dt[at] = dt[t]
            job.new_sig[at] = sig[t]
            job.new_adt[at] = adt[t]
    if job.k_last != NULL:
        state_rows(s.krot, real - 1, real, job.k_last + (row * heads + head) * STATE, STATE, False)
        flush_all(job.k_last + (row * heads + head) * STATE, STATE)
        memcpy(job.v_last + (row * heads + head) * HEAD, s.v + (real - 1) * HEAD, HEAD * sizeof(float))


cdef void mix_head(MixJob* job, Py_ssize_t row, Py_ssize_t head, MixScratch* s) noexcept nogil:
    cdef Shape* shape = &job.shape
    cdef Py_ssize_t line = row * shape.heads + head, chunk, first, real, start, t, item
    cdef const float* dt = job.dt + line * shape.plane
    cdef const float* sig = job.sig + line * shape.plane
    cdef const float* adt = job.adt + line * shape.plane
    cdef const float* values = job.proj + row * shape.length * shape.width + shape.inner + head * HEAD
    cdef float theta[ANGLES]
    cdef float* cosine = s.cosine
    cdef float* sine = s.sine
    cdef float* h = s.h
    cdef float* h_next = s.h
    cdef bint last
    if job.tape_h != NULL:
        h = job.tape_h + line * shape.chunks * TALL
    if job.state.h != NULL:
        memcpy(theta, job.state.theta + line * ANGLES, sizeof(theta))
        transpose(job.state.h + line * TALL, STATE, HEAD, STATE, h, HEAD)
        if job.state.pending_k != NULL:
            apply_pending(job, row, head, dt, sig, h)
    else:
        memset(theta, 0, sizeof(theta))
        memset(h, 0, TALL * sizeof(float))
    for chunk in range(shape.chunks):
        last = chunk == shape.chunks - 1
        start = chunk * CHUNK - shape.buffered
        first = -start if start < 0 else 0
        real = shape.tokens - chunk * CHUNK
        if real > CHUNK:
            real = CHUNK
        if job.tape_h != NULL:
            item = line * shape.chunks + chunk
            cosine = job.tape_cos + item * (TALL // 4)
            sine = job.tape_sin + item * (TALL // 4)
            h = job.tape_h + item * TALL
            h_next = s.h if last else h + TALL
        if last and job.new_h != NULL:
            transpose(h, HEAD, STATE, HEAD, job.new_h + line * TALL, STATE)
            flush_all(job.new_h + line * TALL, TALL)
        key_scales(dt, sig, s.gamma, s.scale)
        running_decay(adt, real, s.total, s.from_start, s.to_end)
        if first < real:
            turn_angles(job.rate + (row * shape.length + start + first) * ANGLES, dt, first, real, theta, s.theta,
                        cosine, sine)
            t = (row * shape.chunks + chunk) * TALL
            rotate_chunk(job.B + t, job.C + t, job.B_bias + head * STATE, job.C_bias + head * STATE, cosine, sine,
                         s.scale, first, real, s.qrot, s.krot, s.ks, s.diagonal)
        if first > 0:
            load_buffered(job, row, head, s)
        for t in range(first, real):
            memcpy(s.v + t * HEAD, values + (start + t) * shape.width, HEAD * sizeof(float))
        if first < real:
            product_tn_lower(s.qrot, s.ks, first, real, STATE, s.scores)
            decay_matrix(adt, first, real, s.decay)
            mask_scores(s.scores, s.decay, first, real, s.scores)
            product_nn_lower(s.scores, s.v, first, real, s.inner)
            product_tn(s.qrot, h, first, real, STATE, s.carried)
            gate_rows(job, row, head, start, first, real, s)
        if last:
            if job.tape_h == NULL:
                keep_rows(job, row, head, first, real, dt, sig, adt, s)
            if job.new_theta != NULL:
                for t in range(ANGLES):
                    job.new_theta[line * ANGLES + t] = sflush(theta[t])
        if not last or job.h_last != NULL:
            carry_state(h, s.ks, s.v, s.to_end, sexp(s.total[CHUNK - 1]), real, s.vs, s.increment, h_next)
            if last:
                transpose(h_next, HEAD, STATE, HEAD, job.h_last + line * TALL, STATE)
                flush_all(job.h_last + line * TALL, TALL)
        dt += CHUNK
        sig += CHUNK
        adt += CHUNK


cdef void mix_job(void* arg, int thread) noexcept nogil:
    cdef MixJob* job = <MixJob*> arg
    cdef MixScratch s
    cdef Py_ssize_t unit
    mix_scratch(job.scratch + thread * MIX_SCRATCH, &s)
    while True:
        unit = next_unit_in_turn(&job.counter)
        if unit >= job.shape.batch * job.shape.heads:
            return
        mix_head(job, unit // job.shape.heads, unit % job.shape.heads, &s)
