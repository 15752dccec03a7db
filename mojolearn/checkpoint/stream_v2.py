"""The plain streamed archive, version 2: what the public GPU package of the same name writes, byte for byte."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

from mojolearn.checkpoint._entries import TRAINING_ARRAYS, ArrayEntry, Bytes, State, as_bytes
from mojolearn.checkpoint._files import PART, HashingReader, HashingWriter
from mojolearn.checkpoint._json import canonical, parse
from mojolearn.checkpoint._pipeline import Pipeline, Rooms
from mojolearn.errors import CheckpointError

__all__ = ["MAGIC", "StreamReader", "write_stream"]

MAGIC = b"MOJOLEARN-SAMBA\x02\n"
SCHEMA = "mojolearn.samba-stream.v2"
HEADER_LIMIT = 1 << 20
HEADER_MARKS = 1 << 18

_SIZE = struct.Struct("<Q")
_DIGEST_BYTES = 32


def write_stream(file: HashingWriter, pipeline: Pipeline, state: State) -> str:
    """Write a training state.

    Parameters
    ----------
    file : HashingWriter
    pipeline : Pipeline
    state : dict
        As ``SambaStack.state_dict()`` gives it, checked.

    Returns
    -------
    str
        Hexadecimal SHA-256 of the whole file.

    Raises
    ------
    ValueError
        The header is larger than a reader accepts.
    """
    arrays = {name: as_bytes(state[name]) for name in TRAINING_ARRAYS}
    digests = _digests(pipeline, arrays)
    header = canonical({
        "arrays": [
            {"name": name, "dtype": dtype, "shape": [len(data) // 4], "nbytes": len(data), "sha256": digests[name]}
            for (name, dtype), data in zip(TRAINING_ARRAYS.items(), arrays.values(), strict=True)
        ],
        "schema": SCHEMA,
        "state": {key: value for key, value in state.items() if key not in TRAINING_ARRAYS},
    })  # fmt: skip
    if len(header) > HEADER_LIMIT:
        raise ValueError(f"the header is {len(header)} bytes of JSON, more than {HEADER_LIMIT}")
    file.write(MAGIC + _SIZE.pack(len(header)) + header + hashlib.sha256(header).digest())
    for data in arrays.values():
        for start in range(0, len(data), PART):
            file.write(data[start : start + PART])
    file.settle()
    return file.digest().hex()


def _digests(pipeline: Pipeline, arrays: dict[str, Bytes]) -> dict[str, str]:
    """Hexadecimal SHA-256 of some arrays, all hashed at once, each in a thread."""
    digests = {name: hashlib.sha256() for name in arrays}
    chains = [pipeline.chain() for _ in arrays]
    for chain, digest, data in zip(chains, digests.values(), arrays.values(), strict=True):
        chain.call(digest.update, data)
    for chain in chains:
        chain.wait()
    return {name: digest.hexdigest() for name, digest in digests.items()}


class StreamReader:
    """Read a plain streamed archive from front to back; the interface is that of `ArchiveReader`."""

    layout = "v2"
    kind = "training"
    extra: State | None = None

    def __init__(self, file: HashingReader, pipeline: Pipeline) -> None:
        self._file = file
        self._pipeline = pipeline
        file.take(len(MAGIC), "the magic number")
        (length,) = _SIZE.unpack(file.take(_SIZE.size, "the length of the header"))
        if not 0 < length <= min(HEADER_LIMIT, file.size):
            raise CheckpointError(f"the header's length is given as {length} bytes")
        text = file.take(length, "the header")
        if file.take(_DIGEST_BYTES, "the header's digest") != hashlib.sha256(text).digest():
            raise CheckpointError("the header does not match its digest")
        header = parse(text, "the header", HEADER_MARKS)
        if not isinstance(header, dict) or set(header) != {"arrays", "schema", "state"}:
            raise CheckpointError("the header must be an object with the keys arrays, schema, state")
        if header["schema"] != SCHEMA:
            raise CheckpointError(f"the header's schema is {header['schema']!r}, not {SCHEMA!r}")
        if not isinstance(header["state"], dict) or not isinstance(header["arrays"], list):
            raise CheckpointError("the header's state must be an object and its arrays a list")
        self.state = header["state"]
        self.entries = [
            ArrayEntry.parse(found, f"array {i} of the header", with_digest=True)
            for i, found in enumerate(header["arrays"])
        ]
        expected = file.position + sum(entry.nbytes for entry in self.entries)
        if expected != file.size:
            raise CheckpointError(f"the header describes a file of {expected} bytes, but it has {file.size}")
        self._next, self._start = 0, file.position
        self._content = pipeline.chain()

    def parts(self, entry: ArrayEntry, target: Bytes | None = None) -> Iterator[Bytes]:
        """Read one array, after checking those before it that were not asked for."""
        while self._next < self.entries.index(entry):
            for _ in self.parts(self.entries[self._next]):
                pass
        self._next += 1
        what, digest, rooms = f"array {entry.name}", hashlib.sha256(), Rooms(min(PART, entry.nbytes))

        def jobs() -> Iterator[tuple[int, Bytes, str]]:
            for start in range(0, entry.nbytes, PART):
                nbytes = min(PART, entry.nbytes - start)
                part = rooms.next(nbytes) if target is None else target[start : start + nbytes]
                yield self._start + start, part, what

        for part in self._pipeline.map(self._read_part, jobs()):
            self._file.passed(part)
            self._content.call(digest.update, part)
            yield part
        self._content.wait()
        self._start += entry.nbytes
        if digest.hexdigest() != entry.sha256:
            raise CheckpointError(f"array {entry.name} does not match its digest")

    def _read_part(self, position: int, part: Bytes, what: str) -> Bytes:
        self._file.read_at(position, part, what)
        return part

    def digests(self) -> dict[str, str]:
        """Stated digests of the arrays as ``{name: hexadecimal}``."""
        return {entry.name: str(entry.sha256) for entry in self.entries}

    def stored(self) -> dict[str, int]:
        """Sizes of the arrays in the file as ``{name: bytes}``."""
        return {entry.name: entry.nbytes for entry in self.entries}

    def finish(self) -> str | None:
        """Check the arrays that were not read. Returns the digest of the whole file, if it was wanted."""
        while self._next < len(self.entries):
            for _ in self.parts(self.entries[self._next]):
                pass
        return self._file.digest()
