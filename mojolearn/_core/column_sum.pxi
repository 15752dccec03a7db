# Sums over tokens, and the merging of such sums.
#
# Only additions: the sum of two floats is a multiple of 2^-149, so flushing in hardware takes from it just what F does.

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
    cdef vf waiting[FOLD_LEVELS][SUM_VECTORS]
    cdef vf acc[SUM_VECTORS]
    cdef Py_ssize_t filled[SUM_VECTORS]
    cdef Py_ssize_t levels[FOLD_LEVELS]
    cdef Py_ssize_t columns = min(job.width - first, <Py_ssize_t> (SUM_VECTORS * vlanes))
    cdef Py_ssize_t leaves = ceil_div(job.count, job.leaf), leaf, merges, i, t, q
    cdef bint full = columns == SUM_VECTORS * vlanes
    cdef const float* row = job.rows + first
    cdef float* out = job.out + first
    for q in range(SUM_VECTORS):
        filled[q] = min(max(columns - q * vlanes, <Py_ssize_t> 0), <Py_ssize_t> vlanes)
    for leaf in range(leaves):
        for q in range(SUM_VECTORS):
            acc[q] = vloadn(out + q * vlanes, filled[q]) if job.seeded else vzero()
        for t in range(leaf * job.leaf, min((leaf + 1) * job.leaf, job.count)):
            for q in range(SUM_VECTORS):
                if full:
                    acc[q] = vadd(vload(row + q * vlanes), acc[q])
                else:
                    acc[q] = vadd(vloadn(row + q * vlanes, filled[q]), acc[q])
            row += job.stride
        merges = merged_levels(leaf, leaf == leaves - 1, levels)
        for i in range(merges):
            for q in range(SUM_VECTORS):
                acc[q] = vadd(waiting[levels[i]][q], acc[q])
        if leaf < leaves - 1:
            for q in range(SUM_VECTORS):
                waiting[merges][q] = acc[q]
    for q in range(SUM_VECTORS):
        vstoren(out + q * vlanes, acc[q], filled[q])


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
