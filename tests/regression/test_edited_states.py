"""A decode state belongs to the user, who may have set any of its fields to anything between two calls.

Counts that do not fit the arrays once made the compiled step read and write outside of them.
"""

import copy
import threading

import numpy as np
import pytest

import mojolearn
from mojolearn.training import Generator

CONFIG = mojolearn.SambaConfig(vocab=20, d_model=32, layers=("mamba3", "attention"), n_heads=2, intermediate=24)
STACK = mojolearn.SambaStack(CONFIG, generator=Generator(1))
MODELS = {"stack": STACK, "inference": mojolearn.SambaInference(CONFIG, STACK.parameters())}
PROMPT = np.arange(12).reshape(2, 6)
TOKENS = np.array([3, 4])
BOUND = "bound"  # a step has been taken, so that pointers to the arrays are kept


@pytest.fixture(params=list(MODELS))
def model(request):
    return MODELS[request.param]


@pytest.fixture(params=["fresh", BOUND])
def state(request, model):
    state = model.allocate_state(2, 16)
    model.forward(PROMPT, state)
    if request.param == BOUND:
        model.step(TOKENS, state)
    return state


def flatten(state):
    fields = [vars(layer) for layer in state.layers]
    fields.append({name: getattr(state, name) for name in ("batch_size", "max_tokens", "tokens")})
    values = [value for part in fields for value in part.values()]
    return [value.tobytes() if isinstance(value, np.ndarray) else repr(value) for value in values]


COUNTS = [
    (0, "buffered_tokens", [-300_000, -1, 65, 10**6, 2**70, 2.0, "3", None, True, np.zeros(2)]),
    (0, "pending", [0, None, "", np.zeros(2)]),
    (1, "cached_tokens", [-50, -1, 17, 10**6, 2**70, 6.0, "6", None, True, np.zeros(2)]),
    (1, "max_tokens", [0, 8, 64, 2**70, 16.0, np.nan, None]),
    (None, "batch_size", [0, 1, 3, 2.0, None, np.zeros(2)]),
    (None, "max_tokens", [0, np.inf, "16", None]),
    (None, "tokens", [-1, 17, 6.0, np.nan, None, True, np.zeros(2)]),
    (None, "layers", [None, 3, [], "ab", [None, None]]),
]


@pytest.mark.parametrize(
    "layer, name, value", [(layer, name, value) for layer, name, values in COUNTS for value in values]
)
@pytest.mark.parametrize("call", ["step", "forward"])
def test_counts_that_fit_nothing_are_refused_by_name(model, state, call, layer, name, value):
    setattr(state if layer is None else state.layers[layer], name, value)
    arrays = [] if name == "layers" else flatten(state)
    with pytest.raises((TypeError, ValueError)) as caught:
        model.step(TOKENS, state) if call == "step" else model.forward(PROMPT[:, :1], state)
    message = str(caught.value)
    assert name in message or (name == "max_tokens" and "k_cache" in message)
    if name != "layers":
        assert flatten(state) == arrays


def test_numpy_integers_are_counts_too(model, state):
    other = copy.deepcopy(state)
    state.layers[0].buffered_tokens = np.int8(state.layers[0].buffered_tokens)
    state.layers[1].cached_tokens = np.uint64(state.layers[1].cached_tokens)
    state.tokens = np.int16(state.tokens)
    assert np.array_equal(model.step(TOKENS, state), model.step(TOKENS, other))
    assert flatten(state) == flatten(other)


def test_layers_of_a_larger_state(model, state):
    """More rows and more slots than the state had at its first step."""
    larger = model.allocate_state(5, 300)
    expected = model.allocate_state(5, 300)
    ids = np.arange(5 * 200).reshape(5, 200) % 20
    for one in (larger, expected):
        model.forward(ids, one)
    state.batch_size, state.max_tokens, state.tokens = 5, 300, 200
    state.layers = tuple(larger.layers)
    for token in range(3):
        got, want = (model.step(np.full(5, token), one) for one in (state, expected))
        assert np.array_equal(got, want)


def test_arrays_edited_in_place_count_once_the_layers_are_set_anew(model, state):
    state.layers[0].buffer_v[:, : state.layers[0].buffered_tokens] *= 2
    state.layers = list(state.layers)
    rebuilt = mojolearn.SambaState.from_dict(state.to_dict())
    assert np.array_equal(model.step(TOKENS, state), model.step(TOKENS, rebuilt))


def test_copies_of_a_state_with_a_wrong_row_count_are_refused(state):
    state.batch_size = 3
    for use in (state.copy, lambda: state.select([2])):
        with pytest.raises(ValueError, match=r"layers\[0\]\.theta must have batch_size 3 rows"):
            use()


def test_threads_on_one_state_take_turns(model):
    shared, alone = model.allocate_state(1, 90), model.allocate_state(1, 90)
    token = np.array([5])

    def decode():
        for _ in range(30):
            model.step(token, shared)

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(90):
        model.step(token, alone)
    assert flatten(shared) == flatten(alone)
