"""Reported: a process that has used threads forks, and its child hangs."""

import multiprocessing
import os
import threading

import pytest
from report_model import new_stack, run, tokens

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def digest(seed):
    stack = new_stack(seed=seed)
    stack.train_step(tokens(2, 40), tokens(2, 40, seed=1))
    return stack.flat.tobytes()


def quietly_forking_pool():
    import warnings

    import mojolearn

    mojolearn.set_num_threads(3)
    want = [digest(seed) for seed in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on warns of forks with threads
        with multiprocessing.get_context("fork").Pool(4) as pool:
            assert pool.map(digest, range(4)) == want
    assert [digest(seed) for seed in range(4)] == want


def fork_inside_a_kernel():
    """Other threads are inside kernels, with the pool busy, at the time of the fork."""
    import warnings

    import mojolearn

    warnings.simplefilter("ignore", DeprecationWarning)
    mojolearn.set_num_threads(3)
    want, stop = digest(0), threading.Event()
    stacks = [new_stack(seed=i) for i in range(2)]

    def busy(stack):
        while not stop.is_set():
            stack.loss_and_grads(tokens(4, 130), tokens(4, 130))

    threads = [threading.Thread(target=busy, args=(stack,)) for stack in stacks]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                os._exit(0 if digest(0) == want else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert digest(0) == want


@pytest.mark.parametrize("case", ["quietly_forking_pool", "fork_inside_a_kernel"])
def test_fork(case):
    assert run(f"import test_hang_after_fork as t; t.{case}(); print('done')", timeout=60) == "done\n"
