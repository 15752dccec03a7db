"""A small text, a small trained run, and ways to call the command line."""

import pytest
from cli_process import LIKE_TRAINED, SMALL

import mojolearn
from mojolearn.cli import main


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with two files of sums, 26 KiB together."""
    folder = tmp_path_factory.mktemp("text")
    for name, first in (("a.txt", 0), ("b.txt", 40)):
        lines = [f"{a} plus {b} makes {a + b}.\n" for a in range(first, first + 40) for b in range(14)]
        (folder / name).write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory):
    """The folder of a run of 24 steps; tests do not change it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", str(text), "--out", str(folder), *map(str, SMALL + LIKE_TRAINED)]) == 0
    return folder


@pytest.fixture
def run(capsys):
    """Call the command line in this process: exit status, standard output, standard error."""

    threads = mojolearn.get_num_threads()

    def call(*arguments):
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            status = end.code
        finally:
            mojolearn.set_num_threads(threads)
        out, err = capsys.readouterr()
        return status, out, err

    return call
