"""Reported: importing a library makes subnormal floats zero in the whole process."""

from report_model import run

PROGRAM = """
import sys, threading
def alive():
    import ctypes
    return sys.float_info.min / 2 != 0 and ctypes.c_float(1e-40).value != 0
assert alive()
import mojolearn
assert alive()
from report_model import new_stack, tokens
stack = new_stack()
assert alive()
stack.train_step(tokens(2, 30), tokens(2, 30))
assert alive()
results = []
thread = threading.Thread(target=lambda: (stack.forward(tokens(2, 30)), results.append(alive())))
thread.start()
thread.join()
assert results == [True] and alive()
print("done")
"""


def test_import_and_training():
    for threads in ("1", "3"):
        assert run(PROGRAM, MOJOLEARN_NUM_THREADS=threads) == "done\n"
