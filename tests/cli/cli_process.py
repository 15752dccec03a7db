"""Processes that run the command line, and the options of a small model."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150", "TERM": "xterm"}
SMALL = ["--d-model", 32, "--layers", "mamba3,attention", "--n-heads", 2, "--batch-size", 4, "--seq-len", 32]
LIKE_TRAINED = ["--steps", 24, "--eval-every", 8, "--save-every", 8, "--keep", 2, "--eval-windows", 6]
LIKE_TRAINED += ["--dropout", 0.1, "--accumulation-steps", 2]


def command(*arguments):
    """The argument list of a fresh process that runs the command line."""
    return [sys.executable, "-W", "error", "-m", "mojolearn", *map(str, arguments)]


def start(*arguments, **options):
    """The same, started."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command(*arguments), env=ENVIRONMENT, **options)
