"""The loop of a training run: steps, evaluations, checkpoints, metrics, and a clean end."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mojolearn.cli._common import bytes_text, note, progress, time_text
from mojolearn.cli.ranks import speaks
from mojolearn.cli.resources import training_memory
from mojolearn.cli.run_data import RunData
from mojolearn.cli.run_folder import RunFolder
from mojolearn.cli.settings import TrainSettings
from mojolearn.distributed import Comm, agree, divide_rows, require_agreement

EXTRA_SCHEMA = "mojolearn.run.v1"
SPEED_WINDOW = 30.0  # seconds over which the shown speed is averaged


class Trainer:
    """A run between its settings and its folder.

    Everything that the next step depends on is in the checkpoint: the stack's own state, and in its `extra` the
    position in the data, the settings and the tokenizer. A run that was broken off and resumed therefore writes the
    same parameters, moments and losses as one that was not.
    """

    def __init__(self, folder: RunFolder, settings: TrainSettings, stack: Any, data: RunData, tokenizer: str | None):
        self.folder, self.settings, self.stack, self.data, self.tokenizer = folder, settings, stack, data, tokenizer
        self.best_loss: float | None = None
        self.last_valid: dict[str, Any] | None = None
        self.last_train: dict[str, Any] | None = None
        self.tokens_per_step = settings.batch_size * settings.seq_len
        self.caught_signal: int | None = None  # by this process, at any time
        self.stop_signal: int | None = None  # what ends the run, after the same step on all ranks
        self.comm: Comm | None = stack.comm
        if self.comm is not None:
            # What cannot be divided is refused at once, and not after the first batch.
            divide_rows(settings.batch_size, settings.seq_len, self.comm.size, stack.n_shards)

    @property
    def step(self) -> int:
        return int(self.stack.optimizer.t)

    # -- before --------------------------------------------------------------------------------------------------------

    def plan(self, processes: list[str]) -> dict[str, Any]:
        """Size, memory need and time estimate; gradients are computed for the latter, and thrown away.

        Parameters
        ----------
        processes : list of str
            Where the ranks are.
        """
        config, settings = self.stack.config, self.settings
        ranks = 1 if self.comm is None else self.comm.size
        seconds = self._gradient_seconds() * settings.accumulation_steps / ranks
        left = max(0, settings.steps - self.step)
        return {
            "parameters": config.num_parameters,
            "config": config.to_dict(),
            "numeric_mode": self.stack.numeric_mode,
            "train_tokens": self.data.train.n_tokens,
            "valid_tokens": self.data.valid.n_tokens if self.data.valid else 0,
            "files": len(self.data.train.files),
            "memory_bytes": training_memory(
                config,
                settings.batch_size,
                settings.seq_len,
                settings.accumulation_steps,
                ranks,
                self.stack.n_shards,
            ),
            "ranks": ranks,
            "processes": processes,
            "checkpoint_bytes": 3 * 4 * config.num_parameters,
            "steps_left": left,
            "step_seconds": seconds,
            "seconds": seconds * left,
            "epochs": settings.steps * self.tokens_per_step / self.data.train.n_tokens,
        }

    def _gradient_seconds(self) -> float:
        """Time for the gradient of a micro-batch; the first one also warms up, so a quick one is taken again."""
        rows = max(self.settings.batch_size // self.settings.accumulation_steps, self.stack.n_shards)
        inputs, targets = self.data.train.peek()
        seconds = math.inf
        for _ in range(3):
            started = time.perf_counter()
            self.stack.loss_and_grads(inputs[:rows], targets[:rows])
            seconds = min(seconds, time.perf_counter() - started)
            if seconds > 2:
                break
        return seconds

    def plan_text(self, plan: dict[str, Any]) -> str:
        """The plan for people."""
        import mojolearn

        config, settings = self.stack.config, self.settings
        processes = places = ""
        if plan["ranks"] > 1:
            processes = f"{plan['ranks']} ranks of "
            places = "ranks   " + ", ".join(f"{rank} {place}" for rank, place in enumerate(plan["processes"])) + "\n"
        kinds = ", ".join(f"{config.layers.count(kind)} {kind}" for kind in dict.fromkeys(config.layers))
        return (
            f"{places}"
            f"model   {plan['parameters']:,} parameters: width {config.d_model}, {kinds}, {config.vocab:,} tokens\n"
            f"data    {plan['files']:,} files, {plan['train_tokens']:,} tokens to train on, "
            f"{plan['valid_tokens']:,} held out\n"
            f"steps   {settings.steps:,} of {settings.batch_size} x {settings.seq_len} tokens "
            f"({plan['epochs']:.2g} epochs), mode {plan['numeric_mode']}, "
            f"{processes}{mojolearn.get_num_threads()} threads\n"
            f"memory  about {bytes_text(plan['memory_bytes'])}; "
            f"a checkpoint is at most {bytes_text(plan['checkpoint_bytes'])}\n"
            f"time    about {time_text(plan['seconds'])} for {plan['steps_left']:,} steps"
        )

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self, stop_after: int | None = None) -> int:
        """Train to the last step, or to Ctrl-C.

        Parameters
        ----------
        stop_after : int or None, default None
            Save and stop after this step; a run that is resumed then goes on as if nothing had been.

        Returns
        -------
        int
            0, or 128 and the number of the signal that ended the run early.
        """
        settings = self.settings
        if self.comm is not None:
            require_agreement(self.comm, {"digest of the training data": self.data.train.digest})
            self.stack.check_ranks()
        if speaks():
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.folder.config.write_text(settings.to_toml(), encoding="utf-8")
        bar = progress(settings.steps, "training", "step", initial=self.step, delay=0, leave=True)
        with (
            self._signals(),
            open(self.folder.metrics if speaks() else os.devnull, "a", encoding="utf-8") as metrics,
            bar,
        ):
            clock = _Clock()
            goal = settings.steps if stop_after is None else min(stop_after, settings.steps)
            while self.step < goal and self.stop_signal is None:
                self._one_step(metrics, clock, bar)
                if self.data.valid and (self.step % settings.eval_every == 0 or self.step == settings.steps):
                    self._evaluate(metrics)
                    clock.restart()
                self._agree_on_stop()
                last = self.step == goal or self.stop_signal is not None
                if last or self.step % settings.save_every == 0:
                    self.save()
                    clock.restart()
        if self.step < settings.steps:
            note(f"stopped after step {self.step:,}; go on with: mojolearn train --out {self.folder.path} --resume")
        return 128 + self.stop_signal if self.stop_signal is not None and self.step < goal else 0

    def _agree_on_stop(self) -> None:
        """Look for a signal; one that some rank has caught ends the run on all of them, after the same step.

        One that comes later, while a checkpoint is written, counts after the next step.
        """
        self.stop_signal = self.caught_signal
        if self.comm is not None:
            self.stop_signal = agree(
                self.comm, None, self.caught_signal, lambda signals: next(filter(None, signals), None)
            )

    def _one_step(self, metrics: Any, clock: _Clock, bar: Any) -> None:
        inputs, targets = next(self.data.train)
        out = self.stack.train_step(inputs, targets)
        row = {
            "kind": "train",
            "step": out["step"],
            "loss": out["loss"],
            "bits_per_byte": self.data.bits_per_byte(out["loss"]),
            "lr": out["lr"],
            "grad_norm": out["total_norm"],
            "tokens": out["step"] * self.tokens_per_step,
            "tokens_per_second": clock.tick(self.tokens_per_step),
        }
        self.last_train = row
        _write_line(metrics, row)
        shown = {"loss": f"{row['loss']:.3f}"}
        if row["bits_per_byte"] is not None:
            shown["bpb"] = f"{row['bits_per_byte']:.3f}"
        shown |= {"lr": f"{row['lr']:.1e}", "tok/s": f"{clock.speed:,.0f}"}
        bar.set_postfix(shown, refresh=False)
        bar.update(1)

    def _evaluate(self, metrics: Any) -> None:
        loss = self.valid_loss()
        row = {
            "kind": "valid",
            "step": self.step,
            "loss": loss,
            "bits_per_byte": self.data.bits_per_byte(loss),
            "tokens": self.step * self.tokens_per_step,
        }
        self.last_valid = row
        _write_line(metrics, row)
        bits = "" if row["bits_per_byte"] is None else f", {row['bits_per_byte']:.4f} bits per byte"
        self._say(f"step {self.step:,}: held-out loss {loss:.4f}{bits}")
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss = loss
            self.stack.save_checkpoint(self.folder.best, extra=self._extra())

    def valid_loss(self) -> float:
        """Mean loss over the first `eval_windows` windows that are held out, the same ones each time."""
        wanted: int = self.settings.eval_windows or self.data.valid.n_windows
        wanted = min(wanted, self.data.valid.n_windows)
        rank, ranks = (0, 1) if self.comm is None else (self.comm.rank, self.comm.size)
        losses: list[float] = []
        seen = 0
        with progress(wanted, "evaluating", "row") as bar:
            for number, (inputs, targets) in enumerate(self.data.valid):
                rows = min(len(inputs), wanted - seen)
                if number % ranks == rank:
                    losses += [self.stack.loss(inputs[:rows], targets[:rows])] * rows
                seen += rows
                bar.update(rows)
                if seen == wanted:
                    break
        if self.comm is None:
            return math.fsum(losses) / wanted
        # fsum is exact before it rounds, so the ranks' order does not matter.
        return float(agree(self.comm, None, losses, lambda parts: math.fsum(itertools.chain(*parts)) / wanted))

    def save(self) -> None:
        """Write the checkpoint of this step and drop those that are too old to keep."""
        self.stack.save_checkpoint(self.folder.checkpoint(self.step), extra=self._extra())
        if speaks():
            self.folder.forget_old(self.settings.keep)

    def _extra(self) -> dict[str, Any]:
        return {
            "schema": EXTRA_SCHEMA,
            "settings": self.settings.to_dict(),
            "data": self.data.train.state_dict(),
            "tokenizer": self.tokenizer,
            "bytes_per_token": self.data.bytes_per_token,
            "best_loss": self.best_loss,
            "last_valid": self.last_valid,
        }

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the step at hand; the next one acts as usual."""

        def stop(number: int, frame: Any) -> None:
            self.caught_signal = number
            self._say("finishing this step, then saving; Ctrl-C again stops at once")
            for one, handler in before.items():
                signal.signal(one, handler)

        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @staticmethod
    def _say(text: str) -> None:
        """A note that does not break the progress bar."""
        from tqdm import tqdm

        if speaks():
            tqdm.write(text, file=sys.stderr)

    # -- after ---------------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Where the run stands."""
        newest = self.folder.newest()
        valid = self.last_valid or {}
        return {
            "step": self.step,
            "train_loss": self.last_train["loss"] if self.last_train else None,
            "valid_loss": valid.get("loss"),
            "valid_bits_per_byte": valid.get("bits_per_byte"),
            "best_valid_loss": self.best_loss,
            "checkpoint": str(newest) if newest else None,
            "best_checkpoint": str(self.folder.best) if self.folder.best.exists() else None,
        }

    def result_text(self, result: dict[str, Any]) -> str:
        """The result for people."""
        lines = [f"step {result['step']:,}: {result['checkpoint']}"]
        if result["valid_loss"] is not None:
            bits = result["valid_bits_per_byte"]
            lines.append(
                f"held-out loss {result['valid_loss']:.4f}" + ("" if bits is None else f", {bits:.4f} bits per byte")
            )
            lines.append(f"best: {result['best_checkpoint']} (held-out loss {result['best_valid_loss']:.4f})")
        return "\n".join(lines)


class _Clock:
    """Tokens per second over the last half minute, time between steps left out."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.busy = self.tokens = 0.0
        self.last = time.perf_counter()

    def restart(self) -> None:
        self.last = time.perf_counter()

    def tick(self, tokens: int) -> float:
        """Speed of the step that has just ended."""
        now = time.perf_counter()
        seconds = max(now - self.last, 1e-9)
        self.last = now
        self.marks.append((seconds, tokens))
        self.busy += seconds
        self.tokens += tokens
        while self.busy > SPEED_WINDOW and len(self.marks) > 1:
            old_seconds, old_tokens = self.marks.pop(0)
            self.busy -= old_seconds
            self.tokens -= old_tokens
        return tokens / seconds

    @property
    def speed(self) -> float:
        return self.tokens / self.busy if self.busy else 0.0


def _write_line(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
