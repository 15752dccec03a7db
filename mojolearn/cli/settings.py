"""The settings of a training run: defaults, a TOML file, flags, in that order."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mojolearn.cli._common import UsageError

TABLES = ("model", "data", "training", "run")


@dataclass
class TrainSettings:
    """Everything that decides what a run computes, and how it reports. `help` is the text of the flag."""

    paths: list[str] = field(default_factory=list, metadata={"table": "data"})

    d_model: int = field(default=256, metadata={"table": "model", "help": "width of the model, a multiple of 32"})
    layers: list[str] = field(
        default_factory=lambda: ["mamba3", "attention"] * 2,
        metadata={"table": "model", "help": "blocks in order, like 'mamba3,attention' or 'mamba3,attention x2'"},
    )
    n_heads: int = field(default=4, metadata={"table": "model", "help": "query heads of attention"})
    n_kv_heads: int | None = field(default=None, metadata={"table": "model", "help": "key/value heads (n_heads)"})
    intermediate: int | None = field(
        default=None, metadata={"table": "model", "help": "width of the attention blocks' MLP (2 d_model)"}
    )
    tie_embeddings: bool = field(default=True, metadata={"table": "model", "help": "one matrix for embedding and head"})
    dropout: float = field(default=0.0, metadata={"table": "model", "help": "dropout rate of the embedding"})
    vocab: int | None = field(
        default=None, metadata={"table": "model", "help": "number of tokens (256, the tokenizer's, or the data's)"}
    )

    batch_size: int = field(default=16, metadata={"table": "data", "help": "rows of a batch"})
    seq_len: int = field(default=256, metadata={"table": "data", "help": "tokens of a row"})
    valid_fraction: float = field(default=0.1, metadata={"table": "data", "help": "part of the data held out"})
    dtype: str | None = field(default=None, metadata={"table": "data", "help": "type of tokens in .bin files"})
    tokenizer: str | None = field(
        default=None, metadata={"table": "data", "help": "a tokenizer.json of Hugging Face, in place of bytes"}
    )

    steps: int = field(default=1000, metadata={"table": "training", "help": "optimizer steps"})
    lr: float = field(default=3e-3, metadata={"table": "training", "help": "peak learning rate"})
    min_lr: float | None = field(default=None, metadata={"table": "training", "help": "last learning rate (lr / 10)"})
    warmup: int | None = field(default=None, metadata={"table": "training", "help": "warmup steps (steps / 20)"})
    schedule: str = field(default="cosine", metadata={"table": "training", "help": "cosine, linear or constant"})
    weight_decay: float = field(default=0.1, metadata={"table": "training", "help": "AdamW weight decay"})
    beta1: float = field(default=0.9, metadata={"table": "training", "help": "AdamW beta1"})
    beta2: float = field(default=0.98, metadata={"table": "training", "help": "AdamW beta2"})
    max_norm: float = field(default=1.0, metadata={"table": "training", "help": "gradient norm limit, 0 for none"})
    accumulation_steps: int = field(default=1, metadata={"table": "training", "help": "micro-batches of a step"})
    n_shards: int = field(
        default=1,
        metadata={"table": "training", "help": "row shards of mode deterministic, at least the number of ranks"},
    )
    seed: int = field(default=0, metadata={"table": "training", "help": "seed of weights, dropout and data order"})
    numeric_mode: str | None = field(
        default=None,
        metadata={"table": "training", "help": "identical (default), deterministic (trains faster) or fast"},
    )
    init: str | None = field(
        default=None, metadata={"table": "training", "help": "start from the weights of this checkpoint or run"}
    )

    eval_every: int = field(default=100, metadata={"table": "run", "help": "steps between evaluations"})
    eval_windows: int = field(default=128, metadata={"table": "run", "help": "rows of an evaluation, 0 for all"})
    save_every: int = field(default=100, metadata={"table": "run", "help": "steps between checkpoints"})
    keep: int = field(default=3, metadata={"table": "run", "help": "how many of the last checkpoints stay"})

    def check(self) -> None:
        """Refuse counts of the run itself, and by their flags the values that the library names otherwise."""
        for name in ("steps", "eval_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "min_lr", "weight_decay", "max_norm", "beta1", "beta2", "dropout", "valid_fraction"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise UsageError(f"{name} must be finite, got {value}")
        for name in ("eval_windows", "max_norm", "lr", "min_lr", "warmup", "weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} must be at least 0, got {value}")
        for name in ("beta1", "beta2", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.accumulation_steps < 1 or self.batch_size % self.accumulation_steps:
            raise UsageError(
                f"accumulation_steps must divide batch_size {self.batch_size}, got {self.accumulation_steps}"
            )
        if self.schedule not in ("cosine", "linear", "constant"):
            raise UsageError(f"schedule must be cosine, linear or constant, got {self.schedule!r}")

    def to_toml(self) -> str:
        """The settings as a TOML file that gives them back."""
        tables = {table: [f"[{table}]"] for table in TABLES}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                # Numbers, strings, booleans and lists of strings look the same in TOML and in JSON.
                tables[item.metadata["table"]].append(f"{item.name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join("\n".join(lines) + "\n" for lines in tables.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


MOST_LAYERS = 10_000

# Settings that a resumed run may change: none of them touches what is computed.
FREE_ON_RESUME = ("eval_every", "eval_windows", "save_every", "keep")


def value_type(name: str) -> Any:
    """The type of a setting without its None."""
    hint = get_type_hints(TrainSettings)[name]
    inner = [one for one in get_args(hint) if one is not type(None)]
    return inner[0] if type(None) in get_args(hint) else hint


def parse_layers(text: str) -> list[str]:
    """'mamba3,attention x2' as ['mamba3', 'attention', 'mamba3', 'attention'].

    Raises
    ------
    ValueError
        An empty list, or one beyond all models; names are checked by the configuration.
    """
    match = re.fullmatch(r"(.*?)(?:\s*[x*]\s*(\d+))?", text.strip())
    names = [name.strip() for name in match[1].strip("() ").split(",") if name.strip()] if match else []
    if not match or not names:
        raise ValueError(f"layers must be a list like 'mamba3,attention' or 'mamba3,attention x2', got {text!r}")
    times = match[2] or "1"
    if len(times) > 6 or len(names) * int(times) > MOST_LAYERS:
        raise ValueError(f"layers must be at most {MOST_LAYERS}, got {text!r}")
    return names * int(times)


def read_config(path: str) -> dict[str, Any]:
    """The settings that a TOML file holds, flat or in the tables model, data, training and run."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    settings: dict[str, Any] = {}
    for key, value in content.items():
        if key in TABLES and isinstance(value, dict):
            settings.update(value)
        else:
            settings[key] = value
    return {name: _checked(path, name, value) for name, value in settings.items()}


def _checked(path: str, name: str, value: Any) -> Any:
    known = [item.name for item in fields(TrainSettings)]
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"{path}: there is no setting {name}{hint}")
    wanted = value_type(name)
    if wanted is float and type(value) is int:
        return float(value)
    if name == "layers" and isinstance(value, str):
        return parse_layers(value)
    if name == "paths" and isinstance(value, str):
        return [value]
    if wanted == list[str]:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
    elif type(value) is wanted:
        return value
    kind = "a list of strings" if wanted == list[str] else wanted.__name__
    raise UsageError(f"{path}: {name} must be {kind}, got {value!r}")
