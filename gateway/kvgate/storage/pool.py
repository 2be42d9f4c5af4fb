"""The L1 pool in shared memory: creating it, mapping it by name, and cutting slots out of it.

Used by the daemon (envelopes) and by the workers (payloads). Imports neither torch nor LMCache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path

from .backend import PoolInfo, Slot

SHM_DIR = Path("/dev/shm")
ALIGN_BYTES = 4096
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class PoolError(Exception):
    """The pool cannot be created or mapped, or a slot does not lie inside it."""


def pool_path(name: str) -> Path:
    """The file of pool ``name``. Raises ``PoolError`` for anything that is not a plain file name."""
    if _NAME.fullmatch(name) is None:
        raise PoolError("not a pool name: letters, digits, '_', '-' and '.' only, no path")
    return SHM_DIR / name


def create_pool(name: str, pool_bytes: int) -> int:
    """Create ``/dev/shm/<name>`` (mode 0600), take its memory now, and return the open, locked descriptor.

    The memory is allocated here and not on first touch: a pool larger than the machine's shared memory must fail at
    start, not as a bus error in a worker. The descriptor holds a ``flock``; while it is open the pool counts as alive.
    Raises ``PoolError``.
    """
    if pool_bytes <= 0 or pool_bytes % ALIGN_BYTES:
        raise PoolError(f"pool_bytes must be a positive multiple of {ALIGN_BYTES}, not {pool_bytes}")
    path = pool_path(name)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PoolError(f"cannot create the pool in {SHM_DIR}: {os.strerror(error.errno or 0)}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        allocate_pool(fd, pool_bytes)
        if path.stat().st_ino != os.fstat(fd).st_ino:
            raise PoolError("the pool was removed while it was being created")
    except (OSError, PoolError) as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        if isinstance(error, PoolError):
            raise
        raise PoolError(f"cannot create the pool: {os.strerror(error.errno or 0)}") from error
    return fd


def allocate_pool(fd: int, pool_bytes: int) -> None:
    """Back all ``pool_bytes`` of the shared-memory file ``fd`` with memory, or raise ``PoolError``."""
    try:
        os.posix_fallocate(fd, 0, pool_bytes)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise PoolError(
                f"{SHM_DIR} has no room for a pool of {pool_bytes} bytes: make the pool smaller, or {SHM_DIR} larger"
            ) from error
        raise PoolError(f"cannot allocate the pool: {os.strerror(error.errno or 0)}") from error


def unlink_pool(name: str) -> bool:
    """Remove the pool's name; its memory goes when the last process unmaps it. True if there was one."""
    try:
        pool_path(name).unlink()
    except FileNotFoundError:
        return False
    return True


def reap_dead_pools(prefix: str) -> list[str]:
    """Remove this user's pools named ``<prefix>*`` that no live process owns (their ``flock`` is free); their names."""
    reaped: list[str] = []
    for path in SHM_DIR.glob(f"{prefix}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, or somebody else's
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            reaped.append(path.name)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(fd)
    return reaped


class PoolMapping:
    """One process's mapping of the pool. Slices are zero-copy views; every one is checked against the pool's bounds."""

    def __init__(self, info: PoolInfo, memory: mmap.mmap, *, writable: bool) -> None:
        """Use ``open``; this takes a mapping made by the caller."""
        self.info = info
        self.writable = writable
        self._view: memoryview | None = memoryview(memory)

    @classmethod
    def open(cls, info: PoolInfo, *, writable: bool = True, populate: bool = False) -> PoolMapping:
        """Map the pool ``info`` names.

        ``populate`` takes all page faults now instead of at the first copy through each page. Raises ``PoolError`` if
        the pool is gone, belongs to another user, or has another size than ``info`` says.
        """
        path = pool_path(info.name)
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise PoolError(f"cannot open the pool: {os.strerror(error.errno or 0)}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PoolError("the pool's name is not a shared-memory file")
            if status.st_uid not in (os.geteuid(), 0):
                raise PoolError("the pool belongs to another user")
            if status.st_size != info.pool_bytes:
                raise PoolError(f"the pool has {status.st_size} bytes, not {info.pool_bytes}")
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            try:
                memory = mmap.mmap(fd, info.pool_bytes, flags=flags, prot=protection)
            except OSError as error:
                raise PoolError(f"cannot map the pool: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(fd)
        return cls(info, memory, writable=writable)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._view is None

    def slice(self, slot: Slot) -> memoryview:
        """The bytes of ``slot``: a view of length ``slot.object_bytes``. Raises ``PoolError`` if it is no slot of the pool."""
        return self.part(slot, 0, slot.object_bytes)

    def part(self, slot: Slot, start: int, length_bytes: int) -> memoryview:
        """Bytes ``start`` to ``start + length_bytes`` of ``slot`` (the envelope, or the payload behind it), as a view."""
        if self._view is None:
            raise PoolError("the pool is closed")
        if slot.offset < 0 or slot.offset % self.info.align_bytes:
            raise PoolError(f"slot offset {slot.offset} is not a multiple of {self.info.align_bytes}")
        if slot.object_bytes <= 0 or slot.offset + slot.object_bytes > self.info.pool_bytes:
            raise PoolError(f"slot {slot.offset}+{slot.object_bytes} lies outside the pool")
        if start < 0 or length_bytes < 0 or start + length_bytes > slot.object_bytes:
            raise PoolError(f"bytes {start}+{length_bytes} lie outside a slot of {slot.object_bytes}")
        first = slot.offset + start
        return self._view[first : first + length_bytes]

    def prepare(self, start: int, length_bytes: int) -> bool:
        """Take the page faults of bytes ``start`` to ``start + length_bytes`` of a writable mapping now; no byte changes.

        False where that cannot be: closed, read-only, or a kernel before 5.14. ``start``: a multiple of ALIGN_BYTES. The GIL is free
        meanwhile.
        """
        view = self._view
        if view is None or not self.writable:
            return False
        part = view[start : start + length_bytes]
        address = ctypes.addressof(ctypes.c_char.from_buffer(part))
        done: bool = _LIBC.madvise(address, part.nbytes, _MADV_POPULATE_WRITE) == 0
        part.release()
        return done

    def close(self) -> None:
        """Hand out no more slices. The memory is unmapped when the last slice is gone. Idempotent."""
        self._view = None

    def __enter__(self) -> PoolMapping:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
