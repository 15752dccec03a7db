"""safetensors files in and out.

A file holds one tensor per registry name: float32 as ``F32``, bfloat16 as ``BF16``, and int8 codes as ``I8`` with their
``I32`` exponents beside them under ``<name>.exponents``. A tied head is stored once, as ``embed.weight``. The metadata
keys ``mojolearn.config`` (the configuration as JSON) and ``mojolearn.format`` make the file complete.

Files of other software need the registry's names and the metadata ``mojolearn.config``, or a configuration handed over
by the caller. With ``tie_embeddings`` they may hold the embedding, the head (``lm_head.weight``), or both when they are
equal. bfloat16 vectors are widened.

The files are read and written here, a tensor at a time, so that neither takes more memory than its largest tensor.
"""

import hashlib
import math
import os

import numpy as np

from mojolearn import lowbit
from mojolearn._arrays import as_path, describe
from mojolearn._progress import reading_observer
from mojolearn.checkpoint import validate
from mojolearn.checkpoint._atomic import replacing
from mojolearn.checkpoint._json import canonical, parse
from mojolearn.config import SambaConfig
from mojolearn.errors import CheckpointError

__all__ = ["SafetensorsReader", "load_safetensors", "save_safetensors"]

CONFIG_KEY = "mojolearn.config"
FORMAT_KEY = "mojolearn.format"
EXTRA_KEY = "mojolearn.extra"

_EMBEDDING, _HEAD = "embed.weight", "lm_head.weight"
_DTYPES = {"F32": "<f4", "BF16": "<u2", "I8": "|i1", "I32": "<i4"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# As in the reference implementation of the format.
_LONGEST_HEADER = 100_000_000
_MOST_MARKS = 4_000_000
_METADATA = "__metadata__"


class SafetensorsReader:
    """The weights of a safetensors file, one tensor at a time.

    Parameters
    ----------
    path : str or path-like
    config : SambaConfig or None, default None
        For files whose metadata has no configuration. One that differs from the file's is refused.

    Attributes
    ----------
    config : SambaConfig
    format : {"float32", "bfloat16", "int8"}
        Format of the packed matrices, as found.
    extra : dict or None
        What an exported checkpoint carried.

    Raises
    ------
    CheckpointError
        The file is damaged, has no configuration, or its tensors do not fit it.
    FileNotFoundError, OSError
        The file cannot be read.

    Examples
    --------
    >>> with SafetensorsReader("model.safetensors") as reader:  # doctest: +SKIP
    ...     weights = dict(reader)
    """

    def __init__(self, path, config=None):
        if config is not None and not isinstance(config, SambaConfig):
            raise TypeError(f"config must be a SambaConfig, got {describe(config)}")
        self._path = as_path(path)
        self._observer = reading_observer()
        self._bytes_read = 0
        self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        try:
            metadata = self._read_header()
            self.config = self._find_config(metadata, config)
            self._match_names()
            self.format = self._find_format(metadata)
            self.extra = self._parse(metadata[EXTRA_KEY], EXTRA_KEY) if EXTRA_KEY in metadata else None
            if self.extra is not None and not isinstance(self.extra, dict):
                raise self._error(f"metadata {EXTRA_KEY} is not a JSON object")
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __iter__(self):
        """Yield (name, tensor) in registry order: float32 arrays and packed matrices of `mojolearn.lowbit`."""
        for name, shape in self.config.registry():
            yield name, self._tensor(name, len(shape))

    def _error(self, message):
        return CheckpointError(f"{self._path}: {message}")

    def _read(self, count, position, what):
        data = np.empty(count, np.uint8)
        filled = 0
        while filled < count:
            got = os.preadv(self._file, [data[filled:]], position + filled)
            if got == 0:
                raise self._error(f"the file ends within {what}")
            filled += got
        self._bytes_read += count
        self._observer(self._bytes_read)
        return data

    def _parse(self, text, what):
        try:
            return parse(text.encode("utf-8") if isinstance(text, str) else text, what, _MOST_MARKS)
        except CheckpointError as error:
            raise self._error(error) from error

    def _read_header(self):
        """Read and check the table of tensors; returns the metadata."""
        size = os.fstat(self._file).st_size
        if size < 8:
            raise self._error(f"{size} bytes are too few for a safetensors file")
        length = int(self._read(8, 0, "the length of the header").view("<u8")[0])
        if not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise self._error(f"not a safetensors file, or cut short: a header of {length} bytes in {size}")
        header = self._parse(_ascii(self._read(length, 8, "the header").tobytes()), "the header")
        if not isinstance(header, dict):
            raise self._error("the header is not a JSON object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise self._error(f"{_METADATA} is not an object of strings")
        self._entries = {name: self._entry(name, entry) for name, entry in header.items()}
        self._start = 8 + length
        end = 0
        for name, (_, _, first, last) in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if first != end:
                raise self._error(f"tensor {name} begins at {first}, where {end} is free: overlap or hole")
            end = last
        if self._start + end != size:
            raise self._error(f"the tensors end at byte {self._start + end}, the file at {size}")
        return metadata

    def _entry(self, name, entry):
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._error(f"tensor {name} has no dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise self._error(f"tensor {name} has dtype {dtype!r}; wanted one of {', '.join(_DTYPES)}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._error(f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}, not lists of sizes")
        wanted = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
        if offsets[1] - offsets[0] != wanted:
            raise self._error(f"tensor {name} takes {offsets[1] - offsets[0]} bytes; its shape and dtype want {wanted}")
        return dtype, tuple(shape), *offsets

    def _find_config(self, metadata, given):
        if CONFIG_KEY not in metadata:
            if given is None:
                raise self._error(f"no metadata {CONFIG_KEY}: made elsewhere? Pass the config of the model")
            return given
        fields = self._parse(metadata[CONFIG_KEY], CONFIG_KEY)
        try:
            validate.check_config(fields, most_layers=len(self._entries))
        except CheckpointError as error:
            raise self._error(error) from error
        config = SambaConfig.from_dict(fields)
        if given is not None and given != config:
            raise self._error(f"the file is of {config}, not of the given {given}")
        return config

    def _match_names(self):
        """Compare the tensors with the registry; settle which one is a tied head."""
        entries = self._entries
        registry = self.config.registry()
        if self.config.tie_embeddings and _HEAD in entries:
            if _EMBEDDING in entries:
                self._check_tied()
                del entries[_HEAD]
                entries.pop(f"{_HEAD}.exponents", None)
            else:
                entries[_EMBEDDING] = entries.pop(_HEAD)
                if f"{_HEAD}.exponents" in entries:
                    entries[f"{_EMBEDDING}.exponents"] = entries.pop(f"{_HEAD}.exponents")
        wanted = {}
        for name, shape in registry:
            wanted[name] = shape
            if name in entries and entries[name][0] == "I8":
                wanted[f"{name}.exponents"] = shape[:1]
        missing, unknown = sorted(wanted.keys() - entries.keys()), sorted(entries.keys() - wanted.keys())
        if missing or unknown:
            named = ((word, names) for word, names in (("missing", missing), ("unknown", unknown)) if names)
            text = "; ".join(f"{word} {_some(names)}" for word, names in named)
            raise self._error(f"the tensors are not those of the config: {text}")
        for name, shape in wanted.items():
            dtype, found, *_ = entries[name]
            if found != shape:
                raise self._error(f"tensor {name} has shape {found}; the config wants {shape}")
            exponents = name.endswith(".exponents")
            if exponents != (dtype == "I32") or (dtype == "I8" and len(shape) != 2):
                raise self._error(f"tensor {name} of shape {shape} must not have dtype {dtype}")

    def _check_tied(self):
        def content(name):
            tensor = lowbit.materialize_one(self._tensor(name, 2))
            return tensor.view(np.uint32)

        if self._entries[_EMBEDDING][1] != self._entries[_HEAD][1] or len(self._entries[_HEAD][1]) != 2:
            raise self._error(f"{_EMBEDDING} and {_HEAD} of a tied model have different shapes")
        if not np.array_equal(content(_EMBEDDING), content(_HEAD)):
            raise self._error(f"{_EMBEDDING} and {_HEAD} differ, but the config ties them")

    def _find_format(self, metadata):
        found = {entry[0] for entry in self._entries.values() if len(entry[1]) == 2}
        if {"BF16", "I8"} <= found:
            raise self._error("the file mixes bfloat16 and int8 matrices")
        name = "int8" if "I8" in found else "bfloat16" if "BF16" in found else "float32"
        if metadata.get(FORMAT_KEY, name) != name:
            raise self._error(f"metadata {FORMAT_KEY} is {metadata[FORMAT_KEY]!r}, but the matrices are {name}")
        return name

    def _array(self, name):
        dtype, shape, first, last = self._entries[name]
        data = self._read(last - first, self._start + first, f"tensor {name}").view(_DTYPES[dtype])
        return data.astype(data.dtype.newbyteorder("="), copy=False).reshape(shape)

    def _tensor(self, name, ndim):
        dtype = self._entries[name][0]
        if dtype == "I8":
            exponents = f"{name}.exponents"
            if exponents not in self._entries or self._entries[exponents][:2] != ("I32", self._entries[name][1][:1]):
                raise self._error(f"tensor {name} is I8 without I32 exponents, one per row, under {exponents}")
            return lowbit.Int8Weight(self._array(name), self._array(exponents))
        array = self._array(name)
        if dtype == "BF16":
            return lowbit.BF16Weight(array) if ndim == 2 else lowbit.widen_bf16(array)
        return array


def load_safetensors(path, config=None):
    """Configuration and weights of a safetensors file.

    Parameters
    ----------
    path : str or path-like
    config : SambaConfig or None, default None
        For files whose metadata has no configuration.

    Returns
    -------
    config : SambaConfig
    weights : dict
        Float32 arrays, and matrices of `mojolearn.lowbit`, in registry order.

    Raises
    ------
    CheckpointError
        The file is damaged, has no configuration, or its tensors do not fit it.
    """
    with SafetensorsReader(path, config) as reader:
        return reader.config, dict(reader)


def save_safetensors(path, config, tensors, format="float32", *, packed=(), extra=None):
    """Write a model as a safetensors file, one tensor at a time.

    Parameters
    ----------
    path : str or path-like
        Replaced when the new file is complete.
    config : SambaConfig
    tensors : iterable of (str, array or packed weight)
        All tensors in registry order.
    format : {"float32", "bfloat16", "int8"}, default "float32"
        Format of the packed tensors.
    packed : collection of str
        Names of the matrices that come packed.
    extra : dict or None, default None
        A JSON object to store in the metadata.

    Returns
    -------
    str
        SHA-256 of the file, hexadecimal.

    Raises
    ------
    ValueError
        Tensors in another order, or of other dtypes or shapes, than announced.
    OSError
        The file cannot be written. The old one is then as it was.
    """
    entries = validate.weight_entries(config.registry(), format, set(packed))
    metadata = {CONFIG_KEY: canonical(config.to_dict()).decode(), FORMAT_KEY: format}
    if extra is not None:
        metadata[EXTRA_KEY] = canonical(extra).decode()
    header = {_METADATA: metadata}
    places, end = {}, 0
    # Wide elements first: then every tensor begins at a multiple of its element size, which some readers need.
    for name, dtype, shape in sorted(entries, key=lambda entry: -np.dtype(entry[1]).itemsize):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
        places[name] = end, dtype, shape
        end += nbytes
    text = canonical(header)
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        _write(file, len(text).to_bytes(8, "little") + text, 0)
        wanted = iter(entries)
        for name, tensor in tensors:
            for part in _parts(tensor):
                entry = next(wanted, (None, None, None))
                if not (entry[0] or "").startswith(name) or part.shape != entry[2] or part.dtype != np.dtype(entry[1]):
                    raise ValueError(f"tensor {name}, {describe(part)}, came where {entry} was announced")
                _write(file, np.ascontiguousarray(part, entry[1]), 8 + len(text) + places[entry[0]][0])
        missing = next(wanted, None)
        if missing is not None:
            raise ValueError(f"tensor {missing[0]} was announced and did not come")
        return _digest(file)


def _parts(tensor):
    if isinstance(tensor, lowbit.Int8Weight):
        return tensor.codes, tensor.exponents
    if isinstance(tensor, lowbit.BF16Weight):
        return (tensor.bits,)
    return (tensor,)


def _write(file, data, position):
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file, view, position)
        view = view[written:]
        position += written


def _digest(file):
    digest = hashlib.sha256()
    position = 0
    while chunk := os.pread(file, 1 << 22, position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()


def _some(names):
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _are_sizes(value):
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 2**62 for one in value)


def _ascii(text):
    """JSON text of the file, which may be UTF-8, in the ASCII that the strict parser takes."""
    if text.isascii():
        return text
    try:
        return text.decode("utf-8").encode("ascii", "backslashreplace")
    except UnicodeDecodeError:
        return text
