"""The checks that users run: they pass here, notice faults, and ship what the golden files say."""

import json
import pathlib
import subprocess
import sys

import pytest

import mojolearn
from mojolearn import verify as module
from mojolearn.training import Generator

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_shipped_values_are_those_of_the_golden_files(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import make_verify_data
    finally:
        sys.path.remove(str(ROOT / "tools"))
    monkeypatch.setattr(make_verify_data, "OUT", tmp_path / "expected.json")
    monkeypatch.setattr(make_verify_data, "ROOT", tmp_path)
    make_verify_data.main()
    shipped = pathlib.Path(mojolearn.__file__).parent / "_verify_data" / "expected.json"
    assert (tmp_path / "expected.json").read_bytes() == shipped.read_bytes()
    assert shipped.stat().st_size < 1 << 20


@pytest.fixture(scope="module")
def report():
    return module.verify()


def test_all_checks_hold(report):
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert report["ok"] is True
    names = [check["name"] for check in report["checks"]]
    for mode in ("identical", "deterministic"):
        for promise in ("threads", "micro-batches", "resume", "a step is a forward", "rows", "packed weights"):
            assert f"{promise}, {mode}" in names
    assert len(report["digest"]) == 64


def test_the_command_prints_a_table_and_the_digest_that_another_process_gets(report):
    done = subprocess.run(
        [sys.executable, "-m", "mojolearn", "verify"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"digest  {report['digest']}"
    assert "FAILED" not in done.stdout


def test_a_model_of_the_user_is_checked(tmp_path, capsys):
    from mojolearn.cli import main

    config = mojolearn.SambaConfig(vocab=60, d_model=32, layers=("attention", "mamba3"), n_heads=2, intermediate=48)
    mojolearn.SambaStack(config, generator=Generator(1)).save_checkpoint(tmp_path / "own.ckpt")
    assert main(["verify", "--checkpoint", str(tmp_path / "own.ckpt"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in report["checks"]] == [
        "instruction sets",
        "threads",
        "a step is a forward",
        "rows",
    ]


def test_a_fault_is_noticed(monkeypatch):
    stack = module._new_stack("identical")
    honest = stack.forward

    def faulty(ids, state=None, **options):
        logits = honest(ids, state, **options)
        if len(ids) > 1:
            logits[-1, 0, 0] += 1e-6
        return logits

    monkeypatch.setattr(stack, "forward", faulty)
    with pytest.raises(module.Failure, match="row 4 of a batch differs"):
        module._check_rows(stack)
    with pytest.raises(module.Failure, match="in pieces of"):
        module._check_steps(stack)
