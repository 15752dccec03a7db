from mojolearn._core.simd cimport next_unit, next_units, unit_done, units_done, cpu_relax

ctypedef void (*job_function)(void* arg, int thread) noexcept nogil

cdef void parallel_run(job_function job, void* arg, int threads) noexcept nogil
