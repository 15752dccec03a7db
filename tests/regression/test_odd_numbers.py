"""Numbers and choices that NumPy or Python convert, warn about or choke on before our message is made."""

import warnings

import numpy as np
import pytest

import mojolearn
from mojolearn import lowbit, training
from mojolearn._arrays import as_index, as_real
from mojolearn.data import TokenDataset
from mojolearn.training import AdamW, Generator

CONFIG = mojolearn.SambaConfig(vocab=20, d_model=32, layers=("mamba3",))
LM = mojolearn.SambaInference(CONFIG, mojolearn.SambaStack(CONFIG, generator=Generator(1)).parameters())
ARRAY = np.ones((2, 3), np.float32)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "value",
    [np.complex64(1), np.complex128(1j), np.array(True), np.datetime64("2020"), np.array([1.0]), 1j, Unprintable()],
)
def test_not_a_real_number(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=r"^rate must be a"):
            as_real(value, "rate")


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["positive", "negative"])
def test_integers_too_long_to_print(value):
    with pytest.raises(ValueError, match=r"^count must be at .* bits"):
        as_index(value, "count", 0, 9)
    with pytest.raises(ValueError, match=r"^rate must be finite"):
        as_real(value, "rate")
    with pytest.raises(TypeError, match=r"^count must be an integer, got a value of type dict"):
        as_index({"key": value}, "count")


@pytest.mark.parametrize("value", [np.zeros((2, 2)), np.zeros(0), np.zeros(2, [("a", "i4")]), [], None, 3, {}])
def test_not_a_choice(value):
    with pytest.raises(ValueError, match="kind"):
        CONFIG.block_shapes(value)
    with pytest.raises(ValueError, match="format"):
        lowbit.pack_one(ARRAY, value)
    with pytest.raises(ValueError, match="split"):
        TokenDataset(__file__, 1, 1, split=value)


@pytest.mark.parametrize("value", [0, 1, 1.0, "no", None, ARRAY])
def test_not_a_flag(value):
    with pytest.raises(TypeError, match="last_only"):
        LM.forward(np.zeros((1, 2), int), last_only=value)
    with pytest.raises(TypeError, match="return_grad"):
        training.cross_entropy(ARRAY, np.array([0, 1]), return_grad=value)


@pytest.mark.parametrize("value", [np.array(0.5), {0.1: 1, 0.2: 2}, {0.1, 0.2}, "ab", np.zeros((2, 2))])
def test_betas_that_are_no_pair(value):
    with pytest.raises(TypeError, match="betas"):
        AdamW(ARRAY.copy(), betas=value)


@pytest.mark.parametrize("shape", [2**61, (2**40, 2**40), (1,) * 65, b"ab", {2: 3}, {2, 3}, np.ones((2, 2), int)])
def test_shapes_beyond_all_arrays_take_no_stream(shape):
    generator = Generator(1)
    with pytest.raises((TypeError, ValueError), match="shape"):
        generator.uniform(shape)
    assert generator.counter == 0


@pytest.mark.parametrize("name", ["fan_in", "fan_out"])
def test_fans_beyond_float(name):
    generator = Generator(1)
    with pytest.raises(ValueError, match=name):
        generator.xavier_uniform((2, 3), **{"fan_in": 2, "fan_out": 3, name: 10**400})
    assert generator.counter == 0


def test_sizes_beyond_all_arrays():
    for batch_size in (2**31, 2**63, 10**400):
        with pytest.raises(ValueError, match="batch_size"):
            LM.allocate_state(batch_size, 4)


def test_eps_beyond_float32():
    weight = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="eps"):
        training.rms_norm_forward(ARRAY, weight, 1e39)
    with pytest.raises(ValueError, match="eps"):
        training.rms_norm_backward(ARRAY, ARRAY, weight, 1e39)
