"""Gateway-driven transfer: workers lend their pages, and the gateway's transfer processes move the bytes.

A store is reserve → pack → (the worker says that its pages held still) → commit; a load is acquire → unpack → digests compared.
What a transfer process may still be writing into is given to nobody: slots stay reserved until their move is through or its process
is gone, whatever became of the worker and its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import structlog

from kvgate.config import Config
from kvgate.contract.plan import Rectangle
from kvgate.contract.record import Record
from kvgate.daemon.background import end_tasks
from kvgate.daemon.errors import Refused
from kvgate.daemon.leases import LeaseTable
from kvgate.daemon.pool_view import PoolView
from kvgate.daemon.reads import Reads
from kvgate.daemon.registry import Registration
from kvgate.daemon.service import Handler, Session, worker_lease, worker_registration
from kvgate.daemon.writers import Writer
from kvgate.daemon.writes import Writes
from kvgate.protocol.messages import Done, PayloadSlot, ReservedSlot, WrittenPayload
from kvgate.protocol.page_messages import (
    AttachPages,
    CommitPages,
    DetachPages,
    KeepWrites,
    LoadPages,
    PagesAttached,
    PagesLoaded,
    PagesPacked,
    PagesStored,
    StorePages,
)
from kvgate.storage.envelope import ENVELOPE_BYTES
from kvgate.transfer import (
    GateShut,
    MoveRefused,
    MoveSpec,
    PageHandle,
    PageMover,
    PagesRefused,
    PayloadShape,
    SlotsInDoubt,
    TransferBusy,
    TransferUnavailable,
    WorkerProcess,
)
from kvgate.transfer.records import BLOCK_ID_BYTES, PageExport

log = structlog.get_logger(__name__)

ATTACH_AGAIN: Final = "send AttachPages again"
MAX_PACKED: Final = 256
"""Stores of one connection that are copied and not closed yet."""


CACHE_DTYPES: Final = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
"""Element type of exported pages → the contract's name of it."""


@dataclass(frozen=True, slots=True)
class Extents:
    """What a connection's pages hold: which layers and heads of which KV, in which form."""

    rectangle: Rectangle
    representation: bytes

    @classmethod
    def of(cls, registration: Registration, rectangle: int) -> Extents:
        """By the registration and the rank's rectangle in it."""
        return cls(registration.form.plan.rectangles[rectangle], registration.form.representation_digest)


@dataclass(eq=False)
class Lent:
    """One connection's pages: what the mover calls them, and who owns the slots that are packed from them. ``handle`` None: lost."""

    handle: PageHandle | None
    extents: Extents
    block_bytes: int  # of one chunk's block ids
    writer: Writer


@dataclass(eq=False)
class Turns:
    """Attaching and detaching of one connection, one after the other, in the order in which they were asked for."""

    lock: asyncio.Lock
    asked: int = 0


@dataclass(frozen=True, slots=True)
class PackedStore:
    """Slots that are filled and invisible."""

    writer: Writer
    written: tuple[WrittenPayload, ...]


class Pages:
    """Everything the gateway does with pages that workers lend."""

    def __init__(
        self, config: Config, mover: PageMover | None, pool: PoolView, leases: LeaseTable, reads: Reads, writes: Writes
    ) -> None:
        """``mover`` None: this gateway moves nothing itself."""
        self._config = config
        self._mover = mover
        self._pool = pool
        self._leases = leases
        self._reads = reads
        self._writes = writes
        self._lent: dict[int, Lent] = {}  # by session
        self._turns: dict[int, Turns] = {}  # by session
        self._packed: dict[int, dict[int, PackedStore]] = {}  # by session, by ticket
        self._tickets = count(1)
        self._background: set[asyncio.Task[None]] = set()
        if mover is not None:
            mover.on_lost(self._process_lost)

    @property
    def lent(self) -> int:
        """How many workers' pages are attached."""
        return sum(one.handle is not None for one in self._lent.values())

    def handlers(self) -> dict[type[Record], Handler]:
        """What this part answers, by message."""
        return {
            AttachPages: self._attach,
            DetachPages: self._detach,
            StorePages: self._store,
            CommitPages: self._commit,
            LoadPages: self._load,
            KeepWrites: self._keep_writes,
        }

    async def close_session(self, session: Session) -> None:
        """A connection is lost and none of its requests runs any more: unmap its pages, drop its stores that nobody will close."""
        for packed in self._packed.pop(session.id, {}).values():
            await self._drop(packed.writer, [item.reservation for item in packed.written])
        self._turns.pop(session.id, None)
        lent = self._lent.pop(session.id, None)
        if lent is not None:
            await self._give_back(lent)

    async def close(self) -> None:
        """End what still runs in the background."""
        await end_tasks(self._background)

    async def _attach(self, session: Session, message: AttachPages) -> Record:
        turns = self._turns_of(session)
        turns.asked += 1
        turn = turns.asked
        # One that was asked for earlier and comes later would leave us with a gate that the worker has closed: the last one counts.
        async with turns.lock:
            if turn != turns.asked:
                raise Refused("busy", "a later AttachPages of this connection takes its place", remedy="send one at a time")
            return await self._attach_now(session, message)

    async def _attach_now(self, session: Session, message: AttachPages) -> Record:
        registration, mover = worker_registration(session), self._require_mover()
        extents = Extents.of(registration, session.rectangle)
        export, chunk_tokens = message.export, self._config.chunk_tokens
        if chunk_tokens % export.block_tokens:
            raise Refused("malformed", f"blocks do not divide chunks of {chunk_tokens} tokens", field="export.block_tokens")
        _require_extents(export, registration, extents)
        worker = _process_of(session)
        shape = PayloadShape(chunk_tokens=chunk_tokens, codec=self._config.codec)
        try:
            handle = await mover.attach(export, shape, worker, self._config.attach_s, gate=message.gate)
        except PagesRefused as error:
            raise Refused("denied", str(error), field="export") from error
        except TransferUnavailable as error:
            raise _refusal(error) from error
        if handle.payload_bytes != registration.form.object_bytes[session.rectangle] - ENVELOPE_BYTES:
            await mover.detach(handle)
            raise Refused("disagree", "the pages are not those of the registered rectangle", field="export")
        before = self._lent.get(session.id)
        block_bytes = chunk_tokens // export.block_tokens * BLOCK_ID_BYTES
        self._lent[session.id] = Lent(handle, extents, block_bytes, self._writes.writers.inside())
        if before is not None:
            await self._give_back(before)
        log.info("pages.attached", device=handle.device, kernels=handle.backend, why=handle.reason)
        return PagesAttached(worker=session.pid, mover=handle.pid)

    async def _detach(self, session: Session, message: DetachPages) -> Record:
        del message
        async with self._turns_of(session).lock:
            lent = self._lent.pop(session.id, None)
            if lent is not None:
                await self._give_back(lent)
        return Done()

    def _turns_of(self, session: Session) -> Turns:
        return self._turns.setdefault(session.id, Turns(asyncio.Lock()))

    async def _store(self, session: Session, message: StorePages) -> Record:
        mover, lent, handle = self._require_lent(session, message.chunks, message.blocks)
        packed = self._packed.setdefault(session.id, {})
        if len(packed) >= MAX_PACKED:
            raise Refused("busy", "too many stores are not closed", remedy="send CommitPages for some first")
        lease = await worker_lease(session, self._leases, message.lease, self._config.adapter_wait_s)
        reserved = await self._writes.reserve(lent.writer, lease, session.rectangle, message.chunks)
        wanted = [(at, slot) for at, slot in enumerate(reserved.slots) if slot.status == "slot"]
        if not wanted:
            return PagesPacked(ticket=0, chunks=())
        moves = [MoveSpec(slot.offset, lent_blocks(message.blocks, at, lent.block_bytes)) for at, slot in wanted]
        slots = [slot for _, slot in wanted]
        try:
            _require_length(handle, slots)
            done = await mover.pack(handle, self._pool.generation, moves, self._config.transfer_s, ready=message.ready)
        except SlotsInDoubt as doubt:
            self._after(doubt.gone, lent.writer, slots)
            raise _refusal(doubt, lent) from doubt
        except BaseException as error:
            # Also a cancellation: by the mover's promise nobody writes to these slots any more.
            await self._drop(lent.writer, [slot.reservation for slot in slots])
            if isinstance(error, TransferUnavailable | MoveRefused):
                raise _refusal(error, lent) from error
            raise
        good = tuple(
            (slot, WrittenPayload(reservation=slot.reservation, digest=one.digest))
            for slot, one in zip(slots, done, strict=True)
            if not one.bad
        )
        bad = [slot.reservation for slot, one in zip(slots, done, strict=True) if one.bad]
        await self._drop(lent.writer, bad)
        if not good:
            return PagesPacked(ticket=0, chunks=())
        ticket = next(self._tickets)
        self._packed.setdefault(session.id, {})[ticket] = PackedStore(lent.writer, tuple(item for _, item in good))
        return PagesPacked(ticket=ticket, chunks=tuple(slot.chunk for slot, _ in good))

    async def _commit(self, session: Session, message: CommitPages) -> Record:
        packed = self._packed.get(session.id, {}).pop(message.ticket, None)
        if packed is None:
            raise Refused("denied", "not an open store of this connection", field="ticket")
        # A pool that was lost meanwhile took its reservations along.
        written = tuple(item for item in packed.written if item.reservation in packed.writer.writes)
        if not message.keep:
            await self._drop(packed.writer, [item.reservation for item in written])
            return PagesStored(visible=0)
        return PagesStored(visible=await self._writes.commit(packed.writer, written, ()))

    async def _load(self, session: Session, message: LoadPages) -> Record:
        mover, lent, handle = self._require_lent(session, message.chunks, message.blocks)
        lease = await worker_lease(session, self._leases, message.lease, self._config.adapter_wait_s)
        plan = self._reads.plan_load(session.id, lease, session.rectangle, message.chunks)
        mismatched: tuple[int, ...] = ()
        try:
            _require_length(handle, plan.slots)
            moves = [
                MoveSpec(slot.offset, lent_blocks(message.blocks, at, lent.block_bytes), 0 if at else message.skip_tokens)
                for at, slot in enumerate(plan.slots)
            ]
            digests = await mover.unpack(
                handle,
                self._pool.generation,
                moves,
                self._config.transfer_s,
                ready=message.ready,
                gate=message.gate,
                paced=message.paced,
            )
            mismatched = tuple(slot.chunk for slot, digest in zip(plan.slots, digests, strict=True) if digest != slot.digest)
        except (TransferUnavailable, MoveRefused) as error:
            # A load only reads slots: one that is cut off harms nobody else. Its gate tells the worker about its pages.
            raise _refusal(error, lent) from error
        finally:
            valid = await self._reads.finish_load(session.id, plan.ticket, mismatched)
        return PagesLoaded(valid=valid, failed=mismatched)

    async def _keep_writes(self, session: Session, message: KeepWrites) -> Record:
        registration, writer = worker_registration(session), session.writer
        assert writer is not None, "registered with it"
        kept = frozenset(message.reservations)
        await self._writes.keep(writer, session.id, registration.engine, session.rectangle, kept)
        return Done()

    def _require_mover(self) -> PageMover:
        if self._mover is None:
            raise Refused(
                "denied",
                "this gateway leaves the copies to the workers",
                field="transfer",
                remedy='set the gateway\'s transfer to "any" or "gateway", or the engine\'s to "worker"',
            )
        return self._mover

    def _require_lent(self, session: Session, chunks: Sequence[int], blocks: bytes) -> tuple[PageMover, Lent, PageHandle]:
        mover, lent = self._require_mover(), self._lent.get(session.id)
        if lent is None or lent.handle is None:
            raise Refused("unavailable", "no pages are attached", field="pages", remedy=ATTACH_AGAIN)
        if lent.extents != Extents.of(worker_registration(session), session.rectangle):
            # The connection has registered something else since it attached them.
            raise Refused("disagree", "the pages are not those of the registered rectangle", field="pages", remedy=ATTACH_AGAIN)
        if len(blocks) != len(chunks) * lent.block_bytes:
            raise Refused("malformed", f"has not {lent.block_bytes} bytes a chunk", field="blocks")
        if len(set(chunks)) != len(chunks):
            raise Refused("malformed", "names a chunk twice", field="chunks")
        return mover, lent, lent.handle

    async def _give_back(self, lent: Lent) -> None:
        handle, lent.handle = lent.handle, None
        self._writes.writers.drop(lent.writer)
        if handle is not None and self._mover is not None:
            await self._mover.detach(handle)

    async def _drop(self, writer: Writer, reservations: list[int]) -> None:
        await self._writes.abandon(writer, reservations)

    def _after(self, gone: asyncio.Future[None], writer: Writer, slots: list[ReservedSlot]) -> None:
        """Drop these reservations once the process that may still write is gone."""

        async def wait() -> None:
            await asyncio.shield(gone)
            await self._drop(writer, [slot.reservation for slot in slots])

        log.warning("pages.in_doubt", slots=len(slots))
        task = asyncio.create_task(wait())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _process_lost(self, device: str, incarnation: int) -> None:
        lost = 0
        for lent in self._lent.values():
            if lent.handle is not None and (lent.handle.device, lent.handle.incarnation) == (device, incarnation):
                lent.handle = None
                lost += 1
        if lost:
            log.warning("pages.lost", device=device, workers=lost)


def lent_blocks(blocks: bytes, at: int, block_bytes: int) -> bytes:
    """The block ids of the chunk at place ``at`` of a message."""
    return blocks[at * block_bytes : (at + 1) * block_bytes]


def _process_of(session: Session) -> WorkerProcess:
    remedy = "share one PID namespace"
    try:
        uid = Path(f"/proc/{session.pid}").stat().st_uid
        ours, theirs = (Path(f"/proc/{process}/ns/pid").stat() for process in ("self", session.pid))
    except OSError as error:
        raise Refused("denied", "the worker's process can't be seen from here", remedy=remedy) from error
    if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
        # Its numbers may be those of other processes here: it could wait for the end of a stranger, with its pages still written.
        raise Refused("denied", "the worker is in another PID namespace", remedy=remedy)
    return WorkerProcess(session.pid, uid)


def _require_extents(export: PageExport, registration: Registration, extents: Extents) -> None:
    """Pages of equal size can be others: more heads of fewer layers, or of another element type."""
    form, rectangle = registration.form.representation, extents.rectangle
    group = form.groups[rectangle.group]
    registered = (rectangle.layers, rectangle.heads, group.head_dim_k, group.head_dim_v, form.k_format.dtype)
    said = (len(export.layers), export.kv_heads, export.head_dim, export.head_dim, CACHE_DTYPES.get(export.dtype))
    if said != registered:
        raise Refused("disagree", "the pages are not those of the registered rectangle", field="export")


def _require_length(handle: PageHandle, slots: Sequence[ReservedSlot] | Sequence[PayloadSlot]) -> None:
    """Looked at again beside what is written to: a slot of another length is not for these pages."""
    if any(slot.length != handle.payload_bytes for slot in slots):
        raise Refused("disagree", "the pages are not those of the registered rectangle", field="pages")


def _refusal(error: TransferUnavailable | MoveRefused, lent: Lent | None = None) -> Refused:
    if isinstance(error, GateShut):
        problem = "the gate that was attached does not let this load through"
        return Refused("denied", problem, field="gate", remedy="open the place before asking; else " + ATTACH_AGAIN)
    if isinstance(error, MoveRefused):
        return Refused("denied", "blocks outside the pages, or an event that is none", field="blocks")
    if isinstance(error, TransferBusy):
        return Refused("busy", "too many transfers are under way", remedy="wait for replies before sending more")
    if lent is not None and lent.handle is None:
        return Refused("unavailable", "the pages were lost with their transfer process", field="pages", remedy=ATTACH_AGAIN)
    return Refused("unavailable", "the transfer process can't do this now", remedy="treat it as a miss; see the gateway's log")
