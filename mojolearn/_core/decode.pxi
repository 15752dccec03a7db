"""One token for a few rows through the whole model in one parallel job (numerics, forward 4 to 7).

A step is a list of phases: a projection (its units are groups of panels), the heads of a mixer, and so on. Threads take
units from a phase's counter, do the element-wise work that belongs to them on the spot, and go on to the next phase when
all units of the present one are done; a thread waits only for units that another thread has taken. Norms are recomputed
by every thread that gets a unit, which is cheaper than a phase of their own.

Nothing of the documented state changes before the output head has found every activation finite; then, in the last
phase, the new rows are copied in. All operations and orders are those of the blocks' own kernels, for one token.
"""
from libc.stdint cimport int32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
import numpy as np

from mojolearn._core._pool cimport parallel_run
from mojolearn._core._pool import HugeBuffer
from mojolearn._core.elementary cimport *
from mojolearn._core.simd cimport *
from mojolearn._core.vectors cimport all_lanes_finite, load_lanes, store_lanes

include "fold.pxi"
include "row_sums.pxi"
include "panel.pxi"
include "attention_step.pxi"
include "mamba3_tiles.pxi"
include "mamba3_forward.pxi"
include "mamba3_step.pxi"

cdef enum:
    MAX_ROWS = 8                # rows of a step; more are better served by the matrix products
    FAST = 2
    PREFETCHED_BYTES = 65536    # of each panel, while a thread waits

cdef float ATTENTION_EPS = 1e-6

MAX_STEP_ROWS = MAX_ROWS
DONE = -2
CACHE_NOT_FINITE = -3


cdef struct Phase:              # a cache line, so that waiting for one phase does not slow the counter of the next
    Py_ssize_t next_unit
    Py_ssize_t done
    Py_ssize_t padding[6]


cdef struct Layer:
    bint attention
    const float* norm           # (D,)
    const float* second_norm    # (D,)
    # attention: q, k, v, o, gate, up, down. Mamba-3: in_proj, out_proj
    const PanelMatrix* q
    const PanelMatrix* k
    const PanelMatrix* v
    const PanelMatrix* o
    const PanelMatrix* gate
    const PanelMatrix* up
    const PanelMatrix* down
    const PanelMatrix* in_proj
    const PanelMatrix* out_proj
    MambaWeights mamba


cdef struct LayerState:
    # attention: the documented cache, and this token's rotated keys and values (B, KV, hd)
    float* keys                 # (B, KV, slots, hd)
    float* values
    Py_ssize_t slots
    bint windowed               # the cache is a ring of `slots` positions
    float* new_keys
    float* new_values
    MambaCarry mamba
    float* projection           # Mamba-3: (B, W), kept until the commit, which takes v from it
    float* witness              # Mamba-3: angles (B, H, 32) and first state rows (B, H, 128) after the last step
    bint stale                  # the carry does not repeat the documented state


cdef struct Step:
    const Layer* layers
    LayerState* states
    Py_ssize_t layer_count, rows, width, threads
    Py_ssize_t heads, kv_heads, head_dim, intermediate, inner
    Py_ssize_t position         # of the new token
    float score_scale           # 1 / sqrt(hd)
    const float* cosines        # (hd / 2,) of that position
    const float* sines
    const float* final_norm
    float final_eps
    const PanelMatrix* head
    float* logits               # (B, V)
    Py_ssize_t vocab
    bint checked                # false: mode fast
    # activations, (B, ...)
    float* x
    float* queries
    float* context              # attention context, or the gate of a Mamba-3 layer
    float* hidden               # gated feed-forward
    Phase* phases
    float* scratch              # of every thread
    Py_ssize_t scratch_floats
    bint nonfinite_cache        # a used slot of a key/value cache
    Py_ssize_t nonfinite_layer  # -2: none; otherwise the layer whose output is not finite (-1: the embedding)


# ---- phases ------------------------------------------------------------------------------------------------------------

cdef inline Py_ssize_t group_panels(Py_ssize_t panels) noexcept nogil:
    """Panels of one unit: four streams keep memory busy; the smallest matrices are cut finer, so that threads share them."""
    return 4 if panels >= 8 else 2


cdef inline Py_ssize_t panel_units(const PanelMatrix* matrix) noexcept nogil:
    return ceil_div(matrix.panels, group_panels(matrix.panels))


cdef inline void matvec_unit(const Step* step, const PanelMatrix* matrix, Py_ssize_t unit, const float* x, Py_ssize_t x_width,
                             float* out, Py_ssize_t out_width) noexcept nogil:
    cdef Py_ssize_t group = group_panels(matrix.panels), first = unit * group, then = first + step.threads * group
    # threads take units by turns, more or less
    panel_matvec(matrix, x, x_width, step.rows, first, min(first + group, matrix.panels),
                 then if then + group <= matrix.panels else first, out, out_width, step.checked)


cdef inline Py_ssize_t unit_columns(const PanelMatrix* matrix, Py_ssize_t unit, Py_ssize_t* first) noexcept nogil:
    """First column of a unit, and their number."""
    cdef Py_ssize_t group = group_panels(matrix.panels) * PANEL
    first[0] = unit * group
    return min(first[0] + group, matrix.outputs) - first[0]


cdef inline void add_residual(const Step* step, const PanelMatrix* matrix, Py_ssize_t unit, const float* product,
                              float* x) noexcept nogil:
    """x += product for the columns of a unit."""
    cdef Py_ssize_t first, count = unit_columns(matrix, unit, &first), r, j, n
    for r in range(step.rows):
        j = 0
        while j < count:
            n = count - j
            store_lanes(x + r * step.width + first + j,
                        vflush(vadd(load_lanes(x + r * step.width + first + j, n),
                                    load_lanes(product + r * matrix.outputs + first + j, n))), n)
            j += vlanes


# ---- norms -------------------------------------------------------------------------------------------------------------

cdef void normalize(Step* step, Py_ssize_t layer, const float* weight, float eps, bint lanes, float* out) noexcept nogil:
    """The norm of all rows of x into ``out``; notes when the rows, the output of ``layer``, are not finite."""
    if not all_lanes_finite(step.x, step.rows * step.width) and step.nonfinite_layer == -2:
        step.nonfinite_layer = layer
    norm_rows(step.x, weight, step.width, step.rows, eps, lanes, out, NULL)


# ---- attention ---------------------------------------------------------------------------------------------------------

cdef bint attend(const Step* step, const LayerState* state, Py_ssize_t line, float* scratch) noexcept nogil:
    """Context of all query heads of one row's key/value head; returns whether its part of the cache is finite."""
    cdef TokenAttention t
    cdef Py_ssize_t then = min(line + step.threads, step.rows * step.kv_heads - 1)
    t.group = step.heads // step.kv_heads
    t.head_dim = step.head_dim
    t.slots = state.slots
    t.cached = min(step.position, state.slots - 1) if state.windowed else step.position
    t.first_slot = (step.position - t.cached) % state.slots
    t.queries = step.queries + line * t.group * t.head_dim
    t.out = step.context + line * t.group * t.head_dim
    t.new_key = state.new_keys + line * t.head_dim
    t.new_value = state.new_values + line * t.head_dim
    t.keys = state.keys + line * t.slots * t.head_dim
    t.values = state.values + line * t.slots * t.head_dim
    t.next_keys = state.keys + (then * t.slots + t.first_slot) * t.head_dim
    t.scale = step.score_scale
    # what other threads have just written for the next head
    fetch(step.queries + then * t.group * t.head_dim, t.group * t.head_dim)
    fetch(state.new_keys + then * t.head_dim, t.head_dim)
    fetch(state.new_values + then * t.head_dim, t.head_dim)
    return attend_token(&t, scratch)


# ---- layers ------------------------------------------------------------------------------------------------------------

cdef inline bint take_unit(Phase* phase, Py_ssize_t units, Py_ssize_t* unit) noexcept nogil:
    unit[0] = next_unit(&phase.next_unit)
    return unit[0] < units


cdef inline bint is_open(Phase* phase, Py_ssize_t units) noexcept nogil:
    return units_done(&phase.next_unit) < units


cdef void finish_phase(Phase* phase, Py_ssize_t units, const PanelMatrix* next) noexcept nogil:
    """Wait for the units that other threads have taken. Meanwhile ask for the weights that this thread will probably
    read next: the second unit of ``next``, since the thread that ends a phase is the first in the one that follows."""
    cdef Py_ssize_t group = group_panels(next.panels), first = group, last = min(2 * group, next.panels), panel
    cdef Py_ssize_t most = min(next.panel_bytes, <Py_ssize_t> PREFETCHED_BYTES), at = 0
    while at < most and units_done(&phase.done) < units:
        for panel in range(first, last):
            prefetch_far(next.data + panel * next.panel_bytes + at)
            prefetch_far(next.data + panel * next.panel_bytes + at + 64)
        at += 128
    wait_until(&phase.done, units)


cdef inline const PanelMatrix* first_matrix(const Step* step, Py_ssize_t index) noexcept nogil:
    """What a layer, or the head behind the last one, reads first."""
    if index == step.layer_count:
        return step.head
    return step.layers[index].q if step.layers[index].attention else step.layers[index].in_proj


cdef Phase* attention_layer(Step* step, Py_ssize_t index, Phase* phase, float* scratch) noexcept nogil:
    cdef const Layer* layer = step.layers + index
    cdef LayerState* state = step.states + index
    cdef Py_ssize_t q_units = panel_units(layer.q), k_units = panel_units(layer.k), units, unit, first, count, r, j, n
    cdef Py_ssize_t q_width = step.heads * step.head_dim, kv_width = step.kv_heads * step.head_dim
    cdef float* normed = scratch
    cdef float* work = scratch + step.rows * step.width
    cdef vf g

    units = q_units + 2 * k_units
    if is_open(phase, units):
        normalize(step, index - 1, layer.norm, ATTENTION_EPS, False, normed)
        while take_unit(phase, units, &unit):
            if unit < q_units:
                matvec_unit(step, layer.q, unit, normed, step.width, step.queries, q_width)
            elif unit < q_units + k_units:
                matvec_unit(step, layer.k, unit - q_units, normed, step.width, state.new_keys, kv_width)
            else:
                matvec_unit(step, layer.v, unit - q_units - k_units, normed, step.width, state.new_values, kv_width)
            unit_done(&phase.done)
    finish_phase(phase, units, layer.o)
    phase += 1

    units = step.rows * step.kv_heads
    while take_unit(phase, units, &unit):
        rotate(state.new_keys + unit * step.head_dim, step.cosines, step.sines, step.head_dim // 2, False)
        count = step.heads // step.kv_heads
        for j in range(count):
            rotate(step.queries + (unit * count + j) * step.head_dim, step.cosines, step.sines, step.head_dim // 2, False)
        if not attend(step, state, unit, work):
            step.nonfinite_cache = True
        unit_done(&phase.done)
    finish_phase(phase, units, layer.o)
    phase += 1

    units = panel_units(layer.o)
    while take_unit(phase, units, &unit):
        matvec_unit(step, layer.o, unit, step.context, q_width, work, step.width)
        add_residual(step, layer.o, unit, work, step.x)
        unit_done(&phase.done)
    finish_phase(phase, units, layer.gate)
    phase += 1

    units = panel_units(layer.gate)
    if is_open(phase, units):
        normalize(step, index, layer.second_norm, ATTENTION_EPS, False, normed)
        while take_unit(phase, units, &unit):
            matvec_unit(step, layer.gate, unit, normed, step.width, step.hidden, step.intermediate)
            matvec_unit(step, layer.up, unit, normed, step.width, work, step.intermediate)
            count = unit_columns(layer.gate, unit, &first)
            for r in range(step.rows):
                j = r * step.intermediate + first
                n = count
                while n > 0:
                    g = vmul(vsilu(load_lanes(step.hidden + j, n)), load_lanes(work + j, n))
                    store_lanes(step.hidden + j, vflush(g), n)
                    j += vlanes
                    n -= vlanes
            unit_done(&phase.done)
    finish_phase(phase, units, layer.down)
    phase += 1

    units = panel_units(layer.down)
    while take_unit(phase, units, &unit):
        matvec_unit(step, layer.down, unit, step.hidden, step.intermediate, work, step.width)
        add_residual(step, layer.down, unit, work, step.x)
        unit_done(&phase.done)
    finish_phase(phase, units, first_matrix(step, index + 1))
    return phase + 1


cdef bint witness_agrees(const Step* step, const LayerState* state, Py_ssize_t row) noexcept nogil:
    """Whether angles and first state rows are what the last step left."""
    cdef const MambaCarry* carry = &state.mamba
    cdef Py_ssize_t heads = carry.heads, lines = step.rows * heads, line
    cdef const float* state_rows = state.witness + lines * ANGLES
    if memcmp(state.witness + row * heads * ANGLES, carry.theta + row * heads * ANGLES,
              heads * ANGLES * sizeof(float)) != 0:
        return False
    for line in range(row * heads, (row + 1) * heads):
        if memcmp(state_rows + line * STATE, carry.h + line * TALL, STATE * sizeof(float)) != 0:
            return False
    return True


cdef void commit_row(const Step* step, const Layer* layer, LayerState* state, Py_ssize_t row) noexcept nogil:
    """Copy what the step has made for one row of a layer into the documented state, counts apart."""
    cdef Py_ssize_t size = step.head_dim, slot, line, head, heads, lines
    cdef float* state_rows
    if layer.attention:
        slot = step.position % state.slots
        for line in range(row * step.kv_heads, (row + 1) * step.kv_heads):
            memcpy(state.keys + (line * state.slots + slot) * size, state.new_keys + line * size, size * sizeof(float))
            memcpy(state.values + (line * state.slots + slot) * size, state.new_values + line * size,
                   size * sizeof(float))
        return
    heads = state.mamba.heads
    lines = step.rows * heads
    state_rows = state.witness + lines * ANGLES
    for head in range(heads):
        line = row * heads + head
        commit_head(&state.mamba, row, head, state.projection + row * layer.in_proj.outputs)
        memcpy(state.witness + line * ANGLES, state.mamba.theta + line * ANGLES, ANGLES * sizeof(float))
        memcpy(state_rows + line * STATE, state.mamba.h + line * TALL, STATE * sizeof(float))


cdef Phase* mamba_layer(Step* step, Py_ssize_t index, Phase* phase, float* scratch) noexcept nogil:
    cdef const Layer* layer = step.layers + index
    cdef LayerState* state = step.states + index
    cdef Py_ssize_t heads = state.mamba.heads, width = layer.in_proj.outputs, inner = heads * HEAD
    cdef Py_ssize_t units, unit, row, normed_row = -1, panel_count
    cdef float* normed = scratch
    cdef float* work = scratch + step.rows * step.width
    cdef float* B = work
    cdef float* C = work + STATE
    cdef const float* proj

    panel_count = panel_units(layer.in_proj)
    units = panel_count + step.rows
    if is_open(phase, units):
        normalize(step, index - 1, layer.norm, NORM_EPS, True, normed)
        while take_unit(phase, units, &unit):
            if unit < panel_count:
                matvec_unit(step, layer.in_proj, unit, normed, step.width, state.projection, width)
            elif not witness_agrees(step, state, unit - panel_count):
                state.stale = True
            unit_done(&phase.done)
    finish_phase(phase, units, layer.out_proj)
    phase += 1

    units = step.rows * heads
    while take_unit(phase, units, &unit):
        row = unit // heads
        proj = state.projection + row * width
        if row != normed_row:
            norm_state_row(proj + 2 * inner, layer.mamba.B_norm, B)
            norm_state_row(proj + 2 * inner + STATE, layer.mamba.C_norm, C)
            normed_row = row
        if state.stale:
            rebuild_carry(&state.mamba, row, unit % heads)
        step_head(&layer.mamba, &state.mamba, row, unit % heads, min(unit + step.threads, units - 1), proj, width, B, C,
                  step.context + row * inner, work + 2 * STATE)
        unit_done(&phase.done)
    finish_phase(phase, units, layer.out_proj)
    phase += 1

    units = panel_units(layer.out_proj)
    while take_unit(phase, units, &unit):
        matvec_unit(step, layer.out_proj, unit, step.context, inner, work, step.width)
        add_residual(step, layer.out_proj, unit, work, step.x)
        unit_done(&phase.done)
    finish_phase(phase, units, first_matrix(step, index + 1))
    return phase + 1


cdef void step_job(void* arg, int thread) noexcept nogil:
    cdef Step* step = <Step*> arg
    cdef float* scratch = step.scratch + thread * step.scratch_floats
    cdef Phase* phase = step.phases
    cdef Py_ssize_t index, units, unit
    for index in range(step.layer_count):
        if step.layers[index].attention:
            phase = attention_layer(step, index, phase, scratch)
        else:
            phase = mamba_layer(step, index, phase, scratch)
    units = panel_units(step.head)
    if is_open(phase, units):
        normalize(step, step.layer_count - 1, step.final_norm, step.final_eps, False, scratch)
        while take_unit(phase, units, &unit):
            matvec_unit(step, step.head, unit, scratch, step.width, step.logits, step.vocab)
            unit_done(&phase.done)
    finish_phase(phase, units, first_matrix(step, 0))
    if step.nonfinite_cache or step.nonfinite_layer != -2:
        return
    phase += 1
    units = step.layer_count * step.rows
    while take_unit(phase, units, &unit):
        index = unit // step.rows
        commit_row(step, step.layers + index, step.states + index, unit % step.rows)
        unit_done(&phase.done)
    wait_until(&phase.done, units)


# ---- the objects behind SambaInference.step ----------------------------------------------------------------------------

cdef const float* vector(array, list keep) except NULL:
    cdef const float[::1] view = np.ascontiguousarray(array).reshape(-1)
    keep.append(view)
    return &view[0]


cdef const PanelMatrix* panels(weight, list keep) except NULL:
    keep.append(weight)
    return <const PanelMatrix*> <uintptr_t> weight.address


cdef float exact_inverse_root(float x) noexcept:
    cdef uint64_t saved = fp_enter()
    cdef float root = sflush(srsqrt(x))
    fp_leave(saved)
    return root


cdef class Decoder:
    """Pointers to a model's packed weights, in the order of a step.

    Parameters
    ----------
    config : SambaConfig
    weights : dict
        By registry name: panel matrices, and float32 arrays for the rest. Kept alive by the decoder.
    mode : int
    """
    cdef Layer* layers
    cdef Py_ssize_t layer_count
    cdef Step prototype
    cdef list keep
    cdef readonly object config
    cdef object embedding

    def __cinit__(self):
        self.layers = NULL

    def __init__(self, config, dict weights, int mode):
        cdef Py_ssize_t i
        cdef Layer* layer
        self.config = config
        self.keep = []
        self.layer_count = len(config.layers)
        self.layers = <Layer*> calloc(self.layer_count, sizeof(Layer))
        if self.layers == NULL:
            raise MemoryError("the decoder's layer table could not be allocated")
        for i in range(self.layer_count):
            layer = &self.layers[i]
            part = {name: weights[f"layers.{i}.{name}"] for name, _ in config.block_shapes(config.layers[i])}
            layer.attention = config.layers[i] == "attention"
            if layer.attention:
                layer.norm = vector(part["input_layernorm.weight"], self.keep)
                layer.second_norm = vector(part["post_attention_layernorm.weight"], self.keep)
                layer.q = panels(part["q_proj.weight"], self.keep)
                layer.k = panels(part["k_proj.weight"], self.keep)
                layer.v = panels(part["v_proj.weight"], self.keep)
                layer.o = panels(part["o_proj.weight"], self.keep)
                layer.gate = panels(part["gate_proj.weight"], self.keep)
                layer.up = panels(part["up_proj.weight"], self.keep)
                layer.down = panels(part["down_proj.weight"], self.keep)
            else:
                layer.norm = vector(part["block_norm.weight"], self.keep)
                layer.in_proj = panels(part["in_proj.weight"], self.keep)
                layer.out_proj = panels(part["out_proj.weight"], self.keep)
                layer.mamba.dt_bias = vector(part["dt_bias"], self.keep)
                layer.mamba.B_norm = vector(part["B_norm.weight"], self.keep)
                layer.mamba.C_norm = vector(part["C_norm.weight"], self.keep)
                layer.mamba.B_bias = vector(part["B_bias"], self.keep)
                layer.mamba.C_bias = vector(part["C_bias"], self.keep)
                layer.mamba.D = vector(part["D"], self.keep)
        memset(&self.prototype, 0, sizeof(Step))
        self.prototype.layers = self.layers
        self.prototype.layer_count = self.layer_count
        self.prototype.width = config.d_model
        if "attention" in config.layers:
            self.prototype.heads = config.n_heads
            self.prototype.kv_heads = config.n_kv_heads
            self.prototype.head_dim = config.head_dim
            self.prototype.intermediate = config.intermediate
            self.prototype.score_scale = exact_inverse_root(config.head_dim)
        self.prototype.inner = 2 * config.d_model
        self.prototype.final_norm = vector(weights["norm_f.weight"], self.keep)
        self.prototype.final_eps = config.norm_eps
        self.prototype.head = panels(weights["embed.weight" if config.tie_embeddings else "lm_head.weight"], self.keep)
        self.prototype.vocab = config.vocab
        self.prototype.checked = mode != FAST
        self.embedding = weights["embed.weight"]

    def __dealloc__(self):
        free(self.layers)


cdef float* writable(array, list keep) except NULL:
    cdef float[::1] view = array.reshape(-1)
    keep.append(view)
    return &view[0]


cdef class Session:
    """Buffers and carries for the steps of one `SambaState`.

    Parameters
    ----------
    decoder : Decoder
    state : SambaState
        Of at most `MAX_STEP_ROWS` rows.
    cosines, sines : ndarray of float32, shape (positions, head_dim / 2), or None
        Rotary tables that reach as far as the state does.
    threads : int

    Notes
    -----
    The carries of Mamba-3 layers repeat what the documented arrays hold. They are rebuilt when a layer's arrays are
    other objects than before, when its count of buffered tokens is another, or when its angles or the first row of its
    states differ from what the last step left there, as after a restored snapshot.
    """
    cdef readonly Decoder decoder
    cdef readonly int threads
    cdef Step job
    cdef LayerState* states
    cdef list identities            # per layer: the array objects that the pointers belong to
    cdef list expected              # per Mamba-3 layer: buffered tokens after the last step, or None; else None
    cdef object layers              # the list of layer states that was bound last
    cdef Py_ssize_t span            # slots that the scratch memory is enough for
    cdef list keep
    cdef const float[:, ::1] cosines
    cdef const float[:, ::1] sines
    cdef object x, phases

    def __cinit__(self):
        self.states = NULL

    def __dealloc__(self):
        free(self.states)

    def __init__(self, Decoder decoder, state, cosines, sines, int threads):
        cdef Py_ssize_t i, rows = state.batch_size, heads, span = 1, work, phase_count = 2
        cdef Layer* layer
        cdef LayerState* own
        cdef Step* job = &self.job
        self.decoder = decoder
        self.threads = threads
        self.keep = []
        self.cosines = cosines
        self.sines = sines
        self.identities = [None] * decoder.layer_count
        self.expected = [None] * decoder.layer_count
        self.states = <LayerState*> calloc(decoder.layer_count, sizeof(LayerState))
        if self.states == NULL:
            raise MemoryError("the layer table of a decoding session could not be allocated")
        job[0] = decoder.prototype
        job.states = self.states
        job.rows = rows
        job.threads = threads
        for i in range(decoder.layer_count):
            layer = decoder.layers + i
            own = self.states + i
            if layer.attention:
                phase_count += 5
                span = max(span, state.layers[i].k_cache.shape[2])
                own.new_keys = self.buffer(rows * job.kv_heads * job.head_dim)
                own.new_values = self.buffer(rows * job.kv_heads * job.head_dim)
            else:
                phase_count += 3
                heads = job.inner // HEAD
                own.mamba.heads = heads
                own.mamba.ks_cache = self.buffer(rows * heads * TALL)
                own.mamba.h_cache = self.buffer(rows * heads * TALL)
                own.mamba.seg_cache = self.buffer(rows * heads * CHUNK)
                own.mamba.new = self.buffer(rows * heads * NEW_FLOATS)
                own.projection = self.buffer(rows * layer.in_proj.outputs)
                own.witness = self.buffer(rows * heads * (ANGLES + STATE))
        self.span = span
        self.x = np.empty((rows, job.width), np.float32)
        job.x = writable(self.x, self.keep)
        job.queries = self.buffer(rows * max(job.heads * job.head_dim, 1))
        job.context = self.buffer(rows * max(job.inner, job.heads * job.head_dim))
        job.hidden = self.buffer(rows * max(job.intermediate, 1))
        work = max(rows * max(job.width, job.intermediate), 2 * STATE + STEP_SCRATCH)
        if job.kv_heads:
            work = max(work, attend_token_scratch(job.heads // job.kv_heads, span + 1))
        job.scratch_floats = rows * job.width + work + vlanes
        job.scratch = self.buffer(threads * job.scratch_floats)
        self.phases = np.zeros((phase_count, sizeof(Phase)), np.uint8)
        job.phases = <Phase*> <uintptr_t> self.phases.ctypes.data

    cdef float* buffer(self, Py_ssize_t floats) except NULL:
        """Zeros at a cache line, in huge pages where they are many: every step reads all of the carries."""
        return writable(np.frombuffer(HugeBuffer(4 * floats), np.float32), self.keep)

    cdef tuple arrays_of(self, Py_ssize_t i, layer_state):
        if self.decoder.layers[i].attention:
            return layer_state.k_cache, layer_state.v_cache
        return (layer_state.theta, layer_state.h, layer_state.buffer_qrot, layer_state.buffer_krot, layer_state.buffer_v,
                layer_state.buffer_dt, layer_state.buffer_sig, layer_state.buffer_adt)

    cdef bint is_bound(self, Py_ssize_t i, layer_state) except -1:
        """Whether a layer's arrays are the very objects that the pointers belong to."""
        cdef Py_ssize_t k
        cdef tuple known, arrays
        if self.identities[i] is None:
            return False
        known = self.identities[i]
        arrays = self.arrays_of(i, layer_state)
        for k in range(len(known)):
            if known[k] is not arrays[k]:
                return False
        return True

    cdef bint is_sound(self, Py_ssize_t i, layer_state) except -1:
        """Whether the counts of a bound layer are integers that its arrays have room for; users may have set them."""
        cdef LayerState* own = self.states + i
        if self.decoder.layers[i].attention:
            cached, most = layer_state.cached_tokens, layer_state.max_tokens
            if type(cached) is not int or type(most) is not int:
                return False
            return 0 <= cached <= most and (own.windowed or most == own.slots)
        buffered = layer_state.buffered_tokens
        return type(buffered) is int and 0 <= buffered <= CHUNK and type(layer_state.pending) is bool

    cdef int bind(self, Py_ssize_t i, layer_state) except -1:
        cdef LayerState* own = self.states + i
        cdef MambaCarry* carry = &own.mamba
        cdef tuple arrays = self.arrays_of(i, layer_state)
        cdef list views = []
        if self.decoder.layers[i].attention:
            own.keys = writable(arrays[0], views)
            own.values = writable(arrays[1], views)
            own.slots = arrays[0].shape[2]
            own.windowed = layer_state.window > 0
        else:
            carry.theta = writable(arrays[0], views)
            carry.h = writable(arrays[1], views)
            carry.qrot = writable(arrays[2], views)
            carry.krot = writable(arrays[3], views)
            carry.v = writable(arrays[4], views)
            carry.dt = writable(arrays[5], views)
            carry.sig = writable(arrays[6], views)
            carry.adt = writable(arrays[7], views)
        self.identities[i] = arrays         # keeps the arrays alive, hence the pointers valid
        self.expected[i] = None
        return 0

    def suits(self, Decoder decoder, state, int threads):
        """Whether the session was made for this model, number of threads and number of rows."""
        return self.decoder is decoder and self.threads == threads and self.job.rows == state.batch_size

    def prepare(self, state, check):
        """Bind to the state's arrays; ``check(i)`` is called first for each layer whose arrays or counts are new here.

        Returns
        -------
        bool
            False when a step of this state has to take the general path: pending input states, layers at different
            positions, no room, or a longer cache than the session was made for.
        """
        cdef Py_ssize_t i
        position = None
        if state.layers is not self.layers:
            self.layers = state.layers
            self.identities = [None] * self.decoder.layer_count
        for i in range(self.decoder.layer_count):
            layer_state = state.layers[i]
            if not self.is_bound(i, layer_state) or not self.is_sound(i, layer_state):
                check(i)
                if self.decoder.layers[i].attention and layer_state.k_cache.shape[2] > self.span:
                    state._session = None
                    return False
                self.bind(i, layer_state)
            if self.decoder.layers[i].attention:
                if position is None:
                    position = layer_state.cached_tokens
                if layer_state.cached_tokens != position or position >= layer_state.max_tokens:
                    return False
            elif layer_state.pending:
                return False
        return position is None or position < self.cosines.shape[0]

    def step(self, const int32_t[::1] ids, state, float[:, ::1] logits):
        """Logits of one token per row, and the state moved on; after `prepare`.

        Returns
        -------
        int
            `DONE`; or `CACHE_NOT_FINITE` or the number of the layer whose output is not finite (-1: the embedding), and
            then nothing has changed.
        """
        cdef Py_ssize_t i
        cdef Step* job = &self.job
        cdef MambaCarry* carry
        cdef LayerState* own
        cdef list layers = state.layers
        job.position = 0
        job.logits = &logits[0, 0]
        job.nonfinite_layer = -2
        job.nonfinite_cache = False
        for i in range(job.layer_count):
            own = self.states + i
            if job.layers[i].attention:
                job.position = layers[i].cached_tokens
                job.cosines = &self.cosines[job.position, 0]
                job.sines = &self.sines[job.position, 0]
            else:
                carry = &own.mamba
                carry.buffered = layers[i].buffered_tokens
                own.stale = self.expected[i] is None or self.expected[i] != carry.buffered
                self.expected[i] = None
        self.decoder.embedding.rows(ids, self.x, 1)
        memset(job.phases, 0, self.phases.nbytes)
        with nogil:
            parallel_run(step_job, job, self.threads)
        if job.nonfinite_cache:
            return -3
        if job.nonfinite_layer != -2:
            return job.nonfinite_layer
        # The arrays have changed; from here on nothing can fail, and no signal handler runs before the return.
        for i in range(job.layer_count):
            if job.layers[i].attention:
                layers[i].cached_tokens = job.position + 1
            else:
                carry = &self.states[i].mamba
                carry.buffered = carry.buffered % CHUNK + 1
                layers[i].buffered_tokens = carry.buffered
                self.expected[i] = carry.buffered
        state.tokens += 1
        return -2
