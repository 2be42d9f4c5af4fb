"""A backend inside the daemon: a pool in shared memory, no tier behind it. For tests and for hosts without LMCache."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from .backend import Held, ObjectRef, PoolInfo, Refusal, Reservation, Slot, StorageUnavailable
from .pool import ALIGN_BYTES, PoolError, create_pool, reap_dead_pools, unlink_pool
from .refs import check_refs
from .slots import SlotAllocator, aligned

POOL_PREFIX = "kvgate_pool_"

_log = structlog.get_logger(__name__)

# Ids carry their generation, so that one of an older pool can never name something in this one.
_ID_BITS = 40


@dataclass(slots=True)
class _Object:
    """A committed object: its slot, and how many holds keep it there. ``condemned``: deleted, gone with the last hold."""

    slot: Slot
    holds: int = 0
    condemned: bool = False


@dataclass(slots=True)
class _Counters:
    """What `status` reports beyond the tables' sizes."""

    evicted: int = 0
    refused_full: int = 0
    unknown_releases: int = 0
    unknown_commits: int = 0


class MemoryBackend:
    """``StorageBackend`` over the daemon's own pool. LRU eviction of objects nobody holds, when room is needed."""

    def __init__(self, pool_bytes: int) -> None:
        """``pool_bytes``: size of the pool, a multiple of 4,096."""
        self._pool_bytes = pool_bytes
        self._generation = 0
        self._pool: PoolInfo | None = None
        self._pool_fd = -1
        self._callbacks: list[Callable[[PoolInfo | None], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._slots = SlotAllocator(self._pool_bytes)
        self._objects: OrderedDict[ObjectRef, _Object] = OrderedDict()  # oldest use first
        self._condemned = 0
        self._holds: dict[int, _Object] = {}
        self._reservations: dict[int, tuple[ObjectRef, Slot]] = {}
        self._writing: set[bytes] = set()
        self._counters = _Counters()
        self._next_id = self._generation << _ID_BITS

    async def start(self) -> None:
        """Create the pool; raises ``StorageUnavailable`` if shared memory has no room for it."""
        if self._pool is not None:
            return
        reaped = reap_dead_pools(POOL_PREFIX)
        if reaped:
            _log.info("dead_pools_reaped", count=len(reaped))
        name = POOL_PREFIX + secrets.token_hex(16)
        try:
            self._pool_fd = create_pool(name, self._pool_bytes)
        except PoolError as error:
            raise StorageUnavailable(str(error)) from error
        self._generation += 1
        self._reset()
        self._pool = PoolInfo(name, self._pool_bytes, ALIGN_BYTES, self._generation)
        self._announce()

    async def stop(self, drain_s: float) -> None:
        """Remove the pool and forget everything. There is nothing to drain. Idempotent."""
        del drain_s
        if self._pool is None:
            return
        name, self._pool = self._pool.name, None
        self._reset()
        unlink_pool(name)
        os.close(self._pool_fd)
        self._announce()

    @property
    def pool(self) -> PoolInfo | None:
        """The live pool, or None before start and after stop."""
        return self._pool

    @property
    def has_l2(self) -> bool:
        """Nothing lies behind this pool."""
        return False

    def on_generation(self, callback: Callable[[PoolInfo | None], None]) -> None:
        """Call ``callback`` when the pool comes up or goes away."""
        self._callbacks.append(callback)

    async def probe(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[bool | None]:
        """Existence of each object; always known here."""
        del deadline_s
        self._require(refs)
        return [ref in self._objects for ref in refs]

    async def acquire(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        """Hold each object that exists."""
        del deadline_s
        self._require(refs)
        return [self._hold(ref) for ref in refs]

    async def release(self, holds: Sequence[int]) -> None:
        """Give holds back; unknown ones are counted."""
        for hold in holds:
            held = self._holds.pop(hold, None)
            if held is None:
                self._counters.unknown_releases += 1
                continue
            held.holds -= 1
            if held.condemned and held.holds == 0:
                self._condemned -= 1
                self._slots.free(held.slot.offset)

    async def reserve(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Reservation | Refusal]:
        """Open a write for each object, evicting the least recently used un-held objects if room is needed."""
        del deadline_s
        self._require(refs)
        return [self._reserve(ref) for ref in refs]

    async def commit(self, reservations: Sequence[int], deadline_s: float) -> list[bool]:
        """Make written objects visible."""
        del deadline_s
        self._require(())
        return [self._commit(reservation) for reservation in reservations]

    async def abort(self, reservations: Sequence[int], deadline_s: float) -> None:
        """Drop open writes; unknown ones are ignored."""
        del deadline_s
        self._require(())
        for reservation in reservations:
            opened = self._reservations.pop(reservation, None)
            if opened is not None:
                ref, slot = opened
                self._writing.discard(ref.address)
                self._slots.free(slot.offset)

    async def delete(self, refs: Sequence[ObjectRef], deadline_s: float) -> None:
        """Remove objects: from lookup now, from memory when nobody holds them."""
        del deadline_s
        self._require(refs)
        for ref in refs:
            known = self._objects.pop(ref, None)
            if known is None:
                continue
            if known.holds:
                known.condemned = True
                self._condemned += 1
            else:
                self._slots.free(known.slot.offset)

    async def status(self, deadline_s: float) -> Mapping[str, int | str]:
        """Counters of this backend."""
        del deadline_s
        return {
            "backend": "memory",
            "generation": self._generation,
            "pool_bytes": self._pool_bytes,
            "pool_used_bytes": self._slots.used_bytes,
            "objects": len(self._objects),
            "condemned_objects": self._condemned,
            "holds": len(self._holds),
            "reservations": len(self._reservations),
            "evicted_objects": self._counters.evicted,
            "refused_full": self._counters.refused_full,
            "unknown_releases": self._counters.unknown_releases,
            "unknown_commits": self._counters.unknown_commits,
            "l2_pending_objects": 0,
        }

    def _require(self, refs: Sequence[ObjectRef]) -> None:
        if self._pool is None:
            raise StorageUnavailable("the storage backend is not running")
        check_refs(refs)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _hold(self, ref: ObjectRef) -> Held | None:
        known = self._objects.get(ref)
        if known is None:
            return None
        self._objects.move_to_end(ref)
        known.holds += 1
        hold = self._new_id()
        self._holds[hold] = known
        return Held(hold, known.slot, "l1")

    def _reserve(self, ref: ObjectRef) -> Reservation | Refusal:
        if ref.address in self._writing:
            return Refusal.BUSY
        if ref in self._objects:
            return Refusal.RESIDENT
        offset = self._make_room(ref.object_bytes)
        if offset is None:
            self._counters.refused_full += 1
            return Refusal.FULL
        slot = Slot(offset, ref.object_bytes)
        reservation = self._new_id()
        self._reservations[reservation] = (ref, slot)
        self._writing.add(ref.address)
        return Reservation(reservation, slot)

    def _make_room(self, object_bytes: int) -> int | None:
        offset = self._slots.allocate(object_bytes)
        if offset is not None:
            return offset
        oldest = next((ref for ref, known in self._objects.items() if not known.holds), None)
        if oldest is None:
            return None
        if aligned(oldest.object_bytes) < aligned(object_bytes):
            free_to_go = {known.slot.offset for known in self._objects.values() if not known.holds}
            if not self._slots.fits_without(object_bytes, free_to_go):
                return None  # evicting everything would not help: evict nothing
        while (offset := self._slots.allocate(object_bytes)) is None:
            self._evict(next(ref for ref, known in self._objects.items() if not known.holds))
        return offset

    def _evict(self, ref: ObjectRef) -> None:
        self._slots.free(self._objects.pop(ref).slot.offset)
        self._counters.evicted += 1

    def _commit(self, reservation: int) -> bool:
        opened = self._reservations.pop(reservation, None)
        if opened is None:
            self._counters.unknown_commits += 1
            return False
        ref, slot = opened
        self._writing.discard(ref.address)
        self._objects[ref] = _Object(slot)
        return True

    def _announce(self) -> None:
        for callback in self._callbacks:
            try:
                callback(self._pool)
            except Exception:  # noqa: BLE001  # a subscriber's bug must not stop the backend; it is logged
                _log.exception("generation_callback_failed")
