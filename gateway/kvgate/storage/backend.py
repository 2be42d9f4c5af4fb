"""The storage interface: what the daemon asks of a backend, and all it may assume.

A backend keeps *objects*: opaque byte strings named by a 32-byte address, each of one exact length. It owns an L1 pool in
shared memory, in which workers read and write objects in place, and it may have tiers behind that pool (L2). It knows nothing
of tokens, models, tenants or envelopes.

Rules every backend obeys (the conformance suite in ``tests/storage`` runs each of them on each backend):

* An object is visible to ``probe`` and ``acquire`` only after its ``commit`` returned ``True``; then with exactly the bytes
  that lay in its slot at that moment.
* A slot belongs to one open reservation, or to one committed object, or to nobody. A slot whose reservation is open is given to
  nobody else, however long it stays open; only ``commit``, ``abort`` or the end of the storage process close it.
* A slot under a read hold is neither moved, overwritten nor evicted until every hold on it is released.
* An object is asked for by address *and* exact length. Another length under the same address is absent, never truncated or padded.
* Each call ends by its deadline. Backend faults raise ``StorageUnavailable``; an absent or refused object is a value, not an error.
* When the process that owns the pool dies, ``generation`` changes: all slots, reservations and holds of the old one are void.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class StorageUnavailable(Exception):
    """The backend cannot answer now (process gone, deadline passed). Callers treat it as a miss or skip the store."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Names one object: 32-byte ``address``, exact ``object_bytes`` (envelope included), 32-byte opaque ``domain`` for quotas."""

    address: bytes
    object_bytes: int
    domain: bytes


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The L1 pool: POSIX shared memory ``/dev/shm/<name>`` of ``pool_bytes``; slots start at multiples of ``align_bytes``."""

    name: str
    pool_bytes: int
    align_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an object lies in the pool."""

    offset: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """An open write: ``reservation`` closes it (commit or abort); the slot's bytes are undefined until written."""

    reservation: int
    slot: Slot


class Refusal(Enum):
    """Why no slot was reserved."""

    RESIDENT = "resident"  # a committed object of that address and length is in L1 already
    BUSY = "busy"  # another reservation for that address is open
    FULL = "full"  # the pool has no room now; the caller skips the store


@dataclass(frozen=True, slots=True)
class Held:
    """A read hold on one committed object: the slot stays as it is until ``release``. ``tier`` is where it came from: "l1" or "l2"."""

    hold: int
    slot: Slot
    tier: str


class StorageBackend(Protocol):
    """One backend instance of the daemon. All methods run on the daemon's event loop and never block it."""

    async def start(self) -> None:
        """Bring the backend up; raises ``StorageUnavailable`` with the cause and the remedy when it cannot."""

    async def stop(self, drain_s: float) -> None:
        """Refuse new work, let pending L2 writes finish for up to ``drain_s``, end processes, remove the pool. Idempotent."""

    @property
    def pool(self) -> PoolInfo | None:
        """The live pool, or None while there is none (starting, or restarting after a crash)."""

    @property
    def has_l2(self) -> bool:
        """Whether objects may be found that did not come through ``commit`` of the live pool: tiers behind it, or other users of it."""

    def on_generation(self, callback: Callable[[PoolInfo | None], None]) -> None:
        """Call ``callback`` on the loop each time the pool is lost (None) or a new one is up."""

    async def probe(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[bool | None]:
        """Existence in any tier, in the order asked; no payload is read, nothing is pinned. None: not known by the deadline."""

    async def acquire(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        """Take a read hold on each object, bringing it to L1 first where needed. None: absent, or not there by the deadline.

        No hold is left behind for a None, also when the deadline passes while an L2 read is under way."""

    async def release(self, holds: Sequence[int]) -> None:
        """Give holds back. Each hold once; an unknown one (also of an older generation) is ignored and counted."""

    async def reserve(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Reservation | Refusal]:
        """Open a write for each object, or say why not. A duplicate address within one call is BUSY."""

    async def commit(self, reservations: Sequence[int], deadline_s: float) -> list[bool]:
        """Make written objects visible; False: the reservation is unknown or of an older generation, nothing became visible."""

    async def abort(self, reservations: Sequence[int], deadline_s: float) -> None:
        """Drop open writes; their slots are free again. The caller vouches that the writer no longer writes."""

    async def delete(self, refs: Sequence[ObjectRef], deadline_s: float) -> None:
        """Remove objects from every tier (quarantine, recall). Objects under a hold vanish from lookup now, from memory later."""

    async def status(self, deadline_s: float) -> Mapping[str, int | str]:
        """Flat counters for `/metrics` and `kvgate status`: used and total bytes, objects, holds, reservations, pending L2 writes, …"""
