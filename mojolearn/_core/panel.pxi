# Products of a few rows with a packed weight. Needs fold.pxi; the weight comes from PackedWeight (packed_weight.pxi).

cdef extern from "panel.h" nogil:
    enum:
        PANEL
        PANEL_VECTORS
        PANEL_FLOAT32
        PANEL_BFLOAT16
        PANEL_INT8
        PANEL_INT8_PLAIN
        MATVEC_FLOATS
        MATVEC_LEVELS
    const int* matvec_streams
    int matvec_rows(int format)
    ctypedef struct OlderSums:
        const float* sums[MATVEC_LEVELS]
        Py_ssize_t count
    void matvec_run(int format, int log2_rows, bint several, const char* panels, Py_ssize_t panel_bytes,
                    const float* scales, Py_ssize_t first, Py_ssize_t last, const float** x, const char* ahead,
                    Py_ssize_t ahead_bytes, const OlderSums* older, float* out)
    void exact_matvec(int format, const char* panel, const float* scales, Py_ssize_t first, Py_ssize_t last,
                      const float* x, float* out)
    void panel_widen(int format, const char* panel, const float* scales, Py_ssize_t first, Py_ssize_t last, float* out)
    void pack_halves(bint int8, const char* rows, Py_ssize_t row_bytes, Py_ssize_t columns, int q, int32_t* out)

# A weight (outputs, steps) in panels of PANEL outputs; see panel.h for the layouts.
cdef struct PanelMatrix:
    const char* data
    const float* scales                # of int8: one for every output, padding included
    int format
    Py_ssize_t outputs, steps
    Py_ssize_t panels, panel_bytes

cdef enum:
    MOST_ROWS = 8                      # that share one reading of a panel


cdef void matvec_group(const PanelMatrix* w, Py_ssize_t panel, Py_ssize_t streams, bint several, int log2_rows,
                       const float** x, Py_ssize_t rows, float* out, Py_ssize_t out_stride, const char* after,
                       bint checked) noexcept nogil:
    """``streams`` neighbouring panels times at most MOST_ROWS rows. ``after``: the panels that come afterwards.

    ``x`` has the rows in groups of 2**log2_rows, the last one filled up; ``rows`` of the results are wanted. All groups
    take a leaf before the next one is read.
    """
    cdef float waiting[MATVEC_LEVELS][MATVEC_FLOATS]
    cdef float sums[MATVEC_FLOATS]
    cdef float* target
    cdef OlderSums older
    cdef Py_ssize_t levels[FOLD_LEVELS]
    cdef Py_ssize_t width = 1 << log2_rows, groups = ceil_div(rows, width), part = streams * width * PANEL
    cdef Py_ssize_t leaf = profile_leaf(w.steps), leaves = ceil_div(w.steps, leaf)
    cdef Py_ssize_t t, i, g, z, r, first, last, columns
    cdef const char* data = w.data + panel * w.panel_bytes
    cdef const float* scales = w.scales + panel * PANEL
    cdef const char* ahead
    cdef Py_ssize_t step_bytes = (4 >> w.format) * PANEL, ahead_bytes = step_bytes // groups
    for t in range(leaves):
        first = t * leaf
        last = min(first + leaf, w.steps)
        ahead = data + last * step_bytes if t < leaves - 1 else after
        older.count = merged_levels(t, t == leaves - 1, levels)
        target = &waiting[older.count][0] if t < leaves - 1 else &sums[0]
        for g in range(groups):
            for i in range(older.count):
                older.sums[i] = waiting[levels[i]] + g * part
            matvec_run(w.format, log2_rows, several, data, w.panel_bytes, scales, first, last, x + g * width,
                       ahead + g * (last - first) * ahead_bytes, ahead_bytes, &older, target + g * part)
        if checked and fp_underflowed():
            # the leaf again, and the older sums, which are as they were, in front of it
            for r in range(rows):
                for z in range(streams):
                    exact_matvec(w.format, data + z * w.panel_bytes, scales + z * PANEL, first, last, x[r],
                                 target + ((r // width * streams + z) * width + r % width) * PANEL)
            fp_fast()
            for i in range(older.count):
                z = 0
                while z < groups * part:
                    vstore(target + z, vadd(vload(waiting[levels[i]] + z), vload(target + z)))
                    z += vlanes
    for r in range(rows):
        for z in range(streams):
            columns = min(w.outputs - (panel + z) * PANEL, <Py_ssize_t> PANEL)
            memcpy(out + r * out_stride + (panel + z) * PANEL,
                   sums + ((r // width * streams + z) * width + r % width) * PANEL, 4 * columns)


cdef void panel_matvec(const PanelMatrix* w, const float* x, Py_ssize_t x_stride, Py_ssize_t rows, Py_ssize_t first,
                       Py_ssize_t last, Py_ssize_t then, float* out, Py_ssize_t out_stride, bint checked) noexcept nogil:
    """out (rows, outputs) = x (rows, steps) times the transpose of w, columns of panels [first, last) only.

    ``then``: the panel that this thread will probably read next. ``checked`` is false in mode fast. Enters and leaves in exact floating-point mode.
    """
    cdef const float* group[MOST_ROWS]
    cdef Py_ssize_t row = 0, r, taken, panel, streams, following
    cdef int log2_rows
    fp_fast()
    while row < rows:
        taken = min(rows - row, <Py_ssize_t> MOST_ROWS)
        log2_rows = 0
        while (1 << log2_rows) < min(taken, <Py_ssize_t> matvec_rows(w.format)):
            log2_rows += 1
        for r in range(MOST_ROWS):
            # rows that are missing repeat the first, and their results are left
            group[r] = x + (row + (r if r < taken else 0)) * x_stride
        streams = matvec_streams[log2_rows]
        panel = first
        while panel < last:
            if panel + streams <= last:
                following = panel + streams if panel + streams < last else then
                matvec_group(w, panel, streams, streams > 1, log2_rows, group, taken, out + row * out_stride,
                             out_stride, w.data + following * w.panel_bytes, checked)
                panel += streams
            else:
                following = panel + 1 if panel + 1 < last else then
                matvec_group(w, panel, 1, False, log2_rows, group, taken, out + row * out_stride, out_stride,
                             w.data + following * w.panel_bytes, checked)
                panel += 1
        row += taken
    fp_exact()
