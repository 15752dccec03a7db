"""Threads, the floating-point environment, the processor's instruction sets and large buffers.

This module and everything imported before an instruction set is chosen is compiled for the baseline only.
"""
from libc.stdint cimport uint64_t
from cpython.exc cimport PyErr_CheckSignals
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES

from mojolearn._core.simd cimport fp_default, fp_leave

cdef extern from "pool.h" nogil:
    ctypedef struct pool_turn:
        bint over
    void pool_run(job_function job, void* arg, int threads, pool_turn* turn)
    void pool_turn_begin(pool_turn* turn)
    Py_ssize_t pool_next_unit(Py_ssize_t* counter)
    int pool_start()

cdef extern from "memory.h" nogil:
    void* huge_alloc(size_t nbytes)
    void huge_free(void* data)

cdef extern from "cpu.h" nogil:
    bint cpu_has_avx2()
    bint cpu_has_avx512()

MAX_THREADS = 256  # as in pool.h


cdef void parallel_run(job_function job, void* arg, int threads) noexcept nogil:
    """Run ``job`` in up to ``threads`` threads, each in exact floating-point mode; restore the caller's mode."""
    pool_run(job, arg, threads, NULL)


cdef int run_in_turns(job_function job, void* arg, int threads) except -1 nogil:
    """Like `parallel_run`, coming up for signals; returns early with the exception if a handler raises one."""
    cdef pool_turn turn
    while True:
        pool_turn_begin(&turn)
        pool_run(job, arg, threads, &turn)
        if not turn.over:
            return 0
        with gil:
            PyErr_CheckSignals()


cdef Py_ssize_t next_unit_in_turn(Py_ssize_t* counter) noexcept nogil:
    """The next unit of a job in turns; beyond all units when the turn is over."""
    return pool_next_unit(counter)


def cpu_instruction_sets():
    """The instruction sets, of those that the library has kernels for, that this processor and system can run."""
    found = ["baseline"]
    if cpu_has_avx2():
        found.append("avx2")
    if cpu_has_avx512():
        found.append("avx512")
    return tuple(found)


cdef class FloatEnvironment:
    """Context manager: the default environment (to nearest, nothing flushed or trapped) inside, the caller's after."""
    cdef uint64_t saved

    def __enter__(self):
        self.saved = fp_default()
        return self

    def __exit__(self, kind, error, traceback):
        fp_leave(self.saved)
        return False


cdef class HugeBuffer:
    """Bytes at a 2 MiB boundary, in huge pages where the system has them; exposes the buffer protocol."""
    cdef void* data
    cdef Py_ssize_t nbytes
    cdef Py_ssize_t stride

    def __cinit__(self, Py_ssize_t nbytes):
        self.nbytes = nbytes
        self.stride = 1
        self.data = huge_alloc(nbytes)
        if self.data == NULL:
            raise MemoryError(f"{nbytes} bytes could not be allocated")

    def __dealloc__(self):
        huge_free(self.data)

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer* view, int flags):
        view.buf = self.data
        view.obj = self
        view.len = self.nbytes
        view.readonly = 0
        view.itemsize = 1
        view.format = NULL
        if flags & PyBUF_FORMAT:
            view.format = "B"
        view.ndim = 1
        view.shape = &self.nbytes if flags & PyBUF_ND else NULL
        view.strides = &self.stride if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL

    def __releasebuffer__(self, Py_buffer* view):
        pass


if pool_start() != 0:
    raise ImportError("the fork handler of the thread pool could not be registered")
