"""Reported: Ctrl-C is ignored while a long call computes."""

import os

import pytest
from report_model import run

LONG_STEP = """
import os, random, signal, sys, threading, time
import numpy as np
import mojolearn
from mojolearn.training import Generator

# Most of this step is a few calls of kernels, of seconds each.
config = mojolearn.SambaConfig(512, 256, ("mamba3", "attention"), n_heads=4, intermediate=512, dropout=0.1)
stack = mojolearn.SambaStack(config, generator=Generator(0), max_norm=1.0)
ids = np.random.default_rng(0).integers(0, 512, (int(sys.argv[1]), 512))

def snapshot():
    state = stack.state_dict()
    return {key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in state.items()}

stack.train_step(ids[:1, :8], ids[:1, :8])
old = stack.state_dict()
before = snapshot()
began = time.monotonic()
stack.train_step(ids, ids)
duration = time.monotonic() - began
after = snapshot()
kept = 0
for i in range(int(sys.argv[2])):
    stack.load_state_dict(old)
    sent = []
    def interrupt():
        time.sleep(random.Random(i).uniform(0.02, 0.9) * duration)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        stack.train_step(ids, ids)
        time.sleep(60)
    except KeyboardInterrupt:
        waited = time.monotonic() - sent[0]
    thread.join()
    now = snapshot()
    assert now in (before, after)
    kept += now == before
    print(f"{waited:.3f} of {duration:.1f}")
    assert waited < 1.0, waited
assert kept
stack.load_state_dict(old)
# The stack works on as if nothing had been.
other = mojolearn.SambaStack(config, generator=Generator(0), max_norm=1.0)
other.train_step(ids[:1, :8], ids[:1, :8])
assert stack.train_step(ids[:2, :70], ids[:2, :70]) == other.train_step(ids[:2, :70], ids[:2, :70])
assert stack.flat.tobytes() == other.flat.tobytes()
print("done")
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


# Sanitized kernels are many times slower, so fewer rows are as long a step.
ROWS = "3" if "MOJOLEARN_SANITIZE" in os.environ else "24"


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_long_step(threads):
    # a step takes 4 to 25 seconds, depending on the machine and what else it does
    done = run(LONG_STEP, timeout=300, arguments=(ROWS, "4"), MOJOLEARN_NUM_THREADS=threads)
    assert done.endswith("done\n")


@pytest.mark.long
@pytest.mark.parametrize(("isa", "rows"), [("baseline", "4"), ("avx2", "64"), ("avx512", "64")])
def test_a_longer_step(isa, rows):
    """Many times longer than a second on every set; baseline takes fewer rows for that."""
    from mojolearn import _core

    if isa not in _core.BUILT or isa not in _core.AVAILABLE:
        pytest.skip(f"{isa} is not built or this CPU lacks it")
    assert run(LONG_STEP, timeout=600, arguments=(rows, "10"), MOJOLEARN_ISA=isa).endswith("done\n")


def test_a_handler_that_does_not_raise():
    """The computation goes on to the same bits."""
    program = """
import signal, threading, os, time
import numpy as np
from report_model import new_stack, tokens
calls = []
signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))
quiet, loud = new_stack(), new_stack()
want = quiet.train_step(tokens(8, 512), tokens(8, 512))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
got = loud.train_step(tokens(8, 512), tokens(8, 512))
signal.setitimer(signal.ITIMER_REAL, 0)
assert calls
assert got == want and loud.flat.tobytes() == quiet.flat.tobytes()
print("done")
"""
    assert run(program) == "done\n"
