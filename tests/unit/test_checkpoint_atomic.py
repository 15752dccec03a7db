"""The path holds the old file or the new one, whole, and nothing is left beside it."""

import errno
import fcntl
import gc
import os
import pathlib
import stat
import subprocess
import sys
import threading

import checkpoint_files as files
import numpy as np
import pytest
from checkpoint_savers import leftovers, state_number

from mojolearn import checkpoint
from mojolearn.checkpoint import _atomic

SAVERS = pathlib.Path(__file__).resolve().parents[1] / "checkpoint_savers.py"


def start_saver(*arguments):
    # The library is imported from where this process has it, installed or not.
    paths = [str(pathlib.Path(checkpoint.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(SAVERS), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def check_ended_well(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.fixture(params=[True, False], ids=["nameless", "named"])
def temporary(request, monkeypatch):
    """Both ways of making the new file."""
    if not request.param:
        monkeypatch.setattr(_atomic, "_create_unnamed", lambda folder: None)


# Kills, full disks, errors


@pytest.mark.parametrize("compression", ["zstd", None])
def test_killed_savers_leave_the_old_file_or_the_new_one(tmp_path, compression):
    check_ended_well(start_saver("kill", tmp_path, 60, *filter(None, [compression])))


@pytest.mark.long
@pytest.mark.parametrize("compression", ["zstd", None])
def test_many_killed_savers(tmp_path, compression):
    check_ended_well(start_saver("kill", tmp_path, 1000, *filter(None, [compression])))


def test_a_full_disk_leaves_the_old_file(tmp_path):
    check_ended_well(start_saver("limit", tmp_path))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("call", ["open", "fchmod", "pwritev", "fdatasync", "fsync", "link", "rename"])
@pytest.mark.parametrize("exists", [True, False])
def test_an_error_in_any_call_leaves_the_old_file(tmp_path, monkeypatch, temporary, call, error, exists):
    path = tmp_path / "file"
    if exists:
        checkpoint.save(path, files.small_state())
    before = path.read_bytes() if exists else None
    gc.collect()  # what other tests have left open would be closed at some moment
    descriptors = len(os.listdir("/proc/self/fd"))
    real, failed = getattr(os, call), []

    def fail(*arguments, **options):
        # The folder is opened and, at the end, forced to the disk as well: only the file's turn fails.
        folder = arguments and isinstance(arguments[0], int) and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
        if failed or folder or (call == "open" and "dir_fd" not in options):
            return real(*arguments, **options)
        failed.append(call)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("mojolearn.checkpoint._files._WRITE_BACK", 1000)
        patch.setattr(os, call, fail)
        try:
            checkpoint.save(path, files.small_state(), extra={"new": 1})
        except type(error) as caught:
            assert failed
            if isinstance(error, OSError):
                assert caught is error
        else:
            assert not failed, "the error was swallowed"
    if failed:
        assert (path.read_bytes() if path.exists() else None) == before
    assert not leftovers(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EOPNOTSUPP, ""), OSError(errno.EINVAL, ""), OSError(errno.ENOSYS, ""), NotImplementedError()],
)
@pytest.mark.parametrize("compression", ["zstd", None])
def test_systems_without_uncached_writing(tmp_path, monkeypatch, compression, error):
    expected = checkpoint.save(tmp_path / "expected", state_number(1), compression=compression)
    pwritev, fdatasync, calls = os.pwritev, os.fdatasync, []

    def refuse(file, views, position, flags):
        if flags:
            raise error
        return pwritev(file, views, position)

    def note(file):
        calls.append("fdatasync")
        fdatasync(file)

    monkeypatch.setattr("mojolearn.checkpoint._files._UNCACHED", 0x80)
    monkeypatch.setattr("mojolearn.checkpoint._files._WRITE_BACK", 1 << 18)
    monkeypatch.setattr(os, "pwritev", refuse)
    monkeypatch.setattr(os, "fdatasync", note)
    assert checkpoint.save(tmp_path / "file", state_number(1), compression=compression) == expected
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()
    assert calls


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EOPNOTSUPP, ""), OSError(errno.EINVAL, ""), OSError(errno.ENOSYS, ""), NotImplementedError()],
)
@pytest.mark.parametrize("compression", ["zstd", None])
def test_large_files_are_read_past_the_cache_where_the_system_can(tmp_path, monkeypatch, compression, error):
    checkpoint.save(tmp_path / "file", state_number(1), compression=compression)
    preadv, seen = os.preadv, []

    def refuse(file, views, position, flags):
        seen.append(flags)
        if flags:
            raise error
        return preadv(file, views, position)

    monkeypatch.setattr("mojolearn.checkpoint._files._UNCACHED", 0x80)
    monkeypatch.setattr(os, "preadv", refuse)
    expected = checkpoint.load(tmp_path / "file")[0]["parameters"].tobytes()
    assert set(seen) == {0}
    seen.clear()
    monkeypatch.setattr("mojolearn.checkpoint._files._LARGE", 1)
    assert checkpoint.load(tmp_path / "file")[0]["parameters"].tobytes() == expected
    assert seen.count(0x80) in (1, 2) and seen.count(0) > 2  # two threads may find out at once


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    expected = checkpoint.save(tmp_path / "expected", state_number(1))
    pwritev = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda file, views, position, flags: pwritev(file, [views[0][:1000]], position, flags)
    )
    assert checkpoint.save(tmp_path / "file", state_number(1)) == expected
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()


def test_an_error_of_the_tensors_leaves_the_old_file(tmp_path, temporary):
    def tensors():
        yield from files.small_weights("float32")[:5]
        raise RuntimeError("no more")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="no more"):
        checkpoint.save_weights(path, files.CONFIG, tensors())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, temporary):
    calls = []
    for name in ("fsync", "link", "rename"):
        real = getattr(os, name)

        def note(*arguments, _name=name, _real=real, **options):
            folder = isinstance(arguments[0], int) and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            calls.append("fsync folder" if folder else _name)
            return _real(*arguments, **options)

        monkeypatch.setattr(os, name, note)
    checkpoint.save(tmp_path / "file", files.small_state())
    checkpoint.save(tmp_path / "file", files.small_state())
    assert calls[0] == "fsync"
    assert calls[-1] == "fsync folder"
    assert calls[-2] == "rename"
    assert calls.count("fsync") == calls.count("fsync folder") == 2


# Savers side by side


def test_two_processes_save_to_one_path(tmp_path):
    savers = [start_saver("contend", tmp_path, number) for number in (1, 2)]
    for saver in savers:
        check_ended_well(saver)
    assert os.listdir(tmp_path) == ["file"]


def test_two_threads_save_to_one_path(tmp_path, temporary):
    states = [state_number(number) for number in (1, 2)]
    failures = []

    def run(state):
        try:
            for _ in range(10):
                checkpoint.save(tmp_path / "file", state)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=[state]) for state in states]
    for thread in threads:
        thread.start()
    for _ in range(10):
        if (tmp_path / "file").exists():
            assert checkpoint.load(tmp_path / "file")[0]["t"] in (1, 2)
    for thread in threads:
        thread.join()
    assert not failures
    assert os.listdir(tmp_path) == ["file"]


def test_arrays_that_change_while_they_are_saved_make_a_whole_file(tmp_path):
    state = state_number(1)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            state["parameters"] += np.float32(1)
            state["exp_avg"][::2] *= np.float32(0.5)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(5):
            checkpoint.save(tmp_path / "file", state)
            checkpoint.inspect(tmp_path / "file", verify=True)
    finally:
        stop.set()
        thread.join()


def test_abandoned_files_are_removed_and_others_are_not(tmp_path, temporary):
    abandoned, held = tmp_path / ".mojolearn-0123456789abcdef.tmp", tmp_path / ".mojolearn-fedcba9876543210.tmp"
    for path in (abandoned, held, tmp_path / ".mojolearn-notes", tmp_path / "other.tmp"):
        path.write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    (tmp_path / ".mojolearn-link.tmp").symlink_to(outside)
    (tmp_path / ".mojolearn-folder.tmp").mkdir()
    with open(held, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        checkpoint.save(tmp_path / "file", files.small_state())
        names = set(os.listdir(tmp_path))
    assert abandoned.name not in names
    assert {held.name, ".mojolearn-notes", "other.tmp", "outside", ".mojolearn-link.tmp"} <= names


# Links, modes, odd paths


def test_saving_over_the_file_that_was_loaded(tmp_path, temporary):
    path = tmp_path / "file"
    for compression in ("zstd", None):
        checkpoint.save(path, files.small_state(), compression=compression)
        before = path.read_bytes()
        state, extra, _ = checkpoint.load(path)
        checkpoint.save(path, state, compression=compression, extra=extra)
        assert path.read_bytes() == before


def test_saving_over_a_file_that_is_being_read(tmp_path, temporary):
    path = tmp_path / "file"
    checkpoint.save(path, state_number(1))
    with checkpoint.WeightsReader(path) as reader:
        tensors = iter(reader)
        first = [next(tensors)]
        checkpoint.save(path, state_number(2))
        found = np.concatenate([tensor.ravel() for _, tensor in [*first, *tensors]])
    assert found.tobytes() == state_number(1)["parameters"].tobytes()


def test_a_symbolic_link_is_followed(tmp_path, temporary):
    (tmp_path / "there").mkdir()
    target, link, chain = tmp_path / "there" / "file", tmp_path / "link", tmp_path / "chain"
    link.symlink_to("there/file")
    chain.symlink_to(link)
    for path in (link, chain):  # the first one leads nowhere yet
        checkpoint.save(path, files.small_state())
        assert path.is_symlink()
        assert not target.is_symlink()
        checkpoint.load(path)
    assert os.listdir(tmp_path / "there") == ["file"]
    assert sorted(os.listdir(tmp_path)) == ["chain", "link", "there"]


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        checkpoint.save(tmp_path / "a", files.small_state())


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000, 0o002])
def test_a_new_file_gets_what_the_umask_leaves(tmp_path, temporary, umask):
    before = os.umask(umask)
    try:
        checkpoint.save(tmp_path / "file", files.small_state())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o777])
def test_an_existing_file_keeps_its_mode(tmp_path, temporary, mode):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(mode)
    checkpoint.save(tmp_path / "file", files.small_state())
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_hard_link_keeps_the_old_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    os.link(tmp_path / "file", tmp_path / "other")
    checkpoint.save(tmp_path / "file", files.small_state())
    assert (tmp_path / "other").read_bytes() == b"old"


def test_paths_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long_name = "n" * 255
    for path in ("plain", tmp_path / "pathlib", b"bytes", "with space\n", "ünï", long_name, "./sub/../dots"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        checkpoint.save(path, files.small_state())
        checkpoint.load(path)
    with pytest.raises(OSError, match="too long"):
        checkpoint.save("n" * 256, files.small_state())
    assert not leftovers(tmp_path)


def test_paths_that_cannot_be_files_are_the_systems_errors(tmp_path):
    state = files.small_state()
    with pytest.raises(FileNotFoundError):
        checkpoint.save(tmp_path / "none" / "file", state)
    with pytest.raises(IsADirectoryError):
        checkpoint.save(tmp_path, state)
    with pytest.raises(IsADirectoryError):
        checkpoint.save(f"{tmp_path}/new/", state)
    with pytest.raises(IsADirectoryError):
        checkpoint.save("", state)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        checkpoint.save(tmp_path / "file" / "file", state)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        checkpoint.save(tmp_path / "pipe", state)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(checkpoint.CheckpointError, match="not a regular file"):
        checkpoint.load(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        checkpoint.save("/dev/null", state)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
