"""Byte planes against NumPy's transposition."""

import numpy as np
import pytest

from mojolearn._core.byte_planes import join_planes, split_planes


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 1000, 262144])
def test_planes_are_the_transposed_bytes(itemsize, n):
    data = np.random.default_rng(n).integers(0, 256, n * itemsize, dtype=np.uint8)
    data.flags.writeable = False
    planes = np.full((itemsize, n), 7, np.uint8)
    split_planes(data, planes)
    assert (planes == data.reshape(-1, itemsize).T).all()
    for rows in ([plane.tobytes() for plane in planes], list(planes)):
        joined = np.full_like(data, 7)
        join_planes(rows, joined)
        assert (joined == data).all()


def test_sizes_that_do_not_fit_are_refused():
    data = np.zeros(12, np.uint8)
    for shape in ((3, 4), (4, 2), (2, 4), (0, 12), (8, 1)):
        with pytest.raises(ValueError, match="bytes"):
            split_planes(data, np.zeros(shape, np.uint8))
    for planes in ([b"1234"] * 3, [b"123", b"123", b"1234", b"12"], [b"12"] * 4, [b"123456", b"12345"]):
        with pytest.raises(ValueError, match="bytes"):
            join_planes(planes, data)
    with pytest.raises(ValueError, match="contiguous"):
        split_planes(data[::2], np.zeros((2, 3), np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        read_only = np.zeros(4, np.uint8)
        read_only.flags.writeable = False
        join_planes([b"1234"], read_only)
