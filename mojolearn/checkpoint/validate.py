"""Does what a file says about a model fit together: schema, profile, mode, configuration, registry, sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from mojolearn.checkpoint._entries import TRAINING_ARRAYS, ArrayEntry, Reader, Registry, State
from mojolearn.checkpoint._json import canonical
from mojolearn.errors import CheckpointError

__all__ = [
    "FORMATS",
    "PROFILE",
    "STATE_SCHEMA",
    "WEIGHTS_SCHEMA",
    "check_config",
    "check_reader",
    "check_training",
    "check_weights",
    "weight_entries",
]

# Name, dtype and shape of an array.
Described: TypeAlias = tuple[str, str, tuple[int, ...]]

STATE_SCHEMA = "mojolearn.samba-stack-state.v1"
WEIGHTS_SCHEMA = "mojolearn.samba-weights.v1"
PROFILE = "mojolearn.samba-stack.fp32.v1"

# Storage of the packed tensors of an inference archive, by format.
FORMATS = {"float32": "<f4", "bfloat16": "<u2", "int8": "|i1"}

_REQUIRED = ("schema", "profile", "numeric_mode", "config", "registry", "t", "optimizer", "schedule", "rng")
_OPTIONAL = ("experiment_profile", "deterministic_profile")
_OPTIMIZER_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_SCHEDULES = ("constant", "linear", "cosine")


def check_reader(reader: Reader) -> Registry:
    """Check what a file says, whatever its kind; returns the registry."""
    if reader.kind == "training":
        return check_training(reader.state, reader.entries, known_keys_only=reader.layout == "archive")
    return check_weights(reader.state, reader.entries)


def check_training(state: State, entries: list[ArrayEntry], known_keys_only: bool) -> Registry:
    """Check a training state without looking at the arrays' values.

    Parameters
    ----------
    state : dict
        All but the four arrays.
    entries : list of ArrayEntry
        The arrays.
    known_keys_only : bool
        Refuse keys that this library does not know; the older layouts let them pass.

    Returns
    -------
    list of (str, tuple of int)
        The registry.

    Raises
    ------
    CheckpointError
        Naming the first thing that is wrong.
    """
    missing = [key for key in _REQUIRED if key not in state]
    if missing:
        raise CheckpointError(f"the state lacks {', '.join(missing)}")
    unknown = sorted(state.keys() - {*_REQUIRED, *_OPTIONAL})
    if known_keys_only and unknown:
        raise CheckpointError(f"the state has keys that this library does not know: {', '.join(unknown)}")
    _check_equal(state["schema"], STATE_SCHEMA, "schema")
    _check_equal(state["profile"], PROFILE, "profile")
    _check_equal(state.get("experiment_profile", "baseline"), "baseline", "experiment_profile")
    _check_mode(state)
    if not isinstance(state["registry"], list):
        raise CheckpointError("registry is not a list")
    registry = check_config(state["config"], state["registry"], len(state["registry"]))
    _check_count(state["t"], "t", 2**63 - 1)
    _check_optimizer(state["optimizer"])
    _check_schedule(state["schedule"])
    rng = _check_object(state["rng"], "rng", ("seed", "counter"))
    _check_count(rng["seed"], "rng.seed", 2**64 - 1)
    _check_count(rng["counter"], "rng.counter", 2**32)
    total = sum(math.prod(shape) for _, shape in registry)
    sizes = [total, total, total, len(registry)]
    expected: list[Described] = [
        (name, dtype, (size,)) for (name, dtype), size in zip(TRAINING_ARRAYS.items(), sizes, strict=True)
    ]
    _check_entries(entries, expected)
    return registry


def check_weights(state: State, entries: list[ArrayEntry]) -> Registry:
    """Check what an inference archive says about its model.

    Parameters
    ----------
    state : dict
    entries : list of ArrayEntry

    Returns
    -------
    list of (str, tuple of int)
        The registry.
    """
    _check_object(state, "state", ("schema", "profile", "config", "format"))
    if len(state) != 4:
        raise CheckpointError("the state has other keys than schema, profile, config, format")
    _check_equal(state["schema"], WEIGHTS_SCHEMA, "schema")
    _check_equal(state["profile"], PROFILE, "profile")
    if state["format"] not in tuple(FORMATS):
        raise CheckpointError(f"format is {state['format']!r}, not one of {', '.join(FORMATS)}")
    registry = check_config(state["config"], most_layers=len(entries))
    packed = {entry.name for entry in entries if entry.dtype == FORMATS[state["format"]]}
    _check_entries(entries, weight_entries(registry, state["format"], packed))
    return registry


def check_config(config: Any, registry: list[Any] | None = None, most_layers: int | None = None) -> Registry:
    """Check a configuration.

    Parameters
    ----------
    config : dict
        As ``SambaConfig.to_dict()`` gives it.
    registry : list of dict or None
        The registry that the file states, to compare with.
    most_layers : int or None
        More layers are refused before a registry is built from them.

    Returns
    -------
    list of (str, tuple of int)
        The registry that the configuration makes.
    """
    from mojolearn.config import SambaConfig

    _check_object(config, "config", ("layers",))
    if most_layers is not None and isinstance(config["layers"], list) and len(config["layers"]) > most_layers:
        raise CheckpointError(f"config has {len(config['layers'])} layers, too many for what the file holds")
    try:
        checked = SambaConfig.from_dict(config)
        expected = checked.registry()
    except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
        raise CheckpointError(f"config: {error}") from error
    if canonical(checked.to_dict()) != canonical(config):
        raise CheckpointError(f"config is {config}, which is not how a configuration is written: {checked.to_dict()}")
    if registry is not None:
        _check_registry(registry, expected)
    return expected


def weight_entries(registry: Registry, weight_format: str, packed: Collection[str]) -> list[Described]:
    """The arrays of an inference archive.

    Parameters
    ----------
    registry : list of (str, tuple of int)
    weight_format : {"float32", "bfloat16", "int8"}
    packed : collection of str
        Names of the matrices that are stored in that format; the other tensors are float32.

    Returns
    -------
    list of (name, dtype, shape)
        In registry order; the codes of an int8 tensor are followed by its exponents, one per row.
    """
    expected = []
    for name, shape in registry:
        if name not in packed or len(shape) != 2:
            expected.append((name, "<f4", shape))
            continue
        expected.append((name, FORMATS[weight_format], shape))
        if weight_format == "int8":
            expected.append((f"{name}.exponents", "<i4", shape[:1]))
    return expected


def _check_mode(state: State) -> None:
    from mojolearn._numerics import DETERMINISTIC_PROFILES, MODE_NAMES

    mode = state["numeric_mode"]
    if mode not in MODE_NAMES:
        raise CheckpointError(f"numeric_mode is {mode!r}, not one of {', '.join(MODE_NAMES)}")
    if mode != "deterministic":
        if "deterministic_profile" in state:
            raise CheckpointError(f"a state of numeric_mode {mode!r} has a deterministic_profile")
        return
    profile = state.get("deterministic_profile")
    if profile is None:
        raise CheckpointError("a state of numeric_mode 'deterministic' lacks deterministic_profile")
    _check_object(profile, "deterministic_profile", ("name", "n_shards"))
    if profile["name"] not in DETERMINISTIC_PROFILES:
        raise CheckpointError(
            f"the state was made with the deterministic profile {profile['name']!r}, which this library does not "
            f"have; it has {', '.join(DETERMINISTIC_PROFILES)}"
        )
    if not _is_count(profile["n_shards"]) or profile["n_shards"] < 1:
        raise CheckpointError(f"deterministic_profile.n_shards is {profile['n_shards']!r}, not a positive integer")


def _check_registry(registry: list[Any], expected: Registry) -> None:
    if len(registry) != len(expected):
        raise CheckpointError(f"registry has {len(registry)} entries, but the config makes {len(expected)}")
    offset = 0
    for i, (name, shape) in enumerate(expected):
        size = math.prod(shape)
        wanted = {"name": name, "shape": list(shape), "offset": offset, "size": size}
        if not isinstance(registry[i], dict) or canonical(registry[i]) != canonical(wanted):
            raise CheckpointError(f"registry[{i}] is {registry[i]!r}, but the config makes {wanted}")
        offset += size


def _check_entries(entries: list[ArrayEntry], expected: list[Described]) -> None:
    found = [(entry.name, entry.dtype, entry.shape) for entry in entries]
    for i, wanted in enumerate(expected):
        if i >= len(found):
            raise CheckpointError(f"array {wanted[0]} is missing")
        if found[i] != wanted:
            raise CheckpointError("array {} is {} {} of shape {}, but the config makes {} {} of shape {}".format(
                i, *found[i], *wanted
            ))  # fmt: skip
    if len(found) > len(expected):
        raise CheckpointError(f"there is an array more than the config makes: {found[len(expected)][0]}")


def _check_optimizer(optimizer: Any) -> None:
    _check_object(optimizer, "optimizer", ("kind", *_OPTIMIZER_NUMBERS, "max_norm", "accumulation_steps"))
    _check_equal(optimizer["kind"], "adamw", "optimizer.kind")
    for name in _OPTIMIZER_NUMBERS:
        _check_number(optimizer[name], f"optimizer.{name}")
    if optimizer["max_norm"] is not None:
        _check_number(optimizer["max_norm"], "optimizer.max_norm")
    _check_count(optimizer["accumulation_steps"], "optimizer.accumulation_steps", 2**31 - 1, low=1)


def _check_schedule(schedule: Any) -> None:
    if schedule is None:
        return
    _check_object(schedule, "schedule", ("kind", "peak_lr", "min_lr", "warmup_steps", "total_steps"))
    if schedule["kind"] not in _SCHEDULES:
        raise CheckpointError(f"schedule.kind is {schedule['kind']!r}, not one of {', '.join(_SCHEDULES)}")
    _check_number(schedule["peak_lr"], "schedule.peak_lr")
    _check_number(schedule["min_lr"], "schedule.min_lr")
    _check_count(schedule["warmup_steps"], "schedule.warmup_steps", 2**63 - 1)
    if schedule["total_steps"] is not None:
        _check_count(schedule["total_steps"], "schedule.total_steps", 2**63 - 1)


def _check_object(value: Any, name: str, keys: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} is not an object")
    missing = [key for key in keys if key not in value]
    if missing:
        raise CheckpointError(f"{name} lacks {', '.join(missing)}")
    return value


def _check_equal(value: Any, wanted: str, name: str) -> None:
    if value != wanted:
        raise CheckpointError(f"{name} is {value!r}, not {wanted!r}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_count(value: Any, name: str, high: int, low: int = 0) -> None:
    if not _is_count(value) or not low <= value <= high:
        raise CheckpointError(f"{name} is {value!r}, not an integer from {low} to {high}")


def _check_number(value: Any, name: str) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CheckpointError(f"{name} is {value!r}, not a finite number")
