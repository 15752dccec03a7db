# Weights that stay packed in memory.

cdef enum:
    UNITS_PER_THREAD = 4               # of the panels of a weight, in a product of few rows


cdef struct PackingJob:
    Operand source
    const PanelMatrix* matrix
    char* data
    Py_ssize_t next_panel
    bint finite


cdef void packing_job(void* arg, int thread) noexcept nogil:
    cdef PackingJob* job = <PackingJob*> arg
    cdef const PanelMatrix* w = job.matrix
    cdef float* panel
    cdef Py_ssize_t j
    while True:
        j = next_unit(&job.next_panel)
        if j >= w.panels:
            break
        panel = <float*> (job.data + j * w.panel_bytes)
        pack_rows(job.source.data + j * PANEL * job.source.stride, job.source.stride,
                  min(w.outputs - j * PANEL, <Py_ssize_t> PANEL), w.steps, panel, PANEL)
        if not all_lanes_finite(panel, w.steps * PANEL):
            job.finite = False


cdef class PackedWeight:
    """A weight (n, k) in panels, as float32, bfloat16 or int8; see :func:`linear`.

    Make one with ``from_float32``, ``from_bfloat16`` or ``from_int8``. Results are those of the float32 weight that
    ``unpack`` returns, bit for bit.
    """
    cdef PanelMatrix matrix
    cdef void* data
    cdef float* scales
    cdef int32_t[::1] exponents
    cdef Py_ssize_t data_bytes
    cdef readonly bint finite           # whether all values of a float32 weight are

    def __cinit__(self):
        self.data = NULL
        self.scales = NULL

    def __dealloc__(self):
        huge_free(self.data)
        huge_free(self.scales)

    cdef int allocate(self, int format, Py_ssize_t outputs, Py_ssize_t steps) except -1:
        if outputs == 0 or steps == 0:
            raise ValueError(f"a weight must not be empty, got shape {outputs, steps}")
        self.matrix.format = format
        self.matrix.outputs = outputs
        self.matrix.steps = steps
        self.matrix.panels = ceil_div(outputs, PANEL)
        if format == PANEL_FLOAT32:
            self.matrix.panel_bytes = steps * PANEL * 4
        elif format == PANEL_BFLOAT16:
            self.matrix.panel_bytes = steps * PANEL * 2
        else:
            self.matrix.panel_bytes = ceil_div(steps, 2) * PANEL * 2
        self.data_bytes = self.matrix.panels * self.matrix.panel_bytes
        self.data = huge_alloc(self.data_bytes)
        if self.data == NULL:
            raise MemoryError(f"{self.data_bytes} bytes for a packed weight {outputs, steps} could not be allocated")
        self.matrix.data = <const char*> self.data
        self.matrix.scales = <const float*> self.data      # not read unless there are scales
        return 0

    @staticmethod
    def from_float32(const float[:, :] values, int threads=1):
        """Pack a float32 array (n, k)."""
        cdef PackedWeight self = PackedWeight.__new__(PackedWeight)
        cdef PackingJob job
        check_threads(threads)
        self.allocate(PANEL_FLOAT32, values.shape[0], values.shape[1])
        job.source = operand(values, "values", BY_ROWS)
        job.matrix = &self.matrix
        job.data = <char*> self.data
        job.next_panel = 0
        job.finite = True
        with nogil:
            parallel_run(packing_job, &job, threads)
        self.finite = job.finite
        return self

    @staticmethod
    def from_bfloat16(const uint16_t[:, ::1] bits):
        """Pack bfloat16 values, given as uint16 bit patterns (n, k)."""
        cdef PackedWeight self = PackedWeight.__new__(PackedWeight)
        self.allocate(PANEL_BFLOAT16, bits.shape[0], bits.shape[1])
        with nogil:
            pack_low_bit(&self.matrix, <char*> self.data, <const char*> &bits[0, 0])
        return self

    @staticmethod
    def from_int8(const int8_t[:, ::1] codes, const int32_t[::1] exponents):
        """Pack int8 codes (n, k) with an exponent (n,) for each row: the value is code * 2**exponent."""
        cdef PackedWeight self = PackedWeight.__new__(PackedWeight)
        cdef Py_ssize_t j
        if exponents.shape[0] != codes.shape[0]:
            raise ValueError(f"{codes.shape[0]} rows of codes need as many exponents, got {exponents.shape[0]}")
        self.allocate(PANEL_INT8, codes.shape[0], codes.shape[1])
        self.exponents = np.array(exponents)
        self.scales = <float*> huge_alloc(4 * self.matrix.panels * PANEL)
        if self.scales == NULL:
            raise MemoryError("the scales of a packed weight could not be allocated")
        self.matrix.scales = self.scales
        for j in range(self.matrix.panels * PANEL):
            self.scales[j] = power_of_two(exponents[j]) if j < self.matrix.outputs else 1
        for j in range(self.matrix.outputs):
            # (2^23 + 128) * scale must be finite, and code * scale normal or a true zero
            if exponents[j] < -126 or exponents[j] > 103:
                self.matrix.format = PANEL_INT8_PLAIN
        with nogil:
            pack_low_bit(&self.matrix, <char*> self.data, <const char*> &codes[0, 0])
        return self

    @property
    def shape(self):
        """(n, k)"""
        return self.matrix.outputs, self.matrix.steps

    @property
    def format(self):
        """"float32", "bfloat16" or "int8"."""
        return ("float32", "bfloat16", "int8", "int8")[self.matrix.format]

    @property
    def nbytes(self):
        """Bytes held."""
        return self.data_bytes + (8 * self.matrix.outputs if self.scales != NULL else 0)

    @property
    def address(self):
        """Where the PanelMatrix lies, for kernels in other modules; valid as long as this object lives."""
        return <uintptr_t> &self.matrix

    def raw(self):
        """What was packed: float32 values, bfloat16 bits, or (int8 codes, exponents)."""
        cdef float[:, ::1] values
        cdef uint16_t[:, ::1] bits
        cdef int8_t[:, ::1] codes
        cdef Py_ssize_t column, p
        if self.matrix.format == PANEL_FLOAT32:
            values = result = np.empty(self.shape, np.float32)
            with nogil:
                for column in range(self.matrix.outputs):
                    for p in range(self.matrix.steps):
                        values[column, p] = (<const float*> stored(&self.matrix, column, p))[0]
            return result
        if self.matrix.format == PANEL_BFLOAT16:
            bits = result = np.empty(self.shape, np.uint16)
            with nogil:
                for column in range(self.matrix.outputs):
                    for p in range(self.matrix.steps):
                        bits[column, p] = (<const uint16_t*> stored(&self.matrix, column, p))[0]
            return result
        codes = result = np.empty(self.shape, np.int8)
        with nogil:
            for column in range(self.matrix.outputs):
                for p in range(self.matrix.steps):
                    codes[column, p] = <int8_t> ((<const uint8_t*> stored(&self.matrix, column, p))[0] ^ 0x80)
        return result, np.array(self.exponents)

    def unpack(self):
        """The float32 weight (n, k) that this stands for."""
        cdef float[:, ::1] values
        cdef Py_ssize_t column
        values = result = np.empty(self.shape, np.float32)
        with nogil:
            for column in range(self.matrix.outputs):
                copy_row(&self.matrix, column, &values[column, 0])
        return result

    def rows(self, const int32_t[::1] ids, float[:, :] out, int threads):
        """out (t, k) = rows ``ids`` of the weight, flushed: an embedding."""
        cdef RowCopy job
        cdef Py_ssize_t i
        check_threads(threads)
        if out.shape[0] != ids.shape[0] or out.shape[1] != self.matrix.steps:
            raise ValueError(f"out must have shape {ids.shape[0], self.matrix.steps}, got {out.shape[0], out.shape[1]}")
        for i in range(ids.shape[0]):
            if not 0 <= ids[i] < self.matrix.outputs:
                raise ValueError(f"ids must be in [0, {self.matrix.outputs}), got {ids[i]} at {i}")
        if ids.shape[0] == 0:
            return
        job.matrix = &self.matrix
        job.ids = &ids[0]
        job.count = ids.shape[0]
        job.out = <float*> operand(out, "out", BY_ROWS).data
        job.stride = out.strides[0] // 4
        job.next_row = 0
        with nogil:
            parallel_run(row_copy_job, &job, threads)

    def __reduce__(self):
        if self.matrix.format == PANEL_FLOAT32:
            return PackedWeight.from_float32, (self.raw(),)
        if self.matrix.format == PANEL_BFLOAT16:
            return PackedWeight.from_bfloat16, (self.raw(),)
        return PackedWeight.from_int8, self.raw()


cdef float power_of_two(int32_t exponent) noexcept nogil:
    """2**exponent: infinite beyond 127, zero below -126."""
    if exponent < -126:
        return 0
    return from_bits((min(exponent, 128) + 127) << 23)


cdef inline const char* stored(const PanelMatrix* w, Py_ssize_t column, Py_ssize_t step) noexcept nogil:
    """Where an element lies."""
    cdef const char* panel = w.data + column // PANEL * w.panel_bytes
    cdef Py_ssize_t c = column % PANEL, low = c % (PANEL // 2), high = c // (PANEL // 2)
    if w.format == PANEL_FLOAT32:
        return panel + (step * PANEL + c) * 4
    if w.format == PANEL_BFLOAT16:
        return panel + (step * (PANEL // 2) + low) * 4 + 2 * high
    return panel + (step // 2 * (PANEL // 2) + low) * 4 + step % 2 * 2 + high


cdef void copy_row(const PanelMatrix* w, Py_ssize_t column, float* out) noexcept nogil:
    """Row ``column`` of the weight as float32, not flushed."""
    cdef Py_ssize_t p, step_bytes
    cdef const char* at = stored(w, column, 0)
    cdef float scale
    if w.format == PANEL_FLOAT32:
        for p in range(w.steps):
            memcpy(out + p, at + p * PANEL * 4, 4)
    elif w.format == PANEL_BFLOAT16:
        for p in range(w.steps):
            out[p] = from_bits(<int32_t> ((<uint32_t> (<const uint16_t*> (at + p * PANEL * 2))[0]) << 16))
    else:
        scale = w.scales[column]
        for p in range(w.steps):
            # the product of a small integer and a power of two never lies below the normal numbers
            out[p] = (<float> ((<int> (<const uint8_t*> stored(w, column, p))[0]) - 128)) * scale


cdef void pack_low_bit(const PanelMatrix* w, char* panels, const char* rows) noexcept nogil:
    """bfloat16 bits or int8 codes, C-contiguous, into panels."""
    cdef bint int8 = w.format != PANEL_BFLOAT16
    cdef Py_ssize_t row_bytes = w.steps * (1 if int8 else 2), words = row_bytes // 2
    cdef Py_ssize_t j, c, p, columns
    cdef const char* source
    cdef char* panel
    cdef int q
    for j in range(w.panels):
        source = rows + j * PANEL * row_bytes
        panel = panels + j * w.panel_bytes
        columns = min(w.outputs - j * PANEL, <Py_ssize_t> PANEL)
        p = 0
        while p + vlanes <= words:
            for q in range(PANEL_VECTORS // 2):
                pack_halves(int8, source + 2 * p, row_bytes, columns, q,
                            <int32_t*> panel + p * (PANEL // 2) + q * vlanes)
            p += vlanes
        memset(panel + p * PANEL * 2, 0x80 if int8 else 0, w.panel_bytes - p * PANEL * 2)
        for c in range(columns):
            for q in range(<int> (p * 2), <int> row_bytes):
                # byte q of a row: of a bfloat16 half of step q / 2, of int8 the code of step q
                if int8:
                    panel[(q // 2 * (PANEL // 2) + c % (PANEL // 2)) * 4 + q % 2 * 2 + c // (PANEL // 2)] = (
                        source[c * row_bytes + q] ^ <char> 0x80)
                else:
                    panel[(q // 2 * (PANEL // 2) + c % (PANEL // 2)) * 4 + c // (PANEL // 2) * 2 + q % 2] = (
                        source[c * row_bytes + q])


cdef struct RowCopy:
    const PanelMatrix* matrix
    const int32_t* ids
    float* out
    Py_ssize_t count, stride, next_row


cdef void row_copy_job(void* arg, int thread) noexcept nogil:
    cdef RowCopy* job = <RowCopy*> arg
    cdef Py_ssize_t i, p
    cdef float* row
    while True:
        i = next_unit(&job.next_row)
        if i >= job.count:
            break
        row = job.out + i * job.stride
        copy_row(job.matrix, job.ids[i], row)
        for p in range(job.matrix.steps):
            row[p] = sflush(row[p])


cdef struct FewRows:
    const PanelMatrix* matrix
    const float* x
    Py_ssize_t x_stride, rows
    float* out
    Py_ssize_t out_stride
    bint checked
    Py_ssize_t unit_panels, next_unit


cdef void few_rows_job(void* arg, int thread) noexcept nogil:
    cdef FewRows* job = <FewRows*> arg
    cdef Py_ssize_t first
    while True:
        first = next_unit(&job.next_unit) * job.unit_panels
        if first >= job.matrix.panels:
            break
        panel_matvec(job.matrix, job.x, job.x_stride, job.rows, first, min(first + job.unit_panels, job.matrix.panels),
                     first, job.out, job.out_stride, job.checked)


cdef int few_rows(const float[:, :] x, const PanelMatrix* w, float[:, :] out, int threads, int mode) except -1:
    cdef FewRows job
    job.matrix = w
    job.x = operand(x, "x", BY_ROWS).data
    job.x_stride = x.strides[0] // 4
    job.rows = x.shape[0]
    job.out = <float*> operand(out, "out", BY_ROWS).data
    job.out_stride = out.strides[0] // 4
    job.checked = mode != FAST
    # a multiple of the panels that a kernel reads side by side
    job.unit_panels = ceil_div(ceil_div(w.panels, UNITS_PER_THREAD * threads), 4) * 4
    job.next_unit = 0
    with nogil:
        parallel_run(few_rows_job, &job, threads)
    return 0
