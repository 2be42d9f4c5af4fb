"""The gateway's own folders: each locked by one gateway at a time; the state directory private and emptied of what a start left behind.

The locks are the kernel's (``flock``): one goes with the process that holds it, whatever ends it. A kill -9 leaves a file that locks
nobody. The files are never passed on to child processes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

SOCKETS: Final = ("gateway.sock", "admin.sock")
_MAX_OWNER_BYTES: Final = 512
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class StateDirError(Exception):
    """A folder of the gateway can't be used; the message names it, why, and what to do."""


class FolderLock:
    """The lock of one folder, a file in it. ``setting``: the setting that names the folder."""

    def __init__(self, setting: str, folder: Path, name: str, *, of_host: bool = False) -> None:
        """``of_host``: note the host as well, for folders that several hosts may have mounted."""
        self._setting = setting
        self._folder = folder
        self._path = folder / name
        self._of_host = of_host
        self._descriptor = -1

    @property
    def held(self) -> bool:
        """Whether this holds the lock."""
        return self._descriptor >= 0

    def acquire(self) -> None:
        """Make the folder where it is not there, and take the lock; raises ``StateDirError``."""
        self._make()
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = _owner(descriptor)
                os.close(descriptor)
                raise self._not_taken(error, owner) from None
            # Its last holder unlinks the file: a lock on a file that is not there any more locks nobody out.
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, (f"{os.getpid()}\n" + (f"{socket.gethostname()}\n" if self._of_host else "")).encode())
        except OSError as error:
            self.release()
            raise self._error(f"can't write its lock: {error.strerror}") from error

    def release(self) -> None:
        """Give the lock back and remove its file. Idempotent."""
        if self._descriptor < 0:
            return
        # Unlinked while still locked: whoever opened it meanwhile sees in acquire() that its file is gone. A file that can't be
        # removed (the file system was made read-only) locks nobody once it is closed.
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _make(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise self._error("is not a directory; move it away, or choose another") from None
        except OSError as error:
            raise self._error(f"can't create it: {error.strerror}; {_remedy(error)}") from error

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._error(f"can't open its lock {self._path.name}: {error.strerror}; {_remedy(error)}") from error

    def _not_taken(self, error: OSError, owner: str) -> StateDirError:
        if isinstance(error, BlockingIOError):
            return self._error(
                f"another gateway ({owner}) runs there; stop it, or choose another folder with --{self._setting.replace('_', '-')}"
            )
        if error.errno in _NO_LOCKS:
            return self._error("its file system has no locks; choose a folder on a local disk")
        return self._error(f"can't be locked: {error.strerror}; {_remedy(error)}")

    def _error(self, problem: str) -> StateDirError:
        return StateDirError(f"{self._setting} {self._folder}: {problem}")


class StateDir:
    """The state directory: its lock, and the sockets in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock("state_dir", path, "lock")

    def acquire(self) -> None:
        """Make the directory, check that it is ours alone, take the lock, remove stale sockets; raises ``StateDirError``."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateDirError(f"state_dir {self.path}: can't create it: {error.strerror}; {_remedy(error)}") from error
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise StateDirError(f"state_dir {self.path}: must be a directory of your own")
        if found.st_mode & 0o077:
            raise StateDirError(f"state_dir {self.path}: is open to others; run: chmod 700 {self.path}")
        self._lock.acquire()
        try:
            for name in SOCKETS:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            self.release()
            raise StateDirError(f"state_dir {self.path}: can't remove a stale socket: {error.strerror}") from error

    def release(self) -> None:
        """Remove sockets and lock. Idempotent."""
        if not self._lock.held:
            return
        for name in SOCKETS:
            path = self.path / name
            if not path.is_dir():
                path.unlink(missing_ok=True)
        self._lock.release()


def data_dir_lock(path: Path) -> FolderLock:
    """The lock of a data directory. Its name differs from the state directory's: both may be one folder."""
    return FolderLock("data_dir", path, "data.lock", of_host=True)


def make_private(socket_path: Path) -> None:
    """Close a socket to others. Its directory is closed already; this holds if somebody opens that."""
    socket_path.chmod(0o600)


def _owner(descriptor: int) -> str:
    pid, _, host = os.read(descriptor, _MAX_OWNER_BYTES).decode("ascii", errors="replace").strip().partition("\n")
    shown = "".join(character if character.isprintable() else "?" for character in host)
    named = f"process {pid}" if pid.isdigit() else "process unknown"
    return f"{named} on {shown}" if shown and shown != socket.gethostname() else named


def _remedy(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "its file system is mounted read-only; mount it writable, or choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "make it yours (chown, chmod 700), or choose another folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room, or choose another folder"
    return "`kvgate doctor` looks at it"
