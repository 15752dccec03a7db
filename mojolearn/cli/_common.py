"""What the subcommands share: options, notes, progress, and finding a model with its tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mojolearn._progress import observed_reading
from mojolearn._typing import NumericMode
from mojolearn.cli._tokenizer import ByteText, TokenizerText
from mojolearn.cli.ranks import speaks
from mojolearn.cli.run_folder import RunFolder

SAFETENSORS = ".safetensors"


class UsageError(Exception):
    """A command line that makes no sense: exit status 2."""


@contextlib.contextmanager
def given_values() -> Iterator[None]:
    """What the library refuses here was said on the command line or in its config file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, examples: str, **options: Any
) -> argparse.ArgumentParser:
    """A subparser with the options that every command has."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=options.pop("description", help[0].upper() + help[1:] + "."),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    general = parser.add_argument_group("general")
    general.add_argument("--json", action="store_true", help="print results as JSON")
    general.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def add_numeric_options(parser: argparse.ArgumentParser, mode: bool = True) -> None:
    numeric = parser.add_argument_group("computation")
    numeric.add_argument("--threads", type=int, metavar="N", help="threads (default: the CPUs of this process)")
    if mode:
        numeric.add_argument(
            "--numeric-mode",
            choices=("identical", "deterministic", "fast"),
            help="what is promised about bits (default: that of the checkpoint, else identical)",
        )


def note(text: str) -> None:
    """A line for the reader, never for the next program."""
    if speaks():
        print(text, file=sys.stderr, flush=True)


def emit(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """The command's result on standard output: as JSON with ``--json``, else as text."""
    if speaks():
        print(json.dumps(result, allow_nan=False) if args.json else text, flush=True)


def progress(total: int, description: str, unit: str, **options: Any) -> Any:
    """A tqdm bar on standard error; it stays away when that is no terminal or the work is done in two seconds."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        file=sys.stderr,
        disable=not (speaks() and sys.stderr.isatty()),
        dynamic_ncols=True,
        **{"delay": 2, "leave": False, **options},
    )


@contextlib.contextmanager
def reading(file: Path, description: str = "loading") -> Iterator[None]:
    """A bar for the bytes of a file of weights that are read within this."""
    with (
        progress(file.stat().st_size, description, "B", unit_scale=True) as bar,
        observed_reading(lambda done: bar.update(done - bar.n)),
    ):
        yield


def bytes_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def time_text(seconds: float) -> str:
    """A duration for people."""
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"


def checkpoint_file(path: str) -> Path:
    """The file that a model is read from: the path itself, or a run's best checkpoint, or its newest."""
    if not path:
        raise FileNotFoundError("a file or folder is wanted, got an empty name")
    where = Path(path)
    if not where.is_dir():
        if not where.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        return where
    folder = RunFolder(where)
    if folder.best.exists():
        return folder.best
    newest = folder.newest()
    if newest is None:
        raise FileNotFoundError(f"{path}: a folder without checkpoints; mojolearn train --out {path} writes them")
    return newest


def file_facts(file: Path, verify: bool = False) -> dict[str, Any]:
    """What `checkpoint.inspect` tells of a checkpoint, and as much of that as a safetensors file holds."""
    from mojolearn import checkpoint

    if file.suffix != SAFETENSORS:
        with reading(file, "checking"):
            facts: dict[str, Any] = checkpoint.inspect(file, verify=verify)
        return facts
    from mojolearn.interop import SafetensorsReader

    with reading(file, "checking"), SafetensorsReader(file) as reader:
        if verify:
            for _ in reader:
                pass
        config = reader.config
        return {
            "layout": "safetensors",
            "kind": "inference",
            "file_size": file.stat().st_size,
            "config": config.to_dict(),
            "num_parameters": config.num_parameters,
            "weight_format": reader.format,
            "tensors": [{"name": name, "shape": list(shape)} for name, shape in config.registry()],
            "extra": reader.extra,
            "verified": verify,
        }


def load_inference(file: Path, numeric_mode: NumericMode | None = None) -> Any:
    """A model for inference from a file of any kind."""
    import mojolearn

    with reading(file):
        if file.suffix == SAFETENSORS:
            return mojolearn.SambaInference.from_safetensors(file, numeric_mode=numeric_mode)
        return mojolearn.SambaInference.from_checkpoint(file, numeric_mode=numeric_mode)


@dataclass
class LoadedModel:
    """A model for inference, the coder between its tokens and text, and what its run has said about itself."""

    model: Any
    text: ByteText | TokenizerText
    run: dict[str, Any]


def load_model(path: str, numeric_mode: NumericMode | None = None) -> LoadedModel:
    """The model of a run's folder, a checkpoint or an exported file."""
    file = checkpoint_file(path)
    model = load_inference(file, numeric_mode)
    extra = file_facts(file)["extra"] or {}
    tokenizer = extra.get("tokenizer")
    text = ByteText(model.config.vocab) if tokenizer is None else TokenizerText(tokenizer)
    return LoadedModel(model, text, extra)
