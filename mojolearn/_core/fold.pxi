# Leaves and tree of a sum (numerics page, section 3).

cdef enum:
    LEAF = 128
    MOST_LEAVES = 1024
    FOLD_LEVELS = 40                   # of a counter, or of one inside another


cdef inline Py_ssize_t ceil_div(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    return (a + b - 1) // b


cdef inline Py_ssize_t profile_leaf(Py_ssize_t steps) noexcept nogil:
    """Length of a leaf of a sum of ``steps`` terms."""
    if steps <= LEAF:
        return max(steps, <Py_ssize_t> 1)
    if ceil_div(steps, LEAF) <= MOST_LEAVES:
        return LEAF
    return ceil_div(steps, MOST_LEAVES)


cdef inline Py_ssize_t merged_levels(Py_ssize_t index, bint last, Py_ssize_t* levels) noexcept nogil:
    """The binary counter of the fold. After subtree ``index`` the subtrees that wait are the bits of index; the new one
    is merged with the run of lowest set bits, the last one with all. Returns how many; ``levels`` gets which, the
    newest first. Unless it is the last, the result then waits at the level that has this number."""
    cdef Py_ssize_t count = 0, level = 0
    while index and (last or index & 1):
        if index & 1:
            levels[count] = level
            count += 1
        index >>= 1
        level += 1
    return count
