"""What the storage tests do again and again: make objects, write them in place, read them back, fill the pool, clean up."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kvgate.storage.backend import Held, ObjectRef, Refusal, Reservation, Slot, StorageBackend
from kvgate.storage.pool import PoolMapping

POOL_BYTES = 16 << 20
DOMAIN = b"d" * 32
# A generous limit for calls that are expected to answer; nothing here measures time.
SOON_S = 30.0


def new_ref(object_bytes: int = 70_000, domain: bytes = DOMAIN) -> ObjectRef:
    """A ref with a fresh address."""
    return ObjectRef(os.urandom(32), object_bytes, domain)


def content(ref: ObjectRef, version: int = 0) -> bytes:
    """Bytes that belong to exactly this ref and version."""
    seed = hashlib.blake2b(ref.address + ref.domain + version.to_bytes(4, "little")).digest()
    return (seed * (ref.object_bytes // len(seed) + 1))[: ref.object_bytes]


class Harness:
    """A started backend with its pool mapped. Remembers what it opened, so that ``clean_up`` leaves the backend empty-handed."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self._mapping: PoolMapping | None = None
        self.holds: set[int] = set()
        self.reservations: set[int] = set()

    @property
    def mapping(self) -> PoolMapping:
        """The live pool, mapped."""
        info = self.backend.pool
        assert info is not None
        if self._mapping is None or self._mapping.info != info:
            self._mapping = PoolMapping.open(info)
        return self._mapping

    def bytes_at(self, slot: Slot) -> bytes:
        """A copy of the slot's bytes."""
        return bytes(self.mapping.slice(slot))

    async def reserve(self, *refs: ObjectRef) -> list[Reservation | Refusal]:
        """``reserve``, remembered."""
        answers = await self.backend.reserve(refs, SOON_S)
        self.reservations |= {answer.reservation for answer in answers if isinstance(answer, Reservation)}
        return answers

    async def open(self, ref: ObjectRef) -> Reservation:
        """An open reservation for ``ref``; fails the test if it is refused."""
        (answer,) = await self.reserve(ref)
        assert isinstance(answer, Reservation), answer
        return answer

    async def commit(self, *reservations: Reservation) -> list[bool]:
        """``commit``."""
        ids = [reservation.reservation for reservation in reservations]
        self.reservations -= set(ids)
        return await self.backend.commit(ids, SOON_S)

    async def abort(self, *reservations: Reservation) -> None:
        """``abort``."""
        ids = [reservation.reservation for reservation in reservations]
        self.reservations -= set(ids)
        await self.backend.abort(ids, SOON_S)

    async def put(self, *refs: ObjectRef, version: int = 0) -> None:
        """Store ``refs`` with their content; fails the test if one is refused."""
        for ref in refs:
            opened = await self.open(ref)
            self.mapping.slice(opened.slot)[:] = content(ref, version)
            assert await self.commit(opened) == [True]

    async def acquire(self, *refs: ObjectRef, deadline_s: float = SOON_S) -> list[Held | None]:
        """``acquire``, remembered."""
        answers = await self.backend.acquire(refs, deadline_s)
        self.holds |= {answer.hold for answer in answers if answer is not None}
        return answers

    async def hold(self, ref: ObjectRef) -> Held:
        """A hold on ``ref``; fails the test if it is absent."""
        (held,) = await self.acquire(ref)
        assert held is not None
        return held

    async def release(self, *holds: Held) -> None:
        """``release``."""
        ids = [held.hold for held in holds]
        self.holds -= set(ids)
        await self.backend.release(ids)

    async def read(self, ref: ObjectRef) -> bytes | None:
        """The object's bytes, or None if it is absent; no hold is left."""
        (held,) = await self.acquire(ref)
        if held is None:
            return None
        assert held.slot.object_bytes == ref.object_bytes
        try:
            return self.bytes_at(held.slot)
        finally:
            await self.release(held)

    async def probe(self, *refs: ObjectRef) -> list[bool | None]:
        """``probe``."""
        return await self.backend.probe(refs, SOON_S)

    async def delete(self, *refs: ObjectRef) -> None:
        """``delete``."""
        await self.backend.delete(refs, SOON_S)

    async def counter(self, name: str) -> int:
        """One number of ``status``."""
        return int((await self.backend.status(SOON_S)).get(name, 0))

    async def until(self, name: str, value: int) -> None:
        """Wait until a number of ``status`` has a value."""
        async with asyncio.timeout(SOON_S):
            while await self.counter(name) != value:  # noqa: ASYNC110  # another process's state: there is no event
                await asyncio.sleep(0.01)

    async def settle(self) -> None:
        """Wait until nothing is on its way to L2."""
        await self.until("l2_pending_objects", 0)

    async def fill(self, object_bytes: int = 1 << 20) -> list[Reservation]:
        """Open reservations of that size until the pool is full."""
        opened: list[Reservation] = []
        while True:
            (answer,) = await self.reserve(new_ref(object_bytes))
            if not isinstance(answer, Reservation):
                assert answer is Refusal.FULL
                return opened
            opened.append(answer)

    async def push_out_of_l1(self) -> None:
        """Make the backend give up everything in the pool that nobody holds."""
        await self.settle()
        opened = [one for object_bytes in (1 << 20, 1 << 16, 4096) for one in await self.fill(object_bytes)]
        await self.abort(*opened)

    async def clean_up(self) -> None:
        """Give back everything opened and not closed."""
        await self.backend.release(sorted(self.holds))
        await self.backend.abort(sorted(self.reservations), SOON_S)
        self.holds.clear()
        self.reservations.clear()


def freeze(pid: int) -> None:
    """Stop a process and wait until each of its threads has stopped: the signal alone takes effect a little later."""
    os.kill(pid, signal.SIGSTOP)
    for _ in range(3000):
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        if all(state == "T" for state in states):
            return
        signal.sigtimedwait([], 0.01)
    raise AssertionError("the process does not stop")


def overlap(first: Slot, second: Slot) -> bool:
    """Whether two slots share a byte."""
    return first.offset < second.offset + second.object_bytes and second.offset < first.offset + first.object_bytes


def disjoint(slots: Sequence[Slot]) -> bool:
    """Whether no two slots share a byte."""
    ordered = sorted(slots, key=lambda slot: slot.offset)
    return not any(overlap(left, right) for left, right in pairwise(ordered))
