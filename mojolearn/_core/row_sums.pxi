"""Sums over one row or several, chains side by side in lanes, and the norm that divides by one of them.

Shared by the kernels for whole batches (layers.pxi) and the decoder of one token (decode.pxi). A *chain* adds one term
after another; a *fold* cuts a sum into leaves (fold.pxi), each a chain, and adds the leaves by pairs (numerics page,
section 3).
"""

cdef enum:
    BLOCK_NORM_LANES = 32   # partial sums of the Mamba block norm

# what a chain adds: x_j, x_j * x_j, or (x_j * w_j) * y_j
cdef enum Term:
    VALUES
    SQUARES
    WEIGHTED_PRODUCTS


cdef float fold_pairs(float* leaves, Py_ssize_t count) noexcept nogil:
    """Sum of the leaves by adjacent pairs, level by level; an odd last one moves up. Overwrites `leaves`."""
    cdef Py_ssize_t half, i
    if count == 0:
        return 0.0
    while count > 1:
        half = count // 2
        for i in range(half):
            leaves[i] = sadd(leaves[2 * i], leaves[2 * i + 1])
        if count & 1:
            leaves[half] = leaves[count - 1]
            half += 1
        count = half
    return sflush(leaves[0])


cdef inline float chain_alone(Term term, const float* x, const float* y, const float* w,
                              Py_ssize_t n) noexcept nogil:
    cdef float total = 0.0
    cdef Py_ssize_t j
    if term == VALUES:
        for j in range(n):
            total = sadd(x[j], total)
    elif term == SQUARES:
        for j in range(n):
            total = sfma(x[j], x[j], total)
    else:
        for j in range(n):
            total = sfma(smul(x[j], w[j]), y[j], total)
    return total


cdef void chains(Term term, const float** x, const float** y, const float* w, Py_ssize_t n, Py_ssize_t count,
                 float* out) noexcept nogil:
    """out[l] = the chain over n terms of x[l] (and y[l], w), for l < count <= vlanes: one chain a lane.

    x and y have room for vlanes pointers; those from `count` on are overwritten.
    """
    cdef vf columns[vlanes]
    cdef vf others[vlanes]
    cdef vf total = vzero()
    cdef Py_ssize_t j = 0, l, steps
    if count == 1:
        out[0] = chain_alone(term, x[0], x[0] if y == NULL else y[0], w, n)
        return
    for l in range(count, vlanes):
        x[l] = x[0]
        if y != NULL:
            y[l] = y[0]
    while j + vlanes <= n:
        for l in range(vlanes):
            columns[l] = vload(x[l] + j)
        vtranspose(columns)
        if term == VALUES:
            for l in range(vlanes):
                total = vadd(columns[l], total)
        elif term == SQUARES:
            for l in range(vlanes):
                total = vfma(columns[l], columns[l], total)
        else:
            for l in range(vlanes):
                others[l] = vload(y[l] + j)
            vtranspose(others)
            for l in range(vlanes):
                total = vfma(vmul(columns[l], vset(w[j + l])), others[l], total)
        j += vlanes
    steps = n - j
    if steps:
        for l in range(vlanes):
            columns[l] = vloadn(x[l] + j, steps)
        vtranspose(columns)
        if term == WEIGHTED_PRODUCTS:
            for l in range(vlanes):
                others[l] = vloadn(y[l] + j, steps)
            vtranspose(others)
        for l in range(steps):
            if term == VALUES:
                total = vadd(columns[l], total)
            elif term == SQUARES:
                total = vfma(columns[l], columns[l], total)
            else:
                total = vfma(vmul(columns[l], vset(w[j + l])), others[l], total)
    vstoren(out, total, count)


cdef inline void row_chains(Term term, const float* x, const float* y, const float* w, Py_ssize_t width,
                            Py_ssize_t count, float* out) noexcept nogil:
    """Chains over `count` <= vlanes consecutive rows of `width` terms."""
    cdef const float* rows[vlanes]
    cdef const float* others[vlanes]
    cdef Py_ssize_t l
    for l in range(count):
        rows[l] = x + l * width
        others[l] = y + l * width if y != NULL else x
    chains(term, rows, others, w, width, count, out)


cdef void block_norm_sums(const float* x, Py_ssize_t width, Py_ssize_t count, float* out) noexcept nogil:
    """Sums of squares of `count` <= vlanes rows in the order of the Mamba block norm.

    Term j goes to chain j mod 32; the 32 chains are added by adjacent pairs. The pairs are formed for all rows at once,
    a row to a lane.
    """
    cdef float partial[vlanes * BLOCK_NORM_LANES]
    cdef vf columns[BLOCK_NORM_LANES]
    cdef vf total
    cdef Py_ssize_t r, j, l, first, half
    for r in range(count):
        first = 0
        while first < BLOCK_NORM_LANES:
            total = vzero()
            j = first
            while j + vlanes <= width:
                total = vfma(vload(x + r * width + j), vload(x + r * width + j), total)
                j += BLOCK_NORM_LANES
            j = (width // BLOCK_NORM_LANES) * BLOCK_NORM_LANES + first
            if j < width < j + vlanes:      # a square chain is never -0, so zeros beyond the end add nothing
                total = vfma(vloadn(x + r * width + j, width - j), vloadn(x + r * width + j, width - j), total)
            vstore(partial + r * BLOCK_NORM_LANES + first, total)
            first += vlanes
    first = 0
    while first < BLOCK_NORM_LANES:
        for r in range(vlanes):
            columns[first + r] = vload(partial + min(r, count - 1) * BLOCK_NORM_LANES + first)
        vtranspose(columns + first)
        first += vlanes
    half = BLOCK_NORM_LANES // 2
    while half:
        for l in range(half):
            columns[l] = vadd(columns[2 * l], columns[2 * l + 1])
        half //= 2
    vstoren(out, columns[0], count)


cdef inline vf inverse_rms(vf sumsq, Py_ssize_t width, float eps) noexcept nogil:
    return vflush(vrsqrt(vflush(vadd(vdiv(sumsq, vset(<float> width)), vset(eps)))))


cdef void norm_rows(const float* x, const float* w, Py_ssize_t width, Py_ssize_t rows, float eps, bint lanes, float* out,
                    float* sumsq) noexcept nogil:
    """out = w * (x / sqrt(mean(x^2) + eps)) for rows of x (rows, width); ``out`` may be x.

    ``lanes`` takes the sums of squares in the order of the Mamba block norm, else one chain a row. ``sumsq`` (rows,)
    receives them, unless it is NULL.
    """
    cdef float sums[vlanes]
    cdef float scales[vlanes]
    cdef Py_ssize_t first = 0, count, r, j, left
    cdef vf scale
    while first < rows:
        count = min(<Py_ssize_t> vlanes, rows - first)
        memset(sums, 0, sizeof(sums))
        if lanes:
            block_norm_sums(x, width, count, sums)
        else:
            row_chains(SQUARES, x, NULL, NULL, width, count, sums)
        vstore(scales, inverse_rms(vload(sums), width, eps))
        for r in range(count):
            if sumsq != NULL:
                sumsq[first + r] = sflush(sums[r])
            scale = vset(scales[r])
            j = 0
            while j < width:
                left = width - j
                store_lanes(out + j, vflush(vmul(load_lanes(w + j, left), vmul(load_lanes(x + j, left), scale))), left)
                j += vlanes
            x += width
            out += width
        first += count
