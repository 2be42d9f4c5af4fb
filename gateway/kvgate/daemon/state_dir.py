"""The state directory: private, locked by one gateway at a time, emptied of what an earlier start left behind."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

SOCKETS = ("gateway.sock", "admin.sock")


class StateDirError(Exception):
    """The state directory can't be used; the message says why and what to do."""


class StateDir:
    """Holds the lock of a state directory. The lock file goes with the holder; a kill -9 leaves a file that locks nobody."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path / "lock"
        self._descriptor = -1

    def acquire(self) -> None:
        """Make the directory, check that it is ours alone, take the lock, remove stale sockets; raises ``StateDirError``."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateDirError(f"state_dir {self.path}: can't create it: {error.strerror}") from error
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise StateDirError(f"state_dir {self.path}: must be a directory of your own")
        if found.st_mode & 0o077:
            raise StateDirError(f"state_dir {self.path}: is open to others; run: chmod 700 {self.path}")
        self._lock()
        try:
            for name in SOCKETS:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            self.release()
            raise StateDirError(f"state_dir {self.path}: can't remove a stale socket: {error.strerror}") from error

    def release(self) -> None:
        """Remove sockets and lock. Idempotent."""
        if self._descriptor < 0:
            return
        for name in SOCKETS:
            path = self.path / name
            if not path.is_dir():
                path.unlink(missing_ok=True)
        # Unlinked while still locked: whoever opened it meanwhile sees in _lock() that its file is gone.
        self._lock_path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _lock(self) -> None:
        while True:
            try:
                descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise StateDirError(f"state_dir {self.path}: can't open its lock: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(descriptor, 32).decode("ascii", errors="replace").strip()
                os.close(descriptor)
                raise StateDirError(
                    f"state_dir {self.path}: another gateway (process {owner or 'unknown'}) runs there; stop it, or choose another"
                ) from None
            # Its last holder unlinks the file: a lock on a file that is not there any more locks nobody out.
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor


def make_private(socket: Path) -> None:
    """Close a socket to others. Its directory is closed already; this holds if somebody opens that."""
    socket.chmod(0o600)
