"""The write path: reserve, then commit or abort. The envelope is written by the gateway; visible only after commit."""

from __future__ import annotations

import asyncio

import structlog

from kvgate.contract.digests import SCHEMA
from kvgate.daemon.background import end_tasks
from kvgate.daemon.errors import Refused
from kvgate.daemon.explain import Explainer
from kvgate.daemon.leases import Lease
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.pool_view import PoolView
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.shards import shard_ref
from kvgate.daemon.writers import OpenWrite, Writer, Writers
from kvgate.protocol.messages import Reserved, ReservedSlot, WrittenPayload
from kvgate.storage.backend import Refusal, Reservation, StorageBackend, StorageUnavailable
from kvgate.storage.envelope import ENVELOPE_BYTES, Envelope, seal

log = structlog.get_logger(__name__)


class Writes:
    """Reserving slots for workers and making what they wrote visible."""

    def __init__(
        self,
        backend: StorageBackend,
        pool: PoolView,
        presence: PresenceIndex,
        explainer: Explainer,
        envelope_key: bytes,
        metrics: Metrics,
        storage_s: float,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._presence = presence
        self._explainer = explainer
        self._envelope_key = envelope_key
        self._metrics = metrics
        self._storage_s = storage_s
        self._background: set[asyncio.Task[None]] = set()
        self.writers = Writers(self._writer_exited)

    async def reserve(
        self, writer: Writer, lease: Lease, rectangle: int, chunks: tuple[int, ...], *, session: int = 0
    ) -> Reserved:
        """Slots for this worker's shard of each chunk; what is resident already, busy or does not fit is skipped by name."""
        if lease.variant is not None and not lease.variant.writable:
            # A variant's own object may be what is asked for, and its bytes may not be what a worker has in its pages.
            raise Refused("denied", "nothing is stored under a restored variant", field="lease")
        addresses = [lease.chunk(index) for index in chunks]
        links = lease.links.first(max(chunks) + 1)
        refs = [shard_ref(lease.registration, chunk, rectangle, lease.domain) for chunk in addresses]
        info = self._pool.info
        with self.writers.room(writer, len(chunks)):
            got = await self._backend.reserve(refs, self._storage_s)
        slots = []
        counts: dict[str, int] = {}
        for index, chunk, ref, result in zip(chunks, addresses, refs, got, strict=True):
            status = result.value if isinstance(result, Refusal) else "slot"
            counts[status] = counts.get(status, 0) + 1
            if isinstance(result, Refusal):
                if result is Refusal.RESIDENT and not self._presence.whole(chunk, lease.rectangles):
                    self._presence.add(chunk, rectangle)
                    if self._presence.whole(chunk, lease.rectangles):
                        self._explainer.stored([(chunk, links[index], lease.components)])
                slots.append(ReservedSlot(chunk=index, status=status, reservation=0, offset=0, length=0))
                continue
            payload_bytes = ref.object_bytes - ENVELOPE_BYTES
            self.writers.add(
                writer,
                OpenWrite(
                    result.reservation,
                    result.slot,
                    lease.registration,
                    chunk,
                    rectangle,
                    ref.address,
                    payload_bytes,
                    lease.components,
                    links[index],
                    session,
                ),
            )
            slots.append(
                ReservedSlot(
                    chunk=index,
                    status=status,
                    reservation=result.reservation,
                    offset=result.slot.offset + ENVELOPE_BYTES,
                    length=payload_bytes,
                )
            )
        for status, shards in counts.items():
            self._metrics.reserved.labels(status).inc(shards)
        if writer.exited or info.generation != self._pool.generation:
            await self._undo(writer, got)
            raise StorageUnavailable("the pool changed while slots were reserved")
        return Reserved(pool=info.name, pool_bytes=info.pool_bytes, slots=tuple(slots))

    async def commit(self, writer: Writer, written: tuple[WrittenPayload, ...], aborted: tuple[int, ...]) -> int:
        """Seal and publish ``written``, drop ``aborted``; returns how many are visible now."""
        self.writers.require_open(writer, [item.reservation for item in written] + list(aborted))
        dropped = [self.writers.take(writer, reservation).reservation for reservation in aborted]
        ready: list[OpenWrite] = []
        for item in written:
            write = self.writers.take(writer, item.reservation)
            if write.registration.revoked:
                dropped.append(write.reservation)
                continue
            self._pool.write_header(write.slot, seal(self._envelope_key, self._envelope(write, item.digest)))
            ready.append(write)
        if dropped:
            await self._abort(dropped)
        if not ready:
            return 0
        try:
            done = await self._backend.commit([write.reservation for write in ready], self._storage_s)
        except StorageUnavailable:
            # Which of them became visible is unknown. Those that did not must not stay reserved for ever.
            self._metrics.storage_faults.labels("commit").inc()
            self._presence.doubt()
            self._abort_soon([write.reservation for write in ready])
            raise
        stored = [write for write, visible in zip(ready, done, strict=True) if visible]
        for write in stored:
            self._presence.add(write.chunk, write.rectangle)
        self._metrics.payload_bytes.labels("stored").inc(sum(write.payload_bytes for write in stored))
        self._explainer.stored(
            (write.chunk, write.link, write.components)
            for write in stored
            if self._presence.whole(write.chunk, len(write.registration.form.plan.rectangles))
        )
        self._metrics.committed.labels("visible").inc(sum(done))
        self._metrics.committed.labels("lost").inc(len(done) - sum(done))
        return sum(done)

    async def keep(self, writer: Writer, session: int, engine: bytes, rectangle: int, kept: frozenset[int]) -> None:
        """Drop what a rank reserved on connections before ``session``, but for ``kept``."""
        stale = [
            number
            for number, write in writer.writes.items()
            if 0 < write.session < session
            and (write.registration.engine, write.rectangle) == (engine, rectangle)
            and number not in kept
        ]
        if stale:
            log.info("writes.dropped", reservations=len(stale))
            await self.abandon(writer, stale)

    async def abandon(self, writer: Writer, reservations: list[int]) -> None:
        """Drop reservations that their writer never heard of."""
        known = [reservation for reservation in reservations if reservation in writer.writes]
        for reservation in known:
            self.writers.take(writer, reservation)
        if known:
            await self._abort(known)

    def void(self) -> None:
        """The pool is gone, and all reservations in it."""
        self.writers.void()

    @staticmethod
    def _envelope(write: OpenWrite, payload_digest: bytes) -> Envelope:
        return Envelope(
            schema=SCHEMA,
            address=write.address,
            payload_bytes=write.payload_bytes,
            payload_digest=payload_digest,
            components=write.components,
        )

    async def close(self) -> None:
        """Stop watching processes, and end what still runs in the background."""
        self.writers.close()
        await end_tasks(self._background)

    async def _undo(self, writer: Writer, got: list[Reservation | Refusal]) -> None:
        opened = [result.reservation for result in got if isinstance(result, Reservation)]
        for reservation in writer.writes.keys() & set(opened):
            self.writers.take(writer, reservation)
        await self._abort(opened)

    def _writer_exited(self, writes: list[OpenWrite]) -> None:
        log.info("writer.exited", open_writes=len(writes))
        self._abort_soon([write.reservation for write in writes])

    def _abort_soon(self, reservations: list[int]) -> None:
        task = asyncio.create_task(self._abort(reservations))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, reservations: list[int]) -> None:
        try:
            await self._backend.abort(reservations, self._storage_s)
            self._metrics.committed.labels("aborted").inc(len(reservations))
        except StorageUnavailable:
            # The slots stay closed to everybody until the storage process restarts: memory lost, never bytes mixed.
            self._metrics.storage_faults.labels("abort").inc()
            log.warning("abort.failed", reservations=len(reservations))
