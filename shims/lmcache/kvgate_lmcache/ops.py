"""The operations of the storage interface on an embedded StorageManager.

LMCache's L1 has the pieces (staging objects nobody sees, read locks that keep an object in place); this adds what the
interface promises beyond them: ids that are given back exactly once, one writer for an address at a time, no fetch of what
is being written or was deleted, objects that vanish from lookup at once although a reader still holds them, and room made
when it is needed instead of once a second.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.v1.distributed.error import L1Error

from kvgate.storage.backend import ObjectRef
from kvgate.storage.lmcache_wire import Grant, ProbeCode, ReserveCode, TierCode
from kvgate.storage.slots import aligned

from .adapters import L2Adapters
from .clock import Deadline
from .deletion import Deletions
from .fetch import Fetcher
from .internals import Internals
from .keys import layout, object_key
from .lookup import L2Lookup
from .tiers import Tiers
from .watch import L2Watch

_NOTHING: Grant = (0, 0, TierCode.ABSENT)
# Evict at least this share of the objects when room is made, so that not every reservation has to.
_MIN_EVICTION = 0.02


@dataclass(frozen=True, slots=True)
class _Write:
    """An open reservation. LMCache knows it by key and ``tag``, which no other reservation of that key ever has."""

    ref: ObjectRef
    key: Any
    tag: str


@dataclass(slots=True)
class _Counters:
    evicted: int = 0
    refused_full: int = 0
    unknown_releases: int = 0
    unknown_commits: int = 0
    lost_holds: int = 0


class StorageOps:
    """All operations. Thread-safe; ``fetch``, ``probe_l2``, ``delete`` and ``drain`` may block until their deadline."""

    def __init__(self, manager: Any, internals: Internals, pool_bytes: int, l2_configs: Sequence[tuple[str, Any]]) -> None:
        """Opens the L2 adapters ``l2_configs`` (type name and LMCache configuration); raises ``HostingError``."""
        self._internals = internals
        self._l1 = internals.l1
        self._pool_bytes = pool_bytes
        self._lock = threading.RLock()
        self._next_id = 0
        self._holds: dict[int, Any] = {}
        self._writes: dict[int, _Write] = {}
        self._writing: set[bytes] = set()
        self._counters = _Counters()
        self.late = threading.Event()  # set when a call left something to ``sweep``
        self.has_l2 = bool(l2_configs)
        self.watch = L2Watch()
        self.watch.expected = self.has_l2
        self.watch.attach(self._l1, internals.store_controller)
        self._adapters = L2Adapters(manager, l2_configs, lambda live: self.watch.attach_adapter(live.adapter, live.damaged))
        self._adapters.on_gone(lambda live: self.watch.forget_adapter(live.adapter))
        self._lookup = L2Lookup(self._adapters, self.watch.damaged)
        self._fetcher = Fetcher(manager, self._l1, self._lock, pool_bytes)
        self.deletions = Deletions(self._l1, self._adapters, self._lookup, self.watch, self._fetcher, self._lock)
        self.tiers = Tiers(self._l1, self._adapters, self._lookup, self.watch, self._fetcher)
        self.watch.on_change = self.deletions.kick
        self._adapters.open()

    def reserve(self, refs: Sequence[ObjectRef]) -> list[Grant]:
        """Open a write for each ref: (reservation, offset, GRANTED) or (0, 0, why not)."""
        grants: list[Grant] = [(0, 0, ReserveCode.BUSY)] * len(refs)
        by_size: dict[int, list[tuple[int, _Write]]] = defaultdict(list)
        with self._lock:
            self._next_id += 1
            tag = f"kvgate:{self._next_id}"
            for place, ref in enumerate(refs):
                key = object_key(ref)
                if ref.address in self._writing or self.deletions.hides(key) or self._fetcher.fetching(key):
                    continue
                self._writing.add(ref.address)
                by_size[ref.object_bytes].append((place, _Write(ref, key, tag)))
        for object_bytes, entries in by_size.items():
            results = self._reserve_in_l1([write.key for _, write in entries], object_bytes, tag)
            with self._lock:
                for place, write in entries:
                    grants[place] = self._granted(write, *results[write.key])
        return grants

    def commit(self, reservations: Sequence[int]) -> bytes:
        """Make written objects visible: 1, or 0 for a reservation that is not open."""
        writes = self._take_writes(reservations)
        self._counters.unknown_commits += sum(write is None for write in writes)
        done = self._close(writes, self._l1.finish_write)
        return bytes(write is not None and write.key in done for write in writes)

    def abort(self, reservations: Sequence[int]) -> None:
        """Drop open writes."""
        self._close(self._take_writes(reservations), self._l1.finish_write_and_delete)

    def acquire_l1(self, refs: Sequence[ObjectRef]) -> list[Grant]:
        """Hold what is in L1: (hold, offset, L1) or ABSENT."""
        keys = [object_key(ref) for ref in refs]
        with self._lock:
            keys = [None if self.deletions.hides(key) else key for key in keys]
        return self._hold(keys, TierCode.L1)

    def fetch(self, refs: Sequence[ObjectRef], deadline: Deadline) -> list[Grant]:
        """Bring objects from L2 and hold them: (hold, offset, L2) or ABSENT. Blocks."""
        if not self.has_l2:
            return [_NOTHING] * len(refs)
        absent = self._lookup.absent_in_folders(refs, deadline) | self._lookup.unsafe_to_fetch(refs, deadline)
        keys = [None if place in absent else object_key(ref) for place, ref in enumerate(refs)]
        items = list({key: (ref, key) for ref, key in zip(refs, keys, strict=True) if key is not None}.values())
        if not items:
            return [_NOTHING] * len(refs)
        locked = self._fetcher.fetch(items, self._may_fetch, self._make_room, deadline)
        if self._fetcher.abandoned:
            self.late.set()
        if not locked:
            return [_NOTHING] * len(refs)
        grants = self._hold([key if key in locked else None for key in keys], TierCode.L2)
        self._l1.finish_read(list(locked))  # the fetch's own locks; each hold has its own now
        return grants

    def release(self, holds: Sequence[int]) -> None:
        """Give holds back; unknown ones are counted."""
        with self._lock:
            keys = [key for hold in holds if (key := self._holds.pop(hold, None)) is not None]
            self._counters.unknown_releases += len(holds) - len(keys)
        if keys:
            results = self._l1.finish_read(keys)
            lost = sum(error != L1Error.SUCCESS for error in results.values())
            with self._lock:
                self._counters.lost_holds += lost
            self.deletions.kick()

    def probe_l1(self, refs: Sequence[ObjectRef]) -> bytearray:
        """Existence as far as L1 knows: PRESENT, ABSENT, or UNKNOWN where L2 must be asked."""
        unknown = ProbeCode.UNKNOWN if self.has_l2 else ProbeCode.ABSENT
        answers = bytearray()
        with self._lock:
            for ref in refs:
                key = object_key(ref)
                if self.deletions.hides(key):
                    answers.append(ProbeCode.ABSENT)
                else:
                    answers.append(ProbeCode.PRESENT if self._internals.resident(key) else unknown)
        return answers

    def probe_l2(self, refs: Sequence[ObjectRef], deadline: Deadline) -> bytes:
        """Existence in L2, one ``ProbeCode`` each. Blocks."""
        codes = {True: ProbeCode.PRESENT, False: ProbeCode.ABSENT, None: ProbeCode.UNKNOWN}
        answers = [codes[found] for found in self._lookup.exists(refs, deadline)]
        if self._lookup.abandoned:
            self.late.set()
        with self._lock:
            return bytes(
                ProbeCode.ABSENT if self.deletions.hides(object_key(ref)) else answer
                for ref, answer in zip(refs, answers, strict=True)
            )

    def delete(self, refs: Sequence[ObjectRef], deadline: Deadline) -> str:
        """Remove objects everywhere; '' or what could not be confirmed. Blocks."""
        return self.deletions.delete(refs, self._writing, deadline)

    def drain(self, deadline: Deadline) -> bool:
        """Wait until no object is on its way to L2; False if the deadline came first."""
        self._adapters.close()
        return self.watch.wait_idle(None, deadline)

    def status(self) -> dict[str, int | str]:
        """Flat counters."""
        used_bytes, total_bytes = self._l1.get_memory_usage()
        return {
            "backend": "lmcache",
            "pool_bytes": total_bytes,
            "pool_used_bytes": used_bytes,
            "objects": self._internals.resident_count(),
            "condemned_objects": self.deletions.count,
            "holds": len(self._holds),
            "reservations": len(self._writes),
            "evicted_objects": self._counters.evicted,
            "refused_full": self._counters.refused_full,
            "unknown_releases": self._counters.unknown_releases,
            "unknown_commits": self._counters.unknown_commits,
            "lost_holds": self._counters.lost_holds,
            "l2_adapters": self._adapters.configured,
            "l2_adapters_away": self._adapters.away,
            "l2_adapter_errors": self._adapters.errors,
            "l2_adapter_renewals": self._adapters.renewals,
            "l2_pending_objects": self.watch.pending_count(),
            "l2_stored_objects": self.watch.stored_objects,
            "l2_store_failed_objects": self.watch.failed_objects,
            "l2_store_lost_objects": self.watch.lost_objects,
            "l2_load_failed_objects": self.watch.load_failed_objects,
            "l2_abandoned_reads": self._fetcher.abandoned + self._lookup.abandoned,
        }

    def sweep(self) -> bool:
        """Take the answers of L2 that came too late for their callers; whether some are still to come."""
        fetches = self._fetcher.sweep()
        return self._lookup.sweep() or fetches

    def _may_fetch(self, ref: ObjectRef, key: Any) -> bool:
        return ref.address not in self._writing and not self.deletions.hides(key)

    def _granted(self, write: _Write, error: Any, memory: Any) -> Grant:
        if memory is None:
            self._writing.discard(write.ref.address)
            if error == L1Error.KEY_NOT_WRITABLE:
                return (0, 0, ReserveCode.RESIDENT)
            self._counters.refused_full += 1
            return (0, 0, ReserveCode.FULL)
        self._next_id += 1
        self._writes[self._next_id] = write
        return (self._next_id, memory.shm_offset, ReserveCode.GRANTED)

    def _take_writes(self, reservations: Sequence[int]) -> list[_Write | None]:
        with self._lock:
            return [self._writes.pop(reservation, None) for reservation in reservations]

    def _close(self, writes: Sequence[_Write | None], finish: Any) -> set[Any]:
        """Finish writes with ``finish``; the keys it accepted. Only then may the address be written again."""
        by_tag: dict[str, list[_Write]] = defaultdict(list)
        for write in writes:
            if write is not None:
                by_tag[write.tag].append(write)
        done: set[Any] = set()
        for tag, group in by_tag.items():
            results = finish([write.key for write in group], tag=tag)
            done.update(key for key, error in results.items() if error == L1Error.SUCCESS)
            with self._lock:
                self._writing.difference_update(write.ref.address for write in group)
        return done

    def _hold(self, keys: Sequence[Any], tier: TierCode) -> list[Grant]:
        """Read-lock each key that is resident and not hidden, one lock per occurrence, and give it a hold."""
        wanted = [key for key in keys if key is not None]
        if not wanted:
            return [_NOTHING] * len(keys)
        results = self._l1.reserve_read(wanted)
        grants: list[Grant] = []
        hidden: list[Any] = []
        with self._lock:
            for key in keys:
                memory = None if key is None else results[key][1]
                if memory is None:
                    grants.append(_NOTHING)
                elif self.deletions.hides(key):
                    hidden.append(key)
                    grants.append(_NOTHING)
                else:
                    self._next_id += 1
                    self._holds[self._next_id] = key
                    grants.append((self._next_id, memory.shm_offset, tier))
        if hidden:
            self._l1.finish_read(hidden)
        self._l1.touch_keys([key for key, grant in zip(keys, grants, strict=True) if grant[2] != TierCode.ABSENT])
        return grants

    def _reserve_in_l1(self, keys: list[Any], object_bytes: int, tag: str) -> dict[Any, tuple[Any, Any]]:
        """LMCache's answer per key. It allocates all or nothing, so what does not fit together is tried one by one."""
        if aligned(object_bytes) > self._pool_bytes:
            return dict.fromkeys(keys, (L1Error.OUT_OF_MEMORY, None))
        # Before asking: a full pool would refuse, and be asked again.
        self._make_room(aligned(object_bytes) * sum(not self._internals.resident(key) for key in keys))
        results: dict[Any, tuple[Any, Any]] = self._ask_l1(keys, object_bytes, tag)
        while full := _out_of_memory(results):
            if not self._evict(aligned(object_bytes) * len(full)):
                break
            results.update(self._ask_l1(full, object_bytes, tag))
        if len(full) > 1:
            for key in full:
                results.update(self._ask_l1([key], object_bytes, tag))
        return results

    def _ask_l1(self, keys: list[Any], object_bytes: int, tag: str) -> dict[Any, tuple[Any, Any]]:
        answer: dict[Any, tuple[Any, Any]] = self._l1.reserve_write(keys, [False] * len(keys), layout(object_bytes), tag=tag)
        return answer

    def _make_room(self, need_bytes: int) -> None:
        """Evict until ``need_bytes`` are free, or nothing more can go."""
        while True:
            used_bytes, total_bytes = self._l1.get_memory_usage()
            missing = min(need_bytes, total_bytes) - (total_bytes - used_bytes)
            if missing <= 0 or not self._evict(missing):
                return

    def _evict(self, need_bytes: int) -> int:
        """Evict some of the least recently used objects that nobody holds and that L2 has; how many."""
        used_bytes, _ = self._l1.get_memory_usage()
        objects = max(1, self._internals.resident_count())
        # LMCache rounds a share of its objects down; as many as hold so many bytes on average must go, or this is done twice.
        wanted = math.ceil(need_bytes * objects / max(1, used_bytes)) + 0.5
        share = min(1.0, max(_MIN_EVICTION, wanted / objects))
        actions = self._internals.eviction_policy.get_eviction_actions(share, key_eligible_filter=self._evictable)
        evicted = 0
        for action in actions:
            results = self._l1.delete(action.keys)
            evicted += sum(error == L1Error.SUCCESS for error in results.values())
        with self._lock:
            self._counters.evicted += evicted
        return evicted

    def _evictable(self, key: Any) -> bool:
        return bool(self._l1.is_key_evictable(key)) and not self.watch.pending(key)


def _out_of_memory(results: dict[Any, tuple[Any, Any]]) -> list[Any]:
    return [key for key, (error, _) in results.items() if error == L1Error.OUT_OF_MEMORY]
