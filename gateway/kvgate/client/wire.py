"""One connection as an asyncio protocol: frames out, frames in, replies matched to requests by id.

A request of another thread is written by that thread: the loop's thread needs the interpreter first, which an engine's step rarely
leaves to it, and would send it a good part of a round trip later.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
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
    timer: asyncio.TimerHandle | None = None


class Wire(asyncio.Protocol):
    """All methods but ``send_from_thread`` run on the loop that owns the connection.

    ``version``: the wire version that was agreed on; 1 until then. Frames go out whole and one after the other: whoever writes has
    ``_lock``, and threads write only while nothing waits in the transport.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._direct: socket.socket | None = None  # a descriptor of our own: the transport closes its one when it likes
        self._rest = b""  # of a frame that a thread could not write whole
        self._waiting = 0  # requests of threads that the loop is to send
        self._clogged = False  # bytes wait in the transport
        self.version = 1
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._loop = asyncio.get_running_loop()
        self._direct = transport.get_extra_info("socket").dup()
        # Paused from its first waiting byte to after its last. Its size says less: asyncio of Python 3.12 takes a chunk out of its
        # buffer and puts back what the socket did not take of it, and a thread that looks between the two sees nothing waiting.
        transport.set_write_buffer_limits(high=0)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``: every open request fails now, not at its deadline."""
        with self._lock:
            self._transport = None
            direct, self._direct = self._direct, None
            pending, self._pending = self._pending, {}
        if direct is not None:
            direct.close()
        for one in pending.values():
            if one.timer is not None:
                one.timer.cancel()
            one.reply.set_exception(GatewayUnavailable("the connection to the gateway was lost"))
        if not self.lost.is_set():
            self.lost.set()
            self._on_lost()

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._clogged = True

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._clogged = False

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
        number = next(self._numbers)
        frame = _framed(number, message, reply)
        if not frame:
            return
        timer = self._loop.call_later(deadline_s, self._expire, number)
        self._pending[number] = _Pending(REPLIES[type(message)], reply, timer)
        self._write(frame)

    def send_from_thread(self, message: Record, deadline_s: float, reply: Reply) -> None:
        """``send`` from another thread than the loop's, in the order of its calls. Raises ``RuntimeError`` where the loop is closed."""
        number, frame = 0, b""
        if SINCE[type(message)] <= self.version:
            number = next(self._numbers)
            frame = _framed(number, message, reply)
            if not frame:
                return
        until_s = self._loop.time() + deadline_s
        with self._lock:
            if not frame or not self._write_directly(number, frame, _Pending(REPLIES[type(message)], reply)):
                self._waiting += 1
                self._loop.call_soon_threadsafe(self._send_waiting, message, until_s, reply)
                return
        try:
            self._loop.call_soon_threadsafe(self._after_thread, number, until_s)
        except RuntimeError:
            if self._pending.pop(number, None) is not None:
                raise

    async def call(self, message: Record, deadline_s: float) -> Record:
        """``send`` and wait for the reply."""
        reply: Reply = Future()
        reply.set_running_or_notify_cancel()
        self.send(message, deadline_s, reply)
        return await settled(reply)

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, frame: bytes) -> None:
        with self._lock:
            rest, self._rest = self._rest, b""
            if self._transport is not None:
                self._transport.write(rest + frame)

    def _write_directly(self, number: int, frame: bytes, pending: _Pending) -> bool:
        """Write now, with the lock held. False: nothing was written, for something waits, or there is no room or no connection."""
        direct, transport = self._direct, self._transport
        if direct is None or transport is None or transport.is_closing():
            return False
        if self._waiting or self._rest or self._clogged:
            return False
        self._pending[number] = pending  # before the answer can be here
        try:
            written = direct.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            # No room, or lost: the loop's own way deals with either.
            del self._pending[number]
            return False
        self._rest = frame[written:]
        return True

    def _send_waiting(self, message: Record, until_s: float, reply: Reply) -> None:
        with self._lock:
            self._waiting -= 1
        self.send(message, until_s - self._loop.time(), reply)

    def _after_thread(self, number: int, until_s: float) -> None:
        """What is left to do for a frame that a thread wrote."""
        if self._rest:
            self._write(b"")
        pending = self._pending.get(number)
        if pending is not None:
            pending.timer = self._loop.call_at(until_s, self._expire, number)

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
        if pending.timer is not None:
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


def _framed(number: int, message: Record, reply: Reply) -> bytes:
    """The frame of a request; empty, and ``reply`` settled, where the message can't be one."""
    try:
        return frame_bytes(number, message)
    except ContractError as error:
        reply.set_exception(error)
        return b""


async def settled(reply: Reply) -> Record:
    """Wait for a reply that is settled on the running loop. Who is cancelled leaves it to its deadline."""
    if not reply.done():
        done = asyncio.Event()
        reply.add_done_callback(lambda _reply: done.set())
        await done.wait()
    return reply.result(0)


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
