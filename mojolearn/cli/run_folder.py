"""The folder that a training run writes.

::

    run/
      config.toml              the settings of the run
      metrics.jsonl            one line a step ("train") and one an evaluation ("valid")
      step-00000100.ckpt ...   the last checkpoints
      best.ckpt                the one with the lowest held-out loss
      tokens.npy, tokens.json  only with a tokenizer: the text as tokens, and its bytes
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})\.ckpt")


class RunFolder:
    """Names and upkeep of the files of a run."""

    def __init__(self, path: str | os.PathLike[str]):
        if not os.fspath(path):
            raise ValueError("the folder of a run must have a name, got an empty one")
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.best = self.path / "best.ckpt"
        self.tokens = self.path / "tokens.npy"
        self.token_facts = self.path / "tokens.json"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"step-{step:08}.ckpt"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Step and path of each checkpoint, oldest first."""
        found = []
        for path in self.path.iterdir() if self.path.is_dir() else ():
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), path))
        return sorted(found)

    def newest(self) -> Path | None:
        checkpoints = self.checkpoints()
        return checkpoints[-1][1] if checkpoints else None

    def forget_old(self, keep: int) -> None:
        """Remove all but the last `keep` checkpoints."""
        for _, path in self.checkpoints()[:-keep]:
            path.unlink(missing_ok=True)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of the metrics file; a last line that a crash cut short is left out."""
        if not self.metrics.exists():
            raise FileNotFoundError(f"{self.metrics}: no such file; is {self.path} the folder of a training run?")
        with open(self.metrics, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    raise ValueError(f"{self.metrics}: line {number} is not JSON") from None
                yield row

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after a step: a resumed run writes them again."""
        if not self.metrics.exists():
            return
        kept = [json.dumps(row) + "\n" for row in self.read_metrics() if row["step"] <= step]
        part = self.metrics.with_name(self.metrics.name + ".part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(self.metrics)
