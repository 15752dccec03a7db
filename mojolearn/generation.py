"""Writing text: tokens sampled one after the other from a model's logits.

What is drawn depends on logits, settings and seed alone. The probabilities are float64 numbers made by additions,
multiplications and divisions in a fixed order (an exponential of our own, running sums instead of NumPy's reductions,
whose order follows the machine), and the uniform numbers are the raw words of NumPy's Philox generator, which are
fixed for all its versions. Equal logits therefore give equal text on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mojolearn._arrays import as_ids, as_index, as_real, describe
from mojolearn._numerics import default_environment
from mojolearn.errors import CapacityError, NonFiniteError
from mojolearn.model import SambaState

__all__ = ["generate"]

FINISHED = -1  # stands for a row that has met its stop sequence


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Any = None,
    seed: int | Sequence[int] = 0,
    *,
    state: Any = None,
) -> Iterator[Any]:
    """Continue one or many prompts, token by token.

    Parameters
    ----------
    model : SambaInference or SambaStack
    prompt : str, bytes, sequence of int or a sequence of such prompts
        What to continue, at least one token. Text is taken as UTF-8 bytes, for models over the 256 bytes. Many prompts
        may have different lengths; prompts of one length run as one batch.
    max_new_tokens : int, default 256
        Tokens to write at most.
    temperature : float, default 1.0
        Logits are divided by it; 0 takes the most likely token each time (the lowest id of equal ones).
    top_k : int or None, default None
        Draw among the `top_k` most likely tokens.
    top_p : float or None, default None
        Draw among the fewest tokens whose probabilities reach `top_p` together, after `top_k`.
    repetition_penalty : float, default 1.0
        Logits of tokens that the row holds already, prompt included, are divided by it when positive and multiplied
        when negative; between 0.01 and 100.
    stop : int, str, bytes, sequence of int, or a list of such, default None
        A row ends after a token or a run of new tokens equal to one of these; the run itself is still written. A list
        of integers is a list of single tokens: a run of tokens is written ``[[13, 10]]``.
    seed : int or sequence of int, default 0
        Row i of many draws with ``seed + i``, or with ``seed[i]``. A row alone with that seed gives the same tokens.
    state : SambaState or None, default None
        A state in which earlier tokens were run already; it is moved on. Copy it first to continue it in several ways.
        All prompts must have one length then.

    Returns
    -------
    iterator
        Of int for one prompt; for many, of int32 arrays of shape (B,) in which -1 stands for a row that has ended. A
        token costs one step of the model, whatever came before, and no more memory.

    Raises
    ------
    TypeError, ValueError
        Here, before anything is computed.

    Examples
    --------
    >>> import mojolearn
    >>> config = mojolearn.SambaConfig(vocab=256, d_model=32, layers=("mamba3",))
    >>> model = mojolearn.SambaStack(config, generator=mojolearn.training.Generator(0))
    >>> len(bytes(mojolearn.generate(model, "def ", max_new_tokens=8, top_k=40, seed=1)))
    8
    """
    if not all(hasattr(model, name) for name in ("config", "forward")):
        raise TypeError(f"model must be a SambaInference or a SambaStack, got {describe(model)}")
    if state is not None and not isinstance(state, SambaState):
        raise TypeError(f"state must be a SambaState or None, got {describe(state)}")
    vocab = model.config.vocab
    single, prompts = _as_prompts(prompt, vocab)
    count = as_index(max_new_tokens, "max_new_tokens", low=1)
    stops = _as_stops(stop, vocab)
    draws: dict[str, Any] = {
        "temperature": as_real(temperature, "temperature", low=0.0),
        "top_k": None if top_k is None else as_index(top_k, "top_k", low=1),
        "top_p": None if top_p is None else as_real(top_p, "top_p", low=0.0, high=1.0, low_open=True),
        "repetition_penalty": as_real(repetition_penalty, "repetition_penalty", low=0.01, high=100.0),
    }
    seeds = _as_seeds(seed, len(prompts))
    rows = [_Row(ids, vocab, stops, one, **draws) for ids, one in zip(prompts, seeds, strict=True)]

    by_length: dict[int, list[_Row]] = {}
    for row in rows:
        by_length.setdefault(row.prompt.size, []).append(row)
    if state is None:
        # The last token that is written is not run through the model.
        groups = [
            _Group(model, alike, model.allocate_state(len(alike), length + count - 1), own=True)
            for length, alike in by_length.items()
        ]
    else:
        if len(by_length) > 1:
            raise ValueError(f"prompt must have one length for all rows with a state, got {sorted(by_length)}")
        if state.batch_size != len(rows):
            raise ValueError(f"state must have one row per prompt ({len(rows)}), got {state.batch_size}")
        needed = state.tokens + rows[0].prompt.size + count - 1
        if needed > state.max_tokens:
            raise CapacityError(f"max_new_tokens needs {needed} positions, and state has max_tokens {state.max_tokens}")
        groups = [_Group(model, rows, state, own=False)]
    tokens = _tokens(rows, groups, count)
    return (int(batch[0]) for batch in tokens) if single else tokens


def _tokens(rows: list[_Row], groups: list[_Group], count: int) -> Iterator[np.ndarray]:
    for group in groups:
        group.prefill()
    for index in range(count):
        yield np.array([row.draw() for row in rows], dtype=np.int32)
        if all(row.finished for row in rows):
            return
        if index + 1 < count:
            for group in groups:
                group.step()


class _Group:
    """Rows of one length, which share a state."""

    def __init__(self, model: Any, rows: list[_Row], state: Any, own: bool):
        self.model, self.rows, self.state, self.own = model, rows, state, own

    def prefill(self) -> None:
        ids = np.stack([row.prompt for row in self.rows])
        self._hand_out(self.model.forward(ids, self.state, last_only=True))

    def step(self) -> None:
        going = [i for i, row in enumerate(self.rows) if not row.finished]
        if not going:
            return
        if self.own and len(going) < len(self.rows):
            self.state = self.state.select(going)
            self.rows = [self.rows[i] for i in going]
        ids = np.array([row.last for row in self.rows], dtype=np.int32)
        self._hand_out(self.model.step(ids, self.state))

    def _hand_out(self, logits: np.ndarray) -> None:
        for row, values in zip(self.rows, logits.reshape(len(self.rows), -1), strict=True):
            row.logits = values


class _Row:
    """One sequence: its last token, what it has drawn from and when it ends."""

    def __init__(
        self,
        prompt: np.ndarray,
        vocab: int,
        stops: list[list[int]],
        seed: int,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        repetition_penalty: float,
    ):
        self.prompt = prompt
        self.last = int(prompt[-1])
        self.finished = False
        self.logits = np.empty(0, dtype=np.float32)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.penalty = repetition_penalty
        self.seen = np.zeros(vocab, dtype=bool)
        self.seen[prompt] = True
        self.words = np.random.Philox(key=seed)
        self.stops = stops
        self.tail: list[int] = []
        self.longest_stop = max(map(len, stops), default=0)

    def draw(self) -> int:
        """The next token, or -1 from the second call after the end on."""
        if self.finished:
            return FINISHED
        self.last = self._pick()
        self.seen[self.last] = True
        if self.stops:
            self.tail = [*self.tail, self.last][-self.longest_stop :]
            self.finished = any(self.tail[-len(stop) :] == stop for stop in self.stops)
        return self.last

    @default_environment
    def _pick(self) -> int:
        logits = self.logits
        if not math.isfinite(logits.max()):
            raise NonFiniteError(f"the model's logits must be finite, got {logits.max()}")
        if self.penalty != 1.0:
            logits = logits.astype(np.float64)
            penalized = np.where(logits > 0, logits / self.penalty, logits * self.penalty)
            logits = np.where(self.seen, penalized, logits)
        if self.temperature == 0:
            return int(logits.argmax())
        uniform = (int(self.words.random_raw()) >> 11) * 2.0**-53
        return sample(logits, uniform, self.temperature, self.top_k, self.top_p)


def sample(
    logits: np.ndarray, uniform: float, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> int:
    """The token that a number in [0, 1) stands for.

    Parameters
    ----------
    logits : array of shape (V,)
    uniform : float
        Place in the distribution: with tokens in the order of their ids (of their probabilities, falling, when `top_k`
        or `top_p` is given), the first whose running sum exceeds ``uniform`` times the whole.
    temperature, top_k, top_p
        As for `generate`; the temperature is positive.
    """
    logits = logits.astype(np.float64)
    # Bounded before the division, which could overflow: below exp(-700) nothing counts.
    scaled = np.maximum(logits - logits.max(), -700.0 * temperature) / temperature
    if top_k is None and top_p is None:
        order = None
    else:
        order = np.argsort(-logits, kind="stable")[:top_k]
        scaled = scaled[order]
    sums = np.add.accumulate(exp_of_nonpositive(scaled))
    if top_p is not None:
        sums = sums[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    # A running sum ends flat where the last terms are too small to count: take the last token that moved it.
    place = min(place, int(np.searchsorted(sums, sums[-1])))
    return place if order is None else int(order[place])


def exp_of_nonpositive(x: np.ndarray) -> np.ndarray:
    """exp(x) for float64 x <= 0, to 2 units in the last place; below -700 it stays at exp(-700).

    ``x = k log 2 + r`` with |r| <= log(2)/2, a Taylor polynomial of degree 13 for exp(r), and an exact scaling by 2**k.
    The C library's exp differs between machines.
    """
    x = np.maximum(x, -700.0)
    k = np.rint(x * 1.4426950408889634)
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10  # log 2 in two parts
    total = np.full_like(r, 1.0 / math.factorial(13))
    for n in range(12, -1, -1):
        total = total * r + 1.0 / math.factorial(n)
    return np.ldexp(total, k.astype(np.int32))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _as_prompts(prompt: Any, vocab: int) -> tuple[bool, list[np.ndarray]]:
    """Whether one prompt was given, and the ids of each."""
    one = isinstance(prompt, (str, bytes, bytearray))
    if not one:
        if isinstance(prompt, np.ndarray) and prompt.ndim:
            one = prompt.ndim == 1
        elif isinstance(prompt, Sequence):
            one = len(prompt) > 0 and not isinstance(prompt[0], (str, bytes, bytearray, Sequence, np.ndarray))
        else:
            raise TypeError(f"prompt must be text, token ids or a sequence of such prompts, got {describe(prompt)}")
    if one:
        return True, [_as_token_ids(prompt, "prompt", vocab)]
    if not len(prompt):
        raise ValueError("prompt must hold at least one token, got an empty sequence")
    return False, [_as_token_ids(row, f"prompt[{i}]", vocab) for i, row in enumerate(prompt)]


def _as_token_ids(value: Any, name: str, vocab: int) -> np.ndarray:
    if isinstance(value, (str, bytes, bytearray)):
        if vocab != 256:
            raise ValueError(f"{name} must be token ids for a model with {vocab} tokens (text is for 256), got text")
        try:
            value = np.frombuffer(value.encode() if isinstance(value, str) else bytes(value), dtype=np.uint8)
        except UnicodeEncodeError:
            raise ValueError(f"{name} must be text that UTF-8 can hold, got {describe(value)}") from None
    elif isinstance(value, Sequence):
        value = np.array([as_index(id, f"{name}[{i}]", low=0, high=vocab - 1) for i, id in enumerate(value)], np.int64)
    if isinstance(value, np.ndarray) and value.size == 0:
        raise ValueError(f"{name} must hold at least one token, got none")
    return as_ids(value, name, vocab, 1)


def _as_stops(stop: Any, vocab: int) -> list[list[int]]:
    if stop is None:
        return []
    if isinstance(stop, (int, np.integer, str, bytes, bytearray)):
        stop = [stop]
    if not isinstance(stop, (Sequence, np.ndarray)) or getattr(stop, "ndim", 1) == 0:
        raise TypeError(f"stop must be a token, text or a sequence of them, got {describe(stop)}")
    stops = []
    for i, one in enumerate(stop):
        run = one if isinstance(one, (str, bytes, bytearray, Sequence, np.ndarray)) else [one]
        stops.append([int(id) for id in _as_token_ids(run, f"stop[{i}]", vocab)])
    return stops


def _as_seeds(seed: Any, count: int) -> list[int]:
    most = (1 << 64) - 1
    if isinstance(seed, (list, tuple, range)) or (isinstance(seed, np.ndarray) and seed.ndim == 1):
        if len(seed) != count:
            raise ValueError(f"seed must have one entry per prompt ({count}), got {len(seed)}")
        return [as_index(one, f"seed[{i}]", low=0, high=most) for i, one in enumerate(seed)]
    first = as_index(seed, "seed", low=0, high=most)
    return [(first + i) & most for i in range(count)]
