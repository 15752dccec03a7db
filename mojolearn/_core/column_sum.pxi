# Sums over tokens, and the merging of such sums.
#
# Only additions: the sum of two floats is a multiple of 2^-149, so what it loses by flushing in hardware is what F takes.

cdef enum:
    SUM_VECTORS = 4
    MERGE_FLOATS = 1 << 14

cdef struct ColumnSum:
    const float* rows
    Py_ssize_t stride, count, width, leaf
    float* out
    bint seeded
    Py_ssize_t next_group


cdef void sum_columns(const ColumnSum* job, Py_ssize_t first) noexcept nogil:
    """SUM_VECTORS vectors of columns, from column ``first`` on."""
    cdef vf stack[FOLD_LEVELS][SUM_VECTORS]
    cdef vf acc[SUM_VECTORS]
    cdef Py_ssize_t counts[FOLD_LEVELS]
    cdef Py_ssize_t depth = 0, start = 0, end, count, t, q, n
    cdef Py_ssize_t columns = min(job.width - first, <Py_ssize_t> (SUM_VECTORS * vlanes))
    cdef bint full = columns == SUM_VECTORS * vlanes
    cdef const float* row = job.rows + first
    while True:
        end = min(start + job.leaf, job.count)
        for q in range(SUM_VECTORS):
            acc[q] = vzero()
            if job.seeded:
                n = min(max(columns - q * vlanes, <Py_ssize_t> 0), <Py_ssize_t> vlanes)
                acc[q] = vloadn(job.out + first + q * vlanes, n)
        for t in range(start, end):
            if full:
                for q in range(SUM_VECTORS):
                    acc[q] = vadd(vload(row + q * vlanes), acc[q])
            else:
                for q in range(SUM_VECTORS):
                    n = min(max(columns - q * vlanes, <Py_ssize_t> 0), <Py_ssize_t> vlanes)
                    acc[q] = vadd(vloadn(row + q * vlanes, n), acc[q])
            row += job.stride
        count = 1
        while depth and (end == job.count or counts[depth - 1] == count):
            depth -= 1
            for q in range(SUM_VECTORS):
                acc[q] = vadd(stack[depth][q], acc[q])
            count *= 2
        if end == job.count:
            break
        for q in range(SUM_VECTORS):
            stack[depth][q] = acc[q]
        counts[depth] = count
        depth += 1
        start = end
    for q in range(SUM_VECTORS):
        n = min(max(columns - q * vlanes, <Py_ssize_t> 0), <Py_ssize_t> vlanes)
        vstoren(job.out + first + q * vlanes, acc[q], n)


cdef void column_sum_job(void* arg, int thread) noexcept nogil:
    cdef ColumnSum* job = <ColumnSum*> arg
    cdef Py_ssize_t group
    fp_fast()
    while True:
        group = next_unit(&job.next_group)
        if group * SUM_VECTORS * vlanes >= job.width:
            break
        sum_columns(job, group * SUM_VECTORS * vlanes)
    fp_exact()


cdef struct Merge:
    const float* older
    const float* newer
    float* out
    Py_ssize_t count, next_piece


cdef void merge_job(void* arg, int thread) noexcept nogil:
    cdef Merge* job = <Merge*> arg
    cdef Py_ssize_t i, end
    fp_fast()
    while True:
        i = next_unit(&job.next_piece) * MERGE_FLOATS
        if i >= job.count:
            break
        end = min(i + MERGE_FLOATS, job.count)
        while i + vlanes <= end:
            vstore(job.out + i, vadd(vload(job.older + i), vload(job.newer + i)))
            i += vlanes
        if i < end:
            vstoren(job.out + i, vadd(vloadn(job.older + i, end - i), vloadn(job.newer + i, end - i)), end - i)
    fp_exact()
