"""One worker's copies between its pages and the gateway's pool: load with verification, store with digest.

Any thread. Nothing raises for what a gateway may do: a load says which chunks failed, a store how many became visible.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar, cast

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
from kvgate_vllm.state import LOGGER

PIECE_CHUNKS: Final = 16
"""Chunks packed without looking whether the job was cancelled: bounds how long a preemption waits."""
SILENCE_S: Final = 10.0
"""After a message without an answer no other is tried for so long, unless the answer comes."""
MAX_UNSETTLED: Final = 16_384
LATE_S: Final = 30.0
"""How long an answer that came too late for us may still come, to be undone."""

Reply = TypeVar("Reply", bound=Record)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Patience for one message of a load or of a store."""

    load_s: float
    store_s: float


class Transfers:
    """Load and store through one client, one pool and one packer."""

    def __init__(
        self, client: GatewayClient, pools: PoolMappings, packer: Packer, block_tokens: int, deadlines: Deadlines
    ) -> None:
        self._client = client
        self._pools = pools
        self._packer = packer
        self._block_tokens = block_tokens
        self._deadlines = deadlines
        self._payload_bytes = packer.payload.payload_bytes
        self._clock = time.monotonic
        self._silent_until = 0.0
        self._unsettled: deque[tuple[bytes, int]] = deque(maxlen=MAX_UNSETTLED)

    def load(self, op: LoadOp) -> set[int]:
        """Restore the chunks of ``op``; returns those that failed. Pages of a failed chunk may hold wrong bytes."""
        everything = set(op.chunks)
        try:
            plan = self._patient(
                Load(lease=op.lease, chunks=op.chunks),
                LoadPlan,
                self._deadlines.load_s,
                undo=lambda late: FinishLoad(ticket=late.ticket, mismatched=()),
            )
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a load failed: %s", error)
            return everything
        mismatched: set[int] | None = None
        try:
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

    def store(self, op: StoreOp, job: Job | None = None) -> int:
        """Store the chunks of ``op`` that are not there yet; returns how many became visible."""
        try:
            reserved = self._patient(
                Reserve(lease=op.lease, chunks=op.chunks),
                Reserved,
                self._deadlines.store_s,
                undo=lambda late: Commit(written=(), aborted=_reservations(late.slots)) if _reservations(late.slots) else None,
            )
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
        digests = self._packer.unpack(moves, digest=True)
        return {slot.chunk for slot, digest in zip(plan.slots, digests, strict=True) if digest != slot.digest}

    def _pack(self, op: StoreOp, reserved: Reserved, slots: Sequence[ReservedSlot]) -> list[WrittenPayload]:
        """Copy pages into reserved slots. Chunks that the codec can't hold are left out."""
        moves = [
            ChunkMove(self._view(reserved.pool, reserved.pool_bytes, slot.offset, slot.length), op.blocks_of(slot.chunk))
            for slot in slots
        ]
        bad: tuple[int, ...] = ()
        try:
            digests: Sequence[bytes] = self._packer.pack(moves, digest=True)
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

    def _patient(self, message: Record, kind: type[Reply], patience_s: float, undo: Callable[[Reply], Record | None]) -> Reply:
        """The reply within ``patience_s``. One that comes later is undone: what it hands out would stay open for ever."""
        if self._clock() < self._silent_until:
            raise GatewayUnavailable("the gateway has been silent")
        future = self._client.submit(message, patience_s + LATE_S)
        try:
            return cast(Reply, future.result(patience_s))
        except TimeoutError:
            # One step may hold many transfers: only the first of them waits for a gateway that hangs.
            self._silent_until = self._clock() + SILENCE_S

        def settle(answered: Future[Record]) -> None:
            if answered.exception() is None:
                self._silent_until = 0.0
                remedy = undo(cast(Reply, answered.result()))
                if remedy is not None:
                    self._client.submit(remedy, LATE_S)

        future.add_done_callback(settle)
        raise GatewayUnavailable(f"the gateway did not answer {kind.__name__} in time")


def _reservations(slots: Sequence[ReservedSlot]) -> tuple[int, ...]:
    return tuple(slot.reservation for slot in slots if slot.status == "slot")
