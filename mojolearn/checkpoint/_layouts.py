"""Which layout a file has, and the options that writers share."""

from __future__ import annotations

import os
from typing import Any

from mojolearn.checkpoint import archive, stream_v2
from mojolearn.checkpoint._entries import Reader
from mojolearn.checkpoint._files import HashingReader
from mojolearn.checkpoint._json import check_plain
from mojolearn.checkpoint._pipeline import Pipeline
from mojolearn.checkpoint.json_v1 import JsonReader
from mojolearn.errors import CheckpointError

__all__ = ["check_extra", "check_level", "make_reader"]


def make_reader(descriptor: int, pipeline: Pipeline, with_digest: bool = False) -> Reader:
    """The reader for a file's layout, which its first bytes tell; its name does not matter.

    Parameters
    ----------
    descriptor : int
        Of a regular file.
    pipeline : Pipeline
    with_digest : bool, default False
        Whether `finish` is asked for the digest of the file. An archive always needs it.

    Returns
    -------
    ArchiveReader, StreamReader or JsonReader
    """
    start = os.pread(descriptor, len(archive.FAMILY), 0)
    if not start:
        raise CheckpointError("the file is empty")
    if start == archive.FAMILY:
        return archive.ArchiveReader(HashingReader(descriptor, pipeline, True), pipeline)
    file = HashingReader(descriptor, pipeline, with_digest)
    if start == stream_v2.MAGIC:
        return stream_v2.StreamReader(file, pipeline)
    return JsonReader(file)


def check_level(level: int | None) -> int:
    """A zstd level, or the default for None."""
    if level is None:
        return archive.DEFAULT_LEVEL
    if isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"level must be an integer or None, got {level!r}")
    if not 1 <= level <= archive.MAX_LEVEL:
        raise ValueError(f"level must be from 1 to {archive.MAX_LEVEL}, got {level}")
    return level


def check_extra(extra: dict[str, Any] | None) -> None:
    """Refuse an `extra` that would not come back as it is."""
    if extra is None:
        return
    if not isinstance(extra, dict):
        raise TypeError(f"extra must be a dict or None, got {type(extra).__name__}")
    check_plain(extra, "extra")
