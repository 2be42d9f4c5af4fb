"""One worker's copies between its pages and the gateway's pool: load with verification, store with digest.

Any thread. Nothing raises for what a gateway may do: a load says which chunks failed, a store how many became visible.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, cast

from kvgate.client import GatewayClient, GatewayRefused, GatewayUnavailable, PoolMappings
from kvgate.contract.record import Record
from kvgate.protocol.messages import (
    Commit,
    Committed,
    FinishLoad,
    Load,
    LoadPlan,
    LoadVerdict,
    Reserve,
    Reserved,
    ReservedSlot,
    WrittenPayload,
)
from kvgate.storage.pool import PoolError
from kvgate_kernels import ChunkMove, MoveError, NonFiniteValues, Packer
from kvgate_vllm.jobs import Job
from kvgate_vllm.metadata import LoadOp, StoreOp
from kvgate_vllm.patience import LATE_S, Patience
from kvgate_vllm.state import LOGGER
from kvgate_vllm.step_order import Mark, StepOrder

PIECE_CHUNKS: Final = 16
"""Chunks packed without looking whether the job was cancelled: bounds how long a preemption waits."""
MAX_UNSETTLED: Final = 16_384


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Patience for one message of a load or of a store."""

    load_s: float
    store_s: float


class HeldWrites:
    """Reservations that this worker may still write to, whatever connection they came on. Thread-safe.

    Noted on the client's thread, with the reply: before that thread can connect again and tell the gateway which ones are held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[int] = set()

    def note(self, answered: Future[Record]) -> None:
        """A ``Reserve`` was answered, or not."""
        if answered.exception() is None:
            with self._lock:
                self._held.update(_reservations(cast(Reserved, answered.result()).slots))

    def forget(self, reservations: Iterable[int]) -> None:
        """Nothing writes to these any more."""
        with self._lock:
            self._held.difference_update(reservations)

    def all(self) -> tuple[int, ...]:
        """What is held now."""
        with self._lock:
            return tuple(sorted(self._held))


class Packers:
    """The packer of one worker's pages. On a GPU it page-locks the pool it copies to and from, and so is made anew for another pool."""

    def __init__(self, make: Callable[[memoryview | None], Packer], *, locks_pool: bool) -> None:
        """``make``: a packer for the whole pool, or for none in particular."""
        self._make = make
        self._locks_pool = locks_pool
        self._lock = threading.Lock()
        self._pool: tuple[str, int] | None = None
        self._packer = make(None)

    @property
    def any(self) -> Packer:
        """The packer as it is now: for its geometry and description."""
        return self._packer

    def of(self, pools: PoolMappings, pool: str, pool_bytes: int) -> Packer:
        """The packer for that pool. Raises ``PoolError``."""
        if not self._locks_pool:
            return self._packer
        with self._lock:
            if self._pool != (pool, pool_bytes):
                before, self._packer = self._packer, self._make(pools.view(pool, pool_bytes, 0, pool_bytes))
                self._pool = (pool, pool_bytes)
                before.close()
            return self._packer

    def close(self) -> None:
        """End it, after the calls under way."""
        self._packer.close()


class Transfers:
    """Load and store through one client, one pool and one packer: this worker copies by itself."""

    def __init__(
        self,
        client: GatewayClient,
        pools: PoolMappings,
        packers: Packers,
        order: StepOrder,
        deadlines: Deadlines,
        held: HeldWrites,
    ) -> None:
        self._client = client
        self._pools = pools
        self._packers = packers
        self._order = order
        self._held = held
        self._deadlines = deadlines
        self._payload_bytes = packers.any.payload.payload_bytes
        self._patience = Patience(client)
        self._unsettled: deque[tuple[bytes, int]] = deque(maxlen=MAX_UNSETTLED)

    def load(self, op: LoadOp, mark: Mark | None) -> set[int]:
        """Restore the chunks of ``op`` behind ``mark``; returns those that failed. Pages of a failed chunk may hold wrong bytes."""
        everything = set(op.chunks)
        try:
            plan: LoadPlan = self._patience.ask(
                Load(lease=op.lease, chunks=op.chunks),
                self._deadlines.load_s,
                undo=lambda late: FinishLoad(ticket=late.ticket, mismatched=()),
            )
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a load failed: %s", error)
            return everything
        mismatched: set[int] | None = None
        try:
            with self._order.behind(mark):
                mismatched = self._unpack(op, plan)
        except (PoolError, MoveError) as error:
            LOGGER.error("kvgate: a load failed: %s", error)
        finally:
            # Also after a failure: until then the gateway keeps the slots for us.
            valid = self._finish_load(plan.ticket, mismatched or set())
        if mismatched is None or not valid:
            return everything
        if mismatched:
            LOGGER.error(
                "kvgate: %d of %d restored chunks were not what was committed; they are computed",
                len(mismatched),
                len(everything),
            )
        return mismatched

    def store(self, op: StoreOp, job: Job | None, mark: Mark | None) -> int:
        """Store the chunks of ``op`` that are not there yet, as they are at ``mark``; returns how many became visible."""
        try:
            sent = self._patience.send(Reserve(lease=op.lease, chunks=op.chunks), self._deadlines.store_s)
            sent[0].add_done_callback(self._held.note)
            reserved = self._patience.wait(sent, self._undo_late)
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a store was skipped: %s", error)
            return 0
        slots = [slot for slot in reserved.slots if slot.status == "slot"]
        written: list[WrittenPayload] = []
        try:
            for at in range(0, len(slots), PIECE_CHUNKS):
                if job is not None and not job.begin_reading():
                    break
                try:
                    with self._order.behind(mark):
                        written += self._pack(op, reserved, slots[at : at + PIECE_CHUNKS])
                finally:
                    if job is not None:
                        job.end_reading()
        except (PoolError, MoveError) as error:
            LOGGER.error("kvgate: a store failed: %s", error)
        finally:
            visible = self._commit(slots, written)
        return visible

    def abort_unsettled(self, boot: bytes) -> None:
        """Connected again to the gateway of ``boot``: drop the reservations whose commit was lost with the connection before.

        Their slots are ours until we say so or end. One that was committed after all is no longer open, and stays.
        """
        pending, self._unsettled = self._unsettled, deque(maxlen=MAX_UNSETTLED)
        for gateway, reservation in pending:
            if gateway == boot:
                self._client.submit(Commit(written=(), aborted=(reservation,)), LATE_S)

    def _undo_late(self, late: Reserved) -> Record | None:
        aborted = _reservations(late.slots)
        self._held.forget(aborted)
        return Commit(written=(), aborted=aborted) if aborted else None

    def close(self) -> None:
        """Nothing: packers and pools are the worker's."""

    def _unpack(self, op: LoadOp, plan: LoadPlan) -> set[int]:
        """Copy and verify; returns the chunks whose bytes did not have their digest. Raises ``PoolError``, ``MoveError``."""
        if tuple(slot.chunk for slot in plan.slots) != op.chunks:
            raise PoolError("the gateway's plan does not hold the chunks that were asked for")
        moves = [
            ChunkMove(
                self._view(plan.pool, plan.pool_bytes, slot.offset, slot.length),
                op.blocks_of(slot.chunk),
                op.skip_tokens if slot.chunk == op.first else 0,
            )
            for slot in plan.slots
        ]
        digests = self._packers.of(self._pools, plan.pool, plan.pool_bytes).unpack(moves, digest=True)
        return {slot.chunk for slot, digest in zip(plan.slots, digests, strict=True) if digest != slot.digest}

    def _pack(self, op: StoreOp, reserved: Reserved, slots: Sequence[ReservedSlot]) -> list[WrittenPayload]:
        """Copy pages into reserved slots. Chunks that the codec can't hold are left out."""
        moves = [
            ChunkMove(self._view(reserved.pool, reserved.pool_bytes, slot.offset, slot.length), op.blocks_of(slot.chunk))
            for slot in slots
        ]
        bad: tuple[int, ...] = ()
        try:
            packer = self._packers.of(self._pools, reserved.pool, reserved.pool_bytes)
            digests: Sequence[bytes] = packer.pack(moves, digest=True)
        except NonFiniteValues as error:
            digests, bad = error.digests, error.indices
        return [
            WrittenPayload(reservation=slot.reservation, digest=digest)
            for index, (slot, digest) in enumerate(zip(slots, digests, strict=True))
            if index not in bad
        ]

    def _view(self, pool: str, pool_bytes: int, offset: int, length_bytes: int) -> memoryview:
        if length_bytes != self._payload_bytes:
            raise PoolError("the gateway's slot has another length than our payload")
        return self._pools.view(pool, pool_bytes, offset, length_bytes)

    def _finish_load(self, ticket: int, mismatched: set[int]) -> bool:
        message = FinishLoad(ticket=ticket, mismatched=tuple(sorted(mismatched)))
        try:
            return cast(LoadVerdict, self._client.call(message, self._deadlines.load_s)).valid
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a load was not confirmed: %s", error)
            return False

    def _commit(self, slots: Sequence[ReservedSlot], written: list[WrittenPayload]) -> int:
        done = {item.reservation for item in written}
        # The copies are over: if the message is lost, the gateway drops them when we come back.
        self._held.forget(_reservations(slots))
        aborted = tuple(number for number in _reservations(slots) if number not in done)
        if not done and not aborted:
            return 0
        try:
            reply = self._client.call(Commit(written=tuple(written), aborted=aborted), self._deadlines.store_s)
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a store was not confirmed: %s", error)
            if isinstance(error, GatewayUnavailable) and self._client.welcome is not None:
                self._unsettled.extend((self._client.welcome.boot, number) for number in (*done, *aborted))
            return 0
        return cast(Committed, reply).visible


def _reservations(slots: Sequence[ReservedSlot]) -> tuple[int, ...]:
    return tuple(slot.reservation for slot in slots if slot.status == "slot")
