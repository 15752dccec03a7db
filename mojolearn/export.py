"""Write a trained model for deployment, packed or not, and say what the packing costs."""

import fnmatch
import os
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from mojolearn import checkpoint, lowbit
from mojolearn._arrays import as_choice, as_float32, as_path, describe
from mojolearn._core import linalg
from mojolearn.config import SambaConfig
from mojolearn.errors import NonFiniteError
from mojolearn.inference import SambaInference
from mojolearn.interop import SafetensorsReader, save_safetensors
from mojolearn.stack import SambaStack

__all__ = ["export"]

_SAFETENSORS = ".safetensors"
_ROWS_AT_A_TIME = 1024


class _Errors(NamedTuple):
    """Sums over the elements of a tensor: squares of the values, squares of the errors; the largest error."""

    count: int
    squares: float
    square_errors: float
    largest: float


def export(source, out, *, format="int8", keep=(), progress=None):
    """Write the weights of a model as a file for inference.

    Parameters
    ----------
    source : str, path-like, SambaStack or SambaInference
        A checkpoint of any layout, a safetensors file, or a model.
    out : str or path-like
        The file to write. A name that ends in ``.safetensors`` makes a safetensors file, any other an archive for
        `SambaInference.from_checkpoint`.
    format : {"float32", "bfloat16", "int8"}, default "int8"
        Format of the matrices. Vectors stay float32.
    keep : sequence of str, default ()
        Names, or patterns with ``*``, ``?`` and ``[...]``, of tensors that stay float32.
    progress : callable or None, default None
        Called with the number of float32 bytes done so far, after each tensor.

    Returns
    -------
    dict
        ``out``, ``format``, ``file_size``, ``sha256``, ``config``; ``tensors``, a list with ``name``, ``shape``,
        ``format``, ``nbytes``, ``rms`` (root mean square of the weights), ``rms_error``, ``max_error`` and
        ``relative_error`` (of the two, the quotient) of each; ``rms_error`` and ``relative_error`` of the whole model;
        ``weight_bytes`` and ``float32_bytes``.

    Raises
    ------
    TypeError
        `keep` is a string, or `source` is none of the above.
    ValueError
        An unknown format; a pattern that fits no tensor; a weight that is not finite, or would not be in `format`.
    CheckpointError
        The source is damaged.
    OSError
        The file cannot be written. An old one is then as it was.

    Examples
    --------
    >>> import mojolearn, tempfile
    >>> from mojolearn.export import export
    >>> cfg = mojolearn.SambaConfig(vocab=16, d_model=32, layers=("mamba3",))
    >>> stack = mojolearn.SambaStack(cfg, generator=mojolearn.training.Generator(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export(stack, folder + "/model.safetensors", format="int8", keep=["embed.weight"])
    ...     lm = mojolearn.SambaInference.from_safetensors(folder + "/model.safetensors")
    >>> lm.weight_format, report["relative_error"] < 0.02
    ('int8', True)
    """
    out = as_path(out, "out")
    as_choice(format, "format", lowbit.FORMATS)
    if isinstance(keep, (str, bytes)) or not isinstance(keep, (Sequence, Set)):
        raise TypeError(f"keep must be a sequence of names or patterns, got {describe(keep)}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function or None, got {describe(progress)}")
    keep = tuple(keep)
    with _opened(source) as model:
        registry = model.config.registry()
        packed = _choose(registry, format, keep)
        if not packed:
            format = "float32"
        tensors = []
        converted = _convert(model, registry, format, packed, tensors, progress)
        if out.lower().endswith(_SAFETENSORS):
            digest = save_safetensors(out, model.config, converted, format, packed=packed, extra=model.extra)
        else:
            config = model.config.to_dict()
            plain = ((name, _plain(tensor)) for name, tensor in converted)
            digest = checkpoint.save_weights(out, config, plain, format, packed=packed, extra=model.extra)
        return _report(out, format, model.config, digest, tensors)


class _ModelSource:
    """The tensors of a model in memory, in the form in which it holds them."""

    def __init__(self, model):
        self.config = model.config
        self.extra = getattr(model, "extra", None)
        self._model = model

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def __iter__(self):
        weights = self._model.parameters() if isinstance(self._model, SambaStack) else self._model._weights
        for name, _ in self.config.registry():
            yield name, _from_panels(weights[name])


class _FileSource:
    """The tensors of a checkpoint."""

    def __init__(self, path):
        self._reader = checkpoint.WeightsReader(path)
        self.config = SambaConfig.from_dict(self._reader.config)
        self.extra = self._reader.extra

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._reader.close()

    def __iter__(self):
        for name, tensor in self._reader:
            if isinstance(tensor, tuple):
                yield name, lowbit.Int8Weight(*tensor)
            elif tensor.dtype == np.uint16:
                yield name, lowbit.BF16Weight(tensor)
            else:
                yield name, tensor


def _opened(source):
    if isinstance(source, (SambaStack, SambaInference)):
        return _ModelSource(source)
    if not isinstance(source, (str, bytes, os.PathLike)):
        raise TypeError(f"source must be a path, a SambaStack or a SambaInference, got {describe(source)}")
    if as_path(source, "source").lower().endswith(_SAFETENSORS):
        return SafetensorsReader(source)
    return _FileSource(source)


def _from_panels(weight):
    """A weight of a model as an array or a `mojolearn.lowbit` object."""
    if not isinstance(weight, linalg.PackedWeight):
        return weight
    if weight.format == "bfloat16":
        return lowbit.BF16Weight(weight.raw())
    if weight.format == "int8":
        return lowbit.Int8Weight(*weight.raw())
    return weight.raw()


def _choose(registry, format, keep):
    """Names of the matrices to pack."""
    names = [name for name, _ in registry]
    kept = set()
    for pattern in keep:
        if not isinstance(pattern, str):
            raise TypeError(f"keep must hold names or patterns, got {describe(pattern)}")
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ValueError(f"keep: {pattern!r} fits none of the model's tensors, {names[0]} to {names[-1]}")
        kept.update(found)
    if format == "float32":
        return set()
    return {name for name, shape in registry if len(shape) == 2 and name not in kept}


def _convert(model, registry, format, packed, tensors, progress):
    """Yield the tensors in their new form; ``tensors`` gets a (name, tensor, _Errors) summary of each."""
    shapes = dict(registry)
    done = 0
    for name, tensor in model:
        values = as_float32(lowbit.materialize_one(tensor, name), name, shape=shapes[name])
        _require_finite(values, name, "")
        result = values
        if name in packed:
            same = lowbit.is_packed(tensor) and tensor.format == format
            result = tensor if same else lowbit.pack_one(values, format, name)
        stored = getattr(result, "format", "float32")
        tensors.append((name, values.shape, stored, result.nbytes, _compare(values, result, name)))
        yield name, result
        done += values.nbytes
        if progress is not None:
            progress(done)


def _require_finite(values, name, why):
    finite = np.isfinite(values)
    if not finite.all():
        where = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), values.shape))
        raise NonFiniteError(f"{name} must be finite, got {values[where]} at {where}{why}")


def _compare(values, result, name):
    """What packing did to a tensor, computed in float64 some rows at a time."""
    if result is values:
        squares = sum(float(np.square(part, dtype=np.float64).sum()) for part in _pieces(values))
        return _Errors(values.size, squares, 0.0, 0.0)
    squares = errors = largest = 0.0
    for first in range(0, len(values), _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        back = lowbit.materialize_one(_slice(result, rows))
        _require_finite(back, name, f" in {result.format}: keep it in float32")
        part = values[rows].astype(np.float64)
        squares += float(np.square(part).sum())
        difference = np.abs(back - part)
        errors += float(np.square(difference).sum())
        largest = max(largest, float(difference.max()))
    return _Errors(values.size, squares, errors, largest)


def _pieces(values):
    return (values[first : first + _ROWS_AT_A_TIME] for first in range(0, len(values), _ROWS_AT_A_TIME))


def _slice(weight, rows):
    if isinstance(weight, lowbit.Int8Weight):
        return lowbit.Int8Weight(weight.codes[rows], weight.exponents[rows])
    return lowbit.BF16Weight(weight.bits[rows])


def _plain(tensor):
    """A tensor as `checkpoint.save_weights` takes it."""
    if isinstance(tensor, lowbit.Int8Weight):
        return tensor.codes, tensor.exponents
    return tensor.bits if isinstance(tensor, lowbit.BF16Weight) else tensor


def _report(out, format, config, digest, tensors):
    entries = []
    for name, shape, stored, nbytes, errors in tensors:
        rms = (errors.squares / errors.count) ** 0.5
        rms_error = (errors.square_errors / errors.count) ** 0.5
        entries.append(
            {
                "name": name,
                "shape": list(shape),
                "format": stored,
                "nbytes": nbytes,
                "rms": rms,
                "rms_error": rms_error,
                "max_error": errors.largest,
                "relative_error": rms_error / rms if rms else 0.0,
            }
        )
    count = sum(errors.count for *_, errors in tensors)
    squares = sum(errors.squares for *_, errors in tensors)
    square_errors = sum(errors.square_errors for *_, errors in tensors)
    return {
        "out": out,
        "format": format,
        "file_size": os.stat(out).st_size,
        "sha256": digest,
        "config": config.to_dict(),
        "tensors": entries,
        "rms_error": (square_errors / count) ** 0.5,
        "relative_error": (square_errors / squares) ** 0.5 if squares else 0.0,
        "weight_bytes": sum(entry["nbytes"] for entry in entries),
        "float32_bytes": 4 * count,
    }
