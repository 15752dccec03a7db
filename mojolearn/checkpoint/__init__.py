"""Checkpoint files: save, load and look into them.

Three layouts are read: our compressed archive (`archive`), the plain streamed archive of the public GPU package
(`stream_v2`) and its older JSON text (`json_v1`). The first two are written. ``docs/formats.md`` describes all three.

This package knows a model only as the dict that ``SambaStack.state_dict()`` gives.
"""

from __future__ import annotations

import math
import os

import numpy as np

from mojolearn._arrays import as_flag
from mojolearn.checkpoint import validate
from mojolearn.checkpoint._atomic import replacing
from mojolearn.checkpoint._entries import TRAINING_ARRAYS, ArrayEntry, Path, State, read_array
from mojolearn.checkpoint._files import HashingWriter, naming, opened
from mojolearn.checkpoint._json import check_plain
from mojolearn.checkpoint._layouts import check_extra, check_level, make_reader
from mojolearn.checkpoint._pipeline import Pipeline
from mojolearn.checkpoint.archive import ArchiveWriter
from mojolearn.checkpoint.stream_v2 import write_stream
from mojolearn.checkpoint.weights import WeightsReader, save_weights
from mojolearn.errors import CheckpointError

__all__ = ["WeightsReader", "inspect", "load", "save", "save_weights"]


def save(
    path: Path, state: State, *, compression: str | None = "zstd", level: int | None = None, extra: State | None = None
) -> str:
    """Write a training state.

    Parameters
    ----------
    path : str or path-like
        The file; a symbolic link is followed. It holds the old bytes or the new ones at any time, whole, whatever
        happens; the new ones are on the disk when this returns.
    state : dict
        As ``SambaStack.state_dict()`` gives it.
    compression : {"zstd", None}, default "zstd"
        None writes the plain streamed archive, byte for byte what the public library writes for the same state.
    level : int or None, default None
        zstd level, 1 (the default) to 22. Higher ones take much longer and hardly save more: a trained model's
        mantissas are noise.
    extra : dict or None, default None
        A JSON object of the caller's. Only the compressed archive carries one, of at most 64 MiB of text.

    Returns
    -------
    str
        SHA-256 of the file, hexadecimal. The bytes do not depend on the number of threads.

    Raises
    ------
    TypeError
        An option of the wrong type; something in `state` or `extra` that JSON would change.
    ValueError
        An unknown compression, a level out of range, an `extra` with ``compression=None``.
    CheckpointError
        A state that could not be loaded again: missing keys, arrays of another type or size than its config makes.
    OSError
        The file cannot be written. The old one is then as it was, and nothing is left beside it.

    Notes
    -----
    The arrays are read while the file is written: do not change them meanwhile. What is written then is whole and
    loads, but some values may be older than others.
    """
    if compression not in ("zstd", None):
        raise ValueError(f"compression must be 'zstd' or None, got {compression!r}")
    if compression is None and (level is not None or extra is not None):
        raise ValueError("compression=None writes the plain archive, which has no level and carries no extra")
    level = check_level(level)
    check_extra(extra)
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, got {type(state).__name__}")
    arrays = {name: _as_array(state, name, dtype) for name, dtype in TRAINING_ARRAYS.items()}
    entries = [ArrayEntry.of(name, TRAINING_ARRAYS[name], array.shape) for name, array in arrays.items()]
    described = {key: value for key, value in state.items() if key not in arrays}
    check_plain(described, "state")
    validate.check_training(described, entries, known_keys_only=compression is not None)
    with replacing(path) as descriptor, Pipeline() as pipeline:
        file = HashingWriter(descriptor, pipeline)
        if compression is None:
            return write_stream(file, pipeline, {**described, **arrays})
        writer = ArchiveWriter(file, pipeline, "training", described, entries, extra, level)
        for array in arrays.values():
            writer.add(array)
        return writer.finish()


def load(path: Path) -> tuple[State, State | None, dict[str, str]]:
    """Read a training state.

    Parameters
    ----------
    path : str or path-like
        A file in any layout; the content tells which.

    Returns
    -------
    state : dict
        For ``SambaStack.load_state_dict``; the arrays are the caller's.
    extra : dict or None
        What was given to `save`.
    info : dict
        ``layout``: ``"archive"``, ``"v2"`` or ``"json"``.

    Raises
    ------
    CheckpointError
        Whatever is wrong with the file, named. A file of weights alone is refused, too.
    FileNotFoundError, OSError
        The file cannot be read.
    """
    with opened(path) as descriptor, naming(path), Pipeline() as pipeline:
        reader = make_reader(descriptor, pipeline)
        if reader.kind != "training":
            raise CheckpointError(
                "holds the weights of a model alone; exp_avg, exp_avg_sq, buf_initialized, t, optimizer, schedule "
                "and rng, which training needs, are missing"
            )
        validate.check_reader(reader)
        state = dict(reader.state)
        for entry in reader.entries:
            state[entry.name] = read_array(reader, entry)
        reader.finish()
        return state, reader.extra, {"layout": reader.layout}


def inspect(path: Path, verify: bool = False) -> State:
    """Tell what is in a checkpoint without loading its arrays.

    Parameters
    ----------
    path : str or path-like
    verify : bool, default False
        Read and check every byte. Otherwise the header, all lengths and the end are checked.

    Returns
    -------
    dict
        JSON values: ``layout``, ``kind``, ``file_size``, ``config``, ``num_parameters``, ``weight_format``,
        ``numeric_mode``, ``deterministic_profile``, ``step``, ``optimizer``, ``schedule``, ``rng`` (None in a file of
        weights alone), ``tensors`` (name and shape of each), ``arrays`` (name, dtype, shape, nbytes, stored bytes and
        SHA-256 of the bytes of each), ``extra``, ``verified``, and ``sha256`` of the file, None
        unless verified.

    Raises
    ------
    CheckpointError
        Whatever is wrong with the file.
    FileNotFoundError, OSError
        The file cannot be read.
    """
    verify = as_flag(verify, "verify")
    with opened(path) as descriptor, naming(path), Pipeline() as pipeline:
        reader = make_reader(descriptor, pipeline, with_digest=verify)
        registry = validate.check_reader(reader)
        state, digests, stored = reader.state, reader.digests(), reader.stored()
        if verify:
            for entry in reader.entries:
                for _ in reader.parts(entry):
                    pass
        return {
            "layout": reader.layout,
            "kind": reader.kind,
            "file_size": os.fstat(descriptor).st_size,
            "config": state["config"],
            "num_parameters": sum(math.prod(shape) for _, shape in registry),
            "weight_format": state.get("format", "float32"),
            "numeric_mode": state.get("numeric_mode"),
            "deterministic_profile": state.get("deterministic_profile"),
            "step": state.get("t"),
            "optimizer": state.get("optimizer"),
            "schedule": state.get("schedule"),
            "rng": state.get("rng"),
            "tensors": [{"name": name, "shape": list(shape)} for name, shape in registry],
            "arrays": [
                {
                    "name": entry.name,
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "nbytes": entry.nbytes,
                    "stored": stored[entry.name],
                    "digest": digests[entry.name],
                }
                for entry in reader.entries
            ],
            "extra": reader.extra,
            "verified": verify,
            "sha256": reader.finish() if verify else None,
        }


def _as_array(state: State, name: str, dtype: str) -> np.ndarray:
    """A flat array of the state in the byte order of the file, copied only where it has to be."""
    if name not in state:
        raise CheckpointError(f"the state lacks {name}")
    array = np.asarray(state[name])
    if array.dtype != np.dtype(dtype) or array.ndim != 1:
        raise CheckpointError(f"{name} must be a flat array of {dtype}, got {array.dtype} of shape {array.shape}")
    return np.ascontiguousarray(array)
