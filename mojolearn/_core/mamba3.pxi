"""Kernels of the Mamba-3 block (numerics, forward 5 and training 4.2).

Arrays are passed flat; their shapes stand in the comments of the job structures. ``threads`` never moves a bit.
"""
include "mamba3_tiles.pxi"
include "mamba3_forward.pxi"
include "mamba3_sums.pxi"
include "mamba3_backward.pxi"


cdef inline const float* source(const float[::1] x):
    if x is None:
        return NULL
    return &x[0]


cdef inline float* target(float[::1] x):
    if x is None:
        return NULL
    return &x[0]


cdef State make_state(tuple arrays):
    """Pointers of (theta, h, krot, v, dt, sig, adt, pending_k, pending_v), the last two None unless pending."""
    cdef State state
    memset(&state, 0, sizeof(State))
    if arrays is not None:
        state.theta = source(arrays[0])
        state.h = source(arrays[1])
        state.krot = source(arrays[2])
        state.v = source(arrays[3])
        state.dt = source(arrays[4])
        state.sig = source(arrays[5])
        state.adt = source(arrays[6])
        state.pending_k = source(arrays[7])
        state.pending_v = source(arrays[8])
    return state


def chunk_count(Py_ssize_t length, Py_ssize_t buffered):
    """Chunks that hold ``buffered + length`` tokens."""
    return make_shape(1, length, 1, buffered).chunks


def plane_length(Py_ssize_t length, Py_ssize_t buffered):
    """Row length of a plane of per-token scalars: whole chunks and some zeros."""
    return make_shape(1, length, 1, buffered).plane


def prepare_scratch(Py_ssize_t heads):
    """Floats of scratch that one thread of `prepare` needs."""
    return (3 * heads + vlanes) * vlanes


def mix_scratch_size():
    """Floats of scratch that one thread of `mix` needs."""
    return MIX_SCRATCH


def prepare(const float[::1] proj, const float[::1] dt_bias, const float[::1] B_norm, const float[::1] C_norm,
            tuple state, float[::1] B, float[::1] C, float[::1] rate, float[::1] B_rstd, float[::1] C_rstd,
            float[::1] dt, float[::1] sig, float[::1] adt, float[:, ::1] scratch,
            Py_ssize_t batch, Py_ssize_t length, Py_ssize_t buffered, int threads):
    """B and C norms, angle rates and per-head scalars of every new token."""
    cdef PrepareJob job
    job.shape = make_shape(batch, length, dt_bias.shape[0], buffered)
    job.state = make_state(state)
    job.proj = &proj[0]
    job.dt_bias = &dt_bias[0]
    job.B_norm = &B_norm[0]
    job.C_norm = &C_norm[0]
    job.B = &B[0]
    job.C = &C[0]
    job.rate = &rate[0]
    job.B_rstd = &B_rstd[0]
    job.C_rstd = &C_rstd[0]
    job.dt = &dt[0]
    job.sig = &sig[0]
    job.adt = &adt[0]
    job.scratch = &scratch[0, 0]
    job.scratch_size = scratch.shape[1]
    job.counter = 0
    with nogil:
        run_in_turns(prepare_job, &job, threads)


def mix(const float[::1] proj, const float[::1] B, const float[::1] C, const float[::1] rate, const float[::1] dt,
        const float[::1] sig, const float[::1] adt, const float[::1] B_bias, const float[::1] C_bias,
        const float[::1] D, tuple state, float[::1] gate, tuple new, tuple reports, tuple tape, float[:, ::1] scratch,
        Py_ssize_t batch, Py_ssize_t length, Py_ssize_t buffered, int threads):
    """The recurrence over chunks, skip connection and gate.

    ``state`` as for `prepare`; ``new`` (theta, h or None, qrot, krot, v, dt, sig, adt), ``reports`` (h, k, v) and
    ``tape`` (h, cos, sin, skip) are None where they are not wanted.
    """
    cdef MixJob job
    memset(&job, 0, sizeof(MixJob))
    job.shape = make_shape(batch, length, D.shape[0], buffered)
    job.state = make_state(state)
    job.proj = &proj[0]
    job.B = &B[0]
    job.C = &C[0]
    job.rate = &rate[0]
    job.dt = &dt[0]
    job.sig = &sig[0]
    job.adt = &adt[0]
    job.B_bias = &B_bias[0]
    job.C_bias = &C_bias[0]
    job.D = &D[0]
    job.gate = &gate[0]
    if new is not None:
        job.new_theta = target(new[0])
        job.new_h = target(new[1])
        job.new_qrot = target(new[2])
        job.new_krot = target(new[3])
        job.new_v = target(new[4])
        job.new_dt = target(new[5])
        job.new_sig = target(new[6])
        job.new_adt = target(new[7])
    if reports is not None:
        job.h_last = target(reports[0])
        job.k_last = target(reports[1])
        job.v_last = target(reports[2])
    if tape is not None:
        job.tape_h = target(tape[0])
        job.tape_cos = target(tape[1])
        job.tape_sin = target(tape[2])
        job.skip = target(tape[3])
    job.scratch = &scratch[0, 0]
    job.counter = 0
    with nogil:
        run_in_turns(mix_job, &job, threads)


cdef enum:
    SUMS_THREADS = 16       # of the sums over a state, whose scratch is megabytes a thread


cdef int sums_threads(Py_ssize_t groups, int threads):
    return <int> min(threads, SUMS_THREADS, groups)


def backward_scratch(Py_ssize_t lines, Py_ssize_t chunks, bint exact_order, int threads):
    """Floats of scratch that `backward` needs for ``lines`` = rows times heads."""
    if not exact_order:
        return threads * <Py_ssize_t> HEAD_SCRATCH
    return (threads * <Py_ssize_t> CHUNK_SCRATCH
            + sums_threads(state_sums_groups(lines, chunks), threads) * <Py_ssize_t> STATE_SUMS_SCRATCH)


def backward(const float[::1] dgate, const float[::1] proj, tuple panels, const float[::1] rate, tuple rstd,
             tuple scalars, tuple kept, tuple weights, float[::1] pack, tuple rows, tuple between,
             float[::1] scratch, Py_ssize_t batch, Py_ssize_t length, int threads, int mode=0):
    """Gradients of the projection and of the small weights' rows.

    ``panels`` (B, C), ``rate``, ``rstd`` (B, C), ``scalars`` (dt, sig, adt) and ``kept`` (h, cos, sin, skip) come from
    the forward; ``weights`` are (dt_bias, B_norm, C_norm, B_bias, C_bias, D); ``rows`` receives (D, B_bias, C_bias,
    B_norm, C_norm); ``between`` is scratch (dy, dh, state sums, four planes, dtheta, its totals).
    """
    cdef BackwardJob job
    cdef int summing
    memset(&job, 0, sizeof(BackwardJob))
    job.shape = make_shape(batch, length, (<object> weights[0]).shape[0], 0)
    summing = sums_threads(state_sums_groups(batch * job.shape.heads, job.shape.chunks), threads)
    job.dgate = source(dgate)
    job.proj = source(proj)
    job.B, job.C = source(panels[0]), source(panels[1])
    job.rate = source(rate)
    job.B_rstd, job.C_rstd = source(rstd[0]), source(rstd[1])
    job.dt, job.sig, job.adt = source(scalars[0]), source(scalars[1]), source(scalars[2])
    job.h, job.cosine, job.sine, job.skip = source(kept[0]), source(kept[1]), source(kept[2]), source(kept[3])
    job.dt_bias, job.B_norm, job.C_norm = source(weights[0]), source(weights[1]), source(weights[2])
    job.B_bias, job.C_bias, job.D = source(weights[3]), source(weights[4]), source(weights[5])
    job.pack = target(pack)
    job.dD, job.dB, job.dC = target(rows[0]), target(rows[1]), target(rows[2])
    job.dB_norm, job.dC_norm = target(rows[3]), target(rows[4])
    job.dy, job.dh, job.state_sum = target(between[0]), target(between[1]), target(between[2])
    job.dscale, job.ddt, job.dtrap = target(between[3]), target(between[4]), target(between[5])
    job.ddt_adt, job.dtheta, job.dtheta_total = target(between[6]), target(between[7]), target(between[8])
    job.scratch = &scratch[0]
    job.scratch_size = CHUNK_SCRATCH
    job.sums_scratch = job.scratch + threads * <Py_ssize_t> CHUNK_SCRATCH
    job.exact_order = mode == 0
    with nogil:
        if job.exact_order:
            run_in_turns(adjoint_job, &job, threads)
            if threads > summing:        # not all have scratch for sums
                run_in_turns(state_sums_job, &job, summing)
            job.counter = 0
            run_in_turns(chunk_job, &job, threads)
        else:
            job.scratch_size = HEAD_SCRATCH
            run_in_turns(head_job, &job, threads)
        job.counter = 0
        run_in_turns(angle_job, &job, threads)
        job.counter = 0
        run_in_turns(norm_job, &job, threads)
