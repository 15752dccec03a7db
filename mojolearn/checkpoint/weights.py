"""Weights one tensor at a time: archives for inference, and the parameters of training checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from mojolearn.checkpoint import validate
from mojolearn.checkpoint._atomic import replacing
from mojolearn.checkpoint._entries import ArrayEntry, Path, State, as_bytes, read_array
from mojolearn.checkpoint._files import HashingWriter, naming, opened
from mojolearn.checkpoint._json import check_plain
from mojolearn.checkpoint._layouts import check_extra, check_level, make_reader
from mojolearn.checkpoint._pipeline import Pipeline
from mojolearn.checkpoint.archive import ArchiveWriter

__all__ = ["Tensor", "WeightsReader", "save_weights"]

# A float32 array, bfloat16 bits, or int8 codes with their exponents.
Tensor: TypeAlias = np.ndarray | tuple[np.ndarray, np.ndarray]


def save_weights(
    path: Path,
    config: State,
    tensors: Iterable[tuple[str, Tensor]],
    format: str = "float32",
    *,
    packed: Iterable[str] | None = None,
    level: int | None = None,
    extra: State | None = None,
) -> str:
    """Write the weights of a model as an archive for inference, one tensor at a time.

    Parameters
    ----------
    path : str or path-like
        Replaced when the new file is complete.
    config : dict
        As ``SambaConfig.to_dict()`` gives it.
    tensors : iterable of (str, array)
        All tensors in registry order. A tensor that is packed as bfloat16 is its uint16 bits, one packed as int8 a pair
        of int8 codes and int32 exponents, one per row; every other one is a float32 array. It is asked for its next
        tensor when the last one has been written.
    format : {"float32", "bfloat16", "int8"}, default "float32"
        Format of the packed tensors.
    packed : collection of str or None, default None
        Names of the packed tensors. None: all matrices, as ``lowbit.pack`` does it.
    level : int or None, default None
        zstd level, 1 to 22.
    extra : dict or None, default None
        A JSON object to store.

    Returns
    -------
    str
        SHA-256 of the file, hexadecimal.

    Raises
    ------
    TypeError
        `extra` holds something that JSON would change.
    ValueError
        Names out of order, missing or unknown; another dtype or shape than the config and `format` make.
    OSError
        The file cannot be written. The old one is then as it was.
    """
    level = check_level(level)
    check_extra(extra)
    if format not in validate.FORMATS:
        raise ValueError(f"format must be one of {', '.join(validate.FORMATS)}, got {format!r}")
    registry = validate.check_config(config)
    matrices = {name for name, shape in registry if len(shape) == 2}
    packed = matrices if packed is None else set(packed)
    if packed - matrices:
        raise ValueError(f"packed must name matrices of the model, got {', '.join(sorted(packed - matrices))}")
    if format == "float32":
        packed = set()
    entries = [ArrayEntry.of(*entry) for entry in validate.weight_entries(registry, format, packed)]
    state = {"schema": validate.WEIGHTS_SCHEMA, "profile": validate.PROFILE, "config": config, "format": format}
    check_plain(state, "config")
    with replacing(path) as descriptor, Pipeline() as pipeline:
        writer = ArchiveWriter(HashingWriter(descriptor, pipeline), pipeline, "inference", state, entries, extra, level)
        names = iter(registry)
        for name, tensor in tensors:
            wanted, _ = next(names, (None, None))
            if name != wanted:
                raise ValueError(f"tensors must come in registry order, got {name!r} where {wanted!r} belongs")
            for part in tensor if isinstance(tensor, tuple) else (tensor,):
                writer.add(np.ascontiguousarray(part))
        return writer.finish()


class WeightsReader:
    """The weights of a file, one tensor at a time.

    Any layout will do; of a training checkpoint only the parameters are decoded, but the rest is checked too. At no
    time is more than one tensor held, besides some buffers.

    Parameters
    ----------
    path : str or path-like

    Attributes
    ----------
    config : dict
        For ``SambaConfig.from_dict``.
    format : {"float32", "bfloat16", "int8"}
        Format of the packed tensors; ``"float32"`` if there are none.
    numeric_mode : str or None
        Mode of a training checkpoint; an inference archive has none.
    registry : list of (str, tuple of int)
        Names and shapes in the order in which they come.
    kind : {"training", "inference"}
    layout : {"archive", "v2", "json"}
    extra : dict or None

    Raises
    ------
    CheckpointError
        The file is damaged or does not fit together. Damage behind a tensor is found when the iteration reaches it, so
        nothing may be built from the tensors before the iteration has ended.
    FileNotFoundError, OSError
        The file cannot be read.

    Examples
    --------
    >>> with WeightsReader(path) as reader:  # doctest: +SKIP
    ...     weights = dict(reader)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.ExitStack() as stack:
            descriptor = stack.enter_context(opened(path))
            pipeline = stack.enter_context(Pipeline())
            with naming(path):
                self._reader = reader = make_reader(descriptor, pipeline)
                self.registry = validate.check_reader(reader)
            self._resources = stack.pop_all()
        self.kind, self.layout, self.extra = reader.kind, reader.layout, reader.extra
        self.config = reader.state["config"]
        self.format = reader.state.get("format", "float32")
        self.numeric_mode = reader.state.get("numeric_mode")
        self._started = False

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._resources.close()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in registry order; only once.

        A float32 tensor is an array, a bfloat16 one its uint16 bits, an int8 one the pair of its int8 codes and int32
        exponents. Every array is the caller's to keep.
        """
        if self._started:
            raise ValueError("the weights of a file can be read once; open it again")
        self._started = True
        with naming(self._path):
            if self.kind == "training":
                yield from self._slices()
            else:
                yield from self._tensors()
            self._reader.finish()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        entries = iter(self._reader.entries)
        for entry in entries:
            array = read_array(self._reader, entry)
            if entry.dtype == "|i1":
                yield entry.name, (array, read_array(self._reader, next(entries)))
            else:
                yield entry.name, array

    def _slices(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors cut out of the flat parameters."""
        parts = self._reader.parts(self._reader.entries[0])
        part = np.empty(0, np.uint8)
        for name, shape in self.registry:
            tensor = np.empty(shape, "<f4")
            missing = as_bytes(tensor)
            while len(missing):
                if not len(part):
                    part = next(parts)
                count = min(len(missing), len(part))
                missing[:count] = part[:count]
                missing, part = missing[count:], part[count:]
            yield name, tensor
        # The digest is compared behind the last part.
        for _ in parts:
            pass
