"""The memory backend with a second tier behind it, in memory too, so that faults of an L2 can be planted without LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgate.storage.backend import Held, ObjectRef, Reservation, Slot
from kvgate.storage.memory import MemoryBackend
from kvgate.storage.pool import PoolMapping

TIER = "l2.0 test"


class TieredBackend(MemoryBackend):
    """Everything committed is in the L2 at once, and comes back from it where the pool has not got it."""

    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        self.l2: dict[Any, bytes] = {}
        self._refs: dict[int, tuple[ObjectRef, Slot]] = {}

    has_l2 = True

    def name(self, ref: ObjectRef) -> Any:
        """Under what name the L2 has an object."""
        return ref

    def fetched(self, data: bytes) -> bytes:
        """What the L2 gives back of an object."""
        return data

    def stored(self, data: bytes) -> bytes:
        """What the L2 keeps of an object."""
        return data

    async def reserve(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Any]:
        """See ``StorageBackend``."""
        answers = await super().reserve(refs, deadline_s)
        for ref, answer in zip(refs, answers, strict=True):
            if isinstance(answer, Reservation):
                self._refs[answer.reservation] = (ref, answer.slot)
        return answers

    async def commit(self, reservations: Sequence[int], deadline_s: float) -> list[bool]:
        """See ``StorageBackend``."""
        for reservation in reservations:
            ref, slot = self._refs[reservation]
            self.l2[self.name(ref)] = self.stored(bytes(self._bytes(slot)))
        return await super().commit(reservations, deadline_s)

    async def probe(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[bool | None]:
        """See ``StorageBackend``."""
        found = await super().probe(refs, deadline_s)
        return [has or self.name(ref) in self.l2 for has, ref in zip(found, refs, strict=True)]

    async def acquire(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        """See ``StorageBackend``."""
        for ref in refs:
            data = self.l2.get(self.name(ref))
            if data is not None and (await super().probe([ref], deadline_s)) == [False]:
                (opened,) = await super().reserve([ref], deadline_s)
                assert isinstance(opened, Reservation)
                self._bytes(opened.slot)[:] = self.fetched(data)
                await super().commit([opened.reservation], deadline_s)
        return await super().acquire(refs, deadline_s)

    async def delete(self, refs: Sequence[ObjectRef], deadline_s: float) -> None:
        """See ``StorageBackend``."""
        await super().delete(refs, deadline_s)
        for ref in refs:
            self.l2.pop(self.name(ref), None)

    async def tiers(self, deadline_s: float) -> list[str]:
        """See ``Tiered``."""
        return ["l1", TIER]

    async def leave_only(self, refs: Sequence[ObjectRef], tier: str, deadline_s: float) -> list[bool | None]:
        """See ``Tiered``."""
        there = [self.name(ref) in self.l2 for ref in refs]
        await super().delete([ref for ref, has in zip(refs, there, strict=True) if has], deadline_s)
        return list(there)

    def _bytes(self, slot: Slot) -> memoryview:
        assert self.pool is not None
        return PoolMapping.open(self.pool).slice(slot)
