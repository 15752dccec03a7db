"""The table of refusals: what each wrong call raises, and that it changes nothing.

The table is also the source of the page docs/errors.md, written by ``python tests/unit/test_errors.py``.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest

import mojolearn
from mojolearn import errors, lowbit
from mojolearn.blocks import Mamba3Block, Mamba3State, TransformerBlock, TransformerState
from mojolearn.config import SambaConfig
from mojolearn.inference import SambaInference
from mojolearn.model import SambaState
from mojolearn.stack import SambaStack
from mojolearn.training import AdamW, ConstantLR, Generator

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "errors.md"

SHAPE = {
    "vocab": 20,
    "d_model": 32,
    "layers": ("mamba3", "attention"),
    "n_heads": 2,
    "n_kv_heads": 1,
    "intermediate": 24,
}


class World:
    """The objects that the calls of the table act on, and a digest of all that they must not change."""

    def __init__(self):
        self.config = SambaConfig(**SHAPE, dropout=0.25)
        self.generator = Generator(3)
        self.stack = SambaStack(self.config, generator=self.generator, max_norm=1.0)
        self.ids = np.arange(12, dtype=np.int32).reshape(2, 6)
        self.stack.train_step(self.ids, self.ids)
        self.weights = self.stack.parameters()
        self.lm = SambaInference(self.config, self.weights)
        self.state = self.lm.allocate_state(2, 8)
        self.lm.forward(self.ids, self.state)
        self.mamba_only = SambaInference(*self._mamba_model())
        self.mamba_state = self.mamba_only.allocate_state(2, 8)
        self.mamba_only.forward(self.ids, self.mamba_state)
        layer = {name: self.weights[f"layers.0.{name}"] for name, _ in self.config.block_shapes("mamba3")}
        self.mamba_weights = layer
        self.mamba = Mamba3Block(layer)
        layer = {name: self.weights[f"layers.1.{name}"] for name, _ in self.config.block_shapes("attention")}
        self.attention_weights = layer
        self.attention = TransformerBlock(layer, n_heads=2, n_kv_heads=1)
        self.x = np.random.default_rng(0).standard_normal((2, 6, 32)).astype(np.float32)
        self.block_mamba_state = self.mamba.allocate_state(2)
        self.mamba.forward(self.x, self.block_mamba_state)
        self.block_attention_state = self.attention.allocate_state(2, 8)
        self.attention.forward(self.x, self.block_attention_state)

    @staticmethod
    def _mamba_model():
        config = SambaConfig(vocab=20, d_model=32, layers=("mamba3",))
        return config, SambaStack(config, generator=Generator(1)).parameters()

    def without(self, name):
        return {key: value for key, value in self.weights.items() if key != name}

    def changed(self, name, value):
        return {**self.weights, name: value}

    def poisoned(self, name, value=np.inf):
        """The weights with one entry of a tensor replaced."""
        tensor = self.weights[name].copy()
        tensor.reshape(-1)[0] = value
        return self.changed(name, tensor)

    def overflowing(self):
        """A model, a state with a past, and the call whose second layer gets an infinite input."""
        stack = SambaStack(self.config, weights=dict(self.weights))
        state = stack.allocate_state(2, 16)
        stack.forward(self.ids, state)
        stack.parameters()["layers.0.out_proj.weight"][...] = 3e38
        return stack, state

    def broken_state(self, change):
        state = self.state.copy()
        change(state)
        return state

    def state_dict(self, **changes):
        return {**self.stack.state_dict(), **changes}

    def optimizer(self, **changes):
        state = self.stack.state_dict()
        return {**state, "optimizer": {**state["optimizer"], **changes}}

    def digest(self):
        parts = []

        def add(value):
            if isinstance(value, dict):
                for key, entry in value.items():
                    parts.append(key)
                    add(entry)
            elif isinstance(value, (list, tuple)):
                for entry in value:
                    add(entry)
            elif isinstance(value, np.ndarray):
                parts.append((value.shape, value.tobytes()))
            else:
                parts.append(value)

        add(self.stack.state_dict())
        add(self.stack.last_)
        add(self.state.to_dict())
        add(self.mamba_state.to_dict())
        block_states = [self.block_mamba_state, self.block_attention_state]
        add(SambaState(2, 8, block_states).to_dict())
        add(self.lm.parameters())
        add([self.ids, self.x])
        add([mojolearn.get_numeric_mode(), mojolearn.get_num_threads()])
        return parts


@pytest.fixture(scope="module")
def world():
    return World()


class Refusal(NamedTuple):
    call: str
    condition: str
    error: type
    act: Any  # function of the world
    text: str = ""  # regular expression that the message matches


V, T = ValueError, TypeError
F32 = np.float32


def config(**changes):
    return SambaConfig(**{**SHAPE, **changes})


def nan_like(array):
    out = array.copy()
    out.reshape(-1)[-1] = np.nan
    return out


def put_nan(array):
    array.reshape(-1)[0] = np.nan


def mutate(change):
    return lambda w: w.lm.step(w.ids[:, 0], w.broken_state(change))


CONFIG = [
    Refusal("SambaConfig", "`vocab` below 2", V, lambda w: config(vocab=1), "vocab must be at least 2, got 1"),
    Refusal("SambaConfig", "`d_model` below 1", V, lambda w: config(d_model=0), "d_model .* got 0"),
    Refusal("SambaConfig", "no layers", V, lambda w: config(layers=()), "layers"),
    Refusal("SambaConfig", "unknown layer kind", V, lambda w: config(layers=("mamba2",)), r"layers\[0\].*'mamba2'"),
    Refusal("SambaConfig", "layer kind is not a string", V, lambda w: config(layers=(3,)), r"layers\[0\]"),
    Refusal("SambaConfig", "a string for `layers`", V, lambda w: config(layers="mamba3"), "layers"),
    Refusal("SambaConfig", "`layers` cannot be iterated", T, lambda w: config(layers=4), "layers"),
    Refusal("SambaConfig", "mamba3 and `d_model` no multiple of 32", V, lambda w: config(d_model=48), "32.* got 48"),
    Refusal("SambaConfig", "attention without `n_heads`", V, lambda w: config(n_heads=None), "n_heads"),
    Refusal("SambaConfig", "attention without `intermediate`", V, lambda w: config(intermediate=None), "intermediate"),
    Refusal("SambaConfig", "`n_heads` 0 or less", V, lambda w: config(n_heads=0), "n_heads .* got 0"),
    Refusal("SambaConfig", "`intermediate` 0 or less", V, lambda w: config(intermediate=0), "intermediate .* got 0"),
    Refusal("SambaConfig", "`head_dim` 0 or less", V, lambda w: config(head_dim=-2), "head_dim .* got -2"),
    Refusal("SambaConfig", "`n_kv_heads` 0 or less", V, lambda w: config(n_kv_heads=0), "n_kv_heads .* got 0"),
    Refusal("SambaConfig", "`n_kv_heads` does not divide `n_heads`", V, lambda w: config(n_kv_heads=3), "n_kv_heads"),
    Refusal("SambaConfig", "`n_heads * head_dim` is not `d_model`", V, lambda w: config(head_dim=8), "2 \\* 8"),
    Refusal(
        "SambaConfig",
        "odd `head_dim`",
        V,
        lambda w: SambaConfig(9, 3, ("attention",), n_heads=1, intermediate=4),
        "head_dim must be even.* got 3",
    ),
    Refusal("SambaConfig", "`norm_eps` negative", V, lambda w: config(norm_eps=-1e-5), "norm_eps"),
    Refusal("SambaConfig", "`norm_eps` NaN", V, lambda w: config(norm_eps=np.nan), "norm_eps .* got nan"),
    Refusal("SambaConfig", "`norm_eps` infinite", V, lambda w: config(norm_eps=np.inf), "norm_eps .* got inf"),
    Refusal("SambaConfig", "`norm_eps` infinite as float32", V, lambda w: config(norm_eps=1e39), "norm_eps"),
    Refusal("SambaConfig", "`dropout` negative", V, lambda w: config(dropout=-0.1), "dropout"),
    Refusal("SambaConfig", "`dropout` 1 or more", V, lambda w: config(dropout=1.0), "dropout"),
    Refusal("SambaConfig", "`dropout` 1 as float32", V, lambda w: config(dropout=0.999999999), "dropout"),
    Refusal("SambaConfig", "`dropout` NaN", V, lambda w: config(dropout=np.nan), "dropout"),
    Refusal("SambaConfig", "a float for an integer", T, lambda w: config(vocab=16.0), "vocab .* got 16.0"),
    Refusal("SambaConfig", "a string for an integer", T, lambda w: config(d_model="64"), "d_model .* got '64'"),
    Refusal("SambaConfig", "a bool for an integer", T, lambda w: config(n_heads=True), "n_heads .* got True"),
    Refusal("SambaConfig", "None for a required integer", T, lambda w: config(vocab=None), "vocab .* got None"),
    Refusal("SambaConfig", "a string for a number", T, lambda w: config(norm_eps="1e-5"), "norm_eps"),
    Refusal("SambaConfig", "a string for `tie_embeddings`", T, lambda w: config(tie_embeddings="no"), "tie_embeddings"),
    Refusal("SambaConfig", "`tie_embeddings` 2", V, lambda w: config(tie_embeddings=2), "tie_embeddings"),
    Refusal("SambaConfig", "unknown keyword", T, lambda w: config(heads=2), "heads"),
    Refusal("SambaConfig", "missing argument", T, lambda w: SambaConfig(20, 32)),
    Refusal("SambaConfig.from_dict", "not a dict", V, lambda w: SambaConfig.from_dict([("vocab", 3)]), "dict"),
    Refusal("SambaConfig.from_dict", "a key is missing", V, lambda w: SambaConfig.from_dict({"vocab": 3}), "d_model"),
    Refusal("SambaConfig.block_shapes", "unknown kind", V, lambda w: w.config.block_shapes("x"), "kind"),
]


def both(call, condition, error, act, text=""):
    """The same refusal by both model classes; `act` gets a constructor of (config, weights)."""
    return [
        Refusal(f"SambaInference{call}", condition, error, lambda w: act(w, SambaInference), text),
        Refusal(f"SambaStack{call}", condition, error, lambda w: act(w, SambaStack), text),
    ]


CONSTRUCTION = [
    *both("(...)", "`config` is not a SambaConfig", T, lambda w, m: m(w.config.to_dict(), w.weights), "config"),
    Refusal("SambaInference(...)", "`weights` is not a dict", T, lambda w: SambaInference(w.config, []), "weights"),
    Refusal("SambaStack(...)", "`weights` is not a dict", V, lambda w: SambaStack(w.config, []), "weights"),
    Refusal("SambaStack(...)", "neither weights nor generator", V, lambda w: SambaStack(w.config), "neither"),
    Refusal(
        "SambaStack(...)",
        "both weights and generator",
        V,
        lambda w: SambaStack(w.config, w.weights, w.generator),
        "both",
    ),
    Refusal(
        "SambaStack(...)", "generator of another type", T, lambda w: SambaStack(w.config, generator=7), "generator"
    ),
    *both("(...)", "a name is missing", V, lambda w, m: m(w.config, w.without("norm_f.weight")), "missing norm_f"),
    *both("(...)", "an unknown name", V, lambda w, m: m(w.config, w.changed("x", w.ids)), "unknown x"),
    *both(
        "(...)",
        "`lm_head.weight` although tied",
        V,
        lambda w, m: m(w.config, w.changed("lm_head.weight", w.weights["embed.weight"])),
        "unknown lm_head.weight",
    ),
    *both(
        "(...)",
        "wrong shape",
        V,
        lambda w, m: m(w.config, w.changed("norm_f.weight", np.ones(33, F32))),
        r"norm_f.weight.*\(32,\), got \(33,\)",
    ),
    *both(
        "(...)", "wrong rank", V, lambda w, m: m(w.config, w.changed("norm_f.weight", np.ones((1, 32), F32))), "shape"
    ),
    *both(
        "(...)", "NaN or infinity in a tensor", V, lambda w, m: m(w.config, w.poisoned("embed.weight")), "embed.weight"
    ),
    *both("(...)", "NaN in a vector", V, lambda w, m: m(w.config, w.poisoned("layers.0.D", np.nan)), "layers.0.D"),
    *both(
        "(...)", "a list for a tensor", V, lambda w, m: m(w.config, w.changed("norm_f.weight", [1.0] * 32)), "norm_f"
    ),
    *both(
        "(...)", "float64 tensor", T, lambda w, m: m(w.config, w.changed("norm_f.weight", np.ones(32))), "float32.*<f8"
    ),
    *both(
        "(...)", "float16 tensor", T, lambda w, m: m(w.config, w.changed("norm_f.weight", np.ones(32, "f2"))), "float32"
    ),
    *both(
        "(...)", "integer tensor", T, lambda w, m: m(w.config, w.changed("norm_f.weight", np.ones(32, int))), "float32"
    ),
    *both(
        "(...)", "big-endian tensor", T, lambda w, m: m(w.config, w.changed("norm_f.weight", np.ones(32, ">f4"))), ">f4"
    ),
    *both(
        "(...)", "unknown numeric mode", V, lambda w, m: m(w.config, w.weights, numeric_mode="exact"), "numeric_mode"
    ),
    *both(
        "(...)", "mode name in capitals", V, lambda w, m: m(w.config, w.weights, numeric_mode="Fast"), "numeric_mode"
    ),
    *both(
        "(...)", "numeric mode is not a string", T, lambda w, m: m(w.config, w.weights, numeric_mode=0), "numeric_mode"
    ),
    Refusal(
        "SambaInference(...)",
        "tensors of two packed formats",
        V,
        lambda w: SambaInference(
            w.config,
            w.changed("embed.weight", lowbit.pack_one(w.weights["embed.weight"], "int8"))
            | {"layers.1.q_proj.weight": lowbit.pack_one(w.weights["layers.1.q_proj.weight"], "bfloat16")},
        ),
        "one packed format|bfloat16|int8",
    ),
    Refusal(
        "SambaInference(...)",
        "infinity in a packed tensor",
        V,
        lambda w: SambaInference(
            w.config, w.changed("embed.weight", lowbit.BF16Weight(np.full((20, 32), 0x7F80, np.uint16)))
        ),
        "finite",
    ),
    Refusal(
        "SambaStack(...)",
        "packed weights",
        V,
        lambda w: SambaStack(w.config, lowbit.pack(w.weights, "int8")),
        "float32",
    ),
    *[
        Refusal("SambaStack(...)", condition, error, lambda w, o=options: SambaStack(w.config, w.weights, **o), text)
        for condition, error, options, text in [
            ("`lr` NaN or infinite", V, {"lr": np.nan}, "lr"),
            ("`lr` is not a number", T, {"lr": "1e-3"}, "lr"),
            ("a beta outside [0, 1)", V, {"betas": (0.9, 1.0)}, "beta"),
            ("a negative beta", V, {"betas": (-0.1, 0.9)}, "beta"),
            ("`betas` is not a pair", V, {"betas": (0.9,)}, "betas"),
            ("`eps` negative", V, {"eps": -1e-8}, "eps"),
            ("`weight_decay` NaN or infinite", V, {"weight_decay": np.inf}, "weight_decay"),
            ("`max_norm` 0 or less", V, {"max_norm": 0.0}, "max_norm"),
            ("`max_norm` NaN or infinite", V, {"max_norm": np.inf}, "max_norm"),
            ("`max_norm` is not a number", T, {"max_norm": "1"}, "max_norm"),
            ("`accumulation_steps` below 1", V, {"accumulation_steps": 0}, "accumulation_steps"),
            ("`accumulation_steps` is not an integer", T, {"accumulation_steps": 2.5}, "accumulation_steps"),
            ("`lr_schedule` is not one of the three", T, {"lr_schedule": lambda t: 1e-3}, "lr_schedule"),
            ("unknown keyword", T, {"amsgrad": True}, "amsgrad"),
        ]
    ],
    Refusal(
        "SambaStack.load_weights",
        "as for the constructor",
        V,
        lambda w: w.stack.load_weights(w.without("embed.weight")),
    ),
    Refusal("SambaStack.load_weights", "NaN", V, lambda w: w.stack.load_weights(w.poisoned("layers.0.D", np.nan))),
]


def ids_case(condition, value, text=""):
    return [
        Refusal("forward, inputs", condition, V, lambda w, v=value: w.lm.forward(v, w.state), text),
        Refusal("SambaStack.forward, inputs", condition, V, lambda w, v=value: w.stack.forward(v), text),
        Refusal("train_step, inputs", condition, V, lambda w, v=value: w.stack.train_step(v, w.ids), text),
    ]


FORWARD = [
    *ids_case("float dtype", np.ones((2, 2)), "inputs .*<f8"),
    *ids_case("bool dtype", np.ones((2, 2), bool), "inputs"),
    *ids_case("a list", [[1, 2], [3, 4]], "inputs"),
    *ids_case("None", None, "inputs"),
    *ids_case("a string", "text", "inputs"),
    *ids_case("one dimension", np.arange(3), "inputs must have 2 dimensions"),
    *ids_case("three dimensions", np.ones((1, 1, 2), int), "inputs"),
    *ids_case("no rows", np.ones((0, 4), int), "inputs must not be empty"),
    *ids_case("no positions", np.ones((2, 0), int), "inputs must not be empty"),
    *ids_case("negative id", np.array([[1, -1], [0, 0]]), r"got -1 at index \(0, 1\)"),
    *ids_case("id of `vocab` or more", np.array([[1, 1], [20, 0]]), r"\[0, 20\), got 20 at index \(1, 0\)"),
    *ids_case("id that wraps around", np.array([[2**32], [0]]), f"got {2**32}"),
    *ids_case("smallest int64", np.array([[0], [np.iinfo(np.int64).min]]), "inputs"),
    Refusal("step, inputs", "more than one token per row", V, lambda w: w.lm.step(w.ids[:, :2], w.state), "inputs"),
    Refusal("step, inputs", "float dtype", V, lambda w: w.lm.step(np.ones(2), w.state), "inputs"),
    Refusal("step, inputs", "id out of range", V, lambda w: w.lm.step(np.array([0, 20]), w.state), "20"),
    Refusal("forward", "`state` is not a SambaState", T, lambda w: w.lm.forward(w.ids, w.state.layers), "state"),
    Refusal("step", "`state` is not a SambaState", T, lambda w: w.lm.step(w.ids[:, 0], {}), "state"),
    Refusal("step", "`state` is None", V, lambda w: w.lm.step(w.ids[:, 0], None), "state"),
    Refusal("step", "`state` missing", T, lambda w: w.lm.step(w.ids[:, 0])),
    Refusal(
        "forward", "state of another batch size", V, lambda w: w.lm.forward(w.ids[:1, :1], w.state), "batch_size 1.* 2"
    ),
    Refusal(
        "forward",
        "state with another number of layers",
        V,
        lambda w: w.lm.forward(w.ids[:, :1], w.mamba_state),
        "layers",
    ),
    Refusal("step", "layer kinds swapped", V, mutate(lambda s: s.layers.reverse()), r"state.layers\[0\]"),
    Refusal(
        "step",
        "a block state of another shape",
        V,
        lambda w: w.lm.step(
            w.ids[:, 0],
            SambaState(
                2, 8, [w.state.layers[0], TransformerBlock(w.attention_weights, n_heads=1).allocate_state(2, 8)]
            ),
        ),
        "",
    ),
    Refusal("step", "NaN in a mamba state", V, mutate(lambda s: put_nan(s.layers[0].h)), r"layers\[0\]"),
    Refusal("step", "NaN in the used part of the cache", V, mutate(lambda s: put_nan(s.layers[1].k_cache)), "finite"),
    Refusal(
        "forward",
        "more tokens than `max_tokens`",
        errors.CapacityError,
        lambda w: w.lm.forward(w.ids[:, :3], w.state),
        "max_tokens = 8 .* 9 ",
    ),
    Refusal(
        "forward",
        "more tokens than `max_tokens`, no attention",
        errors.CapacityError,
        lambda w: w.mamba_only.forward(w.ids[:, :3], w.mamba_state),
        "max_tokens = 8 .* 9 ",
    ),
    Refusal(
        "forward",
        "more than 8192 positions with attention",
        errors.CapacityError,
        lambda w: w.lm.forward(np.zeros((1, 8193), np.int32)),
        "8192.* 8193",
    ),
    Refusal("forward, lengths", "with a state", V, lambda w: w.lm.forward(w.ids, w.state, lengths=[6, 6]), "lengths"),
    Refusal("forward, lengths", "wrong count", V, lambda w: w.lm.forward(w.ids, lengths=[6]), "lengths"),
    Refusal("forward, lengths", "entry below 1", V, lambda w: w.lm.forward(w.ids, lengths=[0, 6]), r"lengths\[0\]"),
    Refusal("forward, lengths", "entry above L", V, lambda w: w.lm.forward(w.ids, lengths=[6, 7]), r"lengths\[1\]"),
    Refusal("forward, lengths", "huge entry", V, lambda w: w.lm.forward(w.ids, lengths=[6, 2**80]), "lengths"),
    Refusal("forward, lengths", "not a sequence", V, lambda w: w.lm.forward(w.ids, lengths=6), "lengths"),
    Refusal("forward, lengths", "a string", V, lambda w: w.lm.forward(w.ids, lengths="66"), "lengths"),
    Refusal("forward, lengths", "bool entry", T, lambda w: w.lm.forward(w.ids, lengths=[True, 6]), "lengths"),
    Refusal("forward, lengths", "float entry", T, lambda w: w.lm.forward(w.ids, lengths=[6.0, 6]), "lengths"),
    Refusal("forward, lengths", "None entry", T, lambda w: w.lm.forward(w.ids, lengths=[None, 6]), "lengths"),
    Refusal(
        "forward",
        "non-finite activation entering a later block",
        errors.NonFiniteError,
        lambda w: w.overflowing()[0].forward(w.ids),
        r"layer 0 \(mamba3\)",
    ),
    *[
        Refusal("allocate_state", condition, error, lambda w, a=arguments: w.lm.allocate_state(*a), text)
        for condition, error, arguments, text in [
            ("`batch_size` 0", V, (0, 4), "batch_size"),
            ("`max_tokens` negative", V, (1, -4), "max_tokens"),
            ("a float", T, (1.0, 4), "batch_size"),
            ("a string", T, (1, "4"), "max_tokens"),
            ("a bool", T, (True, 4), "batch_size"),
            ("None", T, (1, None), "max_tokens"),
            ("`max_tokens` above 8192 with attention", errors.CapacityError, (1, 8193), "8192.* 8193"),
        ]
    ],
    Refusal("SambaInference.loss", "always", NotImplementedError, lambda w: w.lm.loss(w.ids, w.ids), "SambaStack"),
    Refusal(
        "SambaInference.train_step",
        "always",
        NotImplementedError,
        lambda w: w.lm.train_step(w.ids, w.ids),
        "SambaStack",
    ),
    Refusal("token_logprobs", "one position", V, lambda w: w.lm.token_logprobs(w.ids[:, :1]), "2 positions"),
    Refusal("SambaState", "layers of another type", T, lambda w: SambaState(1, 4, [None]), r"layers\[0\]"),
    Refusal("SambaState", "more tokens than `max_tokens`", V, lambda w: SambaState(1, 4, [], 5), "tokens"),
    Refusal("SambaState.select", "no rows", V, lambda w: w.state.select([]), "rows"),
    Refusal("SambaState.select", "row out of range", V, lambda w: w.state.select([2]), r"rows\[0\]"),
    Refusal("SambaState.select", "not a sequence", T, lambda w: w.state.select(1), "rows"),
    Refusal("SambaState.from_dict", "not a dict", T, lambda w: SambaState.from_dict([]), "dict"),
    Refusal("SambaState.from_dict", "a key is missing", V, lambda w: SambaState.from_dict({"tokens": 1}), "batch_size"),
    Refusal(
        "SambaState.from_dict",
        "unknown layer kind",
        V,
        lambda w: SambaState.from_dict({**w.state.to_dict(), "layers": [{"kind": "conv"}]}),
        "kind",
    ),
]

TRAINING = [
    Refusal("train_step, targets", "shape differs", V, lambda w: w.stack.train_step(w.ids, w.ids[:, :5]), "targets"),
    Refusal("train_step, targets", "out of range", V, lambda w: w.stack.train_step(w.ids, w.ids + 10), "targets .* 20"),
    Refusal(
        "train_step, targets", "negative, not -100", V, lambda w: w.stack.train_step(w.ids, w.ids - 99), "targets .*-99"
    ),
    Refusal("train_step, targets", "float dtype", V, lambda w: w.stack.train_step(w.ids, w.x[:, :, 0]), "targets"),
    Refusal("loss, targets", "shape differs", V, lambda w: w.stack.loss(w.ids, w.ids.T), "targets"),
    Refusal("loss, targets", "all ignored", V, lambda w: w.stack.loss(w.ids, np.full_like(w.ids, -100)), "targets"),
    Refusal(
        "train_step",
        "`accumulation_steps` does not divide the rows",
        V,
        lambda w: SambaStack(w.config, w.weights, accumulation_steps=3).train_step(w.ids, w.ids),
        "accumulation_steps .* 3 for 2 rows",
    ),
    Refusal(
        "train_step",
        "more than 8192 positions with attention",
        errors.CapacityError,
        lambda w: w.stack.train_step(np.zeros((1, 8193), int), np.zeros((1, 8193), int)),
        "8192",
    ),
    *[
        Refusal(
            "loss_and_grads", condition, error, lambda w, o=options: w.stack.loss_and_grads(w.ids, w.ids, **o), text
        )
        for condition, error, options, text in [
            ("`num_items` 0 or less", V, {"num_items": 0}, "num_items"),
            ("`num_items` above 2^24", V, {"num_items": 2**24 + 1}, "num_items"),
            ("`num_items` is not an integer", T, {"num_items": 2.0}, "num_items"),
            ("`dropout_stream` outside 32 bits", V, {"dropout_stream": 2**32}, "dropout_stream"),
            ("`dropout_stream` is not an integer", T, {"dropout_stream": "0"}, "dropout_stream"),
            ("`token_offset` negative", V, {"token_offset": -1}, "token_offset"),
        ]
    ],
    Refusal(
        "SambaStack.generator",
        "set to what is no Generator",
        T,
        lambda w: setattr(w.stack, "generator", np.random.default_rng(0)),
        "generator must be",
    ),
    *[
        Refusal(
            f"SambaStack.{name}",
            "set after construction",
            AttributeError,
            lambda w, n=name: setattr(w.stack, n, getattr(w.stack, n)),
            f"{name} is fixed",
        )
        for name in ("config", "optimizer", "names", "shapes", "offsets", "n_total")
    ],
    Refusal(
        "SambaInference.config",
        "set after construction",
        AttributeError,
        lambda w: setattr(w.lm, "config", None),
        "config is fixed .* None",
    ),
]


def late(change):
    """A training step on a stack of its own that fails after the checks; it must not change that stack."""

    def act(w):
        stack = SambaStack(w.config, generator=Generator(5), max_norm=1.0, lr_schedule=ConstantLR(1e-3, 10))
        stack.train_step(w.ids, w.ids)
        change(stack)
        before = stack.state_dict()
        last = stack.last_
        try:
            stack.train_step(w.ids, w.ids)
        finally:
            after = stack.state_dict()
            assert stack.last_ is last
            assert {k: v for k, v in after.items() if not isinstance(v, np.ndarray)} == {
                k: v for k, v in before.items() if not isinstance(v, np.ndarray)
            }
            for name in ("parameters", "exp_avg", "exp_avg_sq"):
                assert after[name].tobytes() == before[name].tobytes(), name

    return act


def exhaust(stack):
    stack.generator.load_state_dict({"seed": 1, "counter": 2**32})


LATE = [
    Refusal(
        "train_step",
        "non-finite parameter",
        errors.NonFiniteError,
        late(lambda s: put_nan(s.parameters()["layers.1.q_proj.weight"])),
    ),
    Refusal(
        "train_step",
        "activation overflows",
        errors.NonFiniteError,
        late(lambda s: s.parameters()["layers.0.out_proj.weight"].fill(3e38)),
        "layer 0",
    ),
    Refusal(
        "train_step",
        "loss overflows",
        errors.NonFiniteError,
        late(lambda s: s.parameters()["norm_f.weight"].fill(3e38)),
    ),
    Refusal(
        "train_step", "non-finite first moment", errors.NonFiniteError, late(lambda s: put_nan(s.optimizer.exp_avg))
    ),
    Refusal(
        "train_step", "non-finite second moment", errors.NonFiniteError, late(lambda s: put_nan(s.optimizer.exp_avg_sq))
    ),
    Refusal("train_step", "no random stream left", errors.RandomStreamError, late(exhaust), "stream"),
]


def state_case(condition, error, change, text=""):
    return Refusal(
        "load_state_dict", condition, error, lambda w: w.stack.load_state_dict(change(w.stack.state_dict())), text
    )


def with_entry(**changes):
    return lambda state: {**state, **changes}


def with_inner(section, **changes):
    return lambda state: {**state, section: {**(state[section] or {}), **changes}}


STATE = [
    state_case("not a dict", V, lambda s: list(s), "dict"),
    *[
        state_case(f"`{name}` missing", V, lambda s, n=name: {k: v for k, v in s.items() if k != n}, name)
        for name in ("schema", "config", "parameters", "exp_avg", "t", "optimizer", "schedule", "rng", "registry")
    ],
    state_case("another schema", V, with_entry(schema="v0"), "schema"),
    state_case("another profile", V, with_entry(profile="fp16"), "profile"),
    state_case("another experiment profile", V, with_entry(experiment_profile="x"), "experiment_profile"),
    state_case("another numeric mode", V, with_entry(numeric_mode="fast"), "numeric_mode"),
    state_case("another configuration", V, with_inner("config", vocab=21), "config"),
    state_case("an invalid configuration", V, with_inner("config", d_model=33), "d_model"),
    state_case("registry that does not fit", V, lambda s: {**s, "registry": s["registry"][::-1]}, r"registry\[0\]"),
    state_case("wrong array size", V, lambda s: {**s, "exp_avg": s["exp_avg"][1:]}, "exp_avg"),
    state_case("array of another dtype", T, lambda s: {**s, "parameters": s["parameters"].astype(float)}, "parameters"),
    state_case("`t` negative", V, with_entry(t=-1), "t must"),
    state_case("`t` is not an integer", T, with_entry(t=1.5), "t must"),
    state_case("another optimizer", V, with_inner("optimizer", kind="sgd"), "kind"),
    state_case("optimizer field missing", V, lambda s: {**s, "optimizer": {"kind": "adamw"}}, "lr"),
    state_case("a beta out of range", V, with_inner("optimizer", beta1=1.0), "beta1"),
    state_case("`eps` negative", V, with_inner("optimizer", eps=-1.0), "eps"),
    state_case("`max_norm` out of range", V, with_inner("optimizer", max_norm=-1.0), "max_norm"),
    state_case("accumulation steps below 1", V, with_inner("optimizer", accumulation_steps=0), "accumulation_steps"),
    state_case("unknown schedule", V, with_entry(schedule={"kind": "step"}), "schedule"),
    state_case("schedule out of range", V, with_entry(schedule={**ConstantLR(1e-3).config(), "peak_lr": -1.0}), ""),
    state_case("`rng` is not a dict", V, with_entry(rng=3), "rng"),
    state_case("random counter out of range", V, with_inner("rng", counter=2**32 + 1), "counter"),
    state_case("seed out of range", V, with_inner("rng", seed=-1), "seed"),
]


def state_arrays(w):
    return [
        np.array(getattr(w.block_mamba_state, name))
        for name in (
            "theta",
            "h",
            "buffer_qrot",
            "buffer_krot",
            "buffer_v",
            "buffer_dt",
            "buffer_sig",
            "buffer_adt",
            "pending_k",
            "pending_v",
        )
    ]


def mamba_step_with(change):
    def act(w):
        state = Mamba3State(*state_arrays(w), buffered_tokens=6)
        change(state)
        w.mamba.step(w.x[:, 0], state)

    return act


def attention_state(w, **changes):
    shape = (2, 1, 8, 16)
    fields = {
        "batch_size": 2,
        "n_kv_heads": 1,
        "head_dim": 16,
        "max_tokens": 8,
        "k_cache": np.zeros(shape, F32),
        "v_cache": np.zeros(shape, F32),
        "cached_tokens": 3,
    }
    return TransformerState(**{**fields, **changes})


def block_case(condition, error, act, text=""):
    """The same refusal by both blocks."""
    return [
        Refusal("Mamba3Block", condition, error, lambda w: act(w, w.mamba, w.block_mamba_state), text),
        Refusal("TransformerBlock", condition, error, lambda w: act(w, w.attention, w.block_attention_state), text),
    ]


def make_attention(w, **options):
    changes = options.pop("changes", {})
    return TransformerBlock({**w.attention_weights, **changes}, **{"n_heads": 2, "n_kv_heads": 1, **options})


BLOCKS = [
    Refusal("Mamba3Block", "weights None", V, lambda w: Mamba3Block(None), "weights"),
    Refusal("Mamba3Block", "weights a list", V, lambda w: Mamba3Block([1]), "weights"),
    Refusal(
        "Mamba3Block",
        "missing name",
        V,
        lambda w: Mamba3Block({k: v for k, v in w.mamba_weights.items() if k != "D"}),
        "D",
    ),
    Refusal("Mamba3Block", "unknown name", V, lambda w: Mamba3Block({**w.mamba_weights, "E": w.x}), "E"),
    Refusal("Mamba3Block", "wrong shape", V, lambda w: Mamba3Block({**w.mamba_weights, "D": np.ones(2, F32)}), "D"),
    Refusal("Mamba3Block", "a list for a tensor", V, lambda w: Mamba3Block({**w.mamba_weights, "D": [1.0]}), "D"),
    Refusal("Mamba3Block", "float64 tensor", T, lambda w: Mamba3Block({**w.mamba_weights, "D": np.ones(1)}), "D"),
    Refusal(
        "Mamba3Block",
        "`d_model` no multiple of 32",
        V,
        lambda w: Mamba3Block({**w.mamba_weights, "block_norm.weight": np.ones(33, F32)}),
    ),
    Refusal("TransformerBlock", "weights None", V, lambda w: TransformerBlock(None, n_heads=2), "weights"),
    Refusal("TransformerBlock", "`n_heads` missing", T, lambda w: TransformerBlock(w.attention_weights)),
    Refusal(
        "TransformerBlock",
        "float64 tensor",
        T,
        lambda w: make_attention(w, changes={"q_proj.weight": np.ones((32, 32))}),
    ),
    *[
        Refusal("TransformerBlock", condition, error, lambda w, o=options: make_attention(w, **o), text)
        for condition, error, options, text in [
            ("`n_heads` 0", V, {"n_heads": 0}, "n_heads"),
            ("`n_heads` is not an integer", T, {"n_heads": 2.0}, "n_heads"),
            ("`d_model` is not `n_heads * head_dim`", V, {"head_dim": 8}, "head_dim"),
            ("`n_kv_heads` does not divide `n_heads`", V, {"n_kv_heads": 3}, "n_kv_heads"),
            ("k_proj of another number of heads", V, {"n_kv_heads": 2}, "k_proj"),
            ("`window` negative", V, {"window": -1}, "window"),
            ("`max_positions` 0", V, {"max_positions": 0}, "max_positions"),
            ("unknown numeric mode", V, {"numeric_mode": "x"}, "numeric_mode"),
        ]
    ],
    *block_case("x float64", T, lambda w, b, s: b.forward(w.x.astype(float), s), "x must be native float32"),
    *block_case("x a list", V, lambda w, b, s: b.forward([[[1.0]]], s), "x"),
    *block_case("x None", V, lambda w, b, s: b.forward(None, s), "x"),
    *block_case("x of rank 2", V, lambda w, b, s: b.forward(w.x[0], s), "x"),
    *block_case("x of another width", V, lambda w, b, s: b.forward(np.ascontiguousarray(w.x[..., :31]), s), "x"),
    *block_case("x without rows", V, lambda w, b, s: b.forward(w.x[:0], s), "x"),
    *block_case("x without positions", V, lambda w, b, s: b.forward(w.x[:, :0], s), "x"),
    *block_case(
        "NaN in x", errors.NonFiniteError, lambda w, b, s: b.forward(nan_like(w.x[:, :2]), s), "x must be finite"
    ),
    *block_case("step with two positions", V, lambda w, b, s: b.step(w.x[:, :2], s), "x"),
    *block_case("step without a state", V, lambda w, b, s: b.step(w.x[:, 0], None), "state"),
    *block_case("lengths with a state", V, lambda w, b, s: b.forward(w.x[:, :2], s, lengths=[1, 2]), "lengths"),
    *block_case("state of another batch size", V, lambda w, b, s: b.forward(w.x[:1, :2], s), ""),
    *block_case("a state of another type", (T, V), lambda w, b, s: b.forward(w.x[:, :2], object()), "state"),
    *block_case("grad_output of another shape", V, lambda w, b, s: b.backward(w.x, w.x[:, :2]), "grad_output"),
    *block_case("NaN in grad_output", V, lambda w, b, s: b.backward(w.x, nan_like(w.x)), "grad_output"),
    Refusal(
        "Mamba3Block",
        "NaN in the weights, at the first forward",
        errors.NonFiniteError,
        lambda w: Mamba3Block({**w.mamba_weights, "D": np.full(1, np.nan, F32)}).forward(w.x),
        "weights",
    ),
    Refusal("Mamba3Block.allocate_state", "0", V, lambda w: w.mamba.allocate_state(0), "batch_size"),
    Refusal("Mamba3Block.allocate_state", "a float", T, lambda w: w.mamba.allocate_state(2.0), "batch_size"),
    Refusal("TransformerBlock.allocate_state", "0", V, lambda w: w.attention.allocate_state(1, 0), "max_tokens"),
    Refusal(
        "TransformerBlock.allocate_state", "a string", T, lambda w: w.attention.allocate_state("1", 2), "batch_size"
    ),
    Refusal(
        "TransformerBlock.allocate_state",
        "more than `max_positions`",
        errors.CapacityError,
        lambda w: w.attention.allocate_state(1, 8193),
        "8192",
    ),
    Refusal(
        "TransformerBlock",
        "more tokens than the state holds",
        errors.CapacityError,
        lambda w: w.attention.forward(w.x[:, :3], w.block_attention_state),
        "8.*9|9.*8",
    ),
    Refusal(
        "Mamba3State",
        "`buffered_tokens` above 64",
        V,
        lambda w: Mamba3State(*state_arrays(w), buffered_tokens=65),
        "buffered",
    ),
    Refusal(
        "Mamba3State",
        "`buffered_tokens` negative",
        V,
        lambda w: Mamba3State(*state_arrays(w), buffered_tokens=-1),
        "buffered",
    ),
    Refusal("Mamba3State", "an array is None", V, lambda w: Mamba3State(None, *state_arrays(w)[1:]), "theta"),
    Refusal("Mamba3State", "NaN in theta, at the next call", V, mamba_step_with(lambda s: put_nan(s.theta)), "theta"),
    Refusal("Mamba3State", "NaN in h, at the next call", V, mamba_step_with(lambda s: put_nan(s.h)), "h "),
    Refusal(
        "Mamba3State",
        "NaN in a buffer, at the next call",
        V,
        mamba_step_with(lambda s: put_nan(s.buffer_v)),
        "buffer_v",
    ),
    Refusal(
        "Mamba3State.set_input_states",
        "wrong shape",
        V,
        lambda w: w.mamba.allocate_state(2).set_input_states(*[np.zeros(3, F32)] * 4),
        "theta",
    ),
    Refusal(
        "Mamba3State.set_input_states",
        "float64",
        T,
        lambda w: w.mamba.allocate_state(2).set_input_states(np.zeros((2, 1, 32)), *[np.zeros(3, F32)] * 3),
        "theta",
    ),
    *[
        Refusal("TransformerState", condition, (V, T), lambda w, c=changes: attention_state(w, **c), text)
        for condition, changes, text in [
            ("`cached_tokens` above `max_tokens`", {"cached_tokens": 9}, "cached_tokens"),
            ("`cached_tokens` negative", {"cached_tokens": -1}, "cached_tokens"),
            ("cache of another size", {"k_cache": np.zeros((2, 1, 7, 16), F32)}, "k_cache"),
            ("cache of another dtype", {"v_cache": np.zeros((2, 1, 8, 16))}, "v_cache"),
            ("cache a list", {"v_cache": [0.0]}, "v_cache"),
            ("`batch_size` 0", {"batch_size": 0}, "batch_size"),
        ]
    ],
    Refusal(
        "TransformerBlock",
        "window of the state differs",
        V,
        lambda w: w.attention.step(w.x[:, 0], make_attention(w, window=4).allocate_state(2, 8)),
        "window",
    ),
]

LIBRARY = [
    Refusal("set_numeric_mode", "unknown name", V, lambda w: mojolearn.set_numeric_mode("exact"), "exact"),
    Refusal("set_numeric_mode", "not a string", T, lambda w: mojolearn.set_numeric_mode(1), "mode"),
    Refusal("set_numeric_mode", "None", T, lambda w: mojolearn.set_numeric_mode(None), "mode"),
    Refusal("set_num_threads", "0", V, lambda w: mojolearn.set_num_threads(0), "at least 1, got 0"),
    Refusal("set_num_threads", "a float", T, lambda w: mojolearn.set_num_threads(2.0), "n must be an integer"),
    Refusal("set_num_threads", "above 256", V, lambda w: mojolearn.set_num_threads(257), "at most 256"),
    Refusal(
        "from_checkpoint", "no such file", FileNotFoundError, lambda w: SambaStack.from_checkpoint("/nonexistent/a")
    ),
    Refusal("from_checkpoint", "path of another type", T, lambda w: SambaStack.from_checkpoint(None)),
    Refusal(
        "from_checkpoint", "unknown numeric mode", V, lambda w: SambaStack.from_checkpoint("a", "exact"), "numeric_mode"
    ),
    Refusal(
        "from_checkpoint", "not a checkpoint", errors.CheckpointError, lambda w: SambaStack.from_checkpoint(__file__)
    ),
    Refusal(
        "SambaInference.from_checkpoint",
        "not a checkpoint",
        errors.CheckpointError,
        lambda w: SambaInference.from_checkpoint(__file__),
    ),
    Refusal("save_checkpoint", "path of another type", T, lambda w: w.stack.save_checkpoint(None)),
    Refusal(
        "save_checkpoint",
        "folder does not exist",
        FileNotFoundError,
        lambda w: w.stack.save_checkpoint("/nonexistent/a"),
    ),
    Refusal(
        "save_checkpoint",
        "unknown compression",
        V,
        lambda w: w.stack.save_checkpoint("a", compression="gz"),
        "compression",
    ),
    Refusal(
        "save_checkpoint",
        "`extra` in a plain archive",
        V,
        lambda w: w.stack.save_checkpoint("a", compression=None, extra={"a": 1}),
        "extra",
    ),
    Refusal("AdamW", "non-float32 parameter", T, lambda w: AdamW([np.zeros(3)]), ""),
    Refusal("lowbit.pack", "unknown format", V, lambda w: lowbit.pack(w.weights, "int4"), "int4"),
    Refusal("lowbit.pack", "not a dict", T, lambda w: lowbit.pack([w.x], "int8")),
    Refusal("lowbit.pack_one", "not a matrix", V, lambda w: lowbit.pack_one(w.x, "int8")),
    Refusal("lowbit.pack_one", "float64", T, lambda w: lowbit.pack_one(np.ones((2, 2)), "int8")),
    Refusal("lowbit.BF16Weight", "wrong dtype", T, lambda w: lowbit.BF16Weight(np.ones((2, 2), np.int16))),
    Refusal(
        "lowbit.Int8Weight",
        "wrong dtype",
        T,
        lambda w: lowbit.Int8Weight(np.ones((2, 2), np.int8), np.ones(2, np.int64)),
    ),
]

SECTIONS = {
    "Configuration": CONFIG,
    "Building a model": CONSTRUCTION,
    "Forward, step and decode states": FORWARD,
    "Training": TRAINING,
    "Training, found out late": LATE,
    "Loading a state": STATE,
    "Blocks and their states": BLOCKS,
    "Library, files and packed weights": LIBRARY,
}


def case_name(case):
    return f"{case.call}: {case.condition}".replace("`", "")


ALL = [case for cases in SECTIONS.values() for case in cases]


@pytest.mark.parametrize("case", ALL, ids=case_name)
def test_refusal(case, world):
    before = world.digest()
    with pytest.raises(case.error, match=case.text or None) as caught:
        case.act(world)
    wanted = case.error if isinstance(case.error, tuple) else (case.error,)
    if case.error is V:
        assert issubclass(caught.type, ValueError)
    else:
        assert caught.type in wanted, caught.type
    assert str(caught.value).strip()
    assert world.digest() == before


def test_refusal_in_a_later_layer_leaves_the_state(world):
    stack, state = world.overflowing()
    before = state.to_dict()
    for call in (lambda: stack.step(world.ids[:, 0], state), lambda: stack.forward(world.ids[:, :2], state)):
        with pytest.raises(errors.NonFiniteError):
            call()
        after = state.to_dict()
        assert after["tokens"] == before["tokens"] == 6
        for old, new in zip(before["layers"], after["layers"]):
            assert all(np.array_equal(old[name], new[name]) for name in old)


def page():
    """The text of docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "What a wrong call raises. `CheckpointError`, `RandomStreamError`, `CapacityError` and `NonFiniteError` are",
        "subclasses of `ValueError`, so `except ValueError` catches every refusal of a value. The message names the",
        "argument, what came and what was wanted. A refused call changes nothing: no state, parameter, moment, step",
        "count or random stream, also when the reason is found late.",
        "",
        "This page is written from the table in `tests/unit/test_errors.py`, which tests each row.",
    ]
    for title, cases in SECTIONS.items():
        lines += ["", f"## {title}", "", "| call | condition | raises |", "|---|---|---|"]
        for case in cases:
            wanted = case.error if isinstance(case.error, tuple) else (case.error,)
            raises = " or ".join(f"`{error.__name__}`" for error in wanted)
            call = ", ".join(f"`{part}`" for part in case.call.split(", "))
            lines.append(f"| {call} | {case.condition} | {raises} |")
    return "\n".join(lines) + "\n"


def test_page_is_the_table():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_all_refusals_are_value_errors():
    # A rank that is lost is no refusal of an argument.
    for name in set(errors.__all__) - {"RankFailedError"}:
        assert issubclass(getattr(errors, name), ValueError)
    assert issubclass(errors.RankFailedError, RuntimeError)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
