"""What earlier starts left on the host: pools, sockets, locks, processes."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvgate.config import Config
from kvgate.doctor.findings import Report, Subject, command, size
from kvgate.storage.lmcache_settings import POOL_PREFIX as LMCACHE_PREFIX
from kvgate.storage.memory import POOL_PREFIX as MEMORY_PREFIX
from kvgate.storage.pool import SHM_DIR
from kvgate.storage.run_folder import RunFolder, RunRecord, process_started

# A pool is locked right after it was made: a younger one may be between the two.
_YOUNG_S: Final = 2.0


def check_leftovers(subject: Subject, report: Report) -> None:
    """Pools, sockets, locks and storage processes whose gateway is gone."""
    state_dir = Path(subject.config.state_dir)
    dead = [(path, path.stat().st_size) for path in dead_pools()]
    for path, pool_bytes in dead:
        report.warn(f"{path} holds {size(pool_bytes)} for a gateway that is gone", command("rm", path))
    lives = gateway_pid(state_dir) > 0
    if not lives:
        _look_at_state(state_dir, report)
        _look_at_process(state_dir, report)
    if not report.findings:
        report.ok("none")


def _look_at_state(state_dir: Path, report: Report) -> None:
    names = [name for name in ("gateway.sock", "admin.sock", "lock") if os.path.lexists(state_dir / name)]
    if names:
        paths = [state_dir / name for name in names]
        found = f"{', '.join(names)} in {state_dir} of a gateway that is gone; the next start removes them"
        report.warn(found, command("rm", "-f", *paths))


def _look_at_process(state_dir: Path, report: Report) -> None:
    record = _record(state_dir)
    if record is None or not record.pid or not (started := process_started(record.pid)) or started != record.started:
        return
    report.warn(f"storage process {record.pid} runs on without its gateway", command("kill", "-TERM", record.pid))


def gateway_pid(state_dir: Path) -> int:
    """Process of the gateway that runs there, as its lock file says, 0 if none does.

    The lock itself is not tried: a gateway that starts at this moment would be refused it.
    """
    try:
        with (state_dir / "lock").open("rb") as file:
            pid = int(file.read(32))
    except (OSError, ValueError):
        return 0
    return pid if process_started(pid) else 0


def live_pool_bytes(config: Config) -> int:
    """Size of the pool that a gateway running on this state directory has in shared memory, 0 if none."""
    state_dir = Path(config.state_dir)
    record = _record(state_dir)
    if record is None or not gateway_pid(state_dir):
        return 0
    try:
        return (SHM_DIR / (LMCACHE_PREFIX + record.start_id)).stat().st_size
    except OSError:
        return 0


def dead_pools() -> Iterator[Path]:
    """This user's pools that nobody holds the lock of."""
    for prefix in (LMCACHE_PREFIX, MEMORY_PREFIX):
        for path in sorted(SHM_DIR.glob(f"{prefix}*")):
            if _is_dead(path):
                yield path


def _is_dead(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # gone meanwhile, or somebody else's
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or time.time() - found.st_ctime < _YOUNG_S:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its owner lives
    finally:
        os.close(descriptor)
    return True


def _record(state_dir: Path) -> RunRecord | None:
    return RunFolder(state_dir).read() if (state_dir / "storage" / "run.json").is_file() else None
