"""Sampling: what is drawn, rows alone and together, reproducibility, refusals."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import mojolearn
from mojolearn.errors import CapacityError, NonFiniteError
from mojolearn.generation import exp_of_nonpositive, generate, sample
from mojolearn.training import Generator


@pytest.fixture(scope="module")
def model():
    config = mojolearn.SambaConfig(
        vocab=256, d_model=32, layers=("mamba3", "attention"), n_heads=2, intermediate=64, tie_embeddings=False
    )
    stack = mojolearn.SambaStack(config, generator=Generator(5))
    # Weights as drawn give nearly equal logits; larger ones give a choice worth testing.
    weights = {name: value.copy() for name, value in stack.parameters().items()}
    weights["lm_head.weight"] *= np.float32(8)
    return mojolearn.SambaInference(config, weights)


def by_forward(model, prompt, count, pick):
    """The tokens that whole forwards without a state give."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(pick(model.forward(np.array([ids], dtype=np.int32))[0, -1], ids))
    return ids[len(prompt) :]


def test_greedy_equals_whole_forwards(model):
    wanted = by_forward(model, b"hello", 20, lambda logits, ids: int(np.argmax(logits)))
    assert list(generate(model, b"hello", 20, temperature=0)) == wanted


def test_draws_are_the_words_of_philox_on_the_distribution(model):
    words = np.random.Philox(key=77)

    def pick(logits, ids):
        probabilities = [math.exp((float(x) - float(logits.max())) / 0.7) for x in logits]
        place = Fraction(int(words.random_raw()) >> 11, 1 << 53) * Fraction(math.fsum(probabilities))
        return next(i for i, total in enumerate(itertools.accumulate(probabilities)) if total > place)

    wanted = by_forward(model, b"ab", 25, pick)
    assert list(generate(model, "ab", 25, temperature=0.7, seed=77)) == wanted


def test_many_prompts_give_each_row_what_it_gives_alone(model):
    prompts = ["a", "bcd", b"xy", [7, 8, 9], np.array([1, 2]), "the last one"]
    together = np.array(list(generate(model, prompts, 15, temperature=0.9, top_k=50, seed=3)))
    assert together.shape == (15, 6)
    assert together.dtype == np.int32
    for i, prompt in enumerate(prompts):
        alone = list(generate(model, prompt, 15, temperature=0.9, top_k=50, seed=3 + i))
        assert together[:, i].tolist() == alone
    given = np.array(list(generate(model, prompts[:2], 15, temperature=0.9, top_k=50, seed=[4, 3])))
    assert given[:, 0].tolist() == list(generate(model, "a", 15, temperature=0.9, top_k=50, seed=4))


def test_rows_end_at_their_stop_and_the_others_go_on(model):
    free = np.array(list(generate(model, ["aa", "bb", "cc"], 30, seed=1)))
    stop = free[5:7, 1].tolist()
    first = next(i for i in range(1, 30) if free[i - 1 : i + 1, 1].tolist() == stop)
    rows = np.array(list(generate(model, ["aa", "bb", "cc"], 30, seed=1, stop=[stop])))
    np.testing.assert_array_equal(rows[: first + 1, 1], free[: first + 1, 1])
    assert set(rows[first + 1 :, 1]) <= {-1}
    for column in (0, 2):
        ended = [i for i in range(1, 30) if free[i - 1 : i + 1, column].tolist() == stop]
        upto = ended[0] + 1 if ended else 30
        np.testing.assert_array_equal(rows[:upto, column], free[:upto, column])


def test_generation_ends_when_all_rows_have(model):
    first = next(generate(model, "aa", 30, temperature=0))
    assert list(generate(model, "aa", 30, temperature=0, stop=first)) == [first]
    assert list(generate(model, "aa", 30, temperature=0, stop=[first, 3])) == [first]
    assert list(generate(model, "aa", 30, temperature=0, stop=bytes([first]))) == [first]


def test_a_state_carries_a_prompt_that_was_run_before(model):
    whole = list(generate(model, "once upon a time", 12, seed=9))
    state = model.allocate_state(1, 64)
    model.forward(np.frombuffer(b"once upon", np.uint8)[None].astype(np.int32), state)
    branch = state.copy()
    assert list(generate(model, " a time", 12, seed=9, state=state)) == whole
    assert list(generate(model, " a time", 12, seed=9, state=branch)) == whole


def test_a_model_that_trains_gives_the_same(model):
    stack = mojolearn.SambaStack(model.config, weights=model.parameters())
    assert list(generate(stack, "xyz", 10, seed=2)) == list(generate(model, "xyz", 10, seed=2))


def test_the_repetition_penalty_follows_its_definition(model):
    def pick(logits, ids):
        values = [float(x) for x in logits]
        for id in set(ids):
            values[id] = values[id] / 1.7 if values[id] > 0 else values[id] * 1.7
        return int(np.argmax(values))

    assert list(generate(model, "hello", 20, temperature=0, repetition_penalty=1.7)) == by_forward(
        model, b"hello", 20, pick
    )


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.5}])
def test_sample_follows_the_definition_of_its_distribution(options):
    logits = np.array([0.5, 2.0, -1.0, 2.0, 1.25, -30.0], dtype=np.float32)
    weights = {i: math.exp((float(x) - 2.0) / 1.5) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i)) if options else list(weights)
    order = order[: options.get("top_k", 6)]
    if "top_p" in options:
        whole, kept = sum(weights[i] for i in order), []
        for i in order:
            kept.append(i)
            if sum(weights[j] for j in kept) >= options["top_p"] * whole:
                break
        order = kept
    whole = math.fsum(weights[i] for i in order)
    below = 0.0
    for i in order:
        for fraction in (0.01, 0.99):
            place = (below + fraction * weights[i]) / whole
            if place < 1 - 1e-12:
                assert sample(logits, place, 1.5, **options) == i
        below += weights[i]


def test_sample_at_the_ends():
    logits = np.array([0.0, 0.0, -1e30], dtype=np.float32)
    assert sample(logits, 0.0, 1.0) == 0
    assert sample(logits, 1 - 2.0**-53, 1.0) == 1
    assert sample(logits, 0.5, 1.0) == 1
    assert sample(logits, 1 - 2.0**-53, 1.0, top_k=1) == 0
    assert sample(logits, 1 - 2.0**-53, 1.0, top_p=1e-9) == 0
    assert sample(logits, 0.999, 1e-300) == 1


def test_the_exponential_is_right_to_the_last_places():
    x = -np.concatenate([np.linspace(0, 700, 4001), np.geomspace(1e-300, 1, 500), [0.0]])
    got = exp_of_nonpositive(x)
    wanted = np.array([math.exp(value) for value in x])
    assert np.max(np.abs(got - wanted) / wanted) < 5e-16
    far = exp_of_nonpositive(np.array([-1e4, -np.inf]))
    np.testing.assert_allclose(far, math.exp(-700), rtol=5e-16)


def test_the_exponential_takes_the_documented_steps():
    """Python's floats walk the same steps to the same bits: no other instruction or order may slip in."""

    def scalar(x):
        k = round(x * 1.4426950408889634)
        r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
        total = 1.0 / math.factorial(13)
        for n in range(12, -1, -1):
            total = total * r + 1.0 / math.factorial(n)
        return math.ldexp(total, k)

    x = np.random.default_rng(0).uniform(-700, 0, 997)
    assert exp_of_nonpositive(x).tolist() == [scalar(value) for value in x.tolist()]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, ValueError, "prompt must hold at least one token"),
        ({"prompt": []}, ValueError, "prompt must hold at least one token"),
        ({"prompt": [[1], []]}, ValueError, r"prompt\[1\] must hold at least one token"),
        ({"prompt": [1, 256]}, ValueError, r"prompt\[1\] must be at most 255"),
        ({"prompt": [1, -1]}, ValueError, r"prompt\[1\] must be at least 0"),
        ({"prompt": [1, 2.0]}, TypeError, r"prompt\[1\] must be an integer"),
        ({"prompt": np.array([1.0])}, ValueError, "prompt must have a native integer dtype"),
        ({"prompt": 3}, TypeError, "prompt must be text"),
        ({"prompt": None}, TypeError, "prompt must be text"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": 1.0}, TypeError, "max_new_tokens"),
        ({"max_new_tokens": 8200}, CapacityError, "8192"),
        ({"temperature": -0.1}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"top_p": 1.1}, ValueError, "top_p"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"),
        ({"stop": 256}, ValueError, "stop"),
        ({"stop": 1.5}, TypeError, "stop"),
        ({"stop": [""]}, ValueError, "stop"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 64}, ValueError, "seed"),
        ({"seed": [1, 2]}, ValueError, "seed must have one entry per prompt"),
    ],
)
def test_arguments_are_refused_before_anything_is_computed(model, arguments, error, message):
    with pytest.raises(error, match=message):
        generate(model, **{"prompt": "ab", **arguments})


def test_a_state_that_does_not_fit_is_refused_untouched(model):
    state = model.allocate_state(2, 8)
    for prompt, count, message in (
        (["ab", "abc"], 2, "one length"),
        (["ab"], 2, "one row per prompt"),
        (["ab", "cd"], 8, "max_new_tokens needs 9 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, prompt, count, state=state)
    assert state.tokens == 0


def test_text_needs_a_model_over_bytes():
    config = mojolearn.SambaConfig(vocab=300, d_model=32, layers=("mamba3",))
    stack = mojolearn.SambaStack(config, generator=Generator(0))
    with pytest.raises(ValueError, match="prompt must be token ids for a model with 300 tokens"):
        generate(stack, "text")
    assert len(list(generate(stack, [299], 3))) == 3


def test_logits_that_are_not_finite_are_refused():
    class Broken:
        config = mojolearn.SambaConfig(vocab=4, d_model=32, layers=("mamba3",))

        def allocate_state(self, rows, tokens):
            return None

        def forward(self, ids, state, last_only):
            return np.array([[0, np.nan, 0, 0]], dtype=np.float32)

    with pytest.raises(NonFiniteError, match="logits must be finite"):
        next(generate(Broken(), [1], 2))
