"""One connection as an asyncio protocol: frames out, frames in, replies matched to requests by id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from kvgate.client.errors import GatewayRefused, GatewayUnavailable
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.protocol.catalog import REPLIES, SINCE
from kvgate.protocol.framing import DIFFERENT_BUILDS, HEADER, UNKNOWN, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import Bound, Commit, Failure, FinishLoad, LoadPlan, Release, Reserved
from kvgate.protocol.page_messages import CommitPages, PagesPacked
from kvgate.protocol.variant_messages import VariantBound, VariantOpened

MAX_UNSENT_BYTES: Final = 16 << 20
"""More bytes than this waiting for the socket: the gateway does not read, so new requests fail at once."""

UNDO_S: Final = 30.0
"""Deadline of a message that gives back what a late reply handed out."""

Reply = Future[Record]


@dataclass(slots=True)
class _Pending:
    reply_type: type[Record]
    reply: Reply
    timer: asyncio.TimerHandle


class Wire(asyncio.Protocol):
    """All methods run on the loop that owns the connection. ``version``: the wire version that was agreed on; 1 until then."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self.version = 1
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``: every open request fails now, not at its deadline."""
        self._transport = None
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.timer.cancel()
            one.reply.set_exception(GatewayUnavailable("the connection to the gateway was lost"))
        if not self.lost.is_set():
            self.lost.set()
            self._on_lost()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        try:
            while len(self._received) >= HEADER.size:
                end = HEADER.size + frame_length(bytes(self._received[: HEADER.size]))
                if len(self._received) < end:
                    break
                payload = bytes(self._received[HEADER.size : end])
                del self._received[:end]
                self._answer(payload)
        except ContractError:
            # Whatever speaks at the other end is no gateway of a version we share: its next bytes mean nothing either.
            self.close()

    def send(self, message: Record, deadline_s: float, reply: Reply) -> None:
        """Send ``message``; ``reply`` is settled by the answer, the deadline or the loss of the connection, exactly once."""
        transport = self._transport
        if transport is None or transport.is_closing():
            reply.set_exception(GatewayUnavailable("not connected to the gateway"))
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            reply.set_exception(GatewayUnavailable("the gateway does not read its requests"))
            return
        if SINCE[type(message)] > self.version:
            problem = f"the gateway speaks wire version {self.version}, which has no {type(message).__name__}; upgrade it"
            reply.set_exception(GatewayUnavailable(problem))
            return
        self._next_id += 1
        number = self._next_id
        try:
            frame = frame_bytes(number, message)
        except ContractError as error:
            reply.set_exception(error)
            return
        timer = asyncio.get_running_loop().call_later(deadline_s, self._expire, number)
        self._pending[number] = _Pending(REPLIES[type(message)], reply, timer)
        transport.write(frame)

    async def call(self, message: Record, deadline_s: float) -> Record:
        """``send`` and wait for the reply."""
        reply: Reply = Future()
        reply.set_running_or_notify_cancel()
        self.send(message, deadline_s, reply)
        return await asyncio.shield(asyncio.wrap_future(reply))

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _expire(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.reply.set_exception(GatewayUnavailable("the gateway did not answer in time"))

    def _answer(self, payload: bytes) -> None:
        frame = parse_frame(payload)
        pending = self._pending.pop(frame.id, None)
        if pending is None:
            # Its deadline has passed: nobody else will ever give back what it hands out.
            remedy = undoing(frame.message())
            if remedy is not None:
                self.send(remedy, UNDO_S, Future())
            return
        pending.timer.cancel()
        try:
            message = frame.message()
        except ContractError as error:
            pending.reply.set_exception(GatewayUnavailable(f"the gateway's reply breaks the protocol: {error}"))
            raise
        if isinstance(message, Failure):
            pending.reply.set_exception(GatewayRefused(_explained(message)))
        elif isinstance(message, pending.reply_type):
            pending.reply.set_result(message)
        else:
            pending.reply.set_exception(GatewayUnavailable("the gateway's reply has the wrong type"))


def _explained(failure: Failure) -> Failure:
    """An older gateway says only that it does not know a message, and not what mends that."""
    if (failure.field, failure.problem, failure.remedy) == ("type", UNKNOWN, "-"):
        return replace(failure, remedy=DIFFERENT_BUILDS)
    return failure


def undoing(reply: Record) -> Record | None:
    """The request that gives back what ``reply`` hands out: a lease, a load or slots. None where that is nothing."""
    match reply:
        case Bound() | VariantBound() | VariantOpened():
            return Release(lease=reply.lease)
        case LoadPlan():
            return FinishLoad(ticket=reply.ticket, mismatched=())
        case Reserved():
            aborted = tuple(slot.reservation for slot in reply.slots if slot.status == "slot")
            return Commit(written=(), aborted=aborted) if aborted else None
        case PagesPacked():
            return CommitPages(ticket=reply.ticket, keep=False) if reply.ticket else None
        case _:
            return None
