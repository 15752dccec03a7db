"""``mojolearn train``: text in, checkpoints and metrics out."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from mojolearn._typing import NumericMode
from mojolearn.cli import ranks
from mojolearn.cli import settings as settings_module
from mojolearn.cli._common import (
    UsageError,
    add_command,
    add_numeric_options,
    checkpoint_file,
    emit,
    given_values,
    load_inference,
    note,
    reading,
)
from mojolearn.cli.resources import check_memory
from mojolearn.cli.run_data import RunData
from mojolearn.cli.run_folder import RunFolder
from mojolearn.cli.settings import FREE_ON_RESUME, TrainSettings
from mojolearn.cli.trainer import EXTRA_SCHEMA, Trainer
from mojolearn.distributed import Comm

EXAMPLES = """\
  mojolearn train books/ --out run
  mojolearn train 'src/**/*.py' --out run --layers 'mamba3,attention x3' --d-model 384 --steps 5000
  mojolearn train --config run.toml --out run --lr 1e-3      flags win over the file
  mojolearn train --out run --resume                         after Ctrl-C, a crash or a reboot
  mojolearn train new/ --out tuned --init run --lr 3e-4      fine-tune the weights of another run
  mojolearn train corpus/ --out run --tokenizer tokenizer.json
  mpiexec -n 4 mojolearn train books/ --out run              with four processes, to the bits of one

The first Ctrl-C finishes the step, saves a checkpoint and ends with status 130; a second one stops at once.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "train",
        run,
        "train a model on text",
        EXAMPLES,
        description="Train a model on files and folders of text (bytes), or on token files (.npy, .bin).",
    )
    parser.add_argument("paths", nargs="*", metavar="TEXT", help="files, folders or patterns")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--config", metavar="FILE", help="settings as a TOML file (a run writes its own: config.toml)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save after this step and stop, to be resumed")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and what it needs, and stop")
    groups = {table: parser.add_argument_group(table) for table in settings_module.TABLES}
    for item in fields(TrainSettings):
        if item.name != "paths":
            _add_setting(groups[item.metadata["table"]], item)
    add_numeric_options(parser, mode=False)


def _add_setting(group: Any, item: Any) -> None:
    flag = "--" + item.name.replace("_", "-")
    default = f" (default {item.default})" if isinstance(item.default, (int, float, str)) else ""
    options: dict[str, Any] = {"help": item.metadata["help"] + default, "default": argparse.SUPPRESS}
    kind = settings_module.value_type(item.name)
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = _layers if item.name == "layers" else kind
        options["metavar"] = "LIST" if item.name == "layers" else {int: "N", float: "X"}.get(kind, "TEXT")
    group.add_argument(flag, **options)


def _layers(text: str) -> list[str]:
    try:
        return settings_module.parse_layers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def absolute(paths: list[str]) -> list[str]:
    """The paths of the data as they are stored. An empty one would come to mean the current folder."""
    if not all(paths):
        raise UsageError("TEXT must name files, folders or patterns, got an empty name")
    return [os.path.abspath(path) for path in paths]


def run(args: argparse.Namespace) -> int:
    folder = RunFolder(args.out)
    given = {item.name: getattr(args, item.name) for item in fields(TrainSettings) if hasattr(args, item.name)}
    if not given["paths"]:
        del given["paths"]
    if args.config:
        given = {**settings_module.read_config(args.config), **given}
    comm = ranks.connect(args.threads)

    def build() -> Trainer:
        return _resumed(folder, given, comm) if args.resume else _fresh(folder, given, args.dry_run, comm)

    trainer = ranks.in_turn(comm, build)
    processes = ranks.processes(comm)
    plan = {}
    if ranks.speaks():
        plan = trainer.plan(processes)
        note(trainer.plan_text(plan))
    if args.dry_run:
        emit(args, plan, "nothing was trained (--dry-run)")
        return 0
    status = trainer.train(args.stop_after)
    result = trainer.result()
    emit(args, result, trainer.result_text(result))
    return status


def _fresh(folder: RunFolder, given: dict[str, Any], dry_run: bool, comm: Comm | None) -> Trainer:
    import mojolearn
    from mojolearn.training import Generator

    settings = TrainSettings(**given)
    settings.check()
    if not settings.paths:
        raise UsageError("what should be trained on? mojolearn train TEXT... --out DIR")
    if folder.checkpoints():
        raise UsageError(f"{folder.path} holds a run already: --resume goes on with it, another --out begins a new one")
    settings.paths = absolute(settings.paths)
    if settings.warmup is None:
        settings.warmup = max(1, settings.steps // 20)
    if settings.min_lr is None:
        settings.min_lr = settings.lr / 10

    if not dry_run:
        folder.path.mkdir(parents=True, exist_ok=True)
    tokenizer = None
    if settings.tokenizer:
        tokenizer = Path(settings.tokenizer).read_text(encoding="utf-8")
        settings.tokenizer = os.path.abspath(settings.tokenizer)
    data = RunData.open(settings, folder, tokenizer)

    source = None
    if settings.init:
        source = load_inference(checkpoint_file(settings.init))
        config = source.config
        settings.vocab = config.vocab
    else:
        settings.vocab = settings.vocab or data.vocab
        with given_values():
            config = mojolearn.SambaConfig(
                vocab=settings.vocab,
                d_model=settings.d_model,
                layers=settings.layers,
                n_heads=settings.n_heads,
                n_kv_heads=settings.n_kv_heads,
                intermediate=settings.intermediate or 2 * settings.d_model,
                tie_embeddings=settings.tie_embeddings,
                dropout=settings.dropout,
            )
    count = 1 if comm is None else comm.size
    fast = (settings.numeric_mode or mojolearn.get_numeric_mode()) == "fast"
    shards = count if fast else settings.n_shards
    check_memory(config, settings.batch_size, settings.seq_len, settings.accumulation_steps, count, shards)
    with given_values():
        stack = mojolearn.SambaStack(
            config,
            generator=Generator(settings.seed),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            lr_schedule=_schedule(settings),
            max_norm=settings.max_norm or None,
            accumulation_steps=settings.accumulation_steps,
            numeric_mode=cast("NumericMode | None", settings.numeric_mode),
            comm=comm,
            n_shards=settings.n_shards,
        )
    if source is not None:
        stack.load_weights(source.parameters())
    settings.numeric_mode = stack.numeric_mode
    return Trainer(folder, settings, stack, data, tokenizer)


def _resumed(folder: RunFolder, given: dict[str, Any], comm: Comm | None) -> Trainer:
    import mojolearn

    newest = folder.newest()
    if newest is None:
        raise FileNotFoundError(f"{folder.path}: no checkpoint to resume from")
    with reading(newest):
        stack = mojolearn.SambaStack.from_checkpoint(newest, comm=comm)
    extra = stack.extra
    if not isinstance(extra, dict) or extra.get("schema") != EXTRA_SCHEMA:
        raise ValueError(f"{newest}: not written by mojolearn train, so there is no run to resume (see --init)")
    stored = extra["settings"]
    if "paths" in given:
        given["paths"] = absolute(given["paths"])
    for name, value in given.items():
        # The data may have moved: their digest, not their place, says whether they are the same.
        if name not in (*FREE_ON_RESUME, "paths") and value != stored[name]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} with --resume: the run has {stored[name]}, and a resumed run keeps it")
    settings = TrainSettings(**{**stored, **given})
    settings.check()
    data = RunData.open(settings, folder, extra["tokenizer"])
    data.train.load_state_dict(extra["data"])
    trainer = Trainer(folder, settings, stack, data, extra["tokenizer"])
    trainer.best_loss = extra["best_loss"]
    trainer.last_valid = extra["last_valid"]
    if ranks.speaks():
        folder.cut_metrics(stack.optimizer.t)
    note(f"resuming {newest} after step {stack.optimizer.t:,}")
    return trainer


def _schedule(settings: TrainSettings) -> Any:
    from mojolearn.training import ConstantLR, WarmupCosineLR, WarmupLinearLR

    warmup = settings.warmup or 0
    if settings.schedule == "constant":
        return ConstantLR(settings.lr, warmup)
    kind = {"cosine": WarmupCosineLR, "linear": WarmupLinearLR}[settings.schedule]
    return kind(settings.lr, warmup, max(settings.steps, warmup), settings.min_lr or 0.0)
