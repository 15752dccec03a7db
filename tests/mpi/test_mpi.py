"""Real MPI jobs, more ranks than cores: the bits of one process, checkpoints, and ranks that die or disagree."""

import functools
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import mojolearn
from mojolearn.distributed.digest import MODES, digest_of_processes, find_mpiexec, launch_environment, run_digest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 120


@functools.cache
def reason_not_to_run():
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if find_mpiexec() is None:
        return "there is no mpiexec"
    done = subprocess.run(
        [find_mpiexec(), "-n", "2", sys.executable, "-c", "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2"],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return "" if done.returncode == 0 else f"mpiexec does not run here: {done.stderr.strip()[-300:]}"


_started = []


@pytest.fixture(autouse=True)
def mpi():
    if reason := reason_not_to_run():
        pytest.skip(reason)
    yield
    while _started:
        job = _started.pop()
        job.terminate()
        job.communicate(timeout=PATIENCE)


def start(ranks, *arguments, **environment):
    """A job, its output in one stream."""
    job = subprocess.Popen(
        [find_mpiexec(), "-n", str(ranks), sys.executable, *map(str, arguments)],
        env={**launch_environment(), "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _started.append(job)
    return job


def finish(job):
    """Status and output of a job, which has to end."""
    output, _ = job.communicate(timeout=PATIENCE)
    return job.returncode, output


@functools.cache
def digests_of_one_process():
    before = mojolearn.get_num_threads()
    mojolearn.set_num_threads(1)
    try:
        return {mode: run_digest(None, mode) for mode in MODES}
    finally:
        mojolearn.set_num_threads(before)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_digest_of_ten_steps(ranks):
    assert digest_of_processes(ranks) == digests_of_one_process()


def test_verify_prints_the_digests(capsys):
    from mojolearn.cli import main

    assert main(["verify", "--ranks", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["ok"] * len(MODES)
    assert [line[-1] for line in lines] == list(digests_of_one_process().values())


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "sums.txt").write_text("".join(f"{a} plus {b} makes {a + b}.\n" for a in range(30) for b in range(20)))
    return folder


MODEL = "--d-model 32 --layers mamba3,attention --n-heads 2 --batch-size 8 --seq-len 64 --dropout 0.1"
OPTIONS = f"{MODEL} --steps 6 --eval-every 3 --eval-windows 20 --save-every 3 --accumulation-steps 2".split()


def train(ranks, *arguments):
    status, output = finish(start(ranks, "-m", "mojolearn", "train", *arguments))
    assert status == 0, output
    return output


def test_runs_of_the_command_line_resume_with_other_ranks(text, tmp_path):
    from mojolearn.cli import main

    assert main(["train", str(text), "--out", str(tmp_path / "one"), *OPTIONS]) == 0
    output = train(4, text, "--out", tmp_path / "four", *OPTIONS, "--stop-after", "4")
    assert output.count("held-out loss") == output.count("mode identical, 4 ranks of 1 threads") * 3, output
    one = tmp_path / "one"
    for ranks in (1, 2):
        folder = tmp_path / f"then{ranks}"
        folder.mkdir()
        for file in (tmp_path / "four").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        train(ranks, "--out", folder, "--resume")
        for name in ("step-00000003.ckpt", "step-00000006.ckpt"):
            assert (folder / name).read_bytes() == (one / name).read_bytes(), (ranks, name)


def endless_run(text, folder, ranks, **environment):
    options = [*MODEL.split(), "--steps", "1000000", "--save-every", "5", "--eval-every", "1000000"]
    job = start(ranks, "-m", "mojolearn", "train", text, "--out", folder, *options, **environment)
    give_up = time.monotonic() + PATIENCE
    while not list(folder.glob("step-*.ckpt")):
        assert job.poll() is None and time.monotonic() < give_up, finish(job)[1]
        time.sleep(0.1)
    job.folder = folder
    return job


def process_of(job, rank):
    """The process of one rank of a job."""
    for folder in pathlib.Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        names = (b"OMPI_COMM_WORLD_RANK=%d" % rank, b"PMI_RANK=%d" % rank)
        if any(name in environment for name in names) and os.fsencode(str(job.folder)) in arguments:
            return int(folder.name)
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.skipif(not pathlib.Path("/proc/self/environ").exists(), reason="processes are found through /proc")
@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_dies_or_falls_silent_ends_the_job(text, tmp_path, silent):
    """The launcher sees a death at once; silence is noticed by the ranks that wait."""
    folder = tmp_path / "run"
    job = endless_run(text, folder, 3, MOJOLEARN_MPI_TIMEOUT="4")
    process = process_of(job, 2)
    os.kill(process, signal.SIGSTOP if silent else signal.SIGKILL)
    started = time.monotonic()
    status, output = finish(job)
    assert status != 0
    assert time.monotonic() - started < 60
    if silent:
        assert "rank 2 has not answered" in output, output
    else:
        assert f"2 {socket.gethostname()}:{process}" in output, output
        if "prterun" in output:  # other launchers name one of the processes that have ended, and not always the first
            assert "process rank 2" in output, output
    newest = sorted(folder.glob("step-*.ckpt"))[-1]
    stack = mojolearn.SambaStack.from_checkpoint(newest)
    assert stack.optimizer.t == int(newest.stem[5:])


@pytest.mark.skipif(not pathlib.Path("/proc/self/environ").exists(), reason="processes are found through /proc")
def test_a_signal_to_one_rank_ends_all_after_the_same_step(text, tmp_path):
    folder = tmp_path / "run"
    job = endless_run(text, folder, 2)
    os.kill(process_of(job, 1), signal.SIGTERM)
    status, output = finish(job)
    assert status != 0 and "stopped after step" in output, output
    newest = sorted(folder.glob("step-*.ckpt"))[-1]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert mojolearn.SambaStack.from_checkpoint(newest).optimizer.t == last["step"]


def test_a_signal_to_one_rank_while_it_saves_ends_all_after_the_same_step(text, tmp_path):
    """Whatever a rank does when the signal comes, the ranks stop together."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from mojolearn.cli import main
        from mojolearn.cli.trainer import Trainer
        from mojolearn.distributed import launched_ranks
        save = Trainer.save
        def interrupted(trainer):
            save(trainer)
            if launched_ranks()[0] == 1 and trainer.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        Trainer.save = interrupted
        sys.exit(main(["train", *sys.argv[1:]]))
        """)
    )
    folder = tmp_path / "run"
    options = [*MODEL.split(), "--steps", "1000000", "--save-every", "5", "--eval-every", "1000000"]
    status, output = finish(start(2, script, text, "--out", folder, *options))
    assert status != 0 and "stopped after step 6;" in output, output
    assert mojolearn.SambaStack.from_checkpoint(folder / "step-00000006.ckpt").optimizer.t == 6


def test_a_division_that_does_not_work_is_said_once(text, tmp_path):
    options = [*MODEL.split(), "--batch-size", "2", "--seq-len", "50"]
    status, output = finish(start(2, "-m", "mojolearn", "train", text, "--out", tmp_path / "run", *options))
    assert status != 0
    assert output.count("2 rows of 50 tokens cannot be divided among 2 ranks") == 1, output


def test_data_that_differ_are_found_at_the_start(text, tmp_path):
    """Each rank sees another folder under the same name, as on machines that were not set up alike."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from mojolearn.cli import main
        from mojolearn.distributed import launched_ranks
        folder, out = sys.argv[1] + str(launched_ranks()[0]), sys.argv[2]
        sys.exit(main(["train", folder, "--out", out, *sys.argv[3:]]))
        """)
    )
    for rank in range(2):
        (tmp_path / f"text{rank}").mkdir()
        (tmp_path / f"text{rank}" / "a.txt").write_text(f"{rank}" * 6000)
    status, output = finish(start(2, script, tmp_path / "text", tmp_path / "run", *OPTIONS))
    assert status != 0
    assert "the same digest of the training data" in output and "on rank 1 and" in output, output


# ---- scripts -----------------------------------------------------------------------------------------------------

SCRIPT = """
import numpy as np
import mojolearn
from mojolearn.distributed import MPIComm
from mojolearn.training import Generator

comm = MPIComm()
config = mojolearn.SambaConfig(32, 32, ("mamba3",), norm_eps={eps})
stack = mojolearn.SambaStack(config, generator=Generator(1), numeric_mode="identical", comm=comm)
ids = np.random.default_rng(0).integers(0, 32, (4, 65))
stack.train_step(ids[:, :-1], ids[:, 1:])
{then}
stack.train_step(ids[:, :-1], ids[:, 1:])
print("the end of rank", comm.rank)
"""


@pytest.mark.parametrize(
    "eps, then, message",
    [
        ("1e-5 if comm.rank != 1 else 1e-6", "", "all ranks must have the same config"),
        ("1e-5", "if comm.rank == 1: raise KeyError('lost')", "rank 1 of 2 has failed: KeyError: 'lost'"),
    ],
)
def test_a_script_that_fails_on_one_rank_ends(tmp_path, eps, then, message):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(eps=eps, then=then))
    status, output = finish(start(2, script))
    assert status != 0
    assert message in output and "the end of" not in output, output


def test_without_mpi4py_the_command_line_says_what_to_install(text, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0",
    }
    command = [sys.executable, "-m", "mojolearn", "train", str(text), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "pip install 'mojolearn[mpi]'" in done.stderr
