"""The older layout: one JSON text with the arrays in hexadecimal digits. It is read, never written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from mojolearn.checkpoint._entries import TRAINING_ARRAYS, ArrayEntry, Bytes, State, is_digest
from mojolearn.checkpoint._files import HashingReader
from mojolearn.checkpoint._json import canonical, parse
from mojolearn.errors import CheckpointError

__all__ = ["JsonReader"]

SCHEMA = "mojolearn.samba-stack-json-checkpoint.v1"
FILE_LIMIT = 256 << 20
MARKS = 1 << 18

_PART = 1 << 20


class JsonReader:
    """Read a JSON checkpoint; the interface is that of `ArchiveReader`. The whole text is held in memory."""

    layout = "json"
    kind = "training"
    extra: State | None = None

    def __init__(self, file: HashingReader) -> None:
        self._file = file
        if file.size > FILE_LIMIT:
            raise CheckpointError(f"not an archive, and {file.size} bytes are too many for a JSON checkpoint")
        payload = self._read_payload()
        arrays = {name: payload.pop(name, None) for name in TRAINING_ARRAYS}
        self.state = payload
        self.entries: list[ArrayEntry] = []
        self._digits: dict[str, str] = {}
        for name, found in arrays.items():
            what = f"array {name}"
            if not isinstance(found, dict) or set(found) != {"dtype", "shape", "hex"}:
                raise CheckpointError(f"{what} must be an object with the keys dtype, hex, shape")
            digits = found["hex"]
            if not isinstance(digits, str):
                raise CheckpointError(f"{what} must have its bytes as a string of hexadecimal digits")
            described = {
                "name": name, "dtype": found["dtype"], "shape": found["shape"], "nbytes": len(digits) // 2
            }  # fmt: skip
            self.entries.append(ArrayEntry.parse(described, what, with_digest=False))
            if len(digits) != 2 * self.entries[-1].nbytes:
                raise CheckpointError(f"{what} has {len(digits)} hexadecimal digits, an odd number")
            self._digits[name] = digits

    def _read_text(self) -> bytes:
        text = self._file.take(self._file.size, "the text")
        if not text.startswith(b"{"):
            raise CheckpointError("not a checkpoint: neither an archive nor JSON")
        # The digest is over the canonical form, so what that form would hide is checked on the text itself.
        if not text.endswith((b"}", b"}\n")):
            raise CheckpointError("the text does not end with its closing bracket")
        if b"\\" in text:
            raise CheckpointError("the text holds a backslash, which this layout does not use")
        return text

    def _read_payload(self) -> State:
        # Handed over, not kept: the text takes as much memory as the values in it.
        envelope = parse(self._read_text(), "the text", MARKS, exact_numbers=True)
        if set(envelope) != {"payload", "payload_sha256", "schema"}:
            raise CheckpointError("the text must be an object with the keys payload, payload_sha256, schema")
        if envelope["schema"] != SCHEMA:
            raise CheckpointError(f"the schema is {envelope['schema']!r}, not {SCHEMA!r}")
        payload = envelope["payload"]
        if not isinstance(payload, dict):
            raise CheckpointError("the payload is not a JSON object")
        if not is_digest(envelope["payload_sha256"]):
            raise CheckpointError("payload_sha256 is not 64 hexadecimal digits")
        digest = hashlib.sha256()
        _hash_canonical(digest, payload)
        if digest.hexdigest() != envelope["payload_sha256"]:
            raise CheckpointError("the payload does not match its digest")
        return payload

    def parts(self, entry: ArrayEntry, target: Bytes | None = None) -> Iterator[Bytes]:
        """Decode one array."""
        digits = self._digits[entry.name]
        for start in range(0, entry.nbytes, _PART):
            nbytes = min(_PART, entry.nbytes - start)
            try:
                data = bytes.fromhex(digits[2 * start : 2 * (start + nbytes)])
            except ValueError:
                data = b""
            if len(data) != nbytes:  # fromhex passes over spaces
                raise CheckpointError(f"array {entry.name} holds something else than hexadecimal digits")
            piece = np.empty(nbytes, np.uint8) if target is None else target[start : start + nbytes]
            piece[:] = np.frombuffer(data, np.uint8)
            yield piece

    def digests(self) -> dict[str, str]:
        """Digests of the arrays as ``{name: hexadecimal}``; the layout states none, so they are computed."""
        found = {}
        for entry in self.entries:
            digest = hashlib.sha256()
            for part in self.parts(entry):
                digest.update(part)
            found[entry.name] = digest.hexdigest()
        return found

    def stored(self) -> dict[str, int]:
        """Sizes of the arrays in the file as ``{name: bytes}``."""
        return {name: len(digits) for name, digits in self._digits.items()}

    def finish(self) -> str | None:
        """Nothing is left to check. Returns the digest of the whole file, if it was wanted."""
        return self._file.digest()


def _hash_canonical(digest: hashlib._Hash, value: Any, depth: int = 0) -> None:
    """Add the canonical text of an object to a digest, one value at a time to keep memory low."""
    if not isinstance(value, dict) or depth > 2:
        digest.update(canonical(value))
        return
    before = b"{"
    for key in sorted(value):
        digest.update(before + canonical(key) + b":")
        _hash_canonical(digest, value[key], depth + 1)
        before = b","
    digest.update(before if not value else b"")
    digest.update(b"}")
