"""Between text and tokens: bytes, or a tokenizer file of Hugging Face's `tokenizers`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 1 << 22  # characters that are tokenized at a time


class ByteText:
    """Tokens that are the bytes of UTF-8 text."""

    def __init__(self, vocab: int):
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        ids = list(text.encode("utf-8", "surrogateescape"))
        if any(id >= self.vocab for id in ids):
            raise ValueError(f"text as bytes needs a model with 256 tokens, got one with {self.vocab} and no tokenizer")
        return ids

    def decoder(self) -> Callable[[int, bool], str]:
        """A function from one token (and whether it is the last) to the text that is complete with it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token, final: decoder.decode(bytes([token]) if 0 <= token < 256 else b"?", final)


class TokenizerText:
    """Tokens of a ``tokenizer.json``, given as its text."""

    def __init__(self, text: str):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError("a tokenizer needs the package tokenizers: pip install 'mojolearn[tokenizers]'") from None
        try:
            self.tokenizer: Any = Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception for everything that is wrong with the text
            raise ValueError(f"tokenizer: a tokenizer.json is wanted, got one that cannot be read: {error}") from None
        self.vocab = self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decoder(self) -> Callable[[int, bool], str]:
        """A function from one token (and whether it is the last) to the text that is complete with it."""
        # A character may be spread over tokens, and a token may look different at the beginning of a text: decode the
        # tokens since the last complete character together with those before them, and hand out what is new.
        context: list[int] = []
        pending: list[int] = []

        def decode(token: int, final: bool) -> str:
            pending.append(token)
            before = self.tokenizer.decode(context)
            text = self.tokenizer.decode(context + pending)
            if text.endswith("�") and not final and len(pending) < 8:
                return ""
            context[:] = pending
            pending.clear()
            return str(text[len(before) :])

        return decode


def tokenize_files(files: list[Path], tokenizer: TokenizerText, out: Path, advance: Callable[[int], Any]) -> None:
    """Write the tokens of text files, one after the other, as an ``.npy`` file.

    Parameters
    ----------
    files : list of Path
    tokenizer : TokenizerText
    out : Path
        Little-endian uint16 when the vocabulary allows it, else uint32.
    advance : callable
        Called with the number of bytes after each file.

    """
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    total = 0
    part = out.with_name(f"{out.name}.part")
    with open(part, "wb+") as target:
        # The header is written twice: its length is the same for any number of tokens that fits into 20 digits.
        header = {"descr": dtype.str, "fortran_order": False, "shape": (10**18,)}
        np.lib.format.write_array_header_1_0(target, header)
        start = target.tell()
        for file in files:
            for text in _pieces(file):
                ids = np.array(tokenizer.encode(text), dtype=dtype)
                target.write(ids.tobytes())
                total += ids.size
            advance(file.stat().st_size)
        target.seek(0)
        np.lib.format.write_array_header_1_0(target, {**header, "shape": (total,)})
        if target.tell() != start:
            raise RuntimeError("the header of the token file has changed its length")
    part.replace(out)


def _pieces(file: Path) -> Iterator[str]:
    """The text of a file in pieces of whole lines, so that large files need no large memory."""
    with open(file, encoding="utf-8", newline="") as source:
        try:
            while lines := source.readlines(PIECE):
                yield "".join(lines)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: UTF-8 text is wanted, got {error.reason}") from None
