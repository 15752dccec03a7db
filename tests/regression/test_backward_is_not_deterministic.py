"""Reported: gradients differ from run to run, since threads add to one place in any order."""

import threading

import pytest
from report_model import new_stack, tokens

import mojolearn


@pytest.mark.parametrize("mode", ["identical", "deterministic"])
def test_twenty_times(mode):
    stack, ids = new_stack(numeric_mode=mode), tokens(2, 70)
    before, stop = mojolearn.get_num_threads(), threading.Event()

    def load():
        other = new_stack(seed=1)
        while not stop.is_set():
            other.forward(ids)

    results = set()
    try:
        for i in range(20):
            mojolearn.set_num_threads((1, 2, 4)[i % 3])
            if i == 10:  # from here on another thread keeps the cores busy
                busy = threading.Thread(target=load)
                busy.start()
            loss, grads = stack.loss_and_grads(ids, ids)
            results.add((loss, *(gradient.tobytes() for gradient in grads)))
    finally:
        stop.set()
        busy.join()
        mojolearn.set_num_threads(before)
    assert len(results) == 1
