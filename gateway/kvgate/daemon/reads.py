"""The read path: acquire, load. A hit is a chunk whose every shard is held and whose every envelope vouches for it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import Final

import structlog

from kvgate.daemon.background import end_tasks
from kvgate.daemon.errors import Refused
from kvgate.daemon.explain import Explainer
from kvgate.daemon.leases import HeldChunk, Lease, LeaseTable, Place
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.pool_view import PoolView
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.probes import Probes
from kvgate.daemon.shards import refs_in
from kvgate.protocol.messages import LoadPlan, PayloadSlot
from kvgate.storage.backend import Held, ObjectRef, StorageBackend, StorageUnavailable
from kvgate.storage.envelope import ENVELOPE_BYTES, EnvelopeError, payload_digest_of

log = structlog.get_logger(__name__)

BATCH_CHUNKS: Final = 64
"""Chunks acquired by one storage call: long enough to be quick, short enough to keep the loop free between two."""
BATCHES_AHEAD: Final = 2
"""Of one acquire that storage is asked for at a time."""
MAX_OPEN_LOADS: Final = 4096
MAX_SESSION_LOADS: Final = 256
"""Of one connection: a worker has a few, and one that closes none must not keep all others from loading."""
LATE_SHARE: Final = 0.05
"""Storage that took all but this share of an acquire's time ran into its deadline."""


@dataclass(eq=False)
class OpenLoad:
    """A load a worker is copying from: its lease's holds stay until it is closed."""

    session: int
    lease: Lease
    generation: int
    chunks: dict[int, tuple[int, bytes]]  # chunk index → (rectangle, payload digest)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks up to ``end``, or to ``last`` where a bad one ends them: storage is asked for ``refs`` of ``wanted``, the rest is held."""

    place: Place
    end: int
    last: int
    wanted: list[int]
    refs: list[list[ObjectRef]]
    generation: int
    got: asyncio.Task[list[Held | None]]


class Reads:
    """Holding and handing out stored chunks."""

    def __init__(
        self,
        backend: StorageBackend,
        pool: PoolView,
        presence: PresenceIndex,
        leases: LeaseTable,
        explainer: Explainer,
        envelope_keys: tuple[bytes, ...],
        metrics: Metrics,
        *,
        probe_s: float,
        storage_s: float,
    ) -> None:
        self.probes = Probes(backend, presence, explainer, envelope_keys, metrics, probe_s)
        self._backend = backend
        self._pool = pool
        self._presence = presence
        self._leases = leases
        self._explainer = explainer
        self._metrics = metrics
        self._storage_s = storage_s
        self._loads: dict[int, OpenLoad] = {}
        self._loads_of: Counter[int] = Counter()  # by session
        self._tickets = count(1)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def open_loads(self) -> int:
        """How many loads are being copied."""
        return len(self._loads)

    async def acquire(self, lease: Lease, first: int, last: int, deadline_s: float) -> int:
        """Hold chunks ``[first, end)`` and return ``end``. Idempotent; what is held already is kept."""
        if last > len(lease.chunks) or first > last:
            raise Refused("denied", f"the lease knows {len(lease.chunks)} chunks", field="last")
        lease.registration.require_sealed()
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        end = first
        try:
            async with asyncio.timeout_at(until):
                await lease.lock.acquire()
        except TimeoutError:
            lease.unanswered = True
            self._metrics.deadlines.labels("acquire").inc()
            self._explainer.missed(lease, end)
            return end
        try:
            stop = min(last, await self._believed(lease, until - loop.time()))
            end, complete = await self._acquire_all(lease, first, stop, until)
            if not complete and loop.time() >= until - LATE_SHARE * deadline_s:
                self._doubt(lease)
        finally:
            lease.lock.release()
        lease.registration.require_sealed()
        if lease.released:
            return first
        if end < last:
            self._explainer.missed(lease, end)
        return end

    def _doubt(self, lease: Lease) -> None:
        """Storage failed or was late: what it did not give may be there, though the index no longer lists it."""
        lease.unanswered = True
        self._presence.doubt()

    async def _believed(self, lease: Lease, wait_s: float) -> int:
        """How many chunks from the first are worth asking storage for, once the probe has ended or the wait is over."""
        probe = lease.probe
        if probe is not None:
            await asyncio.wait({probe}, timeout=max(0.0, wait_s))
            lease.unanswered |= not probe.done()
            if probe.done() and not probe.cancelled():
                return max(probe.result(), self.probes.present(lease))
        return self.probes.present(lease)

    def _next_batch(self, lease: Lease, first: int, last: int) -> tuple[Place, int]:
        """The place that is believed to have chunk ``first``, and the end of what it has of ``[first, last)``."""
        own = self.probes.own(lease)
        if not lease.earlier:
            return own, last
        for place in (own, *lease.earlier.values()):
            end = first
            while end < last and self.probes.believed_in(lease, place, end):
                end += 1
            if end > first:
                return place, end
        return own, last

    async def _acquire_all(self, lease: Lease, end: int, stop: int, until: float) -> tuple[int, bool]:
        """Hold chunks from ``end`` on; where they end, and whether storage gave all that it was asked for.

        While the answer about some is looked at, storage is busy with the next ones.
        """
        asked: deque[_Batch] = deque()
        try:
            while True:
                while len(asked) < BATCHES_AHEAD and (begin := asked[-1].end if asked else end) < stop and not lease.released:
                    asked.append(self._ask(lease, begin, stop, until))
                    await asyncio.sleep(0)  # it is sent before the next are made up
                if not asked:
                    return end, True
                batch = asked[0]
                got = await batch.got
                asked.popleft()
                end = await self._take(lease, batch, got)
                if end < batch.end:
                    return end, False
        except StorageUnavailable:
            self._doubt(lease)
            self._metrics.storage_faults.labels("acquire").inc()
            return end, False
        finally:
            for batch in asked:
                self._drop_later(batch.got)

    def _ask(self, lease: Lease, first: int, stop: int, until: float) -> _Batch:
        """Ask storage for the next chunks. Its call ends by its own deadline: cancelling it from here could leave holds behind."""
        place, end = self._next_batch(lease, first, min(stop, first + BATCH_CHUNKS))
        last = next((index for index in range(first, end) if index in lease.held and not lease.usable(index)), end)
        wanted = [index for index in range(first, last) if index not in lease.held]
        refs = [refs_in(lease, place, index) for index in wanted]
        deadline_s = max(0.001, until - asyncio.get_running_loop().time())
        got = asyncio.create_task(self._held([ref for row in refs for ref in row], deadline_s))
        return _Batch(place, end, last, wanted, refs, self._pool.generation, got)

    async def _held(self, refs: list[ObjectRef], deadline_s: float) -> list[Held | None]:
        return await self._backend.acquire(refs, deadline_s) if refs else []

    async def _take(self, lease: Lease, batch: _Batch, got: list[Held | None]) -> int:
        """Keep what is whole and good of it, up to the first chunk that is not; where that is."""
        place, wide, broken = batch.place, lease.rectangles, batch.last
        spare: list[Held] = []
        tiers: dict[str, int] = {}
        for at, index in enumerate(batch.wanted):
            holds = got[at * wide : (at + 1) * wide]
            usable = index < broken and not lease.released and batch.generation == self._pool.generation
            digests = self._vouched(lease, place, index, batch.refs[at], holds) if usable else None
            if digests is None:
                broken = min(broken, index)
                spare.extend(hold for hold in holds if hold is not None)
            else:
                taken = tuple(hold for hold in holds if hold is not None)
                lease.held[index] = HeldChunk(taken, digests, place)
                if place.chunks is not lease.chunks:
                    self._metrics.earlier_chunks.inc()
                for hold in taken:
                    tiers[hold.tier] = tiers.get(hold.tier, 0) + 1
        for tier, shards in tiers.items():
            self._metrics.acquired.labels(tier).inc(shards)
        await self._give_back([hold.hold for hold in spare])
        return broken

    def _drop_later(self, got: asyncio.Task[list[Held | None]]) -> None:
        """Nobody wants this answer any more: give back what it holds."""

        async def drop() -> None:
            try:
                held = await got
            except StorageUnavailable:
                return  # nothing was given
            await self._give_back([hold.hold for hold in held if hold is not None])

        task = asyncio.create_task(drop())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _vouched(
        self, lease: Lease, place: Place, index: int, refs: list[ObjectRef], holds: list[Held | None]
    ) -> tuple[bytes, ...] | None:
        """The payload digests of one chunk's shards where all are there and all envelopes are good; None is a miss."""
        digests = []
        for rectangle, (hold, ref) in enumerate(zip(holds, refs, strict=True)):
            if hold is None:
                self._presence.discard(place.chunks[index], rectangle)
                return None
            try:
                header = self._pool.read_header(hold.slot)
                payload_bytes = ref.object_bytes - ENVELOPE_BYTES
                digests.append(payload_digest_of(place.envelope_keys, header, ref.address, payload_bytes))
            except EnvelopeError as error:
                log.error("envelope.refused", reason=str(error), tier=hold.tier)
                self._quarantine(lease, place, index, rectangle, f"envelope_{error}")
                return None
        return tuple(digests)

    def plan_load(self, session: int, lease: Lease, rectangle: int, chunks: tuple[int, ...]) -> LoadPlan:
        """Where the payloads of acquired ``chunks`` lie for the worker that holds ``rectangle``."""
        info = self._pool.info
        if lease.released:
            raise Refused("denied", "the lease is released", field="lease", remedy="bind again")
        if len(self._loads) >= MAX_OPEN_LOADS or self._loads_of.get(session, 0) >= MAX_SESSION_LOADS:
            raise Refused("busy", "too many loads are open", remedy="finish some first")
        slots, opened = [], {}
        for index in chunks:
            held = lease.usable(index)
            if held is None:
                raise Refused("denied", "the lease does not hold a chunk", field="chunks", remedy="acquire it first")
            slot, digest = held.holds[rectangle].slot, held.payload_digests[rectangle]
            opened[index] = (rectangle, digest)
            slots.append(
                PayloadSlot(
                    chunk=index,
                    offset=slot.offset + ENVELOPE_BYTES,
                    length=slot.object_bytes - ENVELOPE_BYTES,
                    digest=digest,
                )
            )
        ticket = next(self._tickets)
        self._loads[ticket] = OpenLoad(session, lease, info.generation, opened)
        self._loads_of[session] += 1
        lease.open_loads += 1
        return LoadPlan(ticket=ticket, pool=info.name, pool_bytes=info.pool_bytes, slots=tuple(slots))

    async def finish_load(self, session: int, ticket: int, mismatched: tuple[int, ...]) -> bool:
        """Close a load. True: the holds lasted through the whole copy and the registration still stands."""
        valid, idle = self.settle_load(session, ticket, mismatched)
        if idle is not None:
            await self.free(idle)
        return valid

    def settle_load(self, session: int, ticket: int, mismatched: tuple[int, ...]) -> tuple[bool, Lease | None]:
        """``finish_load`` but for what may wait: the lease that is left to be freed, if one is."""
        load = self._loads.get(ticket)
        if load is None or load.session != session:
            return False, None
        if not load.chunks.keys() >= set(mismatched):
            # The load stays open: whoever sent this can still close it, and a lost connection does.
            raise Refused("malformed", "names a chunk that was not loaded", field="mismatched")
        del self._loads[ticket]
        for index in set(mismatched):
            log.error("payload.mismatch", chunk_index=index)
            self.quarantine(load.lease, index, load.chunks[index][0], "payload_digest")
        if mismatched:
            self._explainer.missed(load.lease, min(mismatched))
        valid = load.generation == self._pool.generation and load.lease.registration.sealed
        self._metrics.loads.labels("good" if valid and not mismatched else "bad").inc(len(load.chunks))
        return valid, load.lease if self._closed(load) else None

    async def release(self, lease: Lease) -> None:
        """Give everything back that ``lease`` holds; loads under way keep it until they are closed. Once, then nothing."""
        if self._retire(lease) and lease.open_loads == 0:
            await self.free(lease)

    async def drop_session(self, session: int) -> None:
        """A connection is lost: its loads are closed, its leases released."""
        for ticket, load in list(self._loads.items()):
            if load.session == session:
                del self._loads[ticket]
                if self._closed(load):
                    await self.free(load.lease)
        leases = [lease for lease in self._leases.of_session(session) if self._retire(lease)]
        # Idle ones first: one that waits for storage must not hold up the rest.
        for lease in sorted(leases, key=lambda lease: lease.lock.locked()):
            if lease.open_loads == 0:
                await self.free(lease)

    def _retire(self, lease: Lease) -> bool:
        """Nothing more is taken under ``lease``; False where that was so already."""
        if lease.released:
            return False
        lease.released = True
        if lease.probe is not None:
            lease.probe.cancel()
        return True

    def void(self) -> None:
        """The pool is gone: no hold of it means anything any more."""
        self._presence.clear()
        for lease in self._leases:
            lease.held.clear()

    async def close(self) -> None:
        """End what still runs in the background."""
        await end_tasks(self._background)

    def quarantine(self, lease: Lease, index: int, rectangle: int, why: str) -> None:
        """Hand out no more, and remove, an object that is not what its address says, from every tier, in the background."""
        held = lease.held.get(index)
        if held is not None:
            held.quarantined = True
        self._quarantine(lease, self.probes.own(lease) if held is None else held.place, index, rectangle, why)

    def _quarantine(self, lease: Lease, place: Place, index: int, rectangle: int, why: str) -> None:
        self._metrics.quarantined.labels(why).inc()
        self._presence.discard(place.chunks[index], rectangle)
        self._explainer.refused(place.chunks[index], why)
        ref = refs_in(lease, place, index)[rectangle]
        task = asyncio.create_task(self._delete(ref))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _delete(self, ref: ObjectRef) -> None:
        try:
            await self._backend.delete([ref], self._storage_s)
        except StorageUnavailable:
            # It stays refused at every acquire: the envelope or the digest is checked each time.
            self._metrics.storage_faults.labels("delete").inc()

    def _closed(self, load: OpenLoad) -> bool:
        """Note that a load is closed; whether its lease was waiting for that, and is to be freed."""
        self._loads_of[load.session] -= 1
        if not self._loads_of[load.session]:
            del self._loads_of[load.session]
        load.lease.open_loads -= 1
        return load.lease.released and load.lease.open_loads == 0

    async def free(self, lease: Lease) -> None:
        """Give back what a retired lease without open loads holds."""
        async with lease.lock:
            holds = [hold.hold for chunk in lease.held.values() for hold in chunk.holds]
            lease.held.clear()
            self._leases.remove(lease)
        await self._give_back(holds)

    async def _give_back(self, holds: list[int]) -> None:
        if not holds:
            return
        try:
            await self._backend.release(holds)
        except StorageUnavailable:
            # Nothing else is to be done about them: they end with their pool.
            self._metrics.storage_faults.labels("release").inc()
            log.warning("release.failed", holds=len(holds))
