"""Wrappers around a real backend that make it slow, unavailable or die, as a storage process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvgate.storage.backend import Held, ObjectRef, PoolInfo, Refusal, Reservation, StorageUnavailable
from kvgate.storage.memory import MemoryBackend

T = TypeVar("T")


class FaultyBackend:
    """The memory backend behind a wrapper. A wrapper, not a mock: all answers are the real backend's.

    ``stalled``: calls wait until ``resume`` or their deadline; ``late``: they are carried out, and their answers wait.
    ``broken``: names of calls that raise. ``die`` and ``revive`` are the storage process going away and coming back, with
    another pool.
    """

    def __init__(self, pool_bytes: int = 1 << 20) -> None:
        self.inner = MemoryBackend(pool_bytes)
        self.l2 = True
        self.broken: set[str] = set()
        self.stalled: set[str] = set()
        self.late: set[str] = set()
        self.waiting = 0
        self.calls: list[str] = []
        self.stored: list[ObjectRef] = []
        self._resume = asyncio.Event()

    def resume(self) -> None:
        """Let the calls that wait go on, and those to come."""
        self.stalled = set()
        self.late = set()
        self._resume.set()
        self._resume = asyncio.Event()

    async def lose_newest(self) -> None:
        """One object is gone, without anybody having asked for it: as eviction does."""
        await self.inner.delete([self.stored[-1]], 1.0)

    async def die(self) -> None:
        """The process is gone: all slots, holds and reservations with it."""
        await self.inner.stop(0)

    async def revive(self) -> None:
        """It is back, with a new and empty pool."""
        await self.inner.start()

    async def start(self) -> None:
        """See ``StorageBackend``."""
        await self.inner.start()

    async def stop(self, drain_s: float) -> None:
        """See ``StorageBackend``."""
        await self.inner.stop(drain_s)

    @property
    def pool(self) -> PoolInfo | None:
        """See ``StorageBackend``."""
        return self.inner.pool

    @property
    def has_l2(self) -> bool:
        """The tests say what lies behind the pool; by default something does, so that it is probed."""
        return self.l2

    def on_generation(self, callback: Callable[[PoolInfo | None], None]) -> None:
        """See ``StorageBackend``."""
        self.inner.on_generation(callback)

    async def probe(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[bool | None]:
        """See ``StorageBackend``: unknown at the deadline."""
        if not await self._pass("probe", deadline_s):
            return [None] * len(refs)
        return await self.inner.probe(refs, deadline_s)

    async def acquire(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        """See ``StorageBackend``: absent at the deadline."""
        if not await self._pass("acquire", deadline_s):
            return [None] * len(refs)
        answer = await self.inner.acquire(refs, deadline_s)
        if "acquire" in self.late:
            await self._wait(deadline_s)
        return answer

    async def release(self, holds: Sequence[int]) -> None:
        """See ``StorageBackend``."""
        await self._pass("release", 1.0)
        await self.inner.release(holds)

    async def reserve(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Reservation | Refusal]:
        """See ``StorageBackend``."""
        await self._require("reserve", deadline_s)
        self.stored += refs
        return await self.inner.reserve(refs, deadline_s)

    async def commit(self, reservations: Sequence[int], deadline_s: float) -> list[bool]:
        """See ``StorageBackend``."""
        await self._require("commit", deadline_s)
        return await self.inner.commit(reservations, deadline_s)

    async def abort(self, reservations: Sequence[int], deadline_s: float) -> None:
        """See ``StorageBackend``."""
        await self._require("abort", deadline_s)
        await self.inner.abort(reservations, deadline_s)

    async def delete(self, refs: Sequence[ObjectRef], deadline_s: float) -> None:
        """See ``StorageBackend``."""
        await self._require("delete", deadline_s)
        await self.inner.delete(refs, deadline_s)

    async def status(self, deadline_s: float) -> Mapping[str, int | str]:
        """See ``StorageBackend``."""
        return await self.inner.status(deadline_s)

    async def _pass(self, call: str, deadline_s: float) -> bool:
        self.calls.append(call)
        if call in self.broken:
            raise StorageUnavailable("broken by the test")
        if call not in self.stalled:
            return True
        return await self._wait(deadline_s)

    async def _wait(self, deadline_s: float) -> bool:
        resumed = self._resume
        self.waiting += 1
        try:
            async with asyncio.timeout(deadline_s):
                await resumed.wait()
        except TimeoutError:
            return False
        finally:
            self.waiting -= 1
        return True

    async def _require(self, call: str, deadline_s: float) -> None:
        if not await self._pass(call, deadline_s):
            raise StorageUnavailable("stalled by the test")
