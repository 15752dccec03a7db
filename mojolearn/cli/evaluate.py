"""``mojolearn eval``: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mojolearn.cli._common import (
    LoadedModel,
    UsageError,
    add_command,
    add_numeric_options,
    emit,
    load_model,
    progress,
)
from mojolearn.cli._tokenizer import TokenizerText
from mojolearn.cli.run_data import tokenize
from mojolearn.cli.run_folder import RunFolder

EXAMPLES = """\
  mojolearn eval run                       the run's own held-out text
  mojolearn eval run other.txt
  mojolearn eval small.ckpt books/ --json
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "eval",
        run,
        "measure loss and bits per byte on text",
        EXAMPLES,
        description="Measure loss, perplexity and bits per byte of a model on text.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a run, checkpoint or exported file")
    parser.add_argument("paths", nargs="*", metavar="TEXT", help="files, folders or patterns (default: the run's)")
    parser.add_argument(
        "--split", choices=("valid", "train", "all"), help="part of the text (valid for the run's own, all of another)"
    )
    parser.add_argument("--valid-fraction", type=float, metavar="X", help="part held out (the run's, else 0.1)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows at a time (8)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a row (the run's, else 256)")
    parser.add_argument("--windows", type=int, default=0, metavar="N", help="rows at most, 0 for all (0)")
    parser.add_argument("--dtype", metavar="TYPE", help="type of tokens in .bin files")
    add_numeric_options(parser)


def run(args: argparse.Namespace) -> int:
    loaded = load_model(args.model, args.numeric_mode)
    settings = loaded.run.get("settings", {})
    paths = args.paths or settings.get("paths")
    if not paths:
        raise UsageError(f"{args.model} does not say which text to use: mojolearn eval MODEL TEXT...")
    split = args.split or ("all" if args.paths else "valid")
    fraction = args.valid_fraction if args.valid_fraction is not None else settings.get("valid_fraction", 0.1)
    result = evaluate(
        loaded,
        paths,
        split=split,
        valid_fraction=fraction,
        seq_len=args.seq_len or settings.get("seq_len", 256),
        batch_size=args.batch_size,
        windows=args.windows,
        dtype=args.dtype or settings.get("dtype"),
    )
    emit(args, result, result_text(result))
    return 0


def evaluate(
    loaded: LoadedModel,
    paths: Any,
    split: str = "all",
    valid_fraction: float = 0.1,
    seq_len: int = 256,
    batch_size: int = 8,
    windows: int = 0,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of a model over the windows of a text."""
    from mojolearn.data import TokenDataset

    with tempfile.TemporaryDirectory() as place:
        bytes_per_token = None
        if isinstance(loaded.text, TokenizerText):
            folder = RunFolder(Path(place))
            bytes_per_token = tokenize(paths, loaded.text, folder)
            paths = folder.tokens
        data = TokenDataset(
            paths,
            batch_size=1,
            seq_len=seq_len,
            split="valid" if split == "valid" else "train",
            valid_fraction=0.0 if split == "all" else valid_fraction,
            dtype=dtype,
        )
        if bytes_per_token is None and data.files[0].suffix not in (".npy", ".bin"):
            bytes_per_token = 1.0
        loss, tokens = _mean_loss(loaded.model, data, batch_size, windows)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": None if bytes_per_token is None else loss / math.log(2) / bytes_per_token,
        "tokens": tokens,
        "split": split,
    }


def result_text(result: dict[str, Any]) -> str:
    """A result of `evaluate` for people."""
    bits = "" if result["bits_per_byte"] is None else f", {result['bits_per_byte']:.4f} bits per byte"
    return f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.3f}{bits} on {result['tokens']:,} tokens"


def _mean_loss(model: Any, data: Any, batch_size: int, windows: int) -> tuple[float, int]:
    wanted = min(windows or data.n_windows, data.n_windows)
    total, length = 0.0, data.seq_len
    with progress(wanted, "evaluating", "row") as bar:
        for first in range(0, wanted, batch_size):
            numbers = range(first, min(first + batch_size, wanted))
            rows = np.stack([data.tokens(i * length, (i + 1) * length + 1) for i in numbers])
            total -= math.fsum(model.token_logprobs(rows).ravel().tolist())
            bar.update(len(rows))
    return total / (wanted * length), wanted * length
