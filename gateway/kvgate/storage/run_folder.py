"""`<state_dir>/storage`: what one daemon's storage process leaves on the host, written down before it exists.

A kill -9 of everything leaves a process, a pool in shared memory, a socket and temporary files. Each is named by the start that
made it, and the record of that start lies here, so that the next start removes exactly those. The folder is locked for the
daemon's life: whoever holds the lock knows that what the record names has no living owner.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from .lmcache_settings import MODULE, POOL_PREFIX, TMP_PREFIX
from .pool import unlink_pool

_START_ID = re.compile(r"[0-9a-f]{32}")
_MAX_RECORD_BYTES = 1 << 20
_TERM_S = 2.0
_KILL_S = 5.0

_log = structlog.get_logger(__name__)


class RunFolderError(Exception):
    """The folder cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One start of a storage process. ``pid`` is 0 until it runs; ``started`` is the kernel's start time of that pid."""

    start_id: str
    pid: int
    started: int
    generation: int
    l2_folders: tuple[str, ...]


class RunFolder:
    """The folder, its lock and its record. Methods block (briefly, `reap` up to some seconds): not for the event loop."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "storage"
        self._lock_fd = -1

    def open(self) -> None:
        """Make the folder private and take its lock. Raises ``RunFolderError`` if another daemon has it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise RunFolderError(f"{self.path} must be a folder of your own with mode 0700")
            while self._lock_fd < 0:
                self._lock_fd = self._try_lock()
        except OSError as error:
            raise RunFolderError(f"{self.path}: {error.strerror}") from error

    def _try_lock(self) -> int:
        """The locked descriptor, or -1 where the last holder removed the file meanwhile: that lock locks nobody out."""
        fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise RunFolderError(f"{self.path} is in use by a running gateway") from None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)
        return -1

    def close(self) -> None:
        """Give the lock back and remove it. Idempotent."""
        if self._lock_fd >= 0:
            (self.path / "lock").unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def socket_path(self, start_id: str) -> Path:
        """Where that start's socket is."""
        return self.path / f"{start_id[:12]}.sock"

    def write(self, record: RunRecord) -> None:
        """Replace the record."""
        new = self.path / "run.json.new"
        new.write_text(json.dumps(asdict(record)))
        new.replace(self.path / "run.json")

    def read(self) -> RunRecord | None:
        """The record of the last start, or None if there is none that can be read."""
        path = self.path / "run.json"
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_RECORD_BYTES + 1)
            values = json.loads(text)
            record = RunRecord(
                start_id=str(values["start_id"]),
                pid=int(values["pid"]),
                started=int(values["started"]),
                generation=int(values["generation"]),
                l2_folders=tuple(str(folder) for folder in values["l2_folders"]),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("run_record_unreadable", error=type(error).__name__)
            return None
        if _START_ID.fullmatch(record.start_id) is None:
            _log.warning("run_record_unreadable", error="start_id")
            return None
        return record

    def reap(self, record: RunRecord) -> None:
        """End the process of ``record`` if it still runs, and remove everything that start named."""
        ended = _end_process(record)
        pool = unlink_pool(POOL_PREFIX + record.start_id)
        sockets = 0
        for path in self.path.glob("*.sock"):
            path.unlink(missing_ok=True)
            sockets += 1
        for folder in record.l2_folders:
            shutil.rmtree(Path(folder) / (TMP_PREFIX + record.start_id), ignore_errors=True)
        if ended or pool or sockets:
            _log.info("storage_process_remains_removed", process=ended, pool=pool, sockets=sockets)


def process_started(pid: int) -> int:
    """The kernel's start time of ``pid`` in clock ticks since boot, 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])  # the name before it may hold spaces and brackets


def storage_processes(start_id: str) -> Sequence[int]:
    """Pids of this user's storage processes with that start id on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_storage_process(int(entry.name), start_id):
            found.append(int(entry.name))
    return found


def _is_storage_process(pid: int, start_id: str) -> bool:
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return False
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # gone meanwhile
    expected = [b"-m", MODULE.encode(), b"--start-id", start_id.encode()]
    return any(arguments[at : at + 4] == expected for at in range(len(arguments)))


def _end_process(record: RunRecord) -> bool:
    """SIGTERM, then SIGKILL, through a descriptor of exactly the process that was checked. Whether there was one."""
    pids = [record.pid] if record.pid else storage_processes(record.start_id)
    ended = False
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if not _is_storage_process(pid, record.start_id):
                continue
            if record.pid and process_started(pid) != record.started:
                continue
            _signal_and_wait(process)
            ended = True
        finally:
            os.close(process)
    return ended


def _signal_and_wait(process: int) -> None:
    for number, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return
        if select.select([process], [], [], patience_s)[0]:
            return
    _log.error("storage_process_does_not_end")
