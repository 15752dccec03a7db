# Building blocks of the Mamba-3 kernels: small products, transposes and decay matrices of one chunk of one head.
#
# A chunk is 64 tokens, a head 64 channels, the state 128 rows; every matrix here has rows of 64 floats. Time or
# channels lie along the lanes, so that a sum over state rows, tokens or channels is walked by each lane alone.

from mojolearn._core.elementary cimport *
from mojolearn._core.vectors cimport all_lanes_finite, largest_magnitude
from mojolearn._core._pool cimport next_unit_in_turn, run_in_turns
from libc.math cimport isfinite
from libc.stdint cimport INT32_MAX, int32_t
from libc.string cimport memcpy, memset

cdef extern from *:
    """
    /* rows of a register tile: 8 x 2 vectors fill half of 32 registers, 4 x 2 half of 16 */
    #if MOJO_ISA == 3
    #define MIX_ROWS 8
    #else
    #define MIX_ROWS 4
    #endif
    #define MIX_COLUMNS (2 * W)
    #define ANGLE_VECTORS (32 / W)
    #define STATE_VECTORS (128 / W)
    #define CHUNK_VECTORS (64 / W)
    #define STATE_BLOCK (128 * W)
    #define STATE_LANES (2 * W)      /* chunks side by side in the serial sums over a state */
    #define CHAIN_VECTORS 8          /* chains in flight that hide the latency of a fused multiply-add */
    """
    enum:
        MIX_ROWS
        MIX_COLUMNS
        ANGLE_VECTORS
        STATE_VECTORS
        CHUNK_VECTORS
        STATE_BLOCK
        STATE_LANES
        CHAIN_VECTORS

cdef extern from "chains.h" nogil:
    int chain_verified(const float* a, Py_ssize_t a_row, Py_ssize_t a_step, const float* b, Py_ssize_t b_step,
                       float* c, Py_ssize_t c_row, Py_ssize_t steps)

cdef extern from "border.h" nogil:
    const double SCALED_MOST
    vf scaled_fma(vf a, vf b, vf c)
    vf scaled_flush(vf t)
    vf scaled_result(vf t)
    vf scale_chain(vf x)
    void settle(vf* x)

cdef enum:
    CHUNK = 64          # tokens in a chunk; also the row length of every matrix below
    HEAD = 64           # channels of a head
    STATE = 128         # state rows
    ANGLES = 32         # rotated pairs
    SQUARE = 64 * 64
    TALL = 128 * 64
    PLANE_PAD = 16      # zeros after the last token of a plane of per-token scalars

cdef double SMALLEST = 2.0 ** -126      # the smallest normal number
cdef double LARGEST = 2.0 ** 128 - 2.0 ** 104
cdef double FAINT_RANGE = 2.0 ** 36     # sums whose largest term is below SMALLEST * this are watched for underflow
cdef float PI = 3.14159274101257324
cdef float TWO_PI = 6.28318548202514648
cdef float NORM_EPS = 1e-5
cdef float A_FLOOR = 1e-4


cdef inline vi lanes_below(Py_ssize_t bound) noexcept nogil:
    """Mask of the lanes whose number is less than ``bound``."""
    return vigt(viset(<int> bound), vilanes())


# ---- products around the smallest normal number --------------------------------------------------------------------
#
# A subnormal result costs the processor a hundred cycles, and where values run out there are thousands of them. With
# FTZ set it costs nothing, but FTZ flushes what lies between 2^-126 - 2^-150 and 2^-126 - 2^-151 too, which F rounds up
# to 2^-126. Scaled by 2^64 no result is subnormal, and only one that rounds to the largest float below the border can
# have been in that interval. Such a result is doubtful: the caller starts over with gradual underflow.

cdef enum:
    BELOW_BORDER = 0x207FFFFF    # the largest float below 2^-126 * 2^64


cdef inline vf scale_up(vf x) noexcept nogil:
    return vmul(x, vbits(0x5F800000))              # 2^64


cdef inline vi beside_border(vf scaled) noexcept nogil:
    """Mask of results, scaled by 2^64, whose flush is doubtful. An infinite one had terms too coarse to come near."""
    return vieq(viand(vasint(scaled), viset(0x7FFFFFFF)), viset(BELOW_BORDER))


cdef inline vf guarded_product(vf scaled, vf by, vi* doubtful) noexcept nogil:
    """F(x by) for scaled = 2^64 x, in any mode; a product that overflowed by the scaling is doubtful as well."""
    cdef vf product = vmul(scaled, by)
    cdef vi size = viand(vasint(product), viset(0x7FFFFFFF))
    doubtful[0] = vior(doubtful[0], vior(vieq(size, viset(BELOW_BORDER)), vigt(size, viset(0x7F7FFFFF))))
    product = vasfloat(viand(vasint(product), vior(vigt(size, viset(BELOW_BORDER)), viset(<int> 0x80000000))))
    return vmul(product, vbits(0x1F800000))        # 2^-64


# ---- products ------------------------------------------------------------------------------------------------------

cdef inline void tile(const float* a, Py_ssize_t a_row, Py_ssize_t a_k, const float* b, Py_ssize_t k,
                      float* out) noexcept nogil:
    """out[r, c] = chain over q of a[r, q] b[q, c] for MIX_ROWS rows and MIX_COLUMNS columns."""
    cdef vf acc[MIX_ROWS][2]
    cdef vf b0, b1, x
    cdef Py_ssize_t r, q
    for r in range(MIX_ROWS):
        acc[r][0] = vzero()
        acc[r][1] = vzero()
    for q in range(k):
        b0 = vload(b)
        b1 = vload(b + vlanes)
        for r in range(MIX_ROWS):
            x = vset(a[r * a_row])
            acc[r][0] = vfma(x, b0, acc[r][0])
            acc[r][1] = vfma(x, b1, acc[r][1])
        a += a_k
        b += CHUNK
    for r in range(MIX_ROWS):
        vstore(out + r * CHUNK, acc[r][0])
        vstore(out + r * CHUNK + vlanes, acc[r][1])


cdef bint tile_doubtful(const float* a, Py_ssize_t a_row, Py_ssize_t a_k, const float* b, Py_ssize_t k) noexcept nogil:
    """Whether a result of `tile` is next to the border."""
    cdef vf acc[MIX_ROWS][2]
    cdef vf b0, b1, x
    cdef vi doubtful = viset(0)
    cdef Py_ssize_t r, q
    for r in range(MIX_ROWS):
        acc[r][0] = vzero()
        acc[r][1] = vzero()
    for q in range(k):
        b0 = vload(b)
        b1 = vload(b + vlanes)
        for r in range(MIX_ROWS):
            x = vset(a[r * a_row])
            doubtful = vior(doubtful, beside_border(vfma(scale_up(x), b0, scale_up(acc[r][0]))))
            doubtful = vior(doubtful, beside_border(vfma(scale_up(x), b1, scale_up(acc[r][1]))))
            acc[r][0] = vfma(x, b0, acc[r][0])
            acc[r][1] = vfma(x, b1, acc[r][1])
        a += a_k
        b += CHUNK
    return vany(doubtful)


cdef struct Product:
    const float* a
    Py_ssize_t a_size
    const float* b
    Py_ssize_t b_size
    bint care                    # a tile has seen underflow
    int vanishing                # 1: every term is flushed to zero; 0: not so; -1: not known yet


cdef inline Product start_product(const float* a, Py_ssize_t a_size, const float* b, Py_ssize_t b_size) noexcept nogil:
    """Tiles run with FTZ set, in which no subnormal result costs time, until `end_product`."""
    cdef Product product
    product.a, product.a_size, product.b, product.b_size, product.vanishing = a, a_size, b, b_size, -1
    product.care = False
    fp_fast()
    return product


cdef inline void end_product() noexcept nogil:
    fp_exact()


cdef inline void exact_tile(Product* product, const float* a, Py_ssize_t a_row, Py_ssize_t a_k, const float* b,
                            Py_ssize_t k, float* out) noexcept nogil:
    """`tile` without doubtful results; after one tile with underflow, in the scaled domain at once.

    Nothing is doubtful without underflow, nor if all terms are less than 2^-127: then every sum is a zero in both modes.
    """
    cdef int zeros
    if MOJO_ISA < 3 or not product.care:
        tile(a, a_row, a_k, b, k, out)
        if product.vanishing == 1 or not fp_underflowed():
            return
        fp_fast()
        if product.vanishing < 0:
            product.vanishing = (largest_magnitude(product.a, 0, 1, product.a_size)
                             * largest_magnitude(product.b, 0, 1, product.b_size) < SMALLEST / 2)
        if product.vanishing:
            return
        product.care = True
    zeros = chain_verified(a, a_row, a_k, b, CHUNK, out, CHUNK, k)
    if zeros == 0:
        return
    fp_fast()
    tile(a, a_row, a_k, b, k, out)       # right where nothing is doubtful, signs of zeros included
    if zeros < 0 and tile_doubtful(a, a_row, a_k, b, k):
        fp_exact()
        tile(a, a_row, a_k, b, k, out)
    fp_fast()


cdef void product_nn(const float* a, const float* b, Py_ssize_t m, Py_ssize_t k, float* out) noexcept nogil:
    """out (m, 64) = a (m, k) b (k, 64)."""
    cdef Product product = start_product(a, m * CHUNK, b, k * CHUNK)
    cdef Py_ssize_t i, j = 0
    while j < CHUNK:
        i = 0
        while i < m:
            exact_tile(&product, a + i * CHUNK, CHUNK, 1, b + j, k, out + i * CHUNK + j)
            i += MIX_ROWS
        j += MIX_COLUMNS
    end_product()


cdef void product_tn(const float* a, const float* b, Py_ssize_t first, Py_ssize_t last, Py_ssize_t k,
                     float* out) noexcept nogil:
    """Rows first..last of out (64, 64) = a (k, 64) transposed times b (k, 64), in whole tiles."""
    cdef Product product = start_product(a, k * CHUNK, b, k * CHUNK)
    cdef Py_ssize_t i, j = 0
    first -= first % MIX_ROWS
    while j < CHUNK:
        i = first
        while i < last:
            exact_tile(&product, a + i, 1, CHUNK, b + j, k, out + i * CHUNK + j)
            i += MIX_ROWS
        j += MIX_COLUMNS
    end_product()


cdef void product_tn_lower(const float* a, const float* b, Py_ssize_t first, Py_ssize_t last, Py_ssize_t k,
                           float* out) noexcept nogil:
    """As product_tn, but only the tiles that reach below the diagonal."""
    cdef Product product = start_product(a, k * CHUNK, b, k * CHUNK)
    cdef Py_ssize_t i = first - first % MIX_ROWS, j
    while i < last:
        j = 0
        while j < i + MIX_ROWS - 1:
            exact_tile(&product, a + i, 1, CHUNK, b + j, k, out + i * CHUNK + j)
            j += MIX_COLUMNS
        i += MIX_ROWS
    end_product()


cdef inline float triangle_chain(const float* a, Py_ssize_t a_k, const float* b, Py_ssize_t k) noexcept nogil:
    cdef float total = 0.0
    cdef Py_ssize_t q
    for q in range(k):
        total = sfma(a[q * a_k], b[q * CHUNK], total)
    return total


# Of a triangular operand the terms beyond the diagonal do not belong to the sums. Tiles reach across it: a zero times
# what is finite changes no sum. Where the other operand is not finite, every sum is walked by itself.

cdef void product_nn_upper(const float* a, const float* b, Py_ssize_t m, Py_ssize_t k, float* out) noexcept nogil:
    """As product_nn for a ``b`` (64, 64) that is zero on and below its diagonal."""
    cdef Product product
    cdef Py_ssize_t i, j = 0, steps
    if not all_lanes_finite(a, m * CHUNK):
        for i in range(m):
            for j in range(CHUNK):
                out[i * CHUNK + j] = triangle_chain(a + i * CHUNK, 1, b + j, min(j, k))
        return
    product = start_product(a, m * CHUNK, b, k * CHUNK)
    while j < CHUNK:
        steps = min(k, j + <Py_ssize_t> MIX_COLUMNS)
        i = 0
        while i < m:
            exact_tile(&product, a + i * CHUNK, CHUNK, 1, b + j, steps, out + i * CHUNK + j)
            i += MIX_ROWS
        j += MIX_COLUMNS
    end_product()


cdef void product_nn_below(const float* a, const float* b, Py_ssize_t m, Py_ssize_t k, float* out) noexcept nogil:
    """As product_nn for a ``b`` (64, 64) that is zero on and above its diagonal."""
    cdef Product product
    cdef Py_ssize_t i, j = 0, steps
    if not all_lanes_finite(a, m * CHUNK):
        for i in range(m):
            for j in range(CHUNK):
                out[i * CHUNK + j] = triangle_chain(a + i * CHUNK + j + 1, 1, b + (j + 1) * CHUNK + j, max(k - j - 1, 0))
        return
    product = start_product(a, m * CHUNK, b, k * CHUNK)
    while j < CHUNK:
        steps = max(k - j, 0)
        i = 0
        while i < m:
            exact_tile(&product, a + i * CHUNK + j, CHUNK, 1, b + j * CHUNK + j, steps, out + i * CHUNK + j)
            i += MIX_ROWS
        j += MIX_COLUMNS
    end_product()


cdef void product_nn_lower(const float* a, const float* b, Py_ssize_t first, Py_ssize_t last,
                           float* out) noexcept nogil:
    """Rows first..last of a (64, 64) b (64, 64) for an ``a`` that is zero on and above its diagonal."""
    cdef Product product
    cdef Py_ssize_t i, j = 0, steps
    if not all_lanes_finite(b, last * CHUNK):
        for i in range(first, last):
            for j in range(CHUNK):
                out[i * CHUNK + j] = triangle_chain(a + i * CHUNK, 1, b + j, i)
        return
    product = start_product(a, last * CHUNK, b, last * CHUNK)
    first -= first % MIX_ROWS
    while j < CHUNK:
        i = first
        while i < last:
            steps = min(last, i + <Py_ssize_t> MIX_ROWS)
            exact_tile(&product, a + i * CHUNK, CHUNK, 1, b + j, steps, out + i * CHUNK + j)
            i += MIX_ROWS
        j += MIX_COLUMNS
    end_product()


cdef void product_tn_upper(const float* a, const float* b, Py_ssize_t rows, float* out) noexcept nogil:
    """out = a^T b over the first ``rows`` rows of both, for an ``a`` that is zero on and above its diagonal."""
    cdef Product product
    cdef Py_ssize_t i, j = 0
    if not all_lanes_finite(b, rows * CHUNK):
        for i in range(rows):
            for j in range(CHUNK):
                out[i * CHUNK + j] = triangle_chain(a + (i + 1) * CHUNK + i, CHUNK, b + (i + 1) * CHUNK + j, rows - i - 1)
        return
    product = start_product(a, rows * CHUNK, b, rows * CHUNK)
    while j < CHUNK:
        i = 0
        while i < rows:
            exact_tile(&product, a + i * CHUNK + i, 1, CHUNK, b + i * CHUNK + j, rows - i, out + i * CHUNK + j)
            i += MIX_ROWS
        j += MIX_COLUMNS
    end_product()


# ---- layout --------------------------------------------------------------------------------------------------------

cdef void transpose(const float* x, Py_ssize_t x_row, Py_ssize_t rows, Py_ssize_t columns, float* out,
                    Py_ssize_t out_row) noexcept nogil:
    """out (columns, rows) = x (rows, columns) transposed; both extents are multiples of 16."""
    cdef vf block[vlanes]
    cdef Py_ssize_t i = 0, j, r
    while i < rows:
        j = 0
        while j < columns:
            for r in range(vlanes):
                block[r] = vload(x + (i + r) * x_row + j)
            vtranspose(block)
            for r in range(vlanes):
                vstore(out + (j + r) * out_row + i, block[r])
            j += vlanes
        i += vlanes


cdef void flush_all(float* x, Py_ssize_t n) noexcept nogil:
    """Flush n values, a multiple of 16, that leave the library."""
    cdef Py_ssize_t i = 0
    while i < n:
        vstore(x + i, vflush(vload(x + i)))
        i += vlanes


cdef void state_rows(const float* x, Py_ssize_t first, Py_ssize_t last, float* out, Py_ssize_t out_row,
                     bint stream) noexcept nogil:
    """out[t - first] = x[:, t] for first <= t < last: columns of x (128, 64) become rows of ``out``. ``stream``: the
    rows are aligned, and not read soon.

    By way of a buffer, because neighbouring rows of ``out`` are often a multiple of 4 KiB apart: stores that walk down
    such a column throw each other out of the first-level cache.
    """
    cdef float buffer[STATE_BLOCK]
    cdef vf block[vlanes]
    cdef Py_ssize_t t = first - first % vlanes, n, r
    while t < last:
        n = 0
        while n < STATE:
            for r in range(vlanes):
                block[r] = vload(x + (n + r) * CHUNK + t)
            vtranspose(block)
            for r in range(vlanes):
                vstore(buffer + r * STATE + n, block[r])
            n += vlanes
        for r in range(vlanes):
            if not first <= t + r < last:
                continue
            for n in range(STATE_VECTORS):
                if stream:
                    vstream(out + (t + r - first) * out_row + n * vlanes, vload(buffer + r * STATE + n * vlanes))
                else:
                    vstore(out + (t + r - first) * out_row + n * vlanes, vload(buffer + r * STATE + n * vlanes))
        t += vlanes


# ---- decay ---------------------------------------------------------------------------------------------------------

cdef void decay_matrix(const float* adt, Py_ssize_t first, Py_ssize_t real, float* decay) noexcept nogil:
    """decay[i, j] = exp(adt[j + 1] + ... + adt[i]) for j < i, first <= i < real; +0 elsewhere.

    Every column has a running sum of its own, which starts from +0 at row j + 1.
    """
    cdef Py_ssize_t i, j, v
    cdef float sums[CHUNK]
    cdef vf total, step
    cdef vi active
    memset(sums, 0, sizeof(sums))
    for i in range(CHUNK):
        step = vset(adt[i])
        j = 0
        while j < CHUNK:
            if j < i and i < real:
                total = vadd(vload(sums + j), step)
                active = lanes_below(i - j)
                total = vselect(active, total, vzero())
                vstore(sums + j, total)
                if i >= first:
                    vstore(decay + i * CHUNK + j, vselect(active, vexp(total), vzero()))
            elif i >= first:
                vstore(decay + i * CHUNK + j, vzero())
            j += vlanes


cdef void mask_scores(const float* scores, const float* decay, Py_ssize_t first, Py_ssize_t real,
                      float* out) noexcept nogil:
    """out = scores * decay below the diagonal and +0 elsewhere, rows first..real; the other rows become +0."""
    cdef Py_ssize_t i, j
    for i in range(CHUNK):
        j = 0
        while j < CHUNK:
            if first <= i < real and j < i:
                vstore(out + i * CHUNK + j, vselect(lanes_below(i - j), vmul(vload(scores + i * CHUNK + j),
                                                                              vload(decay + i * CHUNK + j)), vzero()))
            else:
                vstore(out + i * CHUNK + j, vzero())
            j += vlanes


cdef void running_decay(const float* adt, Py_ssize_t real, float* total, float* from_start,
                        float* to_end) noexcept nogil:
    """total[i] = adt[0] + ... + adt[i], held after the last row, and the decays exp(total[i]) from the chunk's start
    and exp(total[63] - total[i]) to its end."""
    cdef Py_ssize_t i
    cdef float run = 0.0
    cdef vf last
    for i in range(CHUNK):
        if i < real:
            run = sadd(run, adt[i]) if i else sflush(adt[0])
        total[i] = run
    last = vset(run)
    i = 0
    while i < CHUNK:
        vstore(from_start + i, vexp(vflush(vload(total + i))))
        vstore(to_end + i, vexp(vflush(vsub(last, vload(total + i)))))
        i += vlanes
