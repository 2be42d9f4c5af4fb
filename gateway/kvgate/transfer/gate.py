"""The gate between a worker's pages and the process that writes into them: what a worker has given up is not written any more.

A worker that waits too long for a load gives it up, and its engine computes into the same pages. A copy that came later would
overwrite them, and nobody would notice. So every load has a place in a small file that both map, a byte each:

    closed → open (worker, before it asks) → moving (mover, before the first write) → closed (mover, after the last)

Whoever changes a place holds the lock on its byte. A worker that gives up takes the lock, and so waits for a copy under way, and
closes the place. The kernel drops the locks of a process that is killed; a place left at "moving" tells that its copy was cut off.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PLACES: Final = 4096
"""Bytes of a gate file. Place 0 is never used: a forgotten place is refused."""
CLOSED: Final = 0
OPEN: Final = 1
MOVING: Final = 2
_POLL_S: Final = 0.002
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class GateError(Exception):
    """The gate can't be made or opened, or has no free place."""


class Gate:
    """The worker's side: it owns the file, which has no name and goes with its last descriptor. Thread-safe."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvgate-gate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, PLACES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._bytes = mmap.mmap(self.descriptor, PLACES)
        self._lock = threading.Lock()
        self._free = deque(range(1, PLACES))

    def open_place(self) -> int:
        """A place that lets one load write. Raises ``GateError`` where all are in use."""
        with self._lock:
            if not self._free:
                raise GateError("all places of the gate are in use")
            place = self._free.popleft()
        self._bytes[place] = OPEN
        return place

    def close_place(self, place: int, wait_s: float) -> bool:
        """Let nobody write any more; waits for the copy under way. False: it is still under way after ``wait_s``, try again.

        True: nothing writes now. ``cut_off`` tells whether a copy ended with its process. Then give the place back.
        """
        until = time.monotonic() + wait_s
        while not _lock(self.descriptor, place):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        try:
            if self._bytes[place] == OPEN:
                self._bytes[place] = CLOSED
        finally:
            _unlock(self.descriptor, place)
        return True

    def cut_off(self, place: int) -> bool:
        """Whether the copy at a place that ``close_place`` closed was ended by the death of its process."""
        return self._bytes[place] == MOVING

    def give_back(self, place: int) -> None:
        """The place is free again. Only after its load was answered, or ``close_place`` returned True."""
        self._bytes[place] = CLOSED
        with self._lock:
            self._free.append(place)

    def close(self) -> None:
        """Let the file go. Idempotent."""
        if self.descriptor >= 0:
            self._bytes.close()
            os.close(self.descriptor)
            self.descriptor = -1


class MoverGate:
    """The side of the process that moves. One process may hold several gates, each opened once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bytes = mmap.mmap(descriptor, PLACES)

    @classmethod
    def open(cls, pid: int, descriptor: int) -> MoverGate:
        """The gate that process ``pid`` has at ``descriptor``. Raises ``GateError``."""
        try:
            # Not blocking: whoever has a lease on its file (fcntl) could hold all other workers up for as long as it takes to break it.
            own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise GateError(f"the gate can't be opened: {os.strerror(error.errno or 0)}") from error
        status = os.fstat(own)
        if not stat.S_ISREG(status.st_mode) or status.st_size != PLACES:
            os.close(own)
            raise GateError("the gate is no file of the right size")
        if not _sealed(own):
            # Touching a mapping whose file was made shorter ends the process, and with it the moves of all other workers.
            os.close(own)
            raise GateError("the gate can be made shorter: its file must be sealed")
        try:
            return cls(own)
        except OSError as error:  # sealed against writing too, or no memory: its worker's trouble and nobody else's
            os.close(own)
            raise GateError(f"the gate can't be mapped: {os.strerror(error.errno or 0)}") from error

    @contextmanager
    def moving(self, place: int) -> Iterator[bool]:
        """Around one copy: False where the worker has given it up, then nothing may be written. Never waits."""
        if not 0 < place < PLACES or not _lock(self._descriptor, place):
            # A worker that holds the lock is giving it up.
            yield False
            return
        allowed = self._bytes[place] == OPEN
        try:
            if allowed:
                self._bytes[place] = MOVING
            yield allowed
        finally:
            if allowed:
                self._bytes[place] = CLOSED
            _unlock(self._descriptor, place)

    def close(self) -> None:
        """Let the gate go. Idempotent."""
        if self._descriptor >= 0:
            self._bytes.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _sealed(descriptor: int) -> bool:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK != 0
    except OSError:
        return False  # a file that has no seals


def _lock(descriptor: int, place: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int, place: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)
