"""Reported: importing a module brings the global interpreter lock back on a free-threaded interpreter."""

import sys
import sysconfig
import threading

import pytest
from report_model import model, run, tokens

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.mark.skipif(not FREE_THREADED, reason="needs a free-threaded interpreter")
def test_kernels_leave_the_lock_off():
    program = """
import importlib, sys
import numpy
from mojolearn import _core
for name in _core.BUILT:
    if name in _core.AVAILABLE:
        for family in _core.FAMILIES:
            importlib.import_module(f"mojolearn._core.{name}.{family}")
print(sys._is_gil_enabled())
"""
    assert run(program) == "False\n"


def test_threads_on_one_model():
    """Each with a state of its own; interpreters with a lock run the kernels without it."""
    ids = tokens(2, 40)
    served = model()
    want = served.forward(ids)
    results, failures = [], []

    def work():
        try:
            for _ in range(3):
                state = served.allocate_state(2, 40)
                prefill = served.forward(ids[:, :30], state)
                steps = [served.step(ids[:, t], state) for t in range(30, 40)]
                results.append((prefill.tobytes(), b"".join(step.tobytes() for step in steps)))
        except Exception as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    expected = (want[:, :30].tobytes(), b"".join(want[:, t].tobytes() for t in range(30, 40)))
    assert len(results) == 24
    assert set(results) == {expected}
