"""What is drawn does not depend on the floating-point environment of the caller, nor on threads."""

import itertools

import floating_point as fp
import pytest

import mojolearn
from mojolearn.training import Generator


@pytest.fixture(scope="module")
def model():
    config = mojolearn.SambaConfig(vocab=256, d_model=32, layers=("mamba3", "attention"), n_heads=2, intermediate=64)
    return mojolearn.SambaStack(config, generator=Generator(3))


def drawn(model):
    options = [{}, {"top_p": 0.8}, {"top_k": 20, "repetition_penalty": 1.3}]
    return [list(mojolearn.generate(model, "abc", 40, 0.01, seed=2, **one)) for one in options]


@pytest.mark.skipif(not fp.AVAILABLE, reason="needs x86-64 Linux")
def test_draws_in_every_floating_point_environment(model):
    wanted, before = drawn(model), fp.control_word()
    flushes = (0, fp.FLUSH_RESULTS, fp.FLUSH_RESULTS | fp.FLUSH_OPERANDS)
    for rounding, flush in itertools.product(fp.ROUNDING.values(), flushes):
        fp.set_control_word(rounding | flush | fp.DEFAULT)
        try:
            got = drawn(model)
        finally:
            fp.set_control_word(before)
        assert got == wanted


def test_draws_with_any_thread_count(model, threads):
    wanted = drawn(model)
    mojolearn.set_num_threads(1)
    assert drawn(model) == wanted
