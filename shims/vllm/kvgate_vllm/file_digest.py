"""Hashing exactly the bytes a loader opened, through descriptors of our own.

A ``HeldFile`` opens a file before the loader does and keeps its descriptor. Three facts together say that the loader read the
bytes that were hashed:

* ``changed`` is None after the load: the inode's size, times and identity are what they were, and the path still names it. A
  rename away and back moves the inode's change time, so it is seen too.
* Where the loader maps the file, ``FileWatch`` saw a new mapping of that same device and inode appear while it opened it.
* The first look waited until the change time was older than the clock tick of the file system, so that a later write
  cannot hide behind an equal time.
* What was written before was put to disk before anybody read: a page that a writer has mapped and made dirty takes further
  writes without a new time until then. A memory file system (tmpfs) has no such moment: see docs/loaders.md.

Device and inode of a mapping are compared with those of a mapping of our own descriptor: on overlayfs and btrfs they differ from
what ``stat`` says. Like the loader, the hash maps the file; truncating a file while it is mapped kills the process either way.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from blake3 import blake3

from kvgate_vllm.state import Artifact

SETTLE_S: Final = 0.02
"""Longer than a tick of the clock file systems stamp with (10 ms at 100 Hz)."""
COARSE_SETTLE_S: Final = 2.1
"""The same for file systems that keep whole seconds, or every second one, only."""
_SETTLE_TRIES: Final = 10
_COPY_BYTES: Final = 1 << 20

MAX_FILES: Final = 4096
"""More files than this in one load are refused by name; it is also the contract's limit."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What ``fstat`` says about one version of a file."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Stamp:
        """The stamp in a stat result."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def settle(self) -> bool:
        """Wait, at most ``COARSE_SETTLE_S``, until a later change must show in the times. True if it had to wait."""
        coarse = not (self.modified_ns % 1_000_000_000 or self.changed_ns % 1_000_000_000)
        settle_s = COARSE_SETTLE_S if coarse else SETTLE_S
        age_s = (time.time_ns() - max(self.modified_ns, self.changed_ns)) / 1e9
        if not 0 <= age_s < settle_s:
            return False
        time.sleep(settle_s - age_s)
        return True


class HeldFile:
    """One file, held open through a descriptor of our own. ``size_bytes`` and times are those of the first look.

    written_back: first put on disk what others have written, so that also a write through an old mapping moves the times.
    Raises ``OSError`` if it cannot be opened, or not written back.
    """

    def __init__(self, path: str, role: str, *, written_back: bool = False) -> None:
        self.path = path
        self.role = role
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if written_back:
                _write_back(self.fd)
            self.stamp = Stamp.of(os.fstat(self.fd))
            for _ in range(_SETTLE_TRIES):  # a file written to without end is caught by ``changed``
                if not self.stamp.settle():
                    break
                self.stamp = Stamp.of(os.fstat(self.fd))
        except BaseException:
            os.close(self.fd)
            raise

    def changed(self) -> bool:
        """Whether the file changed since the first look, or its path names another file now."""
        try:
            # Opened again, since on a network file system only that asks the server anew.
            again = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return any(Stamp.of(os.fstat(fd)) != self.stamp for fd in (again, self.fd))
            finally:
                os.close(again)
        except OSError:
            return True

    def digest(self, map_lock: threading.Lock | None = None) -> bytes:
        """BLAKE3-256 of the file, by all cores. ``map_lock`` is held while it is mapped and unmapped, not while it is hashed."""
        if self.stamp.size_bytes == 0:
            return blake3(b"").digest()
        map_lock = map_lock or threading.Lock()
        with map_lock:
            mapping = mmap.mmap(self.fd, self.stamp.size_bytes, prot=mmap.PROT_READ)
        try:
            hasher = blake3(max_threads=blake3.AUTO)
            with memoryview(mapping) as view:
                hasher.update(view)
            return hasher.digest()
        finally:
            with map_lock:
                mapping.close()

    def artifact(self, digest: bytes) -> Artifact:
        """The artifact this file is, given its digest."""
        return Artifact(self.role, self.stamp.size_bytes, digest)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)


def _write_back(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # what read-only file systems say, where nobody can write
            raise


@contextmanager
def _own_mapping(fd: int) -> Iterator[int]:
    """Map the first page of ``fd``; gives its address."""
    mapping = mmap.mmap(fd, 1, prot=mmap.PROT_READ)
    try:
        page = np.frombuffer(mapping, dtype=np.uint8)
        yield page.ctypes.data
        del page
    finally:
        mapping.close()


def _maps() -> bytes:
    return Path("/proc/self/maps").read_bytes()


def _identity_at(maps: bytes, address: int) -> bytes | None:
    """``b" device inode "`` of the mapping at ``address``, as its line has it."""
    line = re.search(rb"^0*%x-[0-9a-f]+ \S+ [0-9a-f]+( [0-9a-f]+:[0-9a-f]+ [0-9]+ )" % address, maps, re.MULTILINE)
    return None if line is None else line[1]


class FileWatch:
    """Watches the files one load opens: holds each, hashes it beside the load, and says at the end whether that is what was read.

    Use as a context manager around the load; within it, openers wrapped by ``wrap_mapping`` and ``wrap_reading`` report every file
    they are given. ``finish`` comes after the load and before the context ends.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._files: dict[tuple[str, str], HeldFile] = {}
        self._digests: dict[tuple[str, str], Future[bytes]] = {}
        self._seen: set[str] = set()
        self._reason: str | None = None
        self._lock = threading.Lock()
        # Held while anybody maps or unmaps a watched file, so that a new mapping seen under it is the loader's.
        self._map_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvgate-hash")

    def __enter__(self) -> FileWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for held in self._files.values():
            held.close()

    def hold(self, path: str, role: str | None = None) -> HeldFile | None:
        """Open and start hashing ``path``, once. None, and a reason kept, if that is not possible."""
        key = (path, role or self._role)
        with self._lock:
            held = self._files.get(key)
            if held is not None:
                return held
            if len(self._files) >= MAX_FILES:
                self._fail("the load opened too many files")
                return None
            try:
                held = self._files[key] = HeldFile(path, key[1], written_back=True)
            except OSError:
                self._fail("a file the loader reads could not be opened beside it")
                return None
            self._digests[key] = self._pool.submit(held.digest, self._map_lock)
            return held

    def fail(self, reason: str) -> None:
        """Make the result uncacheable. The first reason stays."""
        with self._lock:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason

    def seen(self, path: str) -> bool:
        """Whether a wrapped opener was given ``path``."""
        with self._lock:
            return path in self._seen

    def wrap_reading(self, opener: Callable[..., Any]) -> Callable[..., Any]:
        """An opener that reads a path (its first argument) without keeping it mapped."""

        @functools.wraps(opener)
        def reading(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                self._note(os.fspath(path))
            return opener(path, *args, **kwargs)

        return reading

    def wrap_mapping(self, opener: Callable[..., Any]) -> Callable[..., Any]:
        """An opener that maps the path it is given: the new mapping must be of the very file held."""

        def mapping(path: Any, *args: Any, **kwargs: Any) -> Any:
            name = os.fspath(path)
            held = self._note(name)
            if held is None or held.stamp.size_bytes == 0:
                return opener(path, *args, **kwargs)
            with self._map_lock, _own_mapping(held.fd) as address:
                before = _maps()
                opened = opener(path, *args, **kwargs)
                after = _maps()
            identity = _identity_at(before, address)
            if identity is None or after.count(identity) <= before.count(identity):
                self.fail("the loader mapped another file than the one hashed")
            return opened

        return mapping

    def _note(self, path: str) -> HeldFile | None:
        held = self.hold(path)
        with self._lock:
            self._seen.add(path)
        return held

    def finish(self) -> tuple[tuple[Artifact, ...], str | None]:
        """Wait for the hashes, look at every file again; gives the artifacts in opening order, or none and a reason."""
        artifacts = []
        for key, held in self._files.items():
            try:
                artifacts.append(held.artifact(self._digests[key].result()))
            except (OSError, ValueError):
                # ValueError: mmap of a file that shrank.
                self.fail("a file the loader reads could not be hashed")
            if held.changed():
                self.fail("a file changed while it was loaded")
        if not self._files:
            self.fail("the loader opened no file")
        return ((), self._reason) if self._reason else (tuple(artifacts), None)


def copy_and_hash(source_fd: int, target: Path, limit_bytes: int) -> tuple[int, bytes]:
    """Copy an open file into a new file ``target`` (mode 0400); gives size and BLAKE3-256 of what was read.

    Raises ``OSError``; ``ValueError`` if there is more than ``limit_bytes``.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    size_bytes = 0
    target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
    try:
        while chunk := os.pread(source_fd, _COPY_BYTES, size_bytes):
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                raise ValueError("too large")
            hasher.update(chunk)
            while chunk:
                chunk = chunk[os.write(target_fd, chunk) :]
    finally:
        os.close(target_fd)
    return size_bytes, hasher.digest()
