"""Empty names, counts beyond reason and broken settings on the command line: one line that says what is wrong."""

import pytest

import mojolearn
from mojolearn import _numerics
from mojolearn.cli import main
from mojolearn.training import Generator


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 200)
    return "text"


def complaint(capsys, *argv):
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status in (1, 2)
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


SMALL = ("--d-model", "32", "--layers", "mamba3", "--steps", "1", "--seq-len", "16", "--batch-size", "2")


@pytest.mark.parametrize("command", ["generate", "inspect", "eval", "export"])
def test_an_empty_model_name_is_not_the_current_folder(capsys, text, command):
    more = ("--out", "x") if command == "export" else ()
    assert "empty name" in complaint(capsys, command, "", *more)


def test_empty_folder_and_text_names(capsys, tmp_path, text):
    assert "empty" in complaint(capsys, "train", text, "--out", "", *SMALL)
    assert "empty" in complaint(capsys, "train", "", "--out", "run", *SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("layers", ["", " x3", "mamba3 x999999999999", "mamba3,attention x9999999", "a x10001"])
def test_layers_say_what_is_wrong(capsys, text, layers):
    assert "layers must be" in complaint(capsys, "train", text, "--out", "run", "--layers", layers)


@pytest.mark.parametrize("threads", ["0", "-1", "257", "99999999999"])
def test_threads_are_named(capsys, text, threads):
    assert "threads must be at" in complaint(capsys, "train", text, "--out", "run", "--threads", threads)


@pytest.mark.parametrize("load", [mojolearn.SambaStack.from_checkpoint, mojolearn.SambaInference.from_checkpoint])
def test_a_wrong_thread_variable_is_no_fault_of_the_file(tmp_path, monkeypatch, load):
    config = mojolearn.SambaConfig(vocab=20, d_model=32, layers=("mamba3",))
    mojolearn.SambaStack(config, generator=Generator(1)).save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.setitem(_numerics._defaults, "threads", None)
    monkeypatch.setenv("MOJOLEARN_NUM_THREADS", "abc")
    with pytest.raises(ValueError, match=r"^MOJOLEARN_NUM_THREADS must be an integer, got 'abc'") as caught:
        load(tmp_path / "a.ckpt")
    assert not isinstance(caught.value, mojolearn.CheckpointError)
