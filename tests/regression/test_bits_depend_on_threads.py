"""Reported: sums come out differently with another number of threads, from some size on."""

import numpy as np
import pytest
from report_model import new_stack, run, tokens

import mojolearn
from mojolearn._core import layers, linalg


def all_kernels(size):
    draw = np.random.default_rng(size)
    a, b = draw.standard_normal((2, size, 129)).astype(np.float32)
    product, sums, total = (np.empty(shape, np.float32) for shape in ((size, size), 129, (129, 129)))
    threads = mojolearn.get_num_threads()
    linalg.gemm_nt(a, b, product, threads)
    linalg.gemm_tn(a, b, total, threads)
    linalg.colsum(a, sums, threads)
    return product.tobytes(), total.tobytes(), sums.tobytes(), layers.gradient_norm([a, b], threads)


@pytest.fixture
def counts():
    before = mojolearn.get_num_threads()
    yield (1, 2, 3, 8, 64)
    mojolearn.set_num_threads(before)


def test_sizes(counts):
    for size in (1, 13, 56, 100, 444):
        results = set()
        for count in counts:
            mojolearn.set_num_threads(count)
            results.add(all_kernels(size))
        assert len(results) == 1, size


@pytest.mark.parametrize("mode", ["identical", "deterministic"])
def test_training(counts, mode):
    results = set()
    for count in counts:
        mojolearn.set_num_threads(count)
        stack = new_stack(numeric_mode=mode, dropout=0.1, max_norm=1.0)
        logs = [repr(stack.train_step(tokens(4, 33, seed=i), tokens(4, 33, seed=i))) for i in range(2)]
        results.add((*logs, stack.flat.tobytes()))
    assert len(results) == 1


def test_the_number_of_threads():
    program = "import mojolearn; print(mojolearn.get_num_threads(), mojolearn.show_config(quiet=True)['threads'])"
    assert run(program, MOJOLEARN_NUM_THREADS="5") == "5 5\n"
    default = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + program
    assert run(default, MOJOLEARN_NUM_THREADS="") == "1 1\n"
