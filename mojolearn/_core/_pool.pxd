from mojolearn._core.simd cimport next_unit, next_units, unit_done, units_done, cpu_relax

ctypedef void (*job_function)(void* arg, int thread) noexcept nogil

cdef void parallel_run(job_function job, void* arg, int threads) noexcept nogil

# For jobs that may take long: the same, but about five times a second it looks for signals, whose handlers may raise. The
# job then must take its units with next_unit_in_turn and keep nothing else from one call to the next.
cdef int run_in_turns(job_function job, void* arg, int threads) except -1 nogil
cdef Py_ssize_t next_unit_in_turn(Py_ssize_t* counter) noexcept nogil
