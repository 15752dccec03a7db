"""Byte planes: the first bytes of all elements, then all second bytes, and so on (formats page, section "The archive").

Copies bytes about, so one build serves every instruction set, at the speed of memory.
"""

from libc.stdint cimport uint8_t
from libc.string cimport memcpy

cdef extern from "planes.h" nogil:
    void split_halves(const uint8_t* data, uint8_t* p0, uint8_t* p1, Py_ssize_t n)
    void join_halves(uint8_t* data, const uint8_t* p0, const uint8_t* p1, Py_ssize_t n)
    void split_words(const uint8_t* data, uint8_t* p0, uint8_t* p1, uint8_t* p2, uint8_t* p3, Py_ssize_t n)
    void join_words(uint8_t* data, const uint8_t* p0, const uint8_t* p1, const uint8_t* p2, const uint8_t* p3,
                    Py_ssize_t n)


def split_planes(const uint8_t[::1] data, uint8_t[:, ::1] planes):
    """Split little-endian elements into byte planes.

    Parameters
    ----------
    data : bytes-like, n elements
    planes : ndarray of uint8, shape (1, 2 or 4, n)
        Written: row k holds byte k of every element, least significant first.
    """
    cdef Py_ssize_t itemsize = planes.shape[0], n = planes.shape[1]
    check_sizes(itemsize, n, data.shape[0])
    if n == 0:
        return
    cdef const uint8_t* source = &data[0]
    cdef uint8_t* plane = &planes[0, 0]
    with nogil:
        if itemsize == 1:
            memcpy(plane, source, n)
        elif itemsize == 2:
            split_halves(source, plane, plane + n, n)
        else:
            split_words(source, plane, plane + n, plane + 2 * n, plane + 3 * n, n)


def join_planes(planes, uint8_t[::1] out):
    """Inverse of `split_planes`.

    Parameters
    ----------
    planes : sequence of 1, 2 or 4 bytes-like, of n bytes each
    out : ndarray of uint8, shape (len(planes) * n,)
        Written.
    """
    cdef Py_ssize_t itemsize = len(planes), n = len(planes[0]), k
    check_sizes(itemsize, n, out.shape[0])
    if n == 0:
        return
    cdef const uint8_t* plane[4]
    cdef const uint8_t[::1] view
    held = []  # keeps the buffers alive
    for k in range(itemsize):
        view = planes[k]
        if view.shape[0] != n:
            raise ValueError(f"planes must have {n} bytes each, got one of {view.shape[0]}")
        plane[k] = &view[0]
        held.append(view)
    cdef uint8_t* target = &out[0]
    with nogil:
        if itemsize == 1:
            memcpy(target, plane[0], n)
        elif itemsize == 2:
            join_halves(target, plane[0], plane[1], n)
        else:
            join_words(target, plane[0], plane[1], plane[2], plane[3], n)


cdef check_sizes(Py_ssize_t itemsize, Py_ssize_t n, Py_ssize_t nbytes):
    if itemsize not in (1, 2, 4):
        raise ValueError(f"elements must have 1, 2 or 4 bytes, got {itemsize}")
    if nbytes != itemsize * n:
        raise ValueError(f"{n} elements of {itemsize} bytes make {itemsize * n} bytes, got {nbytes}")
