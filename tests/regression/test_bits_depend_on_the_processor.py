"""Reported: a loss curve depends on the instruction set and on the variants that the C library picks."""

import pytest
from report_model import run

from mojolearn import _core

CURVE = """
import hashlib
from report_model import new_stack, tokens
stack = new_stack()
losses = [stack.train_step(tokens(4, 24, seed=i), tokens(4, 24, seed=i + 1))["loss"] for i in range(5)]
print(hashlib.sha256(repr(losses).encode() + stack.flat.tobytes()).hexdigest())
"""


def test_loss_curve():
    sets = [name for name in _core.BUILT if name in _core.AVAILABLE]
    curves = {run(CURVE, MOJOLEARN_ISA=name) for name in sets}
    curves |= {run(CURVE, GLIBC_TUNABLES=tunables) for tunables in ("glibc.cpu.hwcaps=-FMA,-AVX2,-AVX512F",)}
    assert len(curves) == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"])
def test_variables_of_others_have_no_effect(name):
    program = CURVE + "import mojolearn\nprint(mojolearn.get_num_threads())"
    assert run(program, **{name: "1"}) == run(program, **{name: "7"})
