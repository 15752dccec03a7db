"""Kernels of the transformer block: rotary positions, the gated feed-forward, causal attention and its backward.

Summation orders (numerics page, sections 6 and 4.1). A score is one product cell over the head width (leaves of 128).
The maximum runs over the visible keys; exponentials, their serial sum, one division per weight, and the weighted sum
of values, one serial chain over the visible keys, follow. Only lanes across outputs are used: queries for scores and
sums over keys, head columns for the weighted sums. So neither tile shapes nor thread counts can move a bit.

No L x L matrix exists. A tile of ``CHAIN_LANES`` queries keeps its weights for all keys that it sees, (keys, queries)
with queries in lanes, in the scratch of its thread. Keys and values come packed by head, (B, KV, span, width), with
rows padded to whole tiles; positions of packed rows count from ``base``.

Glossary: b batch row, h query head, kv key-value head, hd head width, width hd padded to whole tiles, q query,
j key, span number of packed keys.
"""
from libc.stdint cimport INT32_MAX, int32_t, uint32_t
from libc.string cimport memcpy, memset
import numpy as np

from mojolearn._core.simd cimport *
from mojolearn._core.elementary cimport *
from mojolearn._core.vectors cimport all_lanes_finite, largest_magnitude, load_lanes, store_lanes
from mojolearn._core._pool cimport next_unit_in_turn, parallel_run, run_in_turns

cdef extern from "chains.h" nogil:
    enum:
        CHAIN_ROWS
        CHAIN_LANES
    void chain_rows(const float* a, Py_ssize_t a_row, const float* b, float* c, Py_ssize_t steps,
                    int* care)
    void chain_columns(const float* a, const float* b, Py_ssize_t b_step, float* c, Py_ssize_t c_row, Py_ssize_t steps,
                       int* care)
    void chain_column(const float* a, const float* b, Py_ssize_t b_step, float* c, Py_ssize_t steps,
                      int* care)
    void chain_lanes(const float* a, const float* b, Py_ssize_t b_step, float* c, Py_ssize_t c_row, Py_ssize_t steps,
                     int* care)
    vf vfma_flushed(vf a, vf b, vf c)
    vf vmul_flushed(vf a, vf b)

cdef enum:
    # keys whose weights and values stay in the first-level cache while every query of a tile uses them
    KEY_BLOCK = 64

# packed rows are padded to a multiple of this on every instruction set, so that buffers have one layout
HEAD_ALIGNMENT = 32


def head_width(Py_ssize_t head_dim):
    """Floats of a packed row: ``head_dim`` rounded up to whole tiles."""
    return -(-head_dim // HEAD_ALIGNMENT) * HEAD_ALIGNMENT


def packed_rows(Py_ssize_t span):
    """Rows to allocate for ``span`` packed keys: tiles read whole groups of rows."""
    return span + CHAIN_ROWS


cdef inline Py_ssize_t row_stride(const float[:, :] rows) noexcept:
    return rows.strides[0] // <Py_ssize_t> sizeof(float)


include "fold.pxi"
include "attention_step.pxi"
include "attention_rows.pxi"


# ---- tiles of queries ------------------------------------------------------------------------------------------------
cdef struct Attention:
    # shapes shared by forward and backward; query row i of a batch row is at position first + i
    Py_ssize_t batch, length, heads, kv_heads, head_dim, width, first, base, span_rows, window
    float scale
    const float* queries
    Py_ssize_t query_stride
    const float* keys
    const float* values
    float* maxima
    float* denominators


cdef inline Py_ssize_t first_visible(const Attention* a, Py_ssize_t position) noexcept nogil:
    """The first key position that a query sees; the last one is its own."""
    return max(a.base, position - a.window + 1) if a.window else a.base


cdef void pack_queries(const float* rows, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t head_dim, Py_ssize_t width,
                       float* columns) noexcept nogil:
    """Transpose ``count`` rows of ``head_dim`` into columns (width, CHAIN_LANES); lanes without a row are +0."""
    cdef vf block[vlanes]
    cdef Py_ssize_t d, i, lane, n
    lane = 0
    while lane < CHAIN_LANES:
        d = 0
        while d < width:
            n = head_dim - d
            for i in range(vlanes):
                block[i] = load_lanes(rows + (lane + i) * stride + d, n) if n > 0 and lane + i < count else vzero()
            vtranspose(block)
            for i in range(vlanes):
                vstore(columns + (d + i) * CHAIN_LANES + lane, block[i])
            d += vlanes
        lane += vlanes


cdef void score_cells(const float* rows, Py_ssize_t width, const float* columns, Py_ssize_t depth,
                      float* out, int* care) noexcept nogil:
    """Product cells of CHAIN_ROWS rows with CHAIN_LANES columns: a chain per leaf, leaves folded in pairs."""
    if depth <= LEAF:
        chain_rows(rows, width, columns, out, depth, care)
        return
    # a binary counter of finished leaves; 16 levels hold 2^15 leaves, more than any head has
    cdef float levels[16 * CHAIN_ROWS * CHAIN_LANES]
    cdef Py_ssize_t sizes[16]
    cdef Py_ssize_t top = 0, d, i, size, steps
    cdef float* older
    d = 0
    while d < depth:
        steps = min(<Py_ssize_t> LEAF, depth - d)
        chain_rows(rows + d, width, columns + d * CHAIN_LANES, out, steps, care)
        size = 1
        while top and (sizes[top - 1] == size or d + steps == depth):
            top -= 1
            size += sizes[top]
            older = levels + top * CHAIN_ROWS * CHAIN_LANES
            i = 0
            while i < CHAIN_ROWS * CHAIN_LANES:
                vstore(out + i, vadd(vload(older + i), vload(out + i)))
                i += vlanes
        if d + steps < depth:
            memcpy(levels + top * CHAIN_ROWS * CHAIN_LANES, out, CHAIN_ROWS * CHAIN_LANES * sizeof(float))
            sizes[top] = size
            top += 1
        d += LEAF


cdef inline vi hidden_from(const Attention* a, Py_ssize_t first_query, Py_ssize_t lane, Py_ssize_t key) noexcept nogil:
    """Mask of the queries from ``first_query + lane`` on that do not see a key."""
    cdef vi position = viadd(vilanes(), viset(<int32_t> (first_query + lane - key)))
    cdef vi hidden = vigt(viset(0), position)
    if a.window:
        hidden = vior(hidden, vigt(position, viset(<int32_t> (a.window - 1))))
    return hidden


cdef inline vf visible_cell(const Attention* a, vf cell, Py_ssize_t first_query, Py_ssize_t lane, Py_ssize_t key,
                            bint edge) noexcept nogil:
    """Score cells of one key for a vector of queries; -inf where the query does not see the key."""
    if edge:
        cell = vselect(hidden_from(a, first_query, lane, key), vbits(0xFF800000), cell)
    return cell


cdef inline vf exponential(vf cell, vf scale, vf top) noexcept nogil:
    """exp(score - maximum). What fast mode flushes on the way is too small to move an exponential from 1."""
    return vexp_negative(vsub(vmul(cell, scale), top))


cdef inline vf weight_of(vf e, vf total, vf reciprocal) noexcept nogil:
    """F(e / total), for 0 <= e <= 1 <= total and ``reciprocal`` the rounded 1 / total, in either mode.

    Two corrections of e * reciprocal give the rounded quotient: the first brings it within one unit in the last
    place, from where the second rounds right since its remainder is exact (Markstein 1990). That needs remainders
    above the subnormals; smaller e take the division, which is slower on vectors, of e scaled by 2^64."""
    cdef vf quotient, scaled
    cdef vi border
    if MOJO_ISA < 2 or vany(viand(vlt(e, vbits(0x17800000)), vgt(e, vzero()))):
        scaled = vmul(e, vbits(0x5F800000))
        quotient = vdiv(scaled, total)
        # below 2^-126 it is a zero, but for what rounds up to 2^-126: its neighbour with a remainder that is not negative
        border = viand(vieq(vasint(quotient), viset(0x207FFFFF)), vge(vfma(vneg(total), quotient, scaled), vzero()))
        quotient = vselect(border, vbits(0x20800000), quotient)
        return vmul(vselect(vlt(quotient, vbits(0x20800000)), vzero(), quotient), vbits(0x1F800000))
    quotient = vmul(e, reciprocal)
    quotient = vfma(vfma(vneg(total), quotient, e), reciprocal, quotient)
    return vfma(vfma(vneg(total), quotient, e), reciprocal, quotient)


cdef inline void store_head(const float* row, float* out, Py_ssize_t head_dim) noexcept nogil:
    """Copy a finished padded row out, flushed."""
    cdef Py_ssize_t d = 0
    while d < head_dim:
        store_lanes(out + d, vflush(vload(row + d)), head_dim - d)
        d += vlanes


cdef Py_ssize_t longest_view(const Attention* a) noexcept nogil:
    """Rows of weights that a tile of queries needs."""
    cdef Py_ssize_t span = a.first + a.length - a.base
    if a.window:
        span = min(span, a.window + CHAIN_LANES)
    return span + CHAIN_ROWS


cdef float score_scale(Py_ssize_t head_dim) noexcept:
    cdef uint64_t saved = fp_enter()
    cdef float scale = srsqrt(<float> head_dim)
    fp_leave(saved)
    return scale


cdef void fill_attention(Attention* a, const float[:, :] queries, const float[:, :, :, ::1] keys,
                         const float[:, :, :, ::1] values, Py_ssize_t heads, Py_ssize_t head_dim, Py_ssize_t first,
                         Py_ssize_t base, Py_ssize_t window) noexcept:
    a.scale = score_scale(head_dim)
    a.batch = keys.shape[0]
    a.length = queries.shape[0] // a.batch
    a.heads = heads
    a.kv_heads = keys.shape[1]
    a.head_dim = head_dim
    a.width = keys.shape[3]
    a.first = first
    a.base = base
    a.span_rows = keys.shape[2]
    # a window that covers every position is no window
    a.window = window if window < first + a.length else 0
    a.queries = &queries[0, 0]
    a.query_stride = row_stride(queries)
    a.keys = &keys[0, 0, 0, 0]
    a.values = &values[0, 0, 0, 0]
    a.maxima = NULL
    a.denominators = NULL


include "attention_forward.pxi"
include "attention_backward.pxi"
