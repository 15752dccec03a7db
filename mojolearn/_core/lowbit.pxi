# Codes of bfloat16 and int8 weights (numerics page, section 9).

cdef extern from "panel.h" nogil:
    void store_halves(uint16_t* p, vi x)
    void store_bytes(int8_t* p, vi x)
    vi load_halves(const uint16_t* p)
    vi load_bytes(const int8_t* p)

cdef enum:
    ROWS_AT_A_TIME = 8

cdef struct Coding:
    Operand values
    float* widened
    uint16_t* bits
    int8_t* codes
    int32_t* exponents
    Py_ssize_t rows, columns
    Py_ssize_t next_rows


cdef inline vi bfloat16_bits(vf x) noexcept nogil:
    """Bits of the nearest bfloat16, ties to even; a NaN stays one and becomes quiet."""
    cdef vi bits = vasint(vflush(x))
    cdef vi upper = vishr(bits, 16)
    cdef vi rounded = vishr(viadd(bits, viadd(viset(0x7fff), viand(upper, viset(1)))), 16)
    return viselect(veq(x, x), rounded, vior(upper, viset(0x40)))


cdef inline vi int8_code(vf x, vf scale) noexcept nogil:
    """The integer nearest to x * scale, ties to even, within [-127, 127]; 0 for NaN."""
    cdef vf s = vflush(vmul(vflush(x), scale))
    s = vselect(veq(s, s), s, vzero())
    s = vmax(vmin(s, vset(127)), vset(-127))
    # 1.5 * 2^23 has unit steps: the sum is rounded to an integer, and its low byte is the code
    return vasint(vadd(s, vset(12582912)))


cdef int32_t magnitude_exponent(const float* row, Py_ssize_t columns) noexcept nogil:
    """Exponent of the row's scale: its largest magnitude, NaN apart, gets a code in [64, 127]."""
    cdef vi found = viset(0), bits
    cdef vf x
    cdef int32_t largest_bits = 0
    cdef int32_t lanes[vlanes]
    cdef Py_ssize_t p = 0
    while p < columns:
        x = vload(row + p) if p + vlanes <= columns else vloadn(row + p, columns - p)
        bits = viand(vasint(vflush(x)), viset(INT32_MAX))
        found = vimax(found, viand(bits, veq(x, x)))
        p += vlanes
    vistore(lanes, found)
    for p in range(vlanes):
        largest_bits = max(largest_bits, lanes[p])
    return (largest_bits >> 23) - 127 - 6 if largest_bits else 0


cdef void encode_bfloat16_row(const float* row, Py_ssize_t columns, uint16_t* bits) noexcept nogil:
    cdef uint16_t rest[vlanes]
    cdef Py_ssize_t p = 0
    while p + vlanes <= columns:
        store_halves(bits + p, bfloat16_bits(vload(row + p)))
        p += vlanes
    if p < columns:
        store_halves(rest, bfloat16_bits(vloadn(row + p, columns - p)))
        memcpy(bits + p, rest, 2 * (columns - p))


cdef int32_t encode_int8_row(const float* row, Py_ssize_t columns, int8_t* codes) noexcept nogil:
    cdef int32_t exponent = magnitude_exponent(row, columns)
    cdef vf scale = vset(power_of_two(-exponent))
    cdef int8_t rest[vlanes]
    cdef Py_ssize_t p = 0
    while p + vlanes <= columns:
        store_bytes(codes + p, int8_code(vload(row + p), scale))
        p += vlanes
    if p < columns:
        store_bytes(rest, int8_code(vloadn(row + p, columns - p), scale))
        memcpy(codes + p, rest, columns - p)
    return exponent


cdef void decode_bfloat16_row(const uint16_t* bits, Py_ssize_t columns, float* row) noexcept nogil:
    cdef Py_ssize_t p = 0
    while p + vlanes <= columns:
        vistore(<int32_t*> (row + p), vishl(load_halves(bits + p), 16))
        p += vlanes
    while p < columns:
        (<uint32_t*> (row + p))[0] = (<uint32_t> bits[p]) << 16
        p += 1


cdef void decode_int8_row(const int8_t* codes, int32_t exponent, Py_ssize_t columns, float* row) noexcept nogil:
    cdef float scale = power_of_two(exponent)
    cdef Py_ssize_t p = 0
    while p + vlanes <= columns:
        vstore(row + p, vmul(vtofloat(load_bytes(codes + p)), vset(scale)))
        p += vlanes
    while p < columns:
        row[p] = smul(<float> codes[p], scale)
        p += 1


cdef void encode_job(void* arg, int thread) noexcept nogil:
    cdef Coding* job = <Coding*> arg
    cdef Py_ssize_t i, end
    cdef const float* row
    while True:
        i = next_unit(&job.next_rows) * ROWS_AT_A_TIME
        if i >= job.rows:
            break
        end = min(i + ROWS_AT_A_TIME, job.rows)
        while i < end:
            row = job.values.data + i * job.values.stride
            if job.bits != NULL:
                encode_bfloat16_row(row, job.columns, job.bits + i * job.columns)
            else:
                job.exponents[i] = encode_int8_row(row, job.columns, job.codes + i * job.columns)
            i += 1


cdef void decode_job(void* arg, int thread) noexcept nogil:
    cdef Coding* job = <Coding*> arg
    cdef Py_ssize_t i, end
    while True:
        i = next_unit(&job.next_rows) * ROWS_AT_A_TIME
        if i >= job.rows:
            break
        end = min(i + ROWS_AT_A_TIME, job.rows)
        while i < end:
            if job.bits != NULL:
                decode_bfloat16_row(job.bits + i * job.columns, job.columns, job.widened + i * job.columns)
            else:
                decode_int8_row(job.codes + i * job.columns, job.exponents[i], job.columns,
                                job.widened + i * job.columns)
            i += 1


cdef Coding coding(Py_ssize_t rows, Py_ssize_t columns) except *:
    cdef Coding job
    if rows == 0 or columns == 0:
        raise ValueError(f"a weight must not be empty, got shape {rows, columns}")
    memset(&job, 0, sizeof(job))
    job.rows = rows
    job.columns = columns
    return job
