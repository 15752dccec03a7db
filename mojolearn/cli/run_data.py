"""The data of a training run: both splits, through a tokenizer or not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mojolearn.cli._common import note, progress
from mojolearn.cli._tokenizer import TokenizerText, tokenize_files
from mojolearn.cli.run_folder import RunFolder
from mojolearn.cli.settings import TrainSettings


class RunData:
    """The splits of a run.

    Attributes
    ----------
    train : TokenDataset
    valid : TokenDataset or None
        None when nothing is held out.
    vocab : int
        Number of different tokens that the data can hold.
    bytes_per_token : float or None
        Bytes of text that a token stands for on average, None for token files of unknown origin.
    """

    def __init__(self, train: Any, valid: Any, vocab: int, bytes_per_token: float | None):
        self.train, self.valid, self.vocab, self.bytes_per_token = train, valid, vocab, bytes_per_token

    @classmethod
    def open(cls, settings: TrainSettings, folder: RunFolder, tokenizer: str | None) -> RunData:
        """Open the files of the settings; with a tokenizer (its text), write their tokens into the folder first."""
        from mojolearn.data import TokenDataset

        paths: Any = settings.paths
        if tokenizer is not None:
            coder = TokenizerText(tokenizer)
            bytes_per_token = tokenize(paths, coder, folder)
            paths = folder.tokens
        options: dict[str, Any] = {
            "seed": settings.seed,
            "valid_fraction": settings.valid_fraction,
            "dtype": settings.dtype,
        }
        train = TokenDataset(paths, settings.batch_size, settings.seq_len, **options)
        valid = None
        if settings.valid_fraction > 0:
            valid = TokenDataset(paths, settings.batch_size, settings.seq_len, split="valid", **options)
        if train.skipped:
            note(f"passed over {len(train.skipped)} binary files, {train.skipped[0]} for one")

        if tokenizer is not None:
            return cls(train, valid, coder.vocab, bytes_per_token)
        if train.files[0].suffix in (".npy", ".bin"):
            return cls(train, valid, max(2, train.max_id + 1), None)
        return cls(train, valid, 256, 1.0)

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token as bits per byte of text."""
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token


def tokenize(paths: Any, tokenizer: TokenizerText, folder: RunFolder) -> float:
    """Write the tokens of text into a folder, once; returns the bytes of text that a token stands for on average."""
    import numpy as np

    from mojolearn.data import TokenDataset

    if not folder.token_facts.exists():
        # Opened as bytes once, so that empty folders and binary files are refused or passed over as without tokenizer.
        files: list[Path] = TokenDataset(paths, 1, 1, valid_fraction=0.0).files
        nbytes = sum(file.stat().st_size for file in files)
        folder.path.mkdir(parents=True, exist_ok=True)
        with progress(nbytes, "tokenizing", "B", unit_scale=True) as bar:
            tokenize_files(files, tokenizer, folder.tokens, bar.update)
        folder.token_facts.write_text(json.dumps({"bytes": nbytes}) + "\n", encoding="utf-8")
    facts = json.loads(folder.token_facts.read_text(encoding="utf-8"))
    n_tokens: int = np.load(folder.tokens, mmap_mode="r").size
    if not n_tokens:
        raise ValueError("paths: text is wanted, got files without a token")
    return float(facts["bytes"] / n_tokens)
