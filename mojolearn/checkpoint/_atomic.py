"""Replace a file so that its path always holds the old bytes or the new ones, whole.

The new bytes are written beside the target, forced to disk, given the target's name and the folder forced to disk.
Where the system has files without a name (Linux), they get a name only when they are complete, so that a process that
is killed while it writes leaves nothing behind. Otherwise, and in the instant before the rename, there is a file
``.mojolearn-*.tmp`` that its writer holds locked; the next save into the folder removes those that nobody holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator

from mojolearn._arrays import as_path
from mojolearn.checkpoint._entries import Path

__all__ = ["replacing"]

_PREFIX, _SUFFIX = ".mojolearn-", ".tmp"
_NEW_MODE = 0o666  # the kernel takes the umask off

# What a file system or kernel says that cannot make a file without a name.
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Open the future content of a file; it takes the file's place when the block ends without an error.

    A symbolic link is followed: what it points to is replaced, the link stays. An existing file passes its mode on, a
    new one gets 0666 less the umask. After an error the old file is untouched and the new bytes are gone.

    Parameters
    ----------
    path : str or path-like

    Yields
    ------
    int
        Descriptor of the new file, open for writing and reading.

    Raises
    ------
    OSError
        The folder does not exist or cannot be written, the path is a folder or a device, the disk is full.
    """
    given = as_path(path)
    if not given or given.endswith(os.sep):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), given)
    directory, name = os.path.split(os.path.realpath(given))
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mode = _existing_mode(folder, name, given)
        _remove_abandoned(folder)
        file, temporary = _create_unnamed(folder), None
        if file is None:
            file, temporary = _create_named(folder)
        try:
            if mode is not None:
                os.fchmod(file, mode)
            yield file
            os.fsync(file)
            if temporary is None:
                temporary = _give_name(file, folder, name, mode)
            if temporary is not None:
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                temporary = None
        finally:
            if temporary is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
            os.close(file)
        _sync_folder(folder)
    finally:
        os.close(folder)


def _existing_mode(folder: int, name: str, given: str) -> int | None:
    """Mode bits of the file to replace, None if there is none."""
    try:
        found = os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), given)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", given)
    return stat.S_IMODE(found.st_mode)


def _create_unnamed(folder: int) -> int | None:
    """A file in the folder that has no name yet: its descriptor, or None where there is no such thing."""
    if not (hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")):
        return None
    try:
        file = os.open(".", os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, _NEW_MODE, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_UNNAMED_FILES:
            return None
        raise
    # Locked before it has a name, so that nobody can take it for abandoned.
    _lock(file)
    return file


def _create_named(folder: int) -> tuple[int, str]:
    """A new file in the folder under a temporary name: its descriptor and the name."""
    while True:
        temporary = _temporary_name()
        try:
            file = os.open(temporary, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, _NEW_MODE, dir_fd=folder)
        except FileExistsError:
            continue
        # Another saver may have removed it as abandoned between its creation and its lock.
        if _lock(file) and os.fstat(file).st_nlink:
            return file, temporary
        os.close(file)


def _give_name(file: int, folder: int, name: str, mode: int | None) -> str | None:
    """Give a nameless file its final name, or if that is taken a temporary one, which is returned."""
    if mode is None:
        with contextlib.suppress(FileExistsError):  # another saver was first: replace its file
            _link(file, folder, name)
            return None
    temporary = _temporary_name()
    _link(file, folder, temporary)
    return temporary


def _temporary_name() -> str:
    return f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"


def _link(file: int, folder: int, name: str) -> None:
    # With a directory descriptor given, os.link follows the symbolic link that /proc/self/fd/N is.
    os.link(f"/proc/self/fd/{file}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)


def _lock(file: int) -> bool:
    """Hold a file's advisory lock as long as it is open; False if somebody else holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks on this file system: then nobody removes anything either
    return True


def _remove_abandoned(folder: int) -> None:
    """Remove temporary files whose writers are gone."""
    for name in os.listdir(folder):
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        with contextlib.suppress(OSError):
            file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(file)


def _sync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems without fsync for folders
            raise
