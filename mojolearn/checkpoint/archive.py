"""The compressed archive: a header, arrays as zstd frames of byte planes, digests, and a proof of the end.

A float's last byte is its sign and most of its exponent, which takes few values in a trained model; the bytes of the
mantissa are noise. Apart, the one compresses to a third and the others cost no time; mixed, nothing compresses.
``docs/formats.md`` is the normative description.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard

from mojolearn._core.byte_planes import join_planes, split_planes
from mojolearn.checkpoint._entries import ArrayEntry, Bytes, State, as_bytes
from mojolearn.checkpoint._files import HashingReader, HashingWriter
from mojolearn.checkpoint._json import canonical, parse
from mojolearn.checkpoint._pipeline import Pipeline, Rooms
from mojolearn.errors import CheckpointError

__all__ = ["DEFAULT_LEVEL", "MAGIC", "MAX_LEVEL", "ArchiveReader", "ArchiveWriter"]

FAMILY = b"MOJOLEARN-ARCHIVE"
MAGIC = FAMILY + b"\x01\r\n"
END = b"MOJOLEARN-END\r\n\x1a"
SCHEMA = "mojolearn.archive.v1"
KINDS = ("training", "inference")

HEADER_LIMIT = 8 << 20
HEADER_MARKS = 1 << 19
EXTRA_LIMIT = 64 << 20
EXTRA_MARKS = 1 << 22

# Elements of an array that are compressed together: planes of 256 KiB, so 1 MiB of float32.
CHUNK_ELEMENTS = 1 << 18

DEFAULT_LEVEL = 1
MAX_LEVEL = zstandard.MAX_COMPRESSION_LEVEL

_SIZE = struct.Struct("<Q")
_DIGEST_BYTES = 32
_TRAILER_BYTES = len(END) + _SIZE.size + _DIGEST_BYTES

# The lengths of a chunk's frames, by the number of its planes.
_LENGTHS = {count: struct.Struct(f"<{count}I") for count in (1, 2, 4)}

# A frame has at least a magic number, a descriptor, a content size, a block header and a checksum.
_FRAME_MIN = 4 + 1 + 1 + 3 + 4


def _frame_max(nbytes: int) -> int:
    """Most bytes of a frame that holds `nbytes`, stored uncompressed if need be."""
    return nbytes + (nbytes >> 7) + 64


def _compressor(level: int) -> zstandard.ZstdCompressor:
    # Matches shorter than 7 bytes are chance in a plane of exponents and cost more than they save against plain
    # entropy coding, so they are not looked for; for the same reason the smallest table is the best.
    tuned = {"min_match": 7}
    if level == DEFAULT_LEVEL:
        tuned["hash_log"] = 6
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=CHUNK_ELEMENTS, write_checksum=True, **tuned
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


class _Encoder:
    """Compress chunks, in any thread: each has a compressor and room for the planes of its own."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._own = threading.local()

    def __call__(self, data: Bytes, copy: Bytes, itemsize: int) -> tuple[Bytes, list[bytes]]:
        """The chunk as it was when it was read, in `copy`, and its frames, one per byte plane.

        What is hashed and what is compressed is that copy, so that they agree even if the array is changed meanwhile.
        """
        own = self._own
        if not hasattr(own, "compressor"):
            own.compressor = _compressor(self._level)
            own.planes = np.empty(4 * CHUNK_ELEMENTS, np.uint8)
        np.copyto(copy, data)
        planes = own.planes[: len(copy)].reshape(itemsize, -1)
        split_planes(copy, planes)
        return copy, [own.compressor.compress(plane) for plane in planes]


def _decode(frames: list[memoryview], what: str, out: Bytes) -> None:
    """Write the elements of one chunk, from its frames."""
    size = len(out) // len(frames)
    decompressor = zstandard.ZstdDecompressor()
    planes: list[bytes] = []
    for frame in frames:
        try:
            described = zstandard.get_frame_parameters(frame)
            if described.content_size != size or not described.has_checksum or described.dict_id:
                raise CheckpointError(
                    f"{what}: a frame must hold {size} bytes and a checksum, but says it holds "
                    f"{described.content_size} with{'' if described.has_checksum else 'out'} checksum"
                )
            plane = decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CheckpointError(f"{what}: a frame is damaged ({error})") from None
        planes.append(plane)
    join_planes(planes, out)


class ArchiveWriter:
    """Write an archive, array by array.

    Parameters
    ----------
    file : HashingWriter
    pipeline : Pipeline
    kind : {"training", "inference"}
    state : dict
        Everything about the model but its arrays, JSON values.
    entries : list of ArrayEntry
        The arrays that will be added, in order.
    extra : dict or None
        The caller's own JSON object.
    level : int
        Of zstd, 1 to 22.

    Raises
    ------
    ValueError
        The header or `extra` is larger than a reader accepts.
    """

    def __init__(
        self,
        file: HashingWriter,
        pipeline: Pipeline,
        kind: str,
        state: State,
        entries: list[ArrayEntry],
        extra: State | None,
        level: int,
    ) -> None:
        self._file = file
        self._pipeline = pipeline
        self._entries = iter(entries)
        self._encode = _Encoder(level)
        self._content = pipeline.chain()
        text = None if extra is None else canonical(extra)
        if text is not None and len(text) > EXTRA_LIMIT:
            raise ValueError(f"extra is {len(text)} bytes of JSON, more than {EXTRA_LIMIT}")
        header = canonical({
            "arrays": [
                {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "nbytes": entry.nbytes}
                for entry in entries
            ],
            "chunk_elements": CHUNK_ELEMENTS,
            "extra": None if text is None else {"nbytes": len(text)},
            "kind": kind,
            "schema": SCHEMA,
            "state": state,
        })  # fmt: skip
        if len(header) > HEADER_LIMIT:
            raise ValueError(f"the header is {len(header)} bytes of JSON, more than {HEADER_LIMIT}")
        file.write(MAGIC + _SIZE.pack(len(header)) + header + hashlib.sha256(header).digest())
        if text is not None:
            self._section(np.frombuffer(text, np.uint8), 1)

    def add(self, array: np.ndarray) -> None:
        """Write the next array.

        Parameters
        ----------
        array : ndarray, C-contiguous
            Of the type and shape that its entry says.
        """
        entry = next(self._entries, None)
        if entry is None:
            raise ValueError("there are more arrays than entries")
        if array.dtype != np.dtype(entry.dtype) or array.shape != entry.shape:
            raise ValueError(
                f"{entry.name} must be {entry.dtype} of shape {entry.shape}, got {array.dtype.str} of {array.shape}"
            )
        self._section(as_bytes(array), entry.itemsize)

    def finish(self) -> str:
        """Write the end. Returns the hexadecimal SHA-256 of the whole file."""
        missing = next(self._entries, None)
        if missing is not None:
            raise ValueError(f"array {missing.name} is missing")
        file = self._file
        file.write(END + _SIZE.pack(file.position + _TRAILER_BYTES))
        file.write(file.digest())
        file.settle()
        return file.digest().hex()

    def _section(self, data: Bytes, itemsize: int) -> None:
        content = hashlib.sha256()
        step = CHUNK_ELEMENTS * itemsize
        rooms = Rooms(min(step, len(data)))

        def jobs() -> Iterator[tuple[Bytes, Bytes, int]]:
            for start in range(0, len(data), step):
                chunk = data[start : start + step]
                yield chunk, rooms.next(len(chunk)), itemsize

        for copy, frames in self._pipeline.map(self._encode, jobs()):
            self._content.call(content.update, copy)
            self._file.write(_LENGTHS[itemsize].pack(*map(len, frames)), *frames)
        self._content.wait()
        self._file.write(content.digest())


class ArchiveReader:
    """Read an archive from front to back.

    The header, every length and the end are checked before any array is read; arrays are then read in order, with
    `parts`, and `finish` checks the digest of the whole file.

    Parameters
    ----------
    file : HashingReader
        At the start of the file.
    pipeline : Pipeline

    Attributes
    ----------
    kind : {"training", "inference"}
    state : dict
        Everything about the model but its arrays, unchecked.
    entries : list of ArrayEntry
    extra : dict or None
    """

    layout = "archive"

    def __init__(self, file: HashingReader, pipeline: Pipeline) -> None:
        self._file = file
        self._pipeline = pipeline
        self._content = pipeline.chain()
        header = self._read_header()
        self.kind, self.state = header["kind"], header["state"]
        self.entries = [
            ArrayEntry.parse(found, f"array {i} of the header", with_digest=False)
            for i, found in enumerate(header["arrays"])
        ]
        self._chunk_elements = header["chunk_elements"]
        extra = header["extra"]
        self._first = 0 if extra is None else 1
        self._sections = self.entries
        if extra is not None:
            self._sections = [ArrayEntry.of("extra", "|i1", [extra["nbytes"]]), *self.entries]
        self._spans = self._walk()
        self.extra = None if extra is None else self._read_extra()

    def _read_header(self) -> dict[str, Any]:
        file = self._file
        magic = file.take(len(MAGIC), "the magic number")
        if magic != MAGIC:
            raise CheckpointError(f"archive version {magic[len(FAMILY)]} is not known, or the magic number is damaged")
        (length,) = _SIZE.unpack(file.take(_SIZE.size, "the length of the header"))
        if not 0 < length <= min(HEADER_LIMIT, file.size):
            raise CheckpointError(f"the header's length is given as {length} bytes")
        text = file.take(length, "the header")
        if file.take(_DIGEST_BYTES, "the header's digest") != hashlib.sha256(text).digest():
            raise CheckpointError("the header does not match its digest")
        header = parse(text, "the header", HEADER_MARKS)
        keys = {"arrays", "chunk_elements", "extra", "kind", "schema", "state"}
        if not isinstance(header, dict) or set(header) != keys:
            raise CheckpointError(f"the header must be an object with the keys {', '.join(sorted(keys))}")
        if header["schema"] != SCHEMA:
            raise CheckpointError(f"the header's schema is {header['schema']!r}, not {SCHEMA!r}")
        if header["kind"] not in KINDS:
            raise CheckpointError(f"the archive's kind is {header['kind']!r}, not one of {', '.join(KINDS)}")
        if not isinstance(header["state"], dict) or not isinstance(header["arrays"], list):
            raise CheckpointError("the header's state must be an object and its arrays a list")
        elements = header["chunk_elements"]
        if type(elements) is not int or not 1 <= elements <= CHUNK_ELEMENTS:
            raise CheckpointError(f"chunk_elements is {elements!r}, not between 1 and {CHUNK_ELEMENTS}")
        extra = header["extra"]
        if extra is not None:
            if not isinstance(extra, dict) or set(extra) != {"nbytes"} or type(extra["nbytes"]) is not int:
                raise CheckpointError("the header's extra must be null or an object with the key nbytes")
            if not 0 < extra["nbytes"] <= EXTRA_LIMIT:
                raise CheckpointError(f"extra is {extra['nbytes']} bytes of JSON, not between 1 and {EXTRA_LIMIT}")
        return header

    def _chunks(self, entry: ArrayEntry) -> Iterator[int]:
        """Sizes in bytes of the chunks of an array."""
        step = self._chunk_elements * entry.itemsize
        for start in range(0, entry.nbytes, step):
            yield min(step, entry.nbytes - start)

    def _walk(self) -> list[array[int]]:
        """Follow the lengths through the file to its end; returns where the chunks of each section start and end."""
        file = self._file
        position, size = file.position, file.size
        spans = []
        for entry in self._sections:
            lengths = _LENGTHS[entry.itemsize]
            step = self._chunk_elements * entry.itemsize
            chunks = -(-entry.nbytes // step)
            if chunks * (lengths.size + entry.itemsize * _FRAME_MIN) > size - position:
                raise CheckpointError(
                    f"array {entry.name} is said to be {entry.nbytes} bytes, but the file has only "
                    f"{max(size - position, 0)} compressed bytes left for it"
                )
            span = array("Q", [position])
            for nbytes in self._chunks(entry):
                found = lengths.unpack(file.peek(lengths.size, position, f"array {entry.name}"))
                self._check_lengths(found, nbytes, entry)
                position += lengths.size + sum(found)
                span.append(position)
            position += _DIGEST_BYTES
            spans.append(span)
        trailer = file.peek(_TRAILER_BYTES, position, "the end mark")
        if not trailer.startswith(END):
            raise CheckpointError("the end mark is missing")
        (stated,) = _SIZE.unpack_from(trailer, len(END))
        if not stated == position + _TRAILER_BYTES == size:
            raise CheckpointError(
                f"the content ends after {position + _TRAILER_BYTES} bytes and the end mark says {stated}, "
                f"but the file has {size}"
            )
        return spans

    def _check_lengths(self, lengths: tuple[int, ...], nbytes: int, entry: ArrayEntry) -> None:
        """Refuse frames that are too short or too long for a chunk of `nbytes`."""
        high = _frame_max(nbytes // entry.itemsize)
        for length in lengths:
            if not _FRAME_MIN <= length <= high:
                raise CheckpointError(f"array {entry.name}: a frame's length is given as {length} bytes")

    def parts(self, entry: ArrayEntry, target: Bytes | None = None) -> Iterator[Bytes]:
        """Read one array; arrays that were not asked for before it are passed over.

        Parameters
        ----------
        entry : ArrayEntry
            One of `entries`, later than those read so far.
        target : ndarray of uint8 or None
            Where the array's bytes go.

        Yields
        ------
        ndarray of uint8
            The next piece of the array's bytes. Without a `target` it lasts until the next one is asked for.

        Raises
        ------
        CheckpointError
            A damaged frame, or bytes that do not match the digest.
        """
        yield from self._section(self._first + self.entries.index(entry), target)

    def _section(self, index: int, target: Bytes | None) -> Iterator[Bytes]:
        entry, span = self._sections[index], self._spans[index]
        if self._file.position > span[0]:
            raise ValueError(f"array {entry.name} must be read before those that follow it")
        self._file.pass_over(span[0], "the arrays")
        what = f"array {entry.name}"

        content = hashlib.sha256()
        rooms = Rooms(max((end - start for start, end in pairwise(span)), default=0))
        parts = Rooms(min(self._chunk_elements * entry.itemsize, entry.nbytes))

        def jobs() -> Iterator[tuple[ArrayEntry, int, Bytes, Bytes]]:
            done = 0
            for (start, end), nbytes in zip(pairwise(span), self._chunks(entry), strict=True):
                out = parts.next(nbytes) if target is None else target[done : done + nbytes]
                yield entry, start, rooms.next(end - start), out
                done += nbytes

        for room, out in self._pipeline.map(self._read_chunk, jobs()):
            self._file.passed(room)
            self._content.call(content.update, out)
            yield out
        self._content.wait()
        if self._file.take(_DIGEST_BYTES, f"the digest of {what}") != content.digest():
            raise CheckpointError(f"{what} does not match its digest")

    def _read_chunk(self, entry: ArrayEntry, start: int, room: Bytes, out: Bytes) -> tuple[Bytes, Bytes]:
        """Read a chunk's bytes into a room and write its elements."""
        what = f"array {entry.name}"
        self._file.read_at(start, room, what)
        lengths = _LENGTHS[entry.itemsize].unpack_from(room)
        self._check_lengths(lengths, len(out), entry)
        view, frames = memoryview(room)[_LENGTHS[entry.itemsize].size :], []
        if sum(lengths) != len(view):
            raise CheckpointError(f"{what}: the file was changed while it was read")
        for length in lengths:
            frames.append(view[:length])
            view = view[length:]
        _decode(frames, what, out)
        return room, out

    def digests(self) -> dict[str, str]:
        """Stated digests of the arrays as ``{name: hexadecimal}``, without reading the arrays."""
        return {
            entry.name: self._file.peek(_DIGEST_BYTES, span[-1], f"the digest of array {entry.name}").hex()
            for entry, span in zip(self.entries, self._spans[self._first :], strict=True)
        }

    def stored(self) -> dict[str, int]:
        """Sizes of the arrays in the file as ``{name: bytes}``."""
        return {
            entry.name: span[-1] + _DIGEST_BYTES - span[0]
            for entry, span in zip(self.entries, self._spans[self._first :], strict=True)
        }

    def finish(self) -> str | None:
        """Pass over what is left and check the digest of the whole file, which is returned."""
        self._file.pass_over(self._file.size - _DIGEST_BYTES, "the arrays")
        digest = self._file.digest()
        if self._file.peek(_DIGEST_BYTES, self._file.position, "the file's digest").hex() != digest:
            raise CheckpointError("the file does not match its digest")
        self._file.take(_DIGEST_BYTES, "the file's digest")
        return self._file.digest()

    def _read_extra(self) -> State:
        data = np.empty(self._sections[0].nbytes, np.uint8)
        for _ in self._section(0, data):
            pass
        extra = parse(data.tobytes(), "extra", EXTRA_MARKS)
        if not isinstance(extra, dict):
            raise CheckpointError("extra is not a JSON object")
        return extra
