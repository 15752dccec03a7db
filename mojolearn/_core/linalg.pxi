"""Matrix products in the profile's order, packed weights, and sums over tokens (numerics page, section 3).

Arrays are float32. Rows of a two-dimensional argument are contiguous; their distance is free. ``threads`` bounds the
threads that are used; no result depends on it. ``mode`` is 0, 1 or 2 (identical, deterministic, fast); the first two
give the same bits, the last leaves out the care for underflow.
"""
from libc.stdint cimport INT32_MAX, int8_t, int32_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memset

import numpy as np

from mojolearn._core._pool cimport next_unit_in_turn, parallel_run, run_in_turns
from mojolearn._core.simd cimport *
from mojolearn._core.vectors cimport all_lanes_finite

cdef extern from "memory.h" nogil:
    void* huge_alloc(size_t nbytes)
    void huge_free(void* data)

cdef enum:
    FAST = 2

include "fold.pxi"
include "panel.pxi"
include "product.pxi"
include "column_sum.pxi"
include "packed_weight.pxi"
include "lowbit.pxi"


cdef int check_threads(int threads) except -1:
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return 0


cdef int check_product(Py_ssize_t m, Py_ssize_t a_steps, Py_ssize_t n, Py_ssize_t b_steps, float[:, :] out,
                       int threads) except -1:
    check_threads(threads)
    if a_steps != b_steps or out.shape[0] != m or out.shape[1] != n:
        raise ValueError(f"shapes do not fit: {m} rows of {a_steps} with {n} rows of {b_steps}, "
                         f"out {out.shape[0], out.shape[1]}")
    if m == 0 or n == 0 or a_steps == 0:
        raise ValueError(f"a matrix product needs operands that are not empty, got {m} x {n} sums of {a_steps}")
    return 0


def gemm_nt(const float[:, :] a, const float[:, :] w, float[:, :] out, int threads, int mode=0):
    """out (m, n) = a (m, k) times the transpose of w (n, k)."""
    check_product(a.shape[0], a.shape[1], w.shape[0], w.shape[1], out, threads)
    product(operand(a, "a", BY_ROWS), a.shape[0], operand(w, "w", BY_ROWS), w.shape[0], a.shape[1], out, threads, mode)


def gemm_nn(const float[:, :] a, const float[:, :] w, float[:, :] out, int threads, int mode=0):
    """out (m, k) = a (m, n) times w (n, k)."""
    check_product(a.shape[0], a.shape[1], w.shape[1], w.shape[0], out, threads)
    product(operand(a, "a", BY_ROWS), a.shape[0], operand(w, "w", BY_STEPS), w.shape[1], a.shape[1], out, threads, mode)


def gemm_tn(const float[:, :] a, const float[:, :] b, float[:, :] out, int threads, int mode=0, Py_ssize_t leaf=0,
            bint seed=False):
    """out (m, n) = the transpose of a (t, m) times b (t, n), a sum over tokens.

    ``leaf`` is the leaf of the whole sum of which this is a subtree (0: of this sum alone). With ``seed`` the t tokens
    lie inside one leaf and every chain goes on from the value in ``out``.
    """
    check_product(a.shape[1], a.shape[0], b.shape[1], b.shape[0], out, threads)
    if leaf < 0:
        raise ValueError(f"leaf must not be negative, got {leaf}")
    product(operand(a, "a", BY_STEPS), a.shape[1], operand(b, "b", BY_STEPS), b.shape[1], a.shape[0], out, threads,
            mode, leaf, seed)


def linear(const float[:, :] x, w, float[:, :] out, int threads, int mode=0):
    """out (m, n) = x (m, k) times the transpose of w (n, k), a float32 array or a PackedWeight."""
    cdef PackedWeight packed
    cdef Operand b
    if not isinstance(w, PackedWeight):
        gemm_nt(x, w, out, threads, mode)
        return
    packed = w
    check_product(x.shape[0], x.shape[1], packed.matrix.outputs, packed.matrix.steps, out, threads)
    if x.shape[0] <= MOST_ROWS:
        few_rows(x, &packed.matrix, out, threads, mode)
        return
    b.data = NULL
    b.stride = 0
    b.layout = BY_PANELS
    b.panels = &packed.matrix
    product(operand(x, "x", BY_ROWS), x.shape[0], b, packed.matrix.outputs, x.shape[1], out, threads, mode)


def colsum(const float[:, :] rows, float[::1] out, int threads, int mode=0, Py_ssize_t leaf=0, bint seed=False):
    """out (d,) = the sum of rows (t, d) over t, in leaves and tree.

    ``leaf`` and ``seed`` as for :func:`gemm_tn`. All modes give the same bits.
    """
    cdef ColumnSum job
    check_threads(threads)
    if rows.shape[0] == 0 or rows.shape[1] == 0 or out.shape[0] != rows.shape[1] or leaf < 0:
        raise ValueError(f"shapes do not fit: rows {rows.shape[0], rows.shape[1]}, out {out.shape[0],}, leaf {leaf}")
    job.rows = operand(rows, "rows", BY_ROWS).data
    job.stride = rows.strides[0] // 4
    job.count = rows.shape[0]
    job.width = rows.shape[1]
    job.leaf = job.count if seed else min(leaf or profile_leaf(job.count), job.count)
    job.out = &out[0]
    job.seeded = seed
    job.next_group = 0
    with nogil:
        parallel_run(column_sum_job, &job, threads)


def merge(const float[::1] older, const float[::1] newer, float[::1] out, int threads):
    """out = older + newer, elementwise: two subtrees of a sum become one. ``out`` may be either of them."""
    cdef Merge job
    check_threads(threads)
    if older.shape[0] != newer.shape[0] or older.shape[0] != out.shape[0]:
        raise ValueError(f"shapes do not fit: older {older.shape[0],}, newer {newer.shape[0],}, out {out.shape[0],}")
    if out.shape[0] == 0:
        return
    job.older = &older[0]
    job.newer = &newer[0]
    job.out = &out[0]
    job.count = out.shape[0]
    job.next_piece = 0
    with nogil:
        parallel_run(merge_job, &job, threads)


def to_bfloat16(const float[:, :] values, uint16_t[:, ::1] bits, int threads):
    """bits = the bfloat16 codes of values (n, k)."""
    cdef Coding job = coding(values.shape[0], values.shape[1])
    check_codes(values.shape[0], values.shape[1], bits.shape[0], bits.shape[1], threads)
    job.values = operand(values, "values", BY_ROWS)
    job.bits = &bits[0, 0]
    with nogil:
        parallel_run(encode_job, &job, threads)


def to_int8(const float[:, :] values, int8_t[:, ::1] codes, int32_t[::1] exponents, int threads):
    """codes, exponents = the int8 codes of values (n, k), and the exponent of each row's scale."""
    cdef Coding job = coding(values.shape[0], values.shape[1])
    check_codes(values.shape[0], values.shape[1], codes.shape[0], codes.shape[1], threads)
    check_codes(values.shape[0], 1, exponents.shape[0], 1, threads)
    job.values = operand(values, "values", BY_ROWS)
    job.codes = &codes[0, 0]
    job.exponents = &exponents[0]
    with nogil:
        parallel_run(encode_job, &job, threads)


def from_bfloat16(const uint16_t[:, ::1] bits, float[:, ::1] values, int threads):
    """values = the floats that the bfloat16 codes stand for, exactly."""
    cdef Coding job = coding(values.shape[0], values.shape[1])
    check_codes(values.shape[0], values.shape[1], bits.shape[0], bits.shape[1], threads)
    job.widened = &values[0, 0]
    job.bits = <uint16_t*> &bits[0, 0]
    with nogil:
        parallel_run(decode_job, &job, threads)


def from_int8(const int8_t[:, ::1] codes, const int32_t[::1] exponents, float[:, ::1] values, int threads):
    """values = codes * 2**exponents, row by row."""
    cdef Coding job = coding(values.shape[0], values.shape[1])
    check_codes(values.shape[0], values.shape[1], codes.shape[0], codes.shape[1], threads)
    check_codes(values.shape[0], 1, exponents.shape[0], 1, threads)
    job.widened = &values[0, 0]
    job.codes = <int8_t*> &codes[0, 0]
    job.exponents = <int32_t*> &exponents[0]
    with nogil:
        parallel_run(decode_job, &job, threads)


cdef int check_codes(Py_ssize_t rows, Py_ssize_t columns, Py_ssize_t code_rows, Py_ssize_t code_columns,
                     int threads) except -1:
    check_threads(threads)
    if code_rows != rows or code_columns != columns:
        raise ValueError(f"codes {code_rows, code_columns} do not fit values {rows, columns}")
    return 0
