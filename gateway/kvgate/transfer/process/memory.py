"""The pool as this process maps it: page-locked once for the device, replaced with the storage process, unmapped after its last use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvgate.storage.backend import PoolInfo, Slot
from kvgate.storage.pool import PoolMapping


class NoSuchPool(Exception):
    """No pool of that generation is mapped."""


class MappedPool:
    """One mapping and the moves that use it. ``release`` runs once, after ``retire`` and the last move."""

    def __init__(self, info: PoolInfo, mapping: PoolMapping, release: Callable[[], None]) -> None:
        self.info = info
        self._mapping = mapping
        self._release = release
        self._users = 0
        self._retired = False

    def view(self, offset: int, length_bytes: int) -> memoryview:
        """The bytes of one payload. Raises ``PoolError`` where they are not inside the pool."""
        return self._mapping.slice(Slot(offset, length_bytes))

    def enter(self) -> None:
        """A move begins."""
        self._users += 1

    def leave(self) -> None:
        """A move is through."""
        self._users -= 1
        self._end()

    def retire(self) -> None:
        """No move begins any more."""
        self._retired = True
        self._end()

    def _end(self) -> None:
        if self._retired and self._users == 0:
            self._release()
            self._mapping.close()


class Pools:
    """The pool in use. Thread-safe."""

    def __init__(self, lock_memory: Callable[[memoryview], Callable[[], None]], populate: bool) -> None:
        """lock_memory: page-locks memory for the device, returns what undoes that. populate: take page faults when mapping."""
        self._lock_memory = lock_memory
        self._populate = populate
        self._lock = threading.Lock()
        self._current: MappedPool | None = None

    def switch(self, info: PoolInfo | None) -> None:
        """Map ``info`` in place of the pool before. Raises ``PoolError``, and what ``lock_memory`` does; none is mapped then."""
        with self._lock:
            old, self._current = self._current, None
            if old is not None:
                old.retire()
        if info is None:
            return
        mapping = PoolMapping.open(info, populate=self._populate)
        try:
            release = self._lock_memory(mapping.slice(Slot(0, info.pool_bytes)))
        except BaseException:
            mapping.close()
            raise
        with self._lock:
            self._current = MappedPool(info, mapping, release)

    @contextmanager
    def use(self, generation: int) -> Iterator[MappedPool]:
        """The pool of that generation, mapped for as long as the context lasts. Raises ``NoSuchPool``."""
        with self._lock:
            pool = self._current
            if pool is None or pool.info.generation != generation:
                raise NoSuchPool("the pool of these slots is no more")
            pool.enter()
        try:
            yield pool
        finally:
            with self._lock:
                pool.leave()
