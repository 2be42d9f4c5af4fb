"""What processes leave behind that are killed: CUDA's own files in shared memory."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import structlog

from kvgate.storage.pool import SHM_DIR
from kvgate.storage.run_folder import process_started

_POLL_S = 0.2

_log = structlog.get_logger(__name__)


def remove_cuda_files(pid: int, uid: int) -> int:
    """Remove the files that CUDA makes in /dev/shm for a process with interprocess events (``cuda.shm.<uid>.<pid>.<number>``).

    CUDA removes them when the process ends by itself. Only for a process that is known to be gone. How many there were.
    """
    removed = 0
    for path in SHM_DIR.glob(f"cuda.shm.{uid}.{pid:x}.*"):
        try:
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == uid:
                path.unlink()
                removed += 1
        except FileNotFoundError:
            continue
        except PermissionError:
            _log.warning("transfer.file_stays", pid=pid)
    return removed


class WorkerRemains:
    """A worker's process, as it was when its pages were attached, to clean up behind if it is killed."""

    def __init__(self, pid: int, uid: int) -> None:
        self._pid = pid
        self._uid = uid
        self._started = process_started(pid)

    async def remove(self, patience_s: float) -> None:
        """Its connection is gone: remove its files if it ends within ``patience_s``, and leave them if it does not."""
        if not self._started or self._uid != os.geteuid():
            return
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + patience_s
        while process_started(self._pid) == self._started and not _is_zombie(self._pid):
            if loop.time() > ends_at:
                return
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(remove_cuda_files, self._pid, self._uid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
