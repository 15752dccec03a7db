# Matrix products.
#
# A product is cut in tiles of TILE_ROWS x TILE_COLUMNS outputs that live in registers for one leaf of the sum; the tile
# itself is in tile.h. Around it, from the inside out:
#
# * A few row panels take turns at one leaf of a column panel; the leaves are folded by a binary counter. Meanwhile what
#   the next turns need is fetched from the third-level cache.
# * A block of the sum (a power of two of leaves, so that it is a whole subtree of the fold) is packed and done at once.
#   The blocks are folded by a second counter whose partial results lie in the thread's scratch memory.
# * The operand with fewer rows (of the output) is packed once and shared by all threads. The other is cut in blocks of
#   about private_bytes that a thread packs for itself just before use, so that they are still in its cache.
# * Threads take packing units and blocks from counters. A thread waits only for packing units that another thread has
#   taken, never for a thread as such.
#
# No order of work enters the result: every output walks its own sum.

cdef extern from "tile.h" nogil:
    enum:
        TILE_ROWS
        TILE_VECTORS
        TILE_COLUMNS
    ctypedef struct Partial:
        const float* data
        Py_ssize_t stride
    ctypedef struct Leaf:
        Py_ssize_t steps
        Py_ssize_t columns
        const float* ahead
        const float* seed
        const Partial* older
        Py_ssize_t merges
        float* out
        Py_ssize_t out_stride
    void tile_run(bint streamed, Py_ssize_t rows, const float* a, const float* b, const Leaf* leaf)
    enum:
        SCALED_ROWS
    const double SCALED_MOST
    bint scaled_tile_rows(Py_ssize_t rows, Py_ssize_t first, const float* a, const float* b, const Leaf* leaf)
    void exact_tile_row(const float* x, Py_ssize_t x_step, const float* columns, Py_ssize_t row, const Leaf* leaf)
    Py_ssize_t second_level_bytes()
    void transpose_block(const float* rows, Py_ssize_t stride, Py_ssize_t count, float* out, Py_ssize_t out_stride)

cdef enum:
    BLOCK_LEAVES = 16
    BLOCK_STEPS = 2048
    LEAF_LEVELS = 4                    # of the counter inside a block
    GROUP = 12                         # row panels, at most, that take turns at a leaf of a column panel
    SHARED_GROUP = 4                   # of shared row panels, which come from farther away
    FEWEST_ROWS = TILE_ROWS * 6 // 7   # of private row panels that are made more even by being more
    PACK_PANELS = 4                    # packed at a time,
    PACK_STEPS = 64                    # or steps of all panels,
    PACK_RUN = 16                      # of which so many go to a panel before the next one's turn
    SHARED_BYTES = 32 << 20            # the shared operand is done in slices of at most this size
    NARROW_PART = 1 << 26              # multiplications of a part where vectors have four lanes
    LINE = 16                          # floats of a cache line
    # Panels begin 64 bytes further than their length says: rows of equal panels at a distance of a multiple of 4096
    # bytes would fall on the same cache sets, and the packing writes up to a vector beyond a panel.
    PANEL_PAD = 16
    # Products of private rows that are larger than this, weight gradients, are written past the caches.
    STREAMED_BYTES = 5 << 19

# A part of the private operand takes five eighths of the second-level cache.
cdef Py_ssize_t private_bytes = max(second_level_bytes() // 8 * 5, <Py_ssize_t> (300 << 10))

# Products below this are zeros in either mode, and so is their sum.
cdef double VANISHING = 2.0 ** -127

cdef enum Layout:
    BY_ROWS                            # (extent, steps)
    BY_STEPS                           # (steps, extent)
    BY_PANELS                          # a PanelMatrix


# ---- scratch memory ----

cdef class Scratch:
    """Memory for packed operands, kept between calls: fresh pages cost as much as a small product."""
    cdef float* data
    cdef Py_ssize_t floats

    def __cinit__(self, Py_ssize_t floats):
        self.data = <float*> huge_alloc(4 * floats)
        if self.data == NULL:
            raise MemoryError(f"{4 * floats} bytes of scratch memory for a matrix product could not be allocated")
        self.floats = floats

    def __dealloc__(self):
        huge_free(self.data)


_free_scratch = []


cdef Scratch take_scratch(Py_ssize_t floats):
    cdef Scratch scratch
    try:
        scratch = _free_scratch.pop()
    except IndexError:
        return Scratch(floats)
    if scratch.floats < floats:
        scratch = None
        return Scratch(floats)
    return scratch


cdef void give_scratch(Scratch scratch):
    if len(_free_scratch) < 2:
        _free_scratch.append(scratch)


# ---- packing ----

cdef void pack_rows(const float* rows, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t steps, float* panel,
                    Py_ssize_t width) noexcept nogil:
    """``count`` rows as a panel [step][width], zeros behind them; ``width`` is at most vlanes or a multiple of it.

    The rows behind them are fetched meanwhile. Another core has often just written them, and so many places at a time
    are too many for the hardware to foresee.
    """
    cdef Py_ssize_t first = 0, p = 0, i, group = min(width, <Py_ssize_t> vlanes)
    while first < width:
        p = 0
        while p + vlanes <= steps:
            for i in range(first + group, first + 2 * group):
                prefetch_far(rows + i * stride + p)
            # of a narrow panel, what is written too much lies where the next step goes
            transpose_block(rows + first * stride + p, stride, count - first, panel + p * width + first, width)
            p += vlanes
        first += vlanes
    while p < steps:
        for i in range(width):
            panel[p * width + i] = rows[i * stride + p] if i < count else 0
        p += 1


cdef inline void pack_steps(const float* steps_data, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t readable,
                            Py_ssize_t steps, float* panel, Py_ssize_t width) noexcept nogil:
    """``count`` columns of a few rows as a panel [step][width], zeros behind them. Of each row ``readable`` floats,
    from its first on, may be read. The rows of the next run are fetched meanwhile."""
    cdef Py_ssize_t p, i
    for p in range(steps):
        i = 0
        while i < width:
            prefetch(steps_data + PACK_RUN * stride + i)
            if (steps - p) * width - i < vlanes:
                # a narrow panel, and another thread may have packed what comes behind these steps
                vstoren(panel + i, vloadn(steps_data + i, min(count, width)), width)
            elif i + vlanes <= readable and (i + vlanes <= count or width < vlanes):
                vstore(panel + i, vload(steps_data + i))
            elif i < count:
                vstore(panel + i, vloadn(steps_data + i, min(count - i, <Py_ssize_t> vlanes)))
            else:
                vstore(panel + i, vzero())
            i += vlanes
        panel += width
        steps_data += stride


# ---- one product ----

cdef struct Operand:
    const float* data
    Py_ssize_t stride                  # floats from row to row
    Layout layout
    const PanelMatrix* panels

cdef struct Product:
    Operand a, b
    float* out
    Py_ssize_t out_stride
    Py_ssize_t m, n, steps, leaf
    bint seeded, checked, streamed
    Py_ssize_t block_steps, blocks     # of the sum
    Py_ssize_t row_panels, column_panels
    bint rows_private                  # a is the operand that each thread packs for itself
    bint columns_ready                 # b lies in memory as float32 panels
    Py_ssize_t row_stride, column_stride    # floats from panel to panel
    Py_ssize_t parts, part_panels      # of the private operand: how many, and their largest
    Py_ssize_t levels                  # partial results of a part
    float* shared
    Py_ssize_t shared_floats
    float* private_memory
    Py_ssize_t private_floats          # per thread: the packed part
    Py_ssize_t partial_floats          # and, behind it, the partial results
    Py_ssize_t next_pack, packed, next_part


cdef inline Py_ssize_t first_row(const Product* job, Py_ssize_t panel) noexcept nogil:
    """Rows are dealt out evenly, so that equal numbers of panels are equal work."""
    return panel * job.m // job.row_panels


cdef inline Py_ssize_t first_panel(const Product* job, Py_ssize_t part) noexcept nogil:
    """Of a part of the private operand. The larger parts come first: threads take them by turns."""
    cdef Py_ssize_t panels = job.row_panels if job.rows_private else job.column_panels
    return part * (panels // job.parts) + min(part, panels % job.parts)


cdef void pack_row_panels(const Product* job, Py_ssize_t first, Py_ssize_t last, Py_ssize_t start, Py_ssize_t done,
                          Py_ssize_t steps, float* packed) noexcept nogil:
    """``steps`` steps of row panels, from step start + done of the sum on; ``packed`` holds the panels from ``start`` on.
    """
    cdef Py_ssize_t i, row, rows, p = done, count
    if job.a.layout == BY_ROWS:
        for i in range(first, last):
            row = first_row(job, i)
            rows = first_row(job, i + 1) - row
            pack_rows(job.a.data + row * job.a.stride + start + done, job.a.stride, rows, steps, packed + done * rows,
                      rows)
            packed += job.row_stride
        return
    while p < done + steps:
        count = min(done + steps - p, <Py_ssize_t> PACK_RUN)
        for i in range(first, last):
            row = first_row(job, i)
            rows = first_row(job, i + 1) - row
            pack_steps(job.a.data + (start + p) * job.a.stride + row, job.a.stride, rows, job.m - row, count,
                       packed + (i - first) * job.row_stride + p * rows, rows)
        p += count


cdef void pack_column_panels(const Product* job, Py_ssize_t first, Py_ssize_t last, Py_ssize_t start, Py_ssize_t steps,
                             float* packed) noexcept nogil:
    cdef Py_ssize_t j, column, p = 0, count
    if job.b.layout == BY_PANELS:
        for j in range(first, last):
            panel_widen(job.b.panels.format, job.b.panels.data + j * job.b.panels.panel_bytes,
                        job.b.panels.scales + j * PANEL, start, start + steps, packed)
            packed += job.column_stride
        return
    if job.b.layout == BY_ROWS:
        for j in range(first, last):
            column = j * PANEL
            pack_rows(job.b.data + column * job.b.stride + start, job.b.stride, min(job.n - column, <Py_ssize_t> PANEL),
                      steps, packed, PANEL)
            packed += job.column_stride
        return
    while p < steps:
        count = min(steps - p, <Py_ssize_t> PACK_RUN)
        for j in range(first, last):
            column = j * PANEL
            pack_steps(job.b.data + (start + p) * job.b.stride + column, job.b.stride,
                       min(job.n - column, <Py_ssize_t> PANEL), job.n - column, count,
                       packed + (j - first) * job.column_stride + p * PANEL, PANEL)
        p += count


cdef int32_t largest(const float* data, Py_ssize_t step, Py_ssize_t width, Py_ssize_t steps,
                     int32_t* by_lane) noexcept nogil:
    """Bits of the largest magnitude in ``steps`` groups of ``width`` floats; ``by_lane`` gets those of each position
    modulo vlanes. (NaN counts as larger than infinity.)"""
    cdef vi even = viset(0), odd = viset(0), magnitude = viset(INT32_MAX)
    cdef Py_ssize_t p, i
    cdef int32_t result = 0
    for p in range(0, steps):
        i = 0
        while i < width:
            even = vimax(even, viand(vasint(vload(data + i)), magnitude))
            i += vlanes
        even, odd = odd, even
        data += step
    vistore(by_lane, vimax(even, odd))
    for i in range(vlanes):
        result = max(result, by_lane[i])
    return result


cdef inline float from_bits(int32_t bits) noexcept nogil:
    cdef float x
    memcpy(&x, &bits, 4)
    return x


# What the tiles of a group tell the next ones.
cdef struct Watch:
    bint underflow                     # seen in the last tile
    double columns                     # largest size in the present leaf of the columns; negative: not known yet


cdef void careful_tile(Py_ssize_t rows, const float* a, const float* b, const Leaf* leaf, bint done,
                       Watch* watch) noexcept nogil:
    """A tile with underflow, exactly; ``done`` if it was computed before and underflow was seen."""
    cdef int32_t by_lane[vlanes]
    cdef int32_t by_row[vlanes]
    cdef double all_rows = from_bits(largest(a, rows, rows, leaf.steps, by_row))
    cdef Py_ssize_t r = 0, i
    cdef bint scaled
    if watch.columns < 0:
        watch.columns = from_bits(largest(b, PANEL, TILE_COLUMNS, leaf.steps, by_lane))
    scaled = watch.columns < SCALED_MOST and all_rows * watch.columns < SCALED_MOST
    if leaf.seed != NULL:
        scaled = scaled and from_bits(largest(leaf.seed, TILE_COLUMNS, TILE_COLUMNS, rows, by_lane)) < SCALED_MOST
    elif all_rows * watch.columns < VANISHING:
        if not done:
            tile_run(False, rows, a, b, leaf)
        return
    while r < rows:
        fp_fast()
        if not scaled or not scaled_tile_rows(rows, r, a, b, leaf):
            for i in range(r, min(r + SCALED_ROWS, rows)):
                # a row that vanishes was right the first time, unless the attempt has written there
                if scaled or not done or leaf.seed != NULL or not from_bits(by_row[i]) * watch.columns < VANISHING:
                    exact_tile_row(a + i, rows, b, i, leaf)
        r += SCALED_ROWS


cdef inline void compute_tile(const Product* job, Py_ssize_t rows, const float* a, const float* b, Leaf* leaf,
                              bint streamed, Watch* watch) noexcept nogil:
    """One leaf of one tile. Where the last one saw underflow, this one is done carefully at once."""
    cdef bint done = not watch.underflow
    if done:
        tile_run(streamed, rows, a, b, leaf)
        if not job.checked or not fp_underflowed():
            return
    careful_tile(rows, a, b, leaf, done, watch)
    watch.underflow = True
    fp_fast()


cdef void compute_edge_tile(const Product* job, Py_ssize_t rows, const float* a, const float* b, Py_ssize_t columns,
                            Leaf* leaf, Watch* watch) noexcept nogil:
    """The last leaf of a tile that has fewer columns than a full one, or that goes on from the values in the output."""
    cdef float out[TILE_ROWS * TILE_COLUMNS]
    cdef float seed[TILE_ROWS * TILE_COLUMNS]
    cdef float* target = leaf.out
    cdef Py_ssize_t r
    if job.seeded:
        for r in range(rows):
            memcpy(seed + r * TILE_COLUMNS, target + r * leaf.out_stride, 4 * columns)
            memset(seed + r * TILE_COLUMNS + columns, 0, 4 * (TILE_COLUMNS - columns))
        leaf.seed = seed
    cdef Py_ssize_t stride = leaf.out_stride
    leaf.out = out
    leaf.out_stride = TILE_COLUMNS
    compute_tile(job, rows, a, b, leaf, False, watch)
    for r in range(rows):
        memcpy(target + r * stride, out + r * TILE_COLUMNS, 4 * columns)


# A block of the sum, as a group of row panels sees it.
cdef struct Block:
    Py_ssize_t steps
    bint last
    Py_ssize_t merges                  # with earlier blocks
    Py_ssize_t levels[FOLD_LEVELS]
    float* partial                     # results of earlier blocks, a level after the other: the outputs from
    Py_ssize_t row0, column0           # here on
    Py_ssize_t stride, level_floats


cdef void multiply_group(const Product* job, const Block* block, Py_ssize_t first, Py_ssize_t last, Py_ssize_t column,
                         const float* a, const float* b, const float* next_a) noexcept nogil:
    """Row panels [first, last), at most GROUP, times TILE_COLUMNS columns, over one block of the sum.

    Leaf by leaf, so that a leaf of the column panel stays in the nearest cache while the row panels take their turn.
    What comes from far away is fetched ahead: the row panels ``next_a``, unless NULL, or else, by the first tiles, the
    next leaf of the column panel.
    """
    cdef float waiting[LEAF_LEVELS][GROUP][TILE_ROWS * TILE_COLUMNS]
    cdef Partial older[FOLD_LEVELS]
    cdef Py_ssize_t levels[FOLD_LEVELS]
    cdef Py_ssize_t bounds[GROUP + 1]  # the row panels' first rows
    cdef Py_ssize_t leaves = ceil_div(block.steps, job.leaf), columns = min(job.n - column, <Py_ssize_t> TILE_COLUMNS)
    cdef Py_ssize_t t, i, r, row, rows, merges
    cdef bint ends
    cdef const float* a_leaf
    cdef const float* b_leaf
    cdef float* partial
    cdef Leaf leaf
    cdef Watch watch
    leaf.columns = columns
    watch.underflow = False
    for i in range(first, last + 1):
        bounds[i - first] = first_row(job, i)
    for t in range(leaves):
        watch.columns = -1
        ends = t == leaves - 1
        leaf.steps = min(job.leaf, block.steps - t * job.leaf)
        merges = merged_levels(t, ends, levels)
        b_leaf = b + t * job.leaf * PANEL
        for i in range(first, last):
            row = bounds[i - first]
            rows = bounds[i - first + 1] - row
            a_leaf = a + (i - first) * job.row_stride + t * job.leaf * rows
            leaf.ahead = NULL
            if next_a != NULL:
                leaf.ahead = next_a + (i - first) * job.row_stride + t * job.leaf * rows
            elif job.rows_private and (i - first) * LINE < PANEL:
                leaf.ahead = b_leaf + job.leaf * (PANEL + (i - first) * LINE)
            leaf.seed = NULL
            leaf.older = older
            leaf.merges = merges
            for r in range(merges):
                older[r].data = waiting[levels[r]][i - first]
                older[r].stride = TILE_COLUMNS
            if not ends:
                leaf.out = waiting[merges][i - first]
                leaf.out_stride = TILE_COLUMNS
                compute_tile(job, rows, a_leaf, b_leaf, &leaf, False, &watch)
                continue
            partial = block.partial + (row - block.row0) * block.stride + column - block.column0
            for r in range(block.merges):
                older[merges + r].data = partial + block.levels[r] * block.level_floats
                older[merges + r].stride = block.stride
            leaf.merges = merges + block.merges
            if not block.last:
                leaf.out = partial + block.merges * block.level_floats
                leaf.out_stride = block.stride
                compute_tile(job, rows, a_leaf, b_leaf, &leaf, False, &watch)
                continue
            leaf.out = job.out + row * job.out_stride + column
            leaf.out_stride = job.out_stride
            if columns < TILE_COLUMNS or job.seeded:
                compute_edge_tile(job, rows, a_leaf, b_leaf, columns, &leaf, &watch)
            else:
                compute_tile(job, rows, a_leaf, b_leaf, &leaf, job.streamed, &watch)


cdef void pack_shared(Product* job) noexcept nogil:
    """Take part in the packing of the shared operand, and return when all of it is done."""
    cdef Py_ssize_t panels = job.column_panels if job.rows_private else job.row_panels
    cdef Py_ssize_t stride = job.column_stride if job.rows_private else job.row_stride
    # Memory is read in long runs: of rows for a few panels, of steps for all panels.
    cdef bint by_steps = (job.b.layout if job.rows_private else job.a.layout) == BY_STEPS
    cdef Py_ssize_t per_block = ceil_div(job.block_steps, PACK_STEPS) if by_steps else ceil_div(panels, PACK_PANELS)
    cdef Py_ssize_t units = 0 if job.rows_private and job.columns_ready else per_block * job.blocks
    cdef Py_ssize_t unit, start, steps, first, done
    cdef float* packed
    while True:
        unit = next_unit(&job.next_pack)
        if unit >= units:
            break
        start = unit // per_block * job.block_steps
        steps = min(job.block_steps, job.steps - start)
        packed = job.shared + unit // per_block * panels * stride
        if by_steps:
            done = min(unit % per_block * PACK_STEPS, steps)
            steps = min(<Py_ssize_t> PACK_STEPS, steps - done)
            if job.rows_private:
                pack_column_panels(job, 0, panels, start + done, steps, packed + done * PANEL)
            else:
                pack_row_panels(job, 0, panels, start, done, steps, packed)
        else:
            first = unit % per_block * PACK_PANELS
            packed += first * stride
            if job.rows_private:
                pack_column_panels(job, first, min(first + PACK_PANELS, panels), start, steps, packed)
            else:
                pack_row_panels(job, first, min(first + PACK_PANELS, panels), start, 0, steps, packed)
        unit_done(&job.packed)
    while units_done(&job.packed) < units:
        cpu_relax()


cdef void multiply_rows(const Product* job, const Block* block, Py_ssize_t first, Py_ssize_t last, Py_ssize_t j,
                        const float* a, const float* b, const float* next_a) noexcept nogil:
    """Row panels [first, last) times column panel j, over one block of the sum."""
    cdef Py_ssize_t column = j * PANEL, end = min(column + PANEL, job.n), groups = ceil_div(last - first, GROUP), group, i
    while column < end:
        for group in range(groups):
            i = first + group * (last - first) // groups
            multiply_group(job, block, i, first + (group + 1) * (last - first) // groups, column,
                           a + (i - first) * job.row_stride, b, next_a)
        column += TILE_COLUMNS
        b += TILE_COLUMNS


cdef void multiply_part(const Product* job, Py_ssize_t part, float* packed) noexcept nogil:
    """All outputs of one part of the private operand. ``packed`` is this thread's scratch memory."""
    cdef Py_ssize_t first = first_panel(job, part), last = first_panel(job, part + 1)
    cdef Py_ssize_t i0 = 0, i1 = job.row_panels, j0 = 0, j1 = job.column_panels
    cdef Py_ssize_t index, start, groups, group, i, j, end
    cdef const float* a_panels
    cdef const float* b_panels
    cdef Block block
    if job.rows_private:
        i0 = first
        i1 = last
    else:
        j0 = first
        j1 = last
    block.partial = packed + job.private_floats
    block.row0 = first_row(job, i0)
    block.column0 = j0 * PANEL
    block.stride = (j1 - j0) * PANEL
    block.level_floats = (first_row(job, i1) - block.row0) * block.stride
    for index in range(job.blocks):
        start = index * job.block_steps
        block.steps = min(job.block_steps, job.steps - start)
        block.last = index == job.blocks - 1
        block.merges = merged_levels(index, block.last, block.levels)
        if job.rows_private:
            pack_row_panels(job, first, last, start, 0, block.steps, packed)
            a_panels = packed
            b_panels = job.shared + index * job.column_panels * job.column_stride
        else:
            a_panels = job.shared + index * job.row_panels * job.row_stride
            b_panels = packed
            if not job.columns_ready:
                pack_column_panels(job, first, last, start, block.steps, packed)
        if job.columns_ready:
            b_panels = <const float*> job.b.panels.data + j0 * job.column_stride + start * PANEL
        # the panels of the shared operand in the outer loop: the part stays in the second-level cache
        if job.rows_private:
            for j in range(j0, j1):
                multiply_rows(job, &block, i0, i1, j, a_panels, b_panels + (j - j0) * job.column_stride, NULL)
        else:
            groups = ceil_div(i1, SHARED_GROUP)
            for group in range(groups):
                i = group * i1 // groups
                for j in range(j0, j1):
                    end = (group + 1) * i1 // groups
                    multiply_rows(job, &block, i, end, j, a_panels + i * job.row_stride,
                                  b_panels + (j - j0) * job.column_stride,
                                  a_panels + end * job.row_stride if j == j1 - 1 else NULL)


cdef void multiply_job(void* arg, int thread) noexcept nogil:
    cdef Product* job = <Product*> arg
    cdef float* packed = job.private_memory + thread * (job.private_floats + job.partial_floats)
    cdef Py_ssize_t part
    fp_fast()
    pack_shared(job)
    fp_fast()
    while True:
        part = next_unit_in_turn(&job.next_part)
        if part >= job.parts:
            break
        multiply_part(job, part, packed)
    fp_exact()


cdef Py_ssize_t plan(Product* job, int threads) noexcept nogil:
    """Fill in the cutting of the product; return the floats of scratch memory that it needs."""
    cdef Py_ssize_t block, panels, width, stride, share, per_thread, blocks, even, most_rows
    job.block_steps = job.leaf
    while job.block_steps * 2 <= BLOCK_STEPS and job.block_steps < BLOCK_LEAVES * job.leaf:
        job.block_steps *= 2
    job.blocks = ceil_div(job.steps, job.block_steps)
    block = min(job.steps, job.block_steps)
    job.row_panels = ceil_div(job.m, TILE_ROWS)
    even = ceil_div(job.row_panels, threads) * threads
    if job.rows_private and job.m >= even * FEWEST_ROWS:
        job.row_panels = even
    most_rows = ceil_div(job.m, job.row_panels)
    job.column_panels = ceil_div(job.n, PANEL)
    job.row_stride = most_rows * block + PANEL_PAD
    job.row_stride = ceil_div(job.row_stride, 16) * 16
    job.column_stride = PANEL * job.steps if job.columns_ready else PANEL * block + PANEL_PAD
    panels = job.row_panels if job.rows_private else job.column_panels
    stride = job.row_stride if job.rows_private else job.column_stride
    # Parts are even and fit the cache. There are no more of them than that takes: each reads the whole shared operand.
    share = ceil_div(panels, threads)
    per_thread = ceil_div(share, max(private_bytes // (4 * (stride if job.rows_private else PANEL * block)), 1))
    if vlanes == 4:  # without wide vectors the parts of a large product would outlast a turn
        per_thread = max(per_thread, ceil_div(ceil_div(job.m * job.n, threads) * job.steps, NARROW_PART))
    job.parts = min(threads * per_thread, panels)
    job.part_panels = ceil_div(panels, job.parts)
    job.levels = 0
    blocks = job.blocks - 1
    while blocks > 0:
        job.levels += 1
        blocks //= 2
    width = PANEL * (job.column_panels if job.rows_private else job.part_panels)
    job.private_floats = PANEL_PAD
    job.shared_floats = PANEL_PAD
    if job.rows_private:
        job.private_floats += job.part_panels * job.row_stride
    else:
        job.shared_floats += job.row_panels * job.row_stride * job.blocks
    if not job.columns_ready:
        if job.rows_private:
            job.shared_floats += job.column_panels * job.column_stride * job.blocks
        else:
            job.private_floats += job.part_panels * job.column_stride
    job.partial_floats = job.levels * width * (min(job.part_panels * most_rows, job.m) if job.rows_private
                                               else job.m)
    job.next_pack = job.packed = job.next_part = 0
    return job.shared_floats + threads * (job.private_floats + job.partial_floats)


cdef void advance(Operand* operand, Py_ssize_t extent) noexcept nogil:
    operand.data += extent * (operand.stride if operand.layout == BY_ROWS else 1)


cdef int multiply(Product* whole, int threads) except -1:
    """Run a product; the operand that is shared is done in slices of bounded size."""
    cdef Product job
    cdef Py_ssize_t done = 0, extent, slice_extent, floats
    cdef Scratch scratch
    cdef bint low_bit = whole.b.layout == BY_PANELS and whole.b.panels.format != PANEL_FLOAT32
    # low-bit panels are widened part by part: the whole matrix would be as large as the unpacked one
    whole.rows_private = whole.m > whole.n and not low_bit
    whole.columns_ready = whole.b.layout == BY_PANELS and not low_bit
    whole.streamed = (whole.rows_private and (<Py_ssize_t> whole.out) % 64 == 0 and whole.out_stride % LINE == 0
                      and 4 * whole.m * whole.n >= STREAMED_BYTES)
    extent = whole.n if whole.rows_private else whole.m
    slice_extent = max(SHARED_BYTES // (4 * whole.steps) // PANEL * PANEL, <Py_ssize_t> PANEL)
    if whole.rows_private and whole.columns_ready:
        slice_extent = extent
    while done < extent:
        job = whole[0]
        if whole.rows_private:
            job.n = min(slice_extent, extent - done)
            advance(&job.b, done)
            job.out += done
        else:
            job.m = min(slice_extent, extent - done)
            advance(&job.a, done)
            job.out += done * job.out_stride
        floats = plan(&job, threads)
        scratch = take_scratch(floats)
        job.shared = scratch.data
        job.private_memory = scratch.data + job.shared_floats
        with nogil:
            run_in_turns(multiply_job, &job, threads)
        give_scratch(scratch)
        done += slice_extent
    return 0


cdef Operand operand(const float[:, :] x, str name, Layout layout) except *:
    cdef Operand result
    if x.shape[1] > 1 and x.strides[1] != 4 or x.strides[0] % 4:
        raise ValueError(f"the rows of {name} must be contiguous, got strides ({x.strides[0]}, {x.strides[1]})")
    result.data = &x[0, 0]
    result.stride = x.strides[0] // 4
    result.layout = layout
    return result


cdef int product(Operand a, Py_ssize_t m, Operand b, Py_ssize_t n, Py_ssize_t steps, float[:, :] out, int threads,
                 int mode, Py_ssize_t leaf=0, bint seed=False) except -1:
    cdef Product job
    job.a = a
    job.b = b
    job.out = <float*> operand(out, "out", BY_ROWS).data
    job.out_stride = out.strides[0] // 4
    job.m = m
    job.n = n
    job.steps = steps
    job.seeded = seed
    job.leaf = steps if seed else min(leaf or profile_leaf(steps), steps)
    job.checked = mode != FAST
    return multiply(&job, threads)
