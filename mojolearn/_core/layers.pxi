"""Norms, embedding, loss, random draws and optimizer updates.

Sums follow the profile (numerics page): a *chain* adds one term after another; a *fold* cuts a sum into leaves,
each a chain, and adds the leaves by pairs. Chains are latency bound one at a time, so ``vlanes`` of them run side by
side as lanes: of several rows, or of several leaves of one row, brought there by small transposes. Everything else is
element-wise.

Array arguments are checked by the callers. Where an output may be one of the inputs, the docstring says so.
"""
from libc.math cimport frexpf, signbit
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from mojolearn._core._pool cimport next_unit_in_turn, parallel_run, run_in_turns
from mojolearn._core.elementary cimport slog, ssqrt, vexp, vlog, vrsqrt, vsincos
from mojolearn._core.simd cimport *
from mojolearn._core.vectors cimport all_lanes_finite, load_lanes, store_lanes

include "fold.pxi"
include "row_sums.pxi"

cdef enum:
    BLOCK = 16384           # elements of one unit of element-wise work: 64 KiB, so that reads run ahead
    READ_BLOCK = 65536      # of work that only reads, from four places at once
    LEAVES_PER_UNIT = 64
    SCRATCH = 65536         # floats of a thread's loss scratch, unless a single row needs more: half of a small L2
    WORDS = 256             # random words turned into values at a time

# ---- sums --------------------------------------------------------------------------------------------------------

cdef class FoldSum:
    """Fold of `total` values that arrive in pieces; a leaf that a piece leaves open is continued by the next.

    The sum depends on the values and their order only, never on where they were cut.

    Parameters
    ----------
    total : int
        How many values will come; it decides the size of a leaf.

    Examples
    --------
    One micro-batch after another::

        losses = layers.FoldSum(tokens_of_the_step)
        losses.add(row_loss)            # once for each micro-batch
        losses.result(divisor)
    """
    cdef Py_ssize_t leaf, filled, count
    cdef float open_leaf
    cdef float leaves[MOST_LEAVES]

    def __cinit__(self, Py_ssize_t total):
        self.leaf = profile_leaf(total)
        self.filled = self.count = 0
        self.open_leaf = 0.0

    def add(self, const float[::1] values):
        """Add the next values."""
        cdef Py_ssize_t i
        cdef uint64_t saved = fp_enter()
        for i in range(values.shape[0]):
            self.open_leaf = sadd(values[i], self.open_leaf)
            self.filled += 1
            if self.filled == self.leaf and self.count < MOST_LEAVES - 1:
                self.leaves[self.count] = self.open_leaf
                self.count += 1
                self.filled = 0
                self.open_leaf = 0.0
        fp_leave(saved)

    def result(self, float divisor=1.0):
        """Sum of what has come so far, divided by `divisor`; more values may follow."""
        cdef float leaves[MOST_LEAVES]
        cdef Py_ssize_t i, count = self.count
        cdef float sum_
        cdef uint64_t saved = fp_enter()
        for i in range(count):
            leaves[i] = self.leaves[i]
        if self.filled:
            leaves[count] = self.open_leaf
            count += 1
        sum_ = sflush(sdiv(fold_pairs(leaves, count), divisor))
        fp_leave(saved)
        return sum_


# ---- RMS norm ----------------------------------------------------------------------------------------------------

cdef struct NormJob:
    const float* x
    const float* w
    float* out
    float* sumsq
    Py_ssize_t rows
    Py_ssize_t width
    float eps
    bint lanes
    Py_ssize_t counter


cdef void norm_forward_job(void* arg, int tid) noexcept nogil:
    cdef NormJob* job = <NormJob*> arg
    cdef Py_ssize_t first
    while True:
        first = next_unit(&job.counter) * vlanes
        if first >= job.rows:
            return
        norm_rows(job.x + first * job.width, job.w, job.width, min(<Py_ssize_t> vlanes, job.rows - first), job.eps,
                  job.lanes, job.out + first * job.width, NULL if job.sumsq == NULL else job.sumsq + first)


def rms_norm_forward(const float[:, ::1] x, const float[::1] w, float eps, float[:, ::1] out, float[::1] sumsq,
                     bint lanes, int threads):
    """out = w * (x * rstd), rstd = 1 / sqrt(sumsq / d + eps), for rows of x (m, d).

    Parameters
    ----------
    x, out : (m, d) float32
        May be one array.
    w : (d,) float32
    sumsq : (m,) float32 or None
        Receives the rows' sums of squares for the backward pass.
    lanes : bool
        False: one chain a row. True: the 32 chains of the Mamba block norm.
    """
    cdef NormJob job
    job.x, job.w, job.out = &x[0, 0], &w[0], &out[0, 0]
    job.sumsq = NULL if sumsq is None else &sumsq[0]
    job.rows, job.width, job.eps, job.lanes, job.counter = x.shape[0], x.shape[1], eps, lanes, 0
    with nogil:
        parallel_run(norm_forward_job, &job, threads)


cdef struct NormBackwardJob:
    const float* dy
    const float* x
    const float* w
    const float* sumsq
    const float* residual
    float* dx
    float* rows_out
    Py_ssize_t rows
    Py_ssize_t width
    float eps
    bint collapsed
    Py_ssize_t counter


cdef inline void norm_gradient(vf dy, vf x, vf w, vf scale, vf shift, bint collapsed, vf* dx, vf* row) noexcept nogil:
    """Input and weight-row gradient of one vector of a row; `shift` multiplies x (see norm_backward_job)."""
    cdef vf dh = vmul(dy, w)
    if collapsed:
        dx[0] = vmul(scale, vsub(dh, vmul(x, shift)))
    else:
        dx[0] = vadd(vmul(dh, scale), vmul(shift, vadd(x, x)))
    row[0] = vflush(vmul(dy, vmul(x, scale)))


cdef void norm_backward_job(void* arg, int tid) noexcept nogil:
    cdef NormBackwardJob* job = <NormBackwardJob*> arg
    cdef float sums[vlanes]
    cdef float dots[vlanes]
    cdef float scales[vlanes]
    cdef float shifts[vlanes]
    cdef Py_ssize_t first, at, count, r, j, left, width = job.width
    cdef vf scale, shift, dot, dx, row
    while True:
        first = next_unit(&job.counter) * vlanes
        if first >= job.rows:
            return
        count = min(<Py_ssize_t> vlanes, job.rows - first)
        at = first * width
        memset(sums, 0, sizeof(sums))
        memset(dots, 0, sizeof(dots))
        if job.sumsq == NULL:
            row_chains(SQUARES, job.x + at, NULL, NULL, width, count, sums)
        else:
            for r in range(count):
                sums[r] = job.sumsq[first + r]
        row_chains(WEIGHTED_PRODUCTS, job.dy + at, job.x + at, job.w, width, count, dots)
        scale = inverse_rms(vload(sums), width, job.eps)
        dot = vload(dots)
        if job.collapsed:
            shift = vmul(vmul(scale, scale), vdiv(dot, vset(<float> width)))
        else:
            shift = vmul(vset(-0.5), vmul(dot, vmul(vmul(scale, scale), scale)))
            shift = vdiv(shift, vset(<float> width))
        vstore(scales, scale)
        vstore(shifts, shift)
        for r in range(count):
            at = (first + r) * width
            scale, shift = vset(scales[r]), vset(shifts[r])
            j = 0
            while j < width:
                left = width - j
                norm_gradient(load_lanes(job.dy + at + j, left), load_lanes(job.x + at + j, left),
                              load_lanes(job.w + j, left), scale,
                              shift, job.collapsed, &dx, &row)
                if job.residual != NULL:
                    dx = vadd(dx, load_lanes(job.residual + at + j, left))
                store_lanes(job.dx + at + j, vflush(dx), left)
                store_lanes(job.rows_out + at + j, row, left)
                j += vlanes


cdef void run_norm_backward(const float[:, ::1] dy, const float[:, ::1] x, const float[::1] w, const float[::1] sumsq,
                            float eps, const float[:, ::1] residual, float[:, ::1] dx, float[:, ::1] rows,
                            bint collapsed, int threads):
    cdef NormBackwardJob job
    job.dy, job.x, job.w, job.dx, job.rows_out = &dy[0, 0], &x[0, 0], &w[0], &dx[0, 0], &rows[0, 0]
    job.sumsq = job.residual = NULL
    if sumsq is not None:
        job.sumsq = &sumsq[0]
    if residual is not None:
        job.residual = &residual[0, 0]
    job.rows, job.width, job.eps, job.collapsed, job.counter = x.shape[0], x.shape[1], eps, collapsed, 0
    with nogil:
        parallel_run(norm_backward_job, &job, threads)


def rms_norm_backward(const float[:, ::1] dy, const float[:, ::1] x, const float[::1] w, const float[::1] sumsq,
                      float eps, const float[:, ::1] residual, float[:, ::1] dx, float[:, ::1] rows, int threads):
    """Gradient of the norm, node by node of its graph (final norm, transformer norms).

    Parameters
    ----------
    dy, x : (m, d) float32
    w : (d,) float32
    sumsq : (m,) float32 or None
        What the forward pass saved; None computes it (one chain a row).
    residual : (m, d) float32 or None
        Added to dx last.
    dx : (m, d) float32
        May be dy or residual.
    rows : (m, d) float32
        Receives every row's term of the weight gradient, which is its sum over columns. May be dy if dx is not.
    """
    run_norm_backward(dy, x, w, sumsq, eps, residual, dx, rows, False, threads)


def rms_norm_backward_collapsed(const float[:, ::1] dn, const float[:, ::1] x, const float[::1] w,
                                const float[::1] sumsq, float eps, const float[:, ::1] residual, float[:, ::1] dx,
                                float[:, ::1] rows, int threads):
    """Gradient of the norm in the collapsed form of the Mamba block norm; arguments as `rms_norm_backward`."""
    run_norm_backward(dn, x, w, sumsq, eps, residual, dx, rows, True, threads)


# ---- element-wise ------------------------------------------------------------------------------------------------

cdef struct AddJob:
    const float* a
    const float* b
    float* out
    Py_ssize_t n
    Py_ssize_t counter


cdef void add_job(void* arg, int tid) noexcept nogil:
    cdef AddJob* job = <AddJob*> arg
    cdef Py_ssize_t first, last, i
    while True:
        first = next_unit(&job.counter) * BLOCK
        if first >= job.n:
            return
        last = min(job.n, first + BLOCK)
        i = first
        while i < last:
            store_lanes(job.out + i, vflush(vadd(load_lanes(job.a + i, last - i), load_lanes(job.b + i, last - i))),
                        last - i)
            i += vlanes


def add(a, b, out, int threads):
    """out = a + b, for arrays of any one shape; out may be a or b."""
    cdef const float[::1] left = a.reshape(-1), right = b.reshape(-1)
    cdef float[::1] total = out.reshape(-1)
    cdef AddJob job
    job.a, job.b, job.out, job.n, job.counter = &left[0], &right[0], &total[0], total.shape[0], 0
    with nogil:
        parallel_run(add_job, &job, threads)


# Several arrays as one range of units: array s has the units from first_unit[s] to first_unit[s + 1].
cdef struct Piece:
    float* data             # what the work is about: values, gradients
    const float* second
    float* parameter
    float* moment
    float* moment_sq
    bint flag               # a value is not finite; the momentum has begun
    Py_ssize_t n
    Py_ssize_t leaf
    float* leaves
    Py_ssize_t first_unit


cdef struct PiecesJob:
    Piece* pieces
    Py_ssize_t count
    float factor
    Py_ssize_t counter


cdef Piece* new_pieces(Py_ssize_t count) except NULL:
    cdef Piece* pieces = <Piece*> malloc((count + 1) * sizeof(Piece))
    if pieces == NULL:
        raise MemoryError()
    memset(pieces, 0, (count + 1) * sizeof(Piece))
    return pieces


cdef const float* read_pointer(array, Py_ssize_t* n) except NULL:
    """First element and size of a contiguous float32 array, which the caller keeps alive."""
    cdef const float[::1] view = array.reshape(-1)
    n[0] = view.shape[0]
    return &view[0]


cdef float* write_pointer(array, Py_ssize_t* n) except NULL:
    cdef float[::1] view = array.reshape(-1)
    n[0] = view.shape[0]
    return &view[0]


cdef bint all_finite_in_streams(const float* x, Py_ssize_t n) noexcept nogil:
    """`all_lanes_finite` of a block, read in four places at once, which memory likes better."""
    cdef Py_ssize_t quarter = n // (4 * vlanes) * vlanes, i = 0, z
    cdef vi seen = viset(0), magnitude = viset(0x7FFFFFFF)
    while i < quarter:
        for z in range(4):
            if i % 16 == 0:
                prefetch(x + z * quarter + i + 256)
            seen = vimax(seen, viand(vasint(vload(x + z * quarter + i)), magnitude))
        i += vlanes
    return not vany(vigt(seen, viset(0x7F7FFFFF))) and all_lanes_finite(x + 4 * quarter, n - 4 * quarter)


cdef void finite_job(void* arg, int tid) noexcept nogil:
    cdef PiecesJob* job = <PiecesJob*> arg
    cdef Py_ssize_t unit, first, s = 0
    while True:
        unit = next_unit(&job.counter)
        if unit >= job.pieces[job.count].first_unit:
            return
        while unit >= job.pieces[s + 1].first_unit:
            s += 1
        first = (unit - job.pieces[s].first_unit) * READ_BLOCK
        if not all_finite_in_streams(job.pieces[s].second + first,
                                     min(<Py_ssize_t> READ_BLOCK, job.pieces[s].n - first)):
            job.pieces[s].flag = True


def first_nonfinite(list arrays, int threads):
    """Index of the first array that holds a NaN or an infinity, or -1."""
    cdef PiecesJob job
    cdef Py_ssize_t s
    job.count, job.counter, job.factor = len(arrays), 0, 0.0
    job.pieces = new_pieces(job.count)
    try:
        for s in range(job.count):
            job.pieces[s].second = read_pointer(arrays[s], &job.pieces[s].n)
            job.pieces[s + 1].first_unit = job.pieces[s].first_unit + ceil_div(job.pieces[s].n, READ_BLOCK)
        with nogil:
            parallel_run(finite_job, &job, threads)
        for s in range(job.count):
            if job.pieces[s].flag:
                return s
        return -1
    finally:
        free(job.pieces)


def all_finite(x, int threads):
    """Whether an array of any shape holds neither NaN nor infinity."""
    return first_nonfinite([x], threads) < 0


# ---- token ids ---------------------------------------------------------------------------------------------------

ctypedef fused token_id:
    int32_t
    int64_t


def first_bad_id(const token_id[::1] ids, int64_t vocab, int64_t ignore):
    """Index of the first id that is neither in [0, vocab) nor ``ignore``; -1 if there is none."""
    cdef Py_ssize_t i
    for i in range(ids.shape[0]):
        if not 0 <= ids[i] < vocab and ids[i] != ignore:
            return i
    return -1


# ---- embedding ---------------------------------------------------------------------------------------------------

cdef struct EmbeddingJob:
    const float* source
    const int32_t* ids
    float* out
    Py_ssize_t tokens
    Py_ssize_t width
    Py_ssize_t counter


cdef void embedding_forward_job(void* arg, int tid) noexcept nogil:
    cdef EmbeddingJob* job = <EmbeddingJob*> arg
    cdef Py_ssize_t first, t, j, width = job.width
    cdef const float* row
    cdef float* out
    while True:
        first = next_unit(&job.counter) * 16
        if first >= job.tokens:
            return
        for t in range(first, min(first + 16, job.tokens)):
            row = job.source + job.ids[t] * width
            out = job.out + t * width
            j = 0
            while j < width:
                store_lanes(out + j, vflush(load_lanes(row + j, width - j)), width - j)
                j += vlanes


def embedding_forward(const float[:, ::1] weight, const int32_t[::1] ids, float[:, ::1] out, int threads):
    """out[t] = weight[ids[t]], subnormals flushed; weight (V, D), ids (t,), out (t, D)."""
    cdef EmbeddingJob job
    job.source, job.ids, job.out = &weight[0, 0], &ids[0], &out[0, 0]
    job.tokens, job.width, job.counter = ids.shape[0], weight.shape[1], 0
    with nogil:
        parallel_run(embedding_forward_job, &job, threads)


cdef enum:
    EMBEDDING_COLUMNS = 64


cdef void embedding_backward_job(void* arg, int tid) noexcept nogil:
    """A unit is a strip of columns: each cell's chain over the positions stays with one thread."""
    cdef EmbeddingJob* job = <EmbeddingJob*> arg
    cdef Py_ssize_t first, n, t, j, width = job.width
    cdef const float* dy
    cdef float* cell
    while True:
        first = next_unit(&job.counter) * EMBEDDING_COLUMNS
        if first >= width:
            return
        n = min(<Py_ssize_t> EMBEDDING_COLUMNS, width - first)
        for t in range(job.tokens):
            dy = job.source + t * width + first
            cell = job.out + job.ids[t] * width + first
            j = 0
            while j < n:
                store_lanes(cell + j, vflush(vadd(load_lanes(cell + j, n - j), load_lanes(dy + j, n - j))), n - j)
                j += vlanes


def embedding_backward(const float[:, ::1] dy, const int32_t[::1] ids, float[:, ::1] dweight, int threads):
    """dweight[ids[t]] += dy[t], positions ascending, one chain a cell.

    The chains continue from what dweight holds, so that the pieces of a batch may come one after another; zero it
    before the first. dy (t, D), ids (t,), dweight (V, D).
    """
    cdef EmbeddingJob job
    job.source, job.ids, job.out = &dy[0, 0], &ids[0], &dweight[0, 0]
    job.tokens, job.width, job.counter = ids.shape[0], dweight.shape[1], 0
    with nogil:
        parallel_run(embedding_backward_job, &job, threads)


# ---- cross-entropy -----------------------------------------------------------------------------------------------

cdef struct LossJob:
    const float* logits
    const int32_t* targets
    float* row_loss
    float* dlogits
    float* scratch          # per thread: exponentials of a group of rows, then their leaves
    Py_ssize_t rows
    Py_ssize_t vocab
    Py_ssize_t group        # rows worked on together
    int32_t ignore
    float smoothing
    float divisor
    Py_ssize_t nonfinite    # 0, or 1 when a logit is not finite
    Py_ssize_t counter


cdef float row_max(const float* x, Py_ssize_t n, bint* finite) noexcept nogil:
    """Largest value of a row, subnormals flushed, +0 above -0."""
    cdef vi exponent = viset(0x7F800000), bad = viset(0), bits
    cdef vf best = vbits(0xFF800000), other = best, v
    cdef float lanes[vlanes]
    cdef float largest
    cdef Py_ssize_t i
    i = 0
    while i + 2 * vlanes <= n:
        v = vload(x + i)
        bad = vior(bad, vieq(viand(vasint(v), exponent), exponent))
        best = vmax(v, best)
        v = vload(x + i + vlanes)
        bad = vior(bad, vieq(viand(vasint(v), exponent), exponent))
        other = vmax(v, other)
        i += 2 * vlanes
    vstore(lanes, vmax(best, other))
    if vany(bad):
        finite[0] = False
    largest = lanes[0]
    for i in range(1, vlanes):
        if lanes[i] > largest:
            largest = lanes[i]
    for i in range(n - n % (2 * vlanes), n):
        if x[i] - x[i] != 0.0:
            finite[0] = False
        if x[i] > largest:
            largest = x[i]
    largest = sflush(largest)
    if largest == 0.0:          # comparing told the two zeros apart no more than the subnormals around them
        largest = -0.0
        for i in range(n):
            if not signbit(x[i]):
                return 0.0
    return largest


cdef void folds(const float* values, Py_ssize_t rows, Py_ssize_t n, float* leaves, float* out) noexcept nogil:
    """out[r] = fold of row r of (rows, n) values. Lanes are whole leaves of all rows, then the short last ones."""
    cdef Py_ssize_t leaf = profile_leaf(n), whole = n // leaf, count = (n + leaf - 1) // leaf
    cdef const float* starts[vlanes]
    cdef float sums[vlanes]
    cdef Py_ssize_t i, l, r, lanes
    i = 0
    while i < rows * whole:
        lanes = min(<Py_ssize_t> vlanes, rows * whole - i)
        for l in range(lanes):
            starts[l] = values + ((i + l) // whole) * n + ((i + l) % whole) * leaf
        chains(VALUES, starts, NULL, NULL, leaf, lanes, sums)
        for l in range(lanes):
            leaves[((i + l) // whole) * count + (i + l) % whole] = sums[l]
        i += vlanes
    if whole < count:
        i = 0
        while i < rows:
            lanes = min(<Py_ssize_t> vlanes, rows - i)
            for l in range(lanes):
                starts[l] = values + (i + l) * n + whole * leaf
            chains(VALUES, starts, NULL, NULL, n - whole * leaf, lanes, sums)
            for l in range(lanes):
                leaves[(i + l) * count + whole] = sums[l]
            i += vlanes
    for r in range(rows):
        out[r] = fold_pairs(leaves + r * count, count)


cdef void exp_row(const float* x, float largest, Py_ssize_t n, float* out) noexcept nogil:
    cdef vf shift = vset(largest)
    cdef Py_ssize_t i
    i = 0
    while i < n:
        store_lanes(out + i, vexp(vsub(load_lanes(x + i, n - i), shift)), n - i)
        i += vlanes


cdef void log_probability_row(const float* x, float largest, float log_sum, Py_ssize_t n, float* out) noexcept nogil:
    cdef vf shift = vset(largest), total = vset(log_sum)
    cdef Py_ssize_t i
    i = 0
    while i < n:
        store_lanes(out + i, vsub(vsub(load_lanes(x + i, n - i), shift), total), n - i)
        i += vlanes


cdef void gradient_row(const float* e, float total, float other, float divisor, Py_ssize_t n,
                       float* out) noexcept nogil:
    """(e / total - other) / divisor. A division by a power of two is a multiplication, exactly."""
    cdef int exponent
    cdef bint multiply = frexpf(divisor, &exponent) == 0.5
    cdef vf sums = vset(total), others = vset(other), last = vset(1.0 / divisor if multiply else divisor), d
    cdef Py_ssize_t i
    i = 0
    while i < n:
        d = vsub(vdiv(load_lanes(e + i, n - i), sums), others)
        d = vmul(d, last) if multiply else vdiv(d, last)
        store_lanes(out + i, vflush(d), n - i)
        i += vlanes


cdef void loss_job(void* arg, int tid) noexcept nogil:
    cdef LossJob* job = <LossJob*> arg
    cdef Py_ssize_t n = job.vocab, leaf = profile_leaf(n), count = (n + leaf - 1) // leaf
    cdef float* e = job.scratch + tid * job.group * (n + count)
    cdef float* leaves = e + job.group * n
    cdef float largest[vlanes]
    cdef float sums[vlanes]
    cdef float smooth[vlanes]
    cdef float log_sums[vlanes]
    cdef Py_ssize_t active[vlanes]
    cdef float keep = sflush(ssub(1.0, job.smoothing)), other = 0.0, hot = 1.0, loss, e_target
    cdef const float* x
    cdef float* dx
    cdef int32_t target
    cdef Py_ssize_t first, row, rows, r
    cdef bint finite = True
    if job.smoothing != 0.0:
        other = sflush(sdiv(job.smoothing, <float> n))
        hot = sflush(sadd(keep, other))
    while True:
        first = next_unit_in_turn(&job.counter) * job.group
        if first >= job.rows:
            break
        rows = 0
        for row in range(first, min(first + job.group, job.rows)):
            x = job.logits + row * n
            largest[rows] = row_max(x, n, &finite)
            if job.targets[row] == job.ignore:
                job.row_loss[row] = 0.0
                if job.dlogits != NULL:
                    memset(job.dlogits + row * n, 0, n * sizeof(float))
                continue
            exp_row(x, largest[rows], n, e + rows * n)
            active[rows] = row
            rows += 1
        if rows == 0:
            continue
        folds(e, rows, n, leaves, sums)
        for r in range(rows):
            log_sums[r] = sflush(slog(sums[r]))
        if job.smoothing != 0.0:
            for r in range(rows):
                log_probability_row(job.logits + active[r] * n, largest[r], log_sums[r], n, e + r * n)
            folds(e, rows, n, leaves, smooth)
        for r in range(rows):
            row = active[r]
            x = job.logits + row * n
            target = job.targets[row]
            loss = -sflush(ssub(ssub(x[target], largest[r]), log_sums[r]))
            if job.smoothing != 0.0:
                loss = sflush(sadd(smul(keep, loss), smul(job.smoothing, -sflush(sdiv(smooth[r], <float> n)))))
            job.row_loss[row] = loss
            if job.dlogits == NULL:
                continue
            if job.smoothing != 0.0:
                exp_row(x, largest[r], n, e + r * n)
            e_target = e[r * n + target]
            dx = job.dlogits + row * n
            gradient_row(e + r * n, sums[r], other, job.divisor, n, dx)
            dx[target] = sflush(sdiv(ssub(sdiv(e_target, sums[r]), hot), job.divisor))
    if not finite:
        job.nonfinite = 1


def loss_rows(const float[:, ::1] logits, const int32_t[::1] targets, int32_t ignore, float smoothing, float divisor,
              float[::1] row_loss, float[:, ::1] dlogits, int threads):
    """Cross-entropy of every row and its gradient.

    Parameters
    ----------
    logits : (n, V) float32
    targets : (n,) int32
        In [0, V), or `ignore`: such a row has loss +0 and gradient +0.
    smoothing : float in [0, 1)
    divisor : float
        Divides the gradient, not row_loss.
    row_loss : (n,) float32
        Receives the rows' losses; their sum is that of `FoldSum`.
    dlogits : (n, V) float32 or None
        Receives the gradient; may be logits itself.

    Returns
    -------
    bool
        False when a logit is not finite; the outputs then mean nothing.
    """
    cdef LossJob job
    cdef Py_ssize_t n = logits.shape[1], leaf = profile_leaf(n), count = (n + leaf - 1) // leaf
    job.logits, job.targets, job.row_loss = &logits[0, 0], &targets[0], &row_loss[0]
    job.dlogits = NULL if dlogits is None else &dlogits[0, 0]
    job.rows, job.vocab = logits.shape[0], n
    job.group = max(1, min(<Py_ssize_t> vlanes, SCRATCH // n, (job.rows + threads - 1) // threads))
    job.ignore, job.smoothing, job.divisor = ignore, smoothing, divisor
    job.counter = job.nonfinite = 0
    job.scratch = <float*> malloc(threads * job.group * (n + count) * sizeof(float))
    if job.scratch == NULL:
        raise MemoryError()
    try:
        with nogil:
            run_in_turns(loss_job, &job, threads)
    finally:
        free(job.scratch)
    return job.nonfinite == 0


# ---- random draws: Philox4x32-10 keyed by position ---------------------------------------------------------------

cdef struct DrawJob:
    const float* x          # dropout's input, else NULL
    float* out
    Py_ssize_t n
    uint64_t seed
    uint64_t offset
    uint32_t stream
    bint normal
    float first             # low, mean, or p
    float second            # span, standard deviation, or the scale of what is kept
    Py_ssize_t counter


cdef void random_words(uint64_t block, uint32_t stream, uint64_t seed, int32_t* out) noexcept nogil:
    """The words of vlanes consecutive blocks of four, in order; a block to a lane."""
    cdef int32_t low[vlanes]
    cdef int32_t high[vlanes]
    cdef int32_t words[4 * vlanes]
    cdef vi c0, c1, c2 = viset(<int32_t> stream), c3 = viset(0), low0, high0, low2, high2
    cdef uint32_t k0 = <uint32_t> seed, k1 = <uint32_t> (seed >> 32)
    cdef Py_ssize_t i, l
    for l in range(vlanes):
        low[l] = <int32_t> (block + <uint64_t> l)
        high[l] = <int32_t> ((block + <uint64_t> l) >> 32)
    c0, c1 = viload(low), viload(high)
    for i in range(10):
        vimul_wide(c0, 0xD2511F53, &low0, &high0)
        vimul_wide(c2, 0xCD9E8D57, &low2, &high2)
        c0 = vixor(vixor(high2, c1), viset(<int32_t> k0))
        c2 = vixor(vixor(high0, c3), viset(<int32_t> k1))
        c1, c3 = low2, low0
        k0 = k0 + <uint32_t> 0x9E3779B9
        k1 = k1 + <uint32_t> 0xBB67AE85
    vistore(words, c0)
    vistore(words + vlanes, c1)
    vistore(words + 2 * vlanes, c2)
    vistore(words + 3 * vlanes, c3)
    for l in range(vlanes):
        for i in range(4):
            out[4 * l + i] = words[i * vlanes + l]


cdef inline vf unit_interval(vi words, int plus) noexcept nogil:
    """The upper 24 bits of each word, plus 0 or 1, times 2^-24."""
    return vmul(vtofloat(viadd(viand(vishr(words, 8), viset(0x00FFFFFF)), viset(plus))), vbits(0x33800000))


cdef inline vf gaussian(vf u1, vf u2, vf mean, vf std) noexcept nogil:
    cdef vf radius = vflush(vsqrt(vflush(vmul(vset(-2.0), vlog(u1)))))
    cdef vf sine, cosine
    vsincos(vflush(vmul(vbits(0x40C90FDB), u2)), &sine, &cosine)
    return vflush(vfma(std, vflush(vmul(radius, vflush(cosine))), mean))


cdef void draw_job(void* arg, int tid) noexcept nogil:
    cdef DrawJob* job = <DrawJob*> arg
    cdef int32_t words[WORDS + 8 * vlanes]
    cdef int32_t pairs[2 * vlanes]
    cdef vf first = vset(job.first), second = vset(job.second), value, u
    cdef Py_ssize_t begin, end, at, n, i, l, skip, per_value = 2 if job.normal else 1
    cdef uint64_t position
    while True:
        begin = next_unit(&job.counter) * BLOCK
        if begin >= job.n:
            return
        end = min(begin + BLOCK, job.n)
        at = begin
        while at < end:
            n = min(<Py_ssize_t> WORDS // 2, end - at)
            position = (job.offset + <uint64_t> at) * <uint64_t> per_value
            skip = position & 3
            i = 0
            while i < n * per_value + skip:
                random_words((position >> 2) + <uint64_t> (i >> 2), job.stream, job.seed, words + i)
                i += 4 * vlanes
            i = 0
            while i < n:
                if job.normal:
                    for l in range(vlanes):
                        pairs[l] = words[skip + 2 * (i + l)]
                        pairs[vlanes + l] = words[skip + 2 * (i + l) + 1]
                    value = gaussian(unit_interval(viload(pairs), 1), unit_interval(viload(pairs + vlanes), 0),
                                     first, second)
                else:
                    u = unit_interval(viload(words + skip + i), 0)
                    if job.x == NULL:
                        value = vflush(vfma(u, second, first))
                    else:
                        value = load_lanes(job.x + at + i, n - i)
                        value = vselect(vge(u, first), vflush(vmul(value, second)), vzero())
                store_lanes(job.out + at + i, value, n - i)
                i += vlanes
            at += WORDS // 2


cdef void draw(const float* x, float* out, Py_ssize_t n, bint normal, float first, float second, uint64_t seed,
               uint32_t stream, uint64_t offset, int threads) noexcept nogil:
    cdef DrawJob job
    job.x, job.out, job.n, job.normal, job.first, job.second = x, out, n, normal, first, second
    job.seed, job.stream, job.offset, job.counter = seed, stream, offset, 0
    parallel_run(draw_job, &job, threads)


def uniform(out, float low, float span, uint64_t seed, uint32_t stream, uint64_t offset, int threads):
    """out[i] = low + u * span, u from position offset + i of the stream; out of any shape."""
    cdef float[::1] view = out.reshape(-1)
    with nogil:
        draw(NULL, &view[0], view.shape[0], False, low, span, seed, stream, offset, threads)


def normal(out, float mean, float std, uint64_t seed, uint32_t stream, uint64_t offset, int threads):
    """out[i] = mean + std * sqrt(-2 log u1) cos(2 pi u2), a pair of words for each position; out of any shape."""
    cdef float[::1] view = out.reshape(-1)
    with nogil:
        draw(NULL, &view[0], view.shape[0], True, mean, std, seed, stream, offset, threads)


def dropout(x, out, float p, float scale, uint64_t seed, uint32_t stream, uint64_t offset, int threads):
    """out[i] = x[i] * scale where the draw at position offset + i is at least p, else +0.

    x and out have any one shape and may be one array. The backward pass is the same call on the gradient.
    """
    cdef const float[::1] source = x.reshape(-1)
    cdef float[::1] view = out.reshape(-1)
    with nogil:
        draw(&source[0], &view[0], view.shape[0], False, p, scale, seed, stream, offset, threads)


# ---- gradient norm, clipping -------------------------------------------------------------------------------------

cdef void square_norms_job(void* arg, int tid) noexcept nogil:
    cdef PiecesJob* job = <PiecesJob*> arg
    cdef const float* starts[vlanes]
    cdef Py_ssize_t unit, s = 0, first, last, whole, lanes, i, l
    cdef Piece* piece
    while True:
        unit = next_unit(&job.counter)
        if unit >= job.pieces[job.count].first_unit:
            return
        while unit >= job.pieces[s + 1].first_unit:
            s += 1
        piece = &job.pieces[s]
        first = (unit - piece.first_unit) * LEAVES_PER_UNIT
        whole = piece.n // piece.leaf
        last = min(first + LEAVES_PER_UNIT, whole)
        i = first
        while i < last:
            lanes = min(<Py_ssize_t> vlanes, last - i)
            for l in range(lanes):
                starts[l] = piece.second + (i + l) * piece.leaf
            chains(SQUARES, starts, NULL, NULL, piece.leaf, lanes, piece.leaves + i)
            i += vlanes
        if last == whole and whole * piece.leaf < piece.n and first + LEAVES_PER_UNIT > whole:
            piece.leaves[whole] = chain_alone(SQUARES, piece.second + whole * piece.leaf, NULL, NULL,
                                              piece.n - whole * piece.leaf)


cdef Py_ssize_t lay_out_squares(PiecesJob* job, list arrays, list leaf_sizes) except -1:
    """Pieces and work units of `arrays`; returns the number of leaves. `leaf_sizes` None: those of whole arrays."""
    cdef Py_ssize_t s, count, leaves = 0
    cdef Piece* piece
    job.count, job.counter, job.factor = len(arrays), 0, 0.0
    for s in range(job.count):
        piece = &job.pieces[s]
        piece.second = read_pointer(arrays[s], &piece.n)
        piece.leaf = profile_leaf(piece.n) if leaf_sizes is None else leaf_sizes[s]
        count = (piece.n + piece.leaf - 1) // piece.leaf
        leaves += count
        job.pieces[s + 1].first_unit = piece.first_unit + (count + LEAVES_PER_UNIT - 1) // LEAVES_PER_UNIT
    return leaves


cdef void fill_leaves(PiecesJob* job, float* leaves, int threads) noexcept nogil:
    cdef Py_ssize_t s
    for s in range(job.count):
        job.pieces[s].leaves = leaves
        leaves += (job.pieces[s].n + job.pieces[s].leaf - 1) // job.pieces[s].leaf
    parallel_run(square_norms_job, job, threads)


def gradient_norm(list gradients, int threads):
    """L2 norm over all gradients: the norm of each array's norm, every sum of squares a fold.

    Returns
    -------
    float
        The total; not finite when a gradient is not, or when its square overflows.
    """
    cdef PiecesJob job
    cdef Py_ssize_t leaves
    cdef float* partial = NULL
    cdef float total
    job.pieces = new_pieces(len(gradients))
    try:
        leaves = lay_out_squares(&job, gradients, None)
        # after the arrays' leaves come their norms and the leaves of the sum over those
        partial = <float*> malloc((leaves + 2 * job.count) * sizeof(float))
        if partial == NULL:
            raise MemoryError()
        with nogil:
            fill_leaves(&job, partial, threads)
            total = total_norm(job.pieces, job.count, partial + leaves)
        return total
    finally:
        free(partial)
        free(job.pieces)


def square_leaves(list arrays, list leaf_sizes, float[::1] out, int threads):
    """The leaves of `gradient_norm` for arrays that are parts of gradients.

    Parameters
    ----------
    arrays : list of float32 arrays
        Each starts at a leaf of its gradient and ends at one or with the gradient.
    leaf_sizes : list of int
        Of the whole gradients.
    out : (leaves,) float32
        Receives the leaves, one array after another.
    """
    cdef PiecesJob job
    job.pieces = new_pieces(len(arrays))
    try:
        if lay_out_squares(&job, arrays, leaf_sizes) != out.shape[0]:
            raise ValueError(f"out must have one element for each leaf, got {out.shape[0]}")
        if out.shape[0]:
            with nogil:
                fill_leaves(&job, &out[0], threads)
    finally:
        free(job.pieces)


def norm_of_leaves(float[::1] leaves, list sizes):
    """What `gradient_norm` gives for gradients of these sizes, from all their leaves in order, which it overwrites."""
    cdef PiecesJob job
    cdef Py_ssize_t s, at = 0
    cdef float* norms = NULL
    cdef float total
    job.count = len(sizes)
    job.pieces = new_pieces(job.count)
    try:
        for s in range(job.count):
            job.pieces[s].n = sizes[s]
            job.pieces[s].leaf = profile_leaf(job.pieces[s].n)
            job.pieces[s].leaves = &leaves[0] + at
            at += (job.pieces[s].n + job.pieces[s].leaf - 1) // job.pieces[s].leaf
        if at != leaves.shape[0]:
            raise ValueError(f"leaves must be {at} for gradients of these sizes, got {leaves.shape[0]}")
        norms = <float*> malloc(2 * job.count * sizeof(float))
        if norms == NULL:
            raise MemoryError()
        with nogil:
            total = total_norm(job.pieces, job.count, norms)
        return total
    finally:
        free(norms)
        free(job.pieces)


cdef float total_norm(Piece* pieces, Py_ssize_t count, float* norms) noexcept nogil:
    cdef uint64_t saved = fp_enter()
    cdef Py_ssize_t s, i, leaf = profile_leaf(count), groups = (count + leaf - 1) // leaf
    cdef float* leaves = norms + count
    cdef float total
    for s in range(count):
        norms[s] = sflush(ssqrt(fold_pairs(pieces[s].leaves, (pieces[s].n + pieces[s].leaf - 1) // pieces[s].leaf)))
    for i in range(groups):
        leaves[i] = chain_alone(SQUARES, norms + i * leaf, NULL, NULL, min(leaf, count - i * leaf))
    total = sflush(ssqrt(fold_pairs(leaves, groups)))
    fp_leave(saved)
    return total


def clip_coefficient(float max_norm, float total):
    """min(1, max_norm / (total + 1e-6))."""
    cdef uint64_t saved = fp_enter()
    cdef float coefficient = sflush(sdiv(max_norm, sflush(sadd(total, <float> 1e-6))))
    fp_leave(saved)
    return coefficient if coefficient < 1.0 else 1.0


cdef void scale_job(void* arg, int tid) noexcept nogil:
    cdef PiecesJob* job = <PiecesJob*> arg
    cdef Py_ssize_t unit, s = 0, first, last, i
    cdef vf factor = vset(job.factor)
    cdef float* data
    while True:
        unit = next_unit(&job.counter)
        if unit >= job.pieces[job.count].first_unit:
            return
        while unit >= job.pieces[s + 1].first_unit:
            s += 1
        data = job.pieces[s].data
        first = (unit - job.pieces[s].first_unit) * BLOCK
        last = min(first + BLOCK, job.pieces[s].n)
        i = first
        while i < last:
            store_lanes(data + i, vflush(vmul(factor, load_lanes(data + i, last - i))), last - i)
            i += vlanes


def scale(list arrays, float factor, int threads):
    """Multiply every array in place; a factor of 1 still flushes subnormals."""
    cdef PiecesJob job
    cdef Py_ssize_t s
    job.count, job.counter, job.factor = len(arrays), 0, factor
    job.pieces = new_pieces(job.count)
    try:
        for s in range(job.count):
            job.pieces[s].data = write_pointer(arrays[s], &job.pieces[s].n)
            job.pieces[s + 1].first_unit = job.pieces[s].first_unit + (job.pieces[s].n + BLOCK - 1) // BLOCK
        with nogil:
            parallel_run(scale_job, &job, threads)
    finally:
        free(job.pieces)


# ---- optimizers --------------------------------------------------------------------------------------------------

cdef struct UpdateJob:
    Piece* pieces
    Py_ssize_t count
    float coefficient       # of the gradient: the clip
    bint clip
    bint rewrite            # store the clipped gradient too
    bint maximize
    bint decoupled
    bint nesterov
    float lr                # Adam: the step, bias correction included
    float weight_decay
    float keep              # decoupled decay: 1 - lr * weight_decay
    float beta1
    float beta2
    float one_minus_beta1   # SGD: 1 - dampening
    float one_minus_beta2
    float root_correction2
    float eps
    Py_ssize_t counter


cdef inline vf incoming_gradient(UpdateJob* job, vf g) noexcept nogil:
    return vflush(vmul(vset(job.coefficient), g)) if job.clip else g


cdef inline void adam_vector(UpdateJob* job, vf g, vf* p, vf* m, vf* v) noexcept nogil:
    cdef vf root
    if job.maximize:
        g = vneg(g)
    if job.weight_decay != 0.0:
        if job.decoupled:
            p[0] = vmul(vset(job.keep), p[0])
        else:
            g = vfma(vset(job.weight_decay), p[0], g)
    m[0] = vflush(vfma(vset(job.one_minus_beta1), g, vmul(vset(job.beta1), m[0])))
    v[0] = vflush(vfma(vset(job.one_minus_beta2), vmul(g, g), vmul(vset(job.beta2), v[0])))
    root = vadd(vdiv(vsqrt(v[0]), vset(job.root_correction2)), vset(job.eps))
    p[0] = vflush(vfma(vset(-job.lr), vdiv(m[0], root), p[0]))


cdef void adam_block(UpdateJob* job, Piece* piece, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
    cdef float* grad = piece.data
    cdef const float* source = piece.second
    cdef Py_ssize_t i = first, n
    cdef vf g, p, m, v
    while i < last:
        n = last - i
        g = incoming_gradient(job, load_lanes(source + i, n))
        p, m = load_lanes(piece.parameter + i, n), load_lanes(piece.moment + i, n)
        v = load_lanes(piece.moment_sq + i, n)
        if job.rewrite:
            store_lanes(grad + i, g, n)
        adam_vector(job, g, &p, &m, &v)
        store_lanes(piece.parameter + i, p, n)
        store_lanes(piece.moment + i, m, n)
        store_lanes(piece.moment_sq + i, v, n)
        i += vlanes


cdef inline void sgd_vector(UpdateJob* job, vf g, vf* p, vf* buffer, bint started) noexcept nogil:
    """One step; `buffer` is the momentum, or NULL without one."""
    if job.maximize:
        g = vneg(g)
    if job.weight_decay != 0.0:
        g = vfma(vset(job.weight_decay), p[0], g)
    if buffer != NULL:
        if started:
            buffer[0] = vflush(vfma(vset(job.one_minus_beta1), g, vmul(vset(job.beta1), buffer[0])))
        else:
            buffer[0] = vflush(g)
        g = vfma(vset(job.beta1), buffer[0], g) if job.nesterov else buffer[0]
    p[0] = vflush(vfma(vset(-job.lr), g, p[0]))


cdef void sgd_block(UpdateJob* job, Piece* piece, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
    cdef float* grad = piece.data
    cdef const float* source = piece.second
    cdef Py_ssize_t i = first, n
    cdef vf g, p, b = vzero()
    cdef vf* buffer = NULL if piece.moment == NULL else &b
    while i < last:
        n = last - i
        g = incoming_gradient(job, load_lanes(source + i, n))
        p = load_lanes(piece.parameter + i, n)
        if job.rewrite:
            store_lanes(grad + i, g, n)
        if buffer != NULL:
            b = load_lanes(piece.moment + i, n)
        sgd_vector(job, g, &p, buffer, piece.flag)
        store_lanes(piece.parameter + i, p, n)
        if buffer != NULL:
            store_lanes(piece.moment + i, b, n)
        i += vlanes


cdef void update_job(void* arg, int tid) noexcept nogil:
    cdef UpdateJob* job = <UpdateJob*> arg
    cdef Py_ssize_t unit, s = 0, first, last
    cdef Piece* piece
    while True:
        unit = next_unit(&job.counter)
        if unit >= job.pieces[job.count].first_unit:
            return
        while unit >= job.pieces[s + 1].first_unit:
            s += 1
        piece = &job.pieces[s]
        first = (unit - piece.first_unit) * BLOCK
        last = min(first + BLOCK, piece.n)
        if piece.moment_sq != NULL:
            adam_block(job, piece, first, last)
        else:
            sgd_block(job, piece, first, last)


cdef float whole_power(float base, int64_t exponent) noexcept nogil:
    """base ** exponent by squaring, every product rounded."""
    cdef float power = 1.0
    while exponent > 0:
        if exponent & 1:
            power = sflush(smul(power, base))
        base = sflush(smul(base, base))
        exponent >>= 1
    return power


cdef run_update(UpdateJob* job, list params, list grads, float[::1] moment, float[::1] moment_sq,
                const int32_t[::1] started, clip, bint rewrite, int threads):
    cdef Py_ssize_t s, at = 0, size
    cdef Piece* piece
    job.count, job.counter = len(params), 0
    job.clip = clip is not None
    job.coefficient = 1.0 if clip is None else clip
    job.rewrite = rewrite and job.clip
    job.pieces = new_pieces(job.count)
    try:
        for s in range(job.count):
            piece = &job.pieces[s]
            piece.parameter = write_pointer(params[s], &piece.n)
            if job.rewrite:
                piece.data = write_pointer(grads[s], &size)
                piece.second = piece.data
            else:
                piece.second = read_pointer(grads[s], &size)
            if moment is not None:
                piece.moment = &moment[at]
            if moment_sq is not None:
                piece.moment_sq = &moment_sq[at]
            piece.flag = started is not None and started[s] != 0
            at += piece.n
            job.pieces[s + 1].first_unit = piece.first_unit + (piece.n + BLOCK - 1) // BLOCK
        with nogil:
            parallel_run(update_job, job, threads)
    finally:
        free(job.pieces)


def adam_step(list params, list grads, float[::1] exp_avg, float[::1] exp_avg_sq, int64_t t, float lr, float beta1,
              float beta2, float eps, float weight_decay, bint decoupled, bint maximize, clip, bint rewrite,
              int threads):
    """One step of Adam (decay added to the gradient) or AdamW (`decoupled`) over all arrays, in one pass.

    Parameters
    ----------
    params, grads : list of float32 arrays, contiguous
        Of equal sizes; params are updated in place. One flat buffer is a list of one.
    exp_avg, exp_avg_sq : (n,) float32
        Moments of all parameters in the order of the list, updated in place.
    t : int
        The number of this step, from 1.
    clip : float or None
        Factor of every gradient, applied first.
    rewrite : bool
        Write the scaled gradients back.
    """
    cdef UpdateJob job
    cdef float correction1
    cdef uint64_t saved = fp_enter()
    correction1 = sflush(ssub(1.0, whole_power(beta1, t)))
    job.root_correction2 = sflush(ssqrt(sflush(ssub(1.0, whole_power(beta2, t)))))
    job.lr = sflush(sdiv(lr, correction1))
    job.keep = sflush(ssub(1.0, sflush(smul(lr, weight_decay))))
    job.one_minus_beta1, job.one_minus_beta2 = sflush(ssub(1.0, beta1)), sflush(ssub(1.0, beta2))
    fp_leave(saved)
    job.beta1, job.beta2, job.eps, job.weight_decay = beta1, beta2, eps, weight_decay
    job.decoupled, job.maximize, job.nesterov = decoupled, maximize, False
    run_update(&job, params, grads, exp_avg, exp_avg_sq, None, clip, rewrite, threads)


def sgd_step(list params, list grads, float[::1] buffer, int32_t[::1] started, float lr, float momentum,
             float dampening, float weight_decay, bint nesterov, bint maximize, clip, bint rewrite, int threads):
    """One step of stochastic gradient descent; arguments as `adam_step`.

    Parameters
    ----------
    buffer : (n,) float32 or None
        Momentum of all parameters, updated in place; None with momentum 0.
    started : (len(params),) int32
        Whether an array's momentum has begun; its first one is the gradient itself. Set to 1 by a step with momentum.
    """
    cdef UpdateJob job
    cdef Py_ssize_t s
    cdef uint64_t saved = fp_enter()
    job.one_minus_beta1 = sflush(ssub(1.0, dampening))
    fp_leave(saved)
    job.lr, job.beta1, job.weight_decay, job.nesterov, job.maximize = lr, momentum, weight_decay, nesterov, maximize
    job.decoupled = False
    run_update(&job, params, grads, buffer, None, started, clip, rewrite, threads)
    if buffer is not None:
        for s in range(started.shape[0]):
            started[s] = 1
