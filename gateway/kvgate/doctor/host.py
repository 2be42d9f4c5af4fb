"""Checks of the host: shared memory, limits, memory, clock, disk."""

from __future__ import annotations

import errno
import os
import re
import resource
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvgate.doctor.findings import Report, Subject, command, size
from kvgate.doctor.remains import live_pool_bytes
from kvgate.storage.pool import SHM_DIR

# What the daemon, the storage process and LMCache take beside the pool.
_PROCESSES_BYTES: Final = 768 << 20
_SPARE_DESCRIPTORS: Final = 128
_NEEDS_LOCKED_MEMORY: Final = ("mooncake_store", "nixl_store", "nixl_store_dynamic", "p2p", "hf3fs")
_CLOCK_S: Final = 2.0
_BEFORE_US: Final = 1_700_000_000  # any clock that says less was never set
_LITTLE_BYTES: Final = 64 << 20


def check_shared_memory(subject: Subject, report: Report) -> None:
    """Room for the pool in /dev/shm; a pool this gateway has already counts as room."""
    if subject.config.backend == "attach":
        report.ok("the pool is the attached server's")
        return
    wanted = subject.config.pool_bytes
    try:
        usage = shutil.disk_usage(SHM_DIR)
    except OSError as error:
        report.fail(f"{SHM_DIR}: {error.strerror}", command("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", SHM_DIR))
        return
    room = usage.free + live_pool_bytes(subject.config)
    larger = command("mount", "-o", f"remount,size={-(-(usage.used + wanted) // (1 << 20)) + 64}m", SHM_DIR)
    if not os.access(SHM_DIR, os.W_OK | os.X_OK):
        report.fail(f"{SHM_DIR} is not writable", command("chmod", "1777", SHM_DIR))
    elif wanted > usage.total:
        found = f"pool_bytes is {size(wanted)}, {SHM_DIR} has {size(usage.total)} in all"
        report.fail(found, f"{larger}   # in a container: --shm-size; or a smaller pool: {_smaller(room)}")
    elif wanted > room:
        found = f"pool_bytes is {size(wanted)}, {SHM_DIR} has {size(usage.free)} free of {size(usage.total)}"
        report.fail(found, f"{larger}   # or a smaller pool: {_smaller(room)}")
    else:
        report.ok(f"{size(usage.free)} free of {size(usage.total)} in {SHM_DIR}, the pool takes {size(wanted)}")


def check_limits(subject: Subject, report: Report) -> None:
    """Open files for every session, and locked memory where an L2 adapter registers the pool with a network card."""
    config = subject.config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A connection, and a descriptor of the process at its other end.
    need = 2 * config.max_sessions + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need:
        found = f"{soft} open files allowed, {config.max_sessions} sessions need {need}"
        raised = hard == resource.RLIM_INFINITY or hard >= need
        report.fail(found, f"ulimit -n {need}" + ("" if raised else "   # as root, or LimitNOFILE= in the systemd unit"))
    else:
        report.ok(f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    kinds = {str(spec.get("type")) for spec in config.l2_adapters()}
    if locked != resource.RLIM_INFINITY and locked < config.pool_bytes and kinds & set(_NEEDS_LOCKED_MEMORY):
        found = f"{size(locked)} may be locked, the L2 adapter locks the pool of {size(config.pool_bytes)}"
        report.fail(found, "ulimit -l unlimited   # LimitMEMLOCK=infinity in the systemd unit")


def check_memory(subject: Subject, report: Report) -> None:
    """Memory of the machine and of the control group: a pool in shared memory counts against both."""
    need = (0 if subject.config.backend == "attach" else subject.config.pool_bytes) + _PROCESSES_BYTES
    held = live_pool_bytes(subject.config)
    limit = min(_cgroup_limits(), default=None)
    if limit is not None and limit < need:
        found = f"the control group allows {size(limit)}, pool and processes take {size(need)}"
        raise_it = f"systemd-run --user --scope -p MemoryMax={need + (256 << 20)} kvgate serve"
        report.fail(found, f"{_smaller(limit - _PROCESSES_BYTES)}   # or raise the limit: {raise_it}")
        return
    available = _meminfo("MemAvailable")
    if available + held < need:
        found = f"{size(available)} of memory are available, pool and processes take {size(need)}"
        report.warn(found, _smaller(available + held - _PROCESSES_BYTES))
        return
    report.ok(f"{size(available)} available" + (f", control group limit {size(limit)}" if limit is not None else ""))


def check_clock(subject: Subject, report: Report) -> None:
    """The clock is set, agrees with the clock that stamps files of the data directory, and the monotonic one runs."""
    folder = existing(Path(subject.config.data_dir))
    try:
        stamp = _stamp(folder)
    except OSError:
        folder = Path("/tmp")
        stamp = _stamp(folder)
    judge_clock(time.time(), stamp, folder, report)
    before = time.monotonic()
    time.sleep(0.01)
    if time.monotonic() <= before:
        report.fail("the monotonic clock stands still: deadlines would never pass", "reboot   # or choose another clocksource")


def judge_clock(now: float, stamp: float, folder: Path, report: Report) -> None:
    """What two clocks say: the system's ``now`` and the ``stamp`` of a file written in ``folder`` at that moment."""
    set_it = "timedatectl set-ntp true   # or: chronyc makestep"
    if now < _BEFORE_US:
        report.fail(f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}: it was never set", set_it)
    elif abs(stamp - now) > _CLOCK_S:
        found = f"files in {folder} are stamped {stamp - now:+.0f} s from the system's clock"
        report.fail(found, f"{set_it}   # on both hosts, this and the file server's")
    else:
        report.ok(f"set, and the same as that of {folder}")


def check_disk(subject: Subject, report: Report) -> None:
    """The data directory and every L2 folder: writable, with room."""
    config = subject.config
    places = {"data_dir": Path(config.data_dir)}
    for number, spec in enumerate(config.l2_adapters(), 1):
        if config.backend in ("auto", "lmcache") and isinstance(folder := spec.get("base_path"), str) and folder:
            places[f"L2 folder {number}"] = Path(folder).absolute()
    for name, folder in places.items():
        _look_at_folder(name, folder, config.pool_bytes if name != "data_dir" else 0, report)


def _look_at_folder(name: str, folder: Path, wanted: int, report: Report) -> None:
    base = existing(folder)
    if not base.is_dir():
        moved = command("mv", base, f"{base}.old")
        report.fail(f"{name} {folder}: {base} is not a directory", f"{moved} && {command('mkdir', '-p', '-m', '700', folder)}")
        return
    try:
        _stamp(base)
    except OSError as error:
        if error.errno == errno.EROFS:
            writable = f'mount -o remount,rw "$(findmnt -n -o TARGET -T {command(base)})"'
            report.fail(f"{name} {folder} is on a file system mounted read-only", writable)
            return
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # those are told below, by the numbers
            own = f"{command('mkdir', '-p', folder)} && {command('chown', '-R', _user(), folder)} && {command('chmod', '700', folder)}"
            report.fail(f"{name} {folder} cannot be written: {error.strerror}", own)
            return
    room = os.statvfs(base)
    free = room.f_bavail * room.f_frsize
    freed = f"du -x -h -d1 {command(base)} | sort -h   # remove what is not needed, or choose another folder with --l2"
    if free < _LITTLE_BYTES or (room.f_files and room.f_favail < 1000):
        left = size(free) if free < _LITTLE_BYTES else f"{room.f_favail} files"
        report.fail(f"{name} {folder}: only {left} left; objects are not stored there any more", freed)
    elif free < wanted:
        report.warn(f"{name} {folder}: {size(free)} left, less than one pool of {size(wanted)}", freed)
    else:
        report.ok(f"{name} {folder}: writable, {size(free)} left")


def existing(path: Path) -> Path:
    """The nearest of ``path`` and the folders above it that is there."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate
    return Path("/")


def _stamp(folder: Path) -> float:
    """Modification time that a file written now in ``folder`` gets."""
    path = folder / f".kvgate-doctor-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, b"\0" * 4096)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _smaller(room: int) -> str:
    megabytes = max(1, room * 9 // 10 >> 20)
    return f"kvgate serve --pool-bytes {megabytes}MiB"


def _user() -> str:
    return str(os.geteuid())


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _cgroup_limits() -> Iterator[int]:
    """Memory limits of this process's control group and all above it, version 1 and 2; those that cannot be read are none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            base, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's: then only the root of what is mounted here can be read.
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            try:
                text = (place / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 1 << 60:
                yield int(text)


def mode_of(path: Path) -> str:
    """A file's mode as chmod takes it."""
    return f"{stat.S_IMODE(path.lstat().st_mode):04o}"
