"""Training from the command line: files, metrics, resuming, interruption, settings, refusals."""

import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import numpy as np
import pytest
from cli_process import LIKE_TRAINED, SMALL, start

import mojolearn
from mojolearn.cli.settings import TrainSettings, parse_layers, read_config
from mojolearn.cli.trainer import Trainer


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def test_a_run_leaves_its_files(trained):
    names = sorted(path.name for path in trained.iterdir())
    assert names == ["best.ckpt", "config.toml", "metrics.jsonl", "step-00000016.ckpt", "step-00000024.ckpt"]
    rows = metrics(trained)
    train = [row for row in rows if row["kind"] == "train"]
    valid = [row for row in rows if row["kind"] == "valid"]
    assert [row["step"] for row in train] == list(range(1, 25))
    assert [row["step"] for row in valid] == [8, 16, 24]
    assert [row["tokens"] for row in train] == [128 * step for step in range(1, 25)]
    assert train[-1]["loss"] < train[0]["loss"] - 1
    for row in rows:
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), rel=1e-12)
    assert train[0]["lr"] == pytest.approx(3e-3)
    assert train[-1]["lr"] == pytest.approx(3e-4, rel=1e-3)


def test_the_best_checkpoint_has_the_loss_of_its_evaluation(trained, text):
    stack = mojolearn.SambaStack.from_checkpoint(trained / "best.ckpt")
    valid = [row for row in metrics(trained) if row["kind"] == "valid"]
    best = min(valid, key=lambda row: row["loss"])
    assert stack.optimizer.t == best["step"]
    data = mojolearn.data.TokenDataset(stack.extra["settings"]["paths"], 6, 32, split="valid")
    inputs, targets = next(data)
    assert stack.loss(inputs, targets) == pytest.approx(best["loss"], rel=1e-6)


def test_a_resumed_run_equals_an_unbroken_one_in_every_byte(trained, text, tmp_path, run):
    folder = tmp_path / "run"
    status, _, err = run("train", text, "--out", folder, *SMALL, *LIKE_TRAINED, "--stop-after", 11)
    assert status == 0
    assert "stopped after step 11" in err
    # What a crash after step 11 would have left in the metrics is written again.
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 12, "loss": 0}\n{"kind": "tra')
    status, _, err = run("train", "--out", folder, "--resume", "--threads", 3)
    assert status == 0
    assert "after step 11" in err
    assert metrics(folder) == metrics(trained)
    for name in ("best.ckpt", "step-00000024.ckpt"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes()


def test_ctrl_c_saves_and_the_run_goes_on_from_there(text, tmp_path, run):
    settings = [*SMALL, "--eval-every", 100000, "--save-every", 100000, "--schedule", "constant", "--warmup", 5]
    folder = tmp_path / "run"
    process = start("train", text, "--out", folder, *settings, "--steps", 100000)
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").stat().st_size < 500:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finishing this step, then saving" in err
    assert "Traceback" not in err
    (checkpoint,) = folder.glob("step-*.ckpt")
    step = int(re.search(r"\d+", checkpoint.name)[0])
    assert metrics(folder)[-1]["step"] == step

    assert run("train", "--out", folder, "--resume", "--stop-after", step + 3)[0] == 0
    whole = tmp_path / "whole"
    status, _, _ = run("train", text, "--out", whole, *settings, "--steps", 100000, "--stop-after", step + 3)
    assert status == 0
    assert metrics(folder) == metrics(whole)
    name = f"step-{step + 3:08}.ckpt"
    one, other = (mojolearn.SambaStack.from_checkpoint(place / name) for place in (folder, whole))
    assert one.flat.tobytes() == other.flat.tobytes()


def test_ctrl_c_during_an_evaluation_saves_that_step(text, tmp_path, run, monkeypatch):
    evaluate = Trainer._evaluate

    def interrupted(trainer, metrics):
        evaluate(trainer, metrics)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "_evaluate", interrupted)
    folder = tmp_path / "run"
    status, _, err = run("train", text, "--out", folder, *SMALL, "--steps", 50, "--eval-every", 4, "--save-every", 50)
    assert status == 130
    assert "stopped after step 4;" in err
    assert mojolearn.SambaStack.from_checkpoint(folder / "step-00000004.ckpt").optimizer.t == 4
    assert metrics(folder)[-1]["step"] == 4


def test_progress_is_for_terminals_only(text, tmp_path):
    arguments = ["train", text, *SMALL, "--steps", 30, "--eval-every", 30]
    process = start(*arguments, "--out", tmp_path / "quiet")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "\r" not in err
    assert "tok/s" not in err

    shown = terminal_output([*arguments, "--out", tmp_path / "terminal"])
    assert "training: 100%" in shown
    assert "30/30" in shown
    for part in ("loss=", "bpb=", "lr=", "tok/s=", "step/s"):
        assert part in shown


def terminal_output(arguments):
    """What a command writes when its standard error is a terminal."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    process = start(*arguments, stdout=subprocess.DEVNULL, stderr=secondary)
    os.close(secondary)
    chunks = []
    while True:
        ready, _, _ = select.select([primary], [], [], 60)
        try:
            chunk = os.read(primary, 65536) if ready else b""
        except OSError:  # the other end is closed
            chunk = b""
        if not chunk:
            break
        chunks.append(chunk)
    os.close(primary)
    assert process.wait(60) == 0
    return b"".join(chunks).decode()


def test_the_plan_comes_first_and_a_dry_run_writes_nothing(text, tmp_path, run):
    status, out, err = run("train", text, "--out", tmp_path / "none", *SMALL, "--dry-run", "--json")
    assert status == 0
    plan = json.loads(out)
    config = mojolearn.SambaConfig(vocab=256, d_model=32, layers=("mamba3", "attention"), n_heads=2, intermediate=64)
    assert plan["parameters"] == config.num_parameters
    assert plan["train_tokens"] + plan["valid_tokens"] == sum(path.stat().st_size for path in text.iterdir())
    assert f"{config.num_parameters:,} parameters" in err
    assert re.search(r"memory  about [\d.]+ MiB", err)
    assert re.search(r"time    about \d+ ", err)
    assert not (tmp_path / "none").exists()


def test_what_cannot_fit_is_refused_before_it_is_built(text, tmp_path, run):
    status, _, err = run("train", text, "--out", tmp_path / "huge", "--d-model", 1 << 17, "--layers", "mamba3 x40")
    assert status == 1
    assert re.search(r"training needs about [\d.]+ GiB and [\d.]+ \w+ are free", err)


def test_a_config_file_and_flags(text, tmp_path, run, trained):
    again = TrainSettings(**read_config(str(trained / "config.toml")))
    assert again.layers == ["mamba3", "attention"]
    assert again.dropout == 0.1
    assert again.paths == [str(text)]

    config = tmp_path / "run.toml"
    config.write_text('steps = 3\n[model]\nd_model = 32\nlayers = "mamba3"\n[data]\nbatch_size = 2\nseq_len = 16\n')
    arguments = ("train", text, "--config", config, "--seq-len", 24, "--out", tmp_path / "run")
    assert run(*arguments)[0] == 0
    stack = mojolearn.SambaStack.from_checkpoint(tmp_path / "run" / "step-00000003.ckpt")
    assert stack.config.layers == ("mamba3",)
    assert stack.extra["settings"]["batch_size"] == 2
    assert stack.extra["settings"]["seq_len"] == 24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepps = 3", "no setting stepps; did you mean steps?"),
        ('steps = "3"', "steps must be int, got '3'"),
        ("steps = true", "steps must be int"),
        ("layers = [1]", "layers must be a list of strings"),
        ("steps = ", "run.toml: "),
    ],
)
def test_a_wrong_config_file_is_a_usage_error(content, message, tmp_path, run):
    (tmp_path / "run.toml").write_text(content)
    status, _, err = run("train", "x", "--out", tmp_path / "run", "--config", tmp_path / "run.toml")
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_layers_are_written_short():
    assert parse_layers("mamba3") == ["mamba3"]
    assert parse_layers("mamba3, attention x2") == ["mamba3", "attention"] * 2
    assert parse_layers("(mamba3,attention)*3") == ["mamba3", "attention"] * 3
    with pytest.raises(ValueError, match="layers must be a list like"):
        parse_layers(" x3")


def test_a_fine_tuned_model_starts_from_the_weights(trained, text, tmp_path, run):
    options = ("--init", trained, "--steps", 1, "--lr", 0, "--min-lr", 0, "--batch-size", 2, "--seq-len", 16)
    assert run("train", text, "--out", tmp_path / "tuned", *options)[0] == 0
    tuned = mojolearn.SambaStack.from_checkpoint(tmp_path / "tuned" / "step-00000001.ckpt")
    best = mojolearn.SambaStack.from_checkpoint(trained / "best.ckpt")
    assert tuned.config == best.config
    assert tuned.flat.tobytes() == best.flat.tobytes()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--out", "{new}"], 2, "what should be trained on?"),
        (["{text}", "--out", "{run}"], 2, "holds a run already"),
        (["{text}/none.txt", "--out", "{new}"], 1, "neither a file nor a folder"),
        (["{text}", "--out", "{new}", "--steps", "0"], 2, "steps must be at least 1, got 0"),
        (["{text}", "--out", "{new}", "--lr", "nan"], 2, "lr must be finite, got nan"),
        (["{text}", "--out", "{new}", "--min-lr", "-1"], 2, "min_lr must be at least 0, got -1.0"),
        (["{text}", "--out", "{new}", "--warmup", "-1"], 2, "warmup must be at least 0, got -1"),
        (["{text}", "--out", "{new}", "--beta2", "1"], 2, "beta2 must be in [0, 1), got 1.0"),
        (["{text}", "--out", "{new}", "--schedule", "wavy"], 2, "schedule must be cosine"),
        (["{text}", "--out", "{new}", "--layers", "mamba"], 2, "mamba"),
        (["{text}", "--out", "{new}", "--d-model", "33"], 2, "d_model must be a multiple of 32"),
        (["{text}", "--out", "{new}", "--batch-size", "3", "--accumulation-steps", "2"], 2, "must divide batch_size 3"),
        (["{text}", "--out", "{new}", "--seq-len", "1000000"], 1, "fewer than a window"),
        (["--out", "{new}", "--resume"], 1, "no checkpoint to resume from"),
        (["--out", "{run}", "--resume", "--lr", "1"], 2, "--lr 1.0 with --resume: the run has 0.003"),
        (["{root}", "--out", "{run}", "--resume"], 1, "the data differ"),
        (["{text}", "--out", "{new}", "--numeric-mode", "exact"], 2, "numeric_mode must be one of"),
        (["{text}", "--out", "{new}", "--tokenizer", "{root}/none.json"], 1, "No such file"),
    ],
)
def test_refusals_are_one_line(arguments, status, message, text, trained, tmp_path, run):
    (tmp_path / "other.txt").write_text("other text, enough of it for a window. " * 40)
    places = {"new": tmp_path / "new", "text": text, "run": trained, "root": tmp_path}
    arguments = [argument.format(**places) for argument in arguments]
    before = sorted((path.name, path.stat().st_mtime_ns) for path in trained.iterdir())
    got, out, err = run("train", *arguments)
    assert got == status
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("mojolearn train: error: ")
    assert "Traceback" not in err
    assert out == ""
    assert sorted((path.name, path.stat().st_mtime_ns) for path in trained.iterdir()) == before


def test_token_files_train_without_bits_per_byte(tmp_path, run):
    np.save(tmp_path / "tokens.npy", (np.arange(3000) % 50).astype(np.uint16))
    options = [*SMALL, "--steps", 3, "--eval-every", 3]
    status, out, _ = run("train", tmp_path / "tokens.npy", "--out", tmp_path / "run", *options, "--json")
    assert status == 0
    assert json.loads(out)["valid_bits_per_byte"] is None
    stack = mojolearn.SambaStack.from_checkpoint(tmp_path / "run" / "best.ckpt")
    assert stack.config.vocab == 50
