"""The checked shape of a model, and the registry of its parameters."""

import math
from dataclasses import dataclass

import numpy as np

from mojolearn._arrays import as_choice, as_index, as_real, describe
from mojolearn._core._pool import FloatEnvironment

__all__ = ["LAYER_KINDS", "SambaConfig"]

LAYER_KINDS = ("mamba3", "attention")

# Sizes fixed by the Mamba-3 block (docs/numerics): state width, head width, rotation angles.
MAMBA_STATE = 128
MAMBA_HEAD_DIM = 64
MAMBA_ANGLES = 32

# A block's inner width is 2 * d_model in heads of 64, hence d_model in multiples of 32.
_MAMBA_MULTIPLE = MAMBA_HEAD_DIM // 2

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class SambaConfig:
    """Shape of a Samba language model.

    Parameters
    ----------
    vocab : int
        Number of token ids, at least 2.
    d_model : int
        Width of the residual stream. A multiple of 32 when there is a ``"mamba3"`` layer.
    layers : sequence of {"mamba3", "attention"}
        The blocks in stack order.
    n_heads : int or None
        Query heads of the attention layers; required when there is one.
    n_kv_heads : int or None
        Key/value heads; must divide `n_heads`. None means `n_heads`.
    head_dim : int or None
        Width of an attention head, even; ``n_heads * head_dim == d_model``. None means ``d_model // n_heads``.
    intermediate : int or None
        Width of the gated MLP of the attention layers; required when there is one.
    tie_embeddings : bool, default True
        Whether the output head shares the embedding matrix.
    norm_eps : float, default 1e-5
        Epsilon of the final norm, rounded to float32.
    dropout : float, default 0.0
        Dropout rate of the embedding output in training, in [0, 1), rounded to float32.

    Raises
    ------
    TypeError
        A value of the wrong type: integers are taken with ``operator.index``, so floats, strings and
        booleans are refused.
    ValueError
        A value out of range, or sizes that do not fit together.

    Notes
    -----
    A configuration cannot be changed after construction. It compares by value, can be hashed, copied
    and pickled.

    Examples
    --------
    >>> cfg = SambaConfig(vocab=256, d_model=64, layers=("mamba3", "attention"), n_heads=2, intermediate=128)
    >>> cfg.head_dim, cfg.n_kv_heads
    (32, 2)
    >>> cfg == SambaConfig.from_dict(cfg.to_dict())
    True
    """

    vocab: int
    d_model: int
    layers: tuple[str, ...]
    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    tie_embeddings: bool = True
    norm_eps: float = 1e-05
    dropout: float = 0.0

    def __post_init__(self):
        checked = {
            "vocab": as_index(self.vocab, "vocab", 2, _INT32_MAX),
            "d_model": as_index(self.d_model, "d_model", 1, _INT32_MAX),
            "layers": _check_layers(self.layers),
            "tie_embeddings": _check_flag(self.tie_embeddings, "tie_embeddings"),
            "norm_eps": _round_float32(as_real(self.norm_eps, "norm_eps", 0.0), "norm_eps"),
            "dropout": _round_float32(as_real(self.dropout, "dropout", 0.0, 1.0, high_open=True), "dropout"),
        }
        if checked["dropout"] >= 1.0:
            raise ValueError(f"dropout must be less than 1 as a float32, got {self.dropout}")
        for name in ("n_heads", "n_kv_heads", "head_dim", "intermediate"):
            value = getattr(self, name)
            checked[name] = None if value is None else as_index(value, name, 1, _INT32_MAX)
        if "mamba3" in checked["layers"] and checked["d_model"] % _MAMBA_MULTIPLE:
            raise ValueError(
                f"d_model must be a multiple of {_MAMBA_MULTIPLE} with mamba3 layers, got {checked['d_model']}"
            )
        if "attention" in checked["layers"]:
            _complete_attention(checked)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def num_parameters(self):
        """Number of parameters of the model; a tied head counts once."""
        return sum(math.prod(shape) for _, shape in self.registry())

    def to_dict(self):
        """The ten fields as a JSON-ready dict."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["layers"] = list(self.layers)
        return fields

    @classmethod
    def from_dict(cls, fields):
        """Rebuild a configuration from `to_dict`; unknown keys are ignored.

        Parameters
        ----------
        fields : dict
            All ten keys of `to_dict`.

        Returns
        -------
        SambaConfig
        """
        if not isinstance(fields, dict):
            raise ValueError(f"config must be a dict, got {describe(fields)}")
        missing = [name for name in cls.__dataclass_fields__ if name not in fields]
        if missing:
            raise ValueError(f"config lacks {', '.join(missing)}")
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def block_shapes(self, kind):
        """Names and shapes of one block's parameters, in registry order.

        Parameters
        ----------
        kind : {"mamba3", "attention"}

        Returns
        -------
        list of (str, tuple of int)
        """
        as_choice(kind, "kind", LAYER_KINDS)
        d = self.d_model
        if kind == "mamba3":
            inner = 2 * d
            heads = inner // MAMBA_HEAD_DIM
            projected = 2 * inner + 2 * MAMBA_STATE + 3 * heads + MAMBA_ANGLES
            return [
                ("block_norm.weight", (d,)),
                ("in_proj.weight", (projected, d)),
                ("dt_bias", (heads,)),
                ("B_norm.weight", (MAMBA_STATE,)),
                ("C_norm.weight", (MAMBA_STATE,)),
                ("B_bias", (heads, MAMBA_STATE)),
                ("C_bias", (heads, MAMBA_STATE)),
                ("D", (heads,)),
                ("out_proj.weight", (d, inner)),
            ]
        if self.n_heads is None or self.intermediate is None:
            raise ValueError("an attention block needs n_heads and intermediate, which this config does not set")
        head_dim = self.head_dim or d // self.n_heads
        keys = (self.n_kv_heads or self.n_heads) * head_dim
        return [
            ("input_layernorm.weight", (d,)),
            ("post_attention_layernorm.weight", (d,)),
            ("q_proj.weight", (self.n_heads * head_dim, d)),
            ("k_proj.weight", (keys, d)),
            ("v_proj.weight", (keys, d)),
            ("o_proj.weight", (d, self.n_heads * head_dim)),
            ("gate_proj.weight", (self.intermediate, d)),
            ("up_proj.weight", (self.intermediate, d)),
            ("down_proj.weight", (d, self.intermediate)),
        ]

    def registry(self):
        """Names and shapes of all parameters in the order of the flat buffer.

        Returns
        -------
        list of (str, tuple of int)
            ``embed.weight``, then ``layers.<i>.<name>``, ``norm_f.weight`` and, untied, ``lm_head.weight``.
        """
        entries = [("embed.weight", (self.vocab, self.d_model))]
        for i, kind in enumerate(self.layers):
            entries += [(f"layers.{i}.{name}", shape) for name, shape in self.block_shapes(kind)]
        entries.append(("norm_f.weight", (self.d_model,)))
        if not self.tie_embeddings:
            entries.append(("lm_head.weight", (self.vocab, self.d_model)))
        return entries


def _check_layers(layers):
    if isinstance(layers, (str, bytes)):
        raise ValueError(f"layers must be a sequence of layer kinds {LAYER_KINDS}, got {describe(layers)}")
    try:
        kinds = tuple(layers)
    except TypeError:
        raise TypeError(f"layers must be a sequence of layer kinds {LAYER_KINDS}, got {describe(layers)}") from None
    if not kinds:
        raise ValueError("layers must hold at least one layer kind, got none")
    for i, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in LAYER_KINDS:
            raise ValueError(f"layers[{i}] must be one of {LAYER_KINDS}, got {describe(kind)}")
    return tuple(str(kind) for kind in kinds)


def _check_flag(value, name):
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        if value in (0, 1):
            return bool(value)
        raise ValueError(f"{name} must be true or false, got {describe(value)}")
    raise TypeError(f"{name} must be a bool, got {describe(value)}")


def _round_float32(value, name):
    if value > float(np.finfo(np.float32).max):
        raise ValueError(f"{name} must be finite as a float32, got {value}")
    with FloatEnvironment():
        return float(np.float32(value))


def _complete_attention(checked):
    """Fill in the defaults of the attention sizes and check that they fit together."""
    for name in ("n_heads", "intermediate"):
        if checked[name] is None:
            raise ValueError(f"{name} is required with attention layers, got None")
    d_model, n_heads = checked["d_model"], checked["n_heads"]
    if checked["n_kv_heads"] is None:
        checked["n_kv_heads"] = n_heads
    if checked["head_dim"] is None:
        checked["head_dim"] = d_model // n_heads
    head_dim, n_kv_heads = checked["head_dim"], checked["n_kv_heads"]
    if n_heads * head_dim != d_model:
        raise ValueError(f"n_heads * head_dim must equal d_model = {d_model}, got {n_heads} * {head_dim}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for the rotary embedding, got {head_dim}")
    if n_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads must divide n_heads = {n_heads}, got {n_kv_heads}")
