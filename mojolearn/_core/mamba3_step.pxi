# One token of one Mamba-3 head (numerics, forward 5, for L = 1). The open chunk is not replayed: the carry keeps what a
# further token needs of it, in the layout that lets lanes run across tokens or channels:
#
#   ks  [n][t]   scaled rotated keys of the chunk's tokens, in blocks of 16 tokens
#   h   [n][p]   the state that enters the chunk
#   seg [t]      running sums of A dt from token t + 1 to the newest
#
# All three can be rebuilt from the documented state (`rebuild_carry`). They change at once; the documented state changes
# in `commit_head` only, when the whole step has succeeded. After a failed step the carry is rebuilt.

cdef extern from "state_chains.h" nogil:
    ctypedef struct state_token:
        const float* qrot
        const float* q
        const float* k
        float* ks
        const float* h
        const float* previous
        const float* fresh
        const float* next_ks
        const float* next_h
        Py_ssize_t newest
        vf scores[1]        # CHUNK_VECTORS of them
        vf carried[1]
        float dot
    enum:
        KS_COLUMNS
    Py_ssize_t ks_column(Py_ssize_t token)
    void put_column(float* ks, Py_ssize_t token, const float* values)
    void state_chains(state_token* token)

cdef struct MambaWeights:
    const float* dt_bias         # (H,)
    const float* B_norm          # (128,)
    const float* C_norm
    const float* B_bias          # (H, 128)
    const float* C_bias
    const float* D               # (H,)


cdef struct MambaCarry:
    Py_ssize_t heads
    Py_ssize_t buffered          # tokens of the open chunk, 0..64
    # the documented state, rows of one batch
    float* theta                 # (B, H, 32)
    float* h                     # (B, H, 64, 128)
    float* qrot                  # (B, 64, H, 128)
    float* krot
    float* v                     # (B, 64, H, 64)
    float* dt                    # (B, 64, H)
    float* sig
    float* adt
    # the carry
    float* ks_cache              # (B, H, 4, 128, 16)
    float* h_cache               # (B, H, 128, 64)
    float* seg_cache             # (B, H, 64)
    # values of the new token until they are committed, (B, H, NEW_FLOATS)
    float* new


cdef enum:
    # offsets in the values of a new token
    NEW_THETA = 0
    NEW_QROT = 32
    NEW_KROT = 160
    NEW_DT = 288
    NEW_SIG = 289
    NEW_ADT = 290
    NEW_FLOATS = 304
    STEP_SCRATCH = 3 * TALL + 2 * SQUARE    # of a thread


cdef void rebuild_carry(MambaCarry* carry, Py_ssize_t row, Py_ssize_t head) noexcept nogil:
    """Fill the carry of one head from the documented state."""
    cdef Py_ssize_t heads = carry.heads, line = row * heads + head, t, j, at
    cdef float* ks = carry.ks_cache + line * TALL
    cdef float* seg = carry.seg_cache + line * CHUNK
    cdef float column[STATE]
    cdef float scale, beta
    transpose(carry.h + line * TALL, STATE, HEAD, STATE, carry.h_cache + line * TALL, HEAD)
    memset(ks, 0, TALL * sizeof(float))
    memset(seg, 0, CHUNK * sizeof(float))
    for t in range(carry.buffered):
        at = (row * CHUNK + t) * heads + head
        scale = smul(carry.dt[at], carry.sig[at])
        if t + 1 < carry.buffered:      # the newest token's scale is completed by its successor
            beta = smul(carry.dt[at + heads], ssub(1.0, carry.sig[at + heads]))
            scale = sadd(scale, beta)
        scale_row(carry.krot + at * STATE, scale, column)
        put_column(ks, t, column)
        for j in range(t):
            seg[j] = sadd(seg[j], carry.adt[at])


cdef void seal_chunk(MambaCarry* carry, Py_ssize_t row, Py_ssize_t head, float* scratch) noexcept nogil:
    """Fold the full chunk into the state that enters the next one."""
    cdef Py_ssize_t heads = carry.heads, line = row * heads + head, t, n
    cdef float* v = scratch + 2 * TALL
    cdef float* ks = v + 2 * SQUARE
    cdef const float* blocks = carry.ks_cache + line * TALL
    cdef float total[CHUNK]
    cdef float from_start[CHUNK]
    cdef float to_end[CHUNK]
    cdef float adt[CHUNK]
    for t in range(CHUNK):
        adt[t] = carry.adt[(row * CHUNK + t) * heads + head]
        memcpy(v + t * HEAD, carry.v + ((row * CHUNK + t) * heads + head) * HEAD, HEAD * sizeof(float))
    for n in range(STATE):
        t = 0
        while t < CHUNK:
            memcpy(ks + n * CHUNK + t, blocks + ks_column(t) + n * KS_COLUMNS, KS_COLUMNS * sizeof(float))
            t += KS_COLUMNS
    running_decay(adt, CHUNK, total, from_start, to_end)
    carry_state(carry.h_cache + line * TALL, ks, v, to_end, sexp(total[CHUNK - 1]), CHUNK,
                v + SQUARE, scratch, carry.h_cache + line * TALL)


cdef void norm_state_row(const float* x, const float* weight, float* out) noexcept nogil:
    """RMS norm of 128 columns, one chain."""
    cdef float total = 0, scale
    cdef Py_ssize_t n
    for n in range(STATE):
        total = sfma(x[n], x[n], total)
    scale = sflush(srsqrt(sflush(sadd(sdiv(total, <float> STATE), NORM_EPS))))
    n = 0
    while n < STATE:
        vstore(out + n, vmul(vload(weight + n), vmul(vload(x + n), vset(scale))))
        n += vlanes


cdef inline void scale_row(const float* x, float scale, float* out) noexcept nogil:
    cdef Py_ssize_t n = 0
    while n < STATE:
        vstore(out + n, vmul(vload(x + n), vset(scale)))
        n += vlanes


cdef inline void fetch(const float* data, Py_ssize_t count) noexcept nogil:
    """Ask for floats that will be needed soon."""
    cdef Py_ssize_t i = 0
    while i < count:
        prefetch(data + i)
        i += 16


cdef void step_head(const MambaWeights* weights, MambaCarry* carry, Py_ssize_t row, Py_ssize_t head, Py_ssize_t then,
                    const float* proj, Py_ssize_t width, const float* B, const float* C, float* gate, float* scratch) noexcept nogil:
    """Gate row (64) of one head from the token's projection ``proj`` and its normed B and C rows (128). ``then``: the
    line (row, head) that this thread will probably do next."""
    cdef Py_ssize_t heads = carry.heads, line = row * heads + head, inner = heads * HEAD
    cdef Py_ssize_t newest, at, n, j, p, vectors
    cdef float* ks = carry.ks_cache + line * TALL
    cdef float* h = carry.h_cache + line * TALL
    cdef float* seg = carry.seg_cache + line * CHUNK
    cdef float* new = carry.new + line * NEW_FLOATS
    cdef float* qrot = new + NEW_QROT
    cdef float* krot = new + NEW_KROT
    cdef const float* tail = proj + 2 * inner + 2 * STATE
    cdef const float* B_bias = weights.B_bias + head * STATE
    cdef const float* C_bias = weights.C_bias + head * STATE
    cdef const float* values = proj + inner + head * HEAD
    cdef float q[STATE]
    cdef float k[STATE]
    cdef float cosine[ANGLES]
    cdef float sine[ANGLES]
    cdef float weight[CHUNK]
    cdef float previous[STATE]
    cdef float fresh[STATE]
    cdef state_token token
    cdef vf inside[CHUNK_VECTORS]
    cdef vf x, y, sine_of, cosine_of, decay
    cdef float dt, adt, sig, gamma, scale, total, q0, q1, through
    for j in range(carry.buffered % CHUNK):      # of all tokens and heads together, too far apart for the processor to guess
        p = 0
        while p < HEAD:
            prefetch_far(carry.v + ((row * CHUNK + j) * heads + head) * HEAD + p)
            p += 16
    # of the next head, what is far apart or was just written by another thread
    at = (then // heads * CHUNK + (carry.buffered + CHUNK - 1) % CHUNK) * heads + then % heads
    fetch(carry.krot + at * STATE, STATE)
    fetch(carry.theta + then * ANGLES, ANGLES)
    fetch(proj + (then // heads - row) * width + then % heads * HEAD, HEAD)
    fetch(proj + (then // heads - row) * width + inner + then % heads * HEAD, HEAD)
    dt = sflush(vget(vsoftplus(vset(sadd(tail[head], weights.dt_bias[head]))), 0))
    adt = sflush(vget(vmul(decay_rate(vset(tail[heads + head])), vset(dt)), 0))
    sig = sflush(vget(vsigmoid(vset(tail[2 * heads + head])), 0))

    # This token completes the scale of the one before it, and perhaps a chunk.
    token.previous = NULL
    if carry.buffered:
        newest = carry.buffered - 1
        at = (row * CHUNK + newest) * heads + head
        scale = sadd(smul(carry.dt[at], carry.sig[at]), smul(dt, ssub(1.0, sig)))
        scale_row(carry.krot + at * STATE, scale, previous)
        token.previous = previous
    if carry.buffered == CHUNK:
        put_column(ks, newest, previous)
        seal_chunk(carry, row, head, scratch)
        memset(seg, 0, CHUNK * sizeof(float))
        newest = 0
        token.previous = NULL
    else:
        newest = carry.buffered

    n = 0
    while n < ANGLES:
        x = vmul(vmul(vtanh(vload(tail + 3 * heads + n)), vset(PI)), vset(dt))
        x = vflush(wrap_angle(vadd(vload(carry.theta + line * ANGLES + n), x)))
        vstore(new + NEW_THETA + n, x)
        vsincos(x, &sine_of, &cosine_of)
        vstore(sine + n, vflush(sine_of))
        vstore(cosine + n, vflush(cosine_of))
        n += vlanes
    n = 0
    while n < STATE:
        vstore(q + n, vadd(vload(C + n), vload(C_bias + n)))
        vstore(k + n, vadd(vload(B + n), vload(B_bias + n)))
        n += vlanes
    gamma = smul(dt, sig)
    scale = sadd(gamma, 0.0)
    for j in range(ANGLES):
        q0 = q[2 * j]
        q1 = q[2 * j + 1]
        qrot[2 * j] = sflush(ssub(smul(q0, cosine[j]), smul(q1, sine[j])))
        qrot[2 * j + 1] = sflush(sadd(smul(q0, sine[j]), smul(q1, cosine[j])))
        q0 = k[2 * j]
        q1 = k[2 * j + 1]
        krot[2 * j] = sflush(ssub(smul(q0, cosine[j]), smul(q1, sine[j])))
        krot[2 * j + 1] = sflush(sadd(smul(q0, sine[j]), smul(q1, cosine[j])))
    n = 2 * ANGLES
    while n < STATE:
        vstore(qrot + n, vflush(vload(q + n)))
        vstore(krot + n, vflush(vload(k + n)))
        n += vlanes

    vectors = (newest + vlanes - 1) // vlanes
    scale_row(krot, scale, fresh)
    token.qrot, token.q, token.k, token.ks, token.h, token.fresh, token.newest = qrot, q, k, ks, h, fresh, newest
    token.next_ks = carry.ks_cache + then * TALL
    token.next_h = carry.h_cache + then * TALL
    state_chains(&token)
    for j in range(CHUNK_VECTORS):
        inside[j] = vzero()
    for j in range(vectors):
        decay = vadd(vload(seg + j * vlanes), vset(adt))
        vstore(seg + j * vlanes, decay)
        vstore(weight + j * vlanes, vmul(token.scores[j], vexp(decay)))
    if newest < CHUNK:
        seg[newest] = 0
    for j in range(newest):
        x = vset(weight[j])
        for p in range(CHUNK_VECTORS):
            y = vload(carry.v + ((row * CHUNK + j) * heads + head) * HEAD + p * vlanes)
            inside[p] = vfma(x, y, inside[p])
    total = adt
    if newest:
        # cs of this token: the running sum of the chunk, in order from its first token
        total = 0
        for j in range(newest):
            total = sadd(total, carry.adt[(row * CHUNK + j) * heads + head]) if j else carry.adt[row * CHUNK * heads + head]
        total = sadd(total, adt)
    decay = vexp(vset(total))
    through = sadd(weights.D[head], smul(token.dot, gamma))
    for p in range(CHUNK_VECTORS):
        x = vadd(vmul(token.carried[p], decay), inside[p])
        x = vadd(x, vmul(vset(through), vload(values + p * vlanes)))
        y = vsilu(vflush(vload(proj + head * HEAD + p * vlanes)))
        vstore(gate + head * HEAD + p * vlanes, vflush(vmul(x, y)))
    new[NEW_DT] = dt
    new[NEW_SIG] = sig
    new[NEW_ADT] = adt


cdef void commit_head(MambaCarry* carry, Py_ssize_t row, Py_ssize_t head, const float* proj) noexcept nogil:
    """Write what the step of one head has made into the documented state, `buffered` apart."""
    cdef Py_ssize_t heads = carry.heads, line = row * heads + head, p
    cdef Py_ssize_t newest = carry.buffered % CHUNK
    cdef Py_ssize_t at = (row * CHUNK + newest) * heads + head
    cdef const float* new = carry.new + line * NEW_FLOATS
    if carry.buffered == CHUNK:
        transpose(carry.h_cache + line * TALL, HEAD, STATE, HEAD, carry.h + line * TALL, STATE)
        flush_all(carry.h + line * TALL, TALL)
    memcpy(carry.theta + line * ANGLES, new + NEW_THETA, ANGLES * sizeof(float))
    memcpy(carry.qrot + at * STATE, new + NEW_QROT, STATE * sizeof(float))
    memcpy(carry.krot + at * STATE, new + NEW_KROT, STATE * sizeof(float))
    for p in range(HEAD):
        carry.v[at * HEAD + p] = sflush(proj[heads * HEAD + head * HEAD + p])
    carry.dt[at] = new[NEW_DT]
    carry.sig[at] = new[NEW_SIG]
    carry.adt[at] = new[NEW_ADT]
