"""The control socket: connections, frames, requests, and bounds on all of them."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.daemon.errors import Refused
from kvgate.daemon.listening import ACCEPTS_A_TURN, let_wait
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.service import Answer, Service, Session
from kvgate.daemon.state_dir import make_private
from kvgate.protocol.catalog import BY_NAME
from kvgate.protocol.framing import HEADER, Frame, frame_bytes, frame_length, parse_frame
from kvgate.storage.backend import StorageUnavailable

log = structlog.get_logger(__name__)

HELLO_S = 5.0
WRITE_S = 10.0
FLUSH_S = 1.0
TURN_FRAMES = 32
"""Frames of one connection taken before the others have their turn."""
_PEER = struct.Struct("iII")


class ControlServer:
    """Serves the control protocol on one unix socket."""

    def __init__(self, service: Service, metrics: Metrics, *, max_sessions: int, max_requests_per_session: int) -> None:
        self._service = service
        self._metrics = metrics
        self._max_sessions = max_sessions
        self._max_requests = max_requests_per_session
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    async def start(self, path: Path) -> None:
        """Listen on ``path``, mode 0600."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connection, path=str(path), backlog=ACCEPTS_A_TURN)
        let_wait(self._server)
        make_private(path)

    async def stop(self, wait_s: float) -> None:
        """Accept nobody any more and end all connections; requests that storage holds up are cut off after ``wait_s``."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.end()
        if self._connections:
            await asyncio.wait(set(self._connections), timeout=wait_s)
        if self._connections:
            log.warning("server.cut_off", connections=len(self._connections))
            for connection in self._connections.values():
                connection.cut_off()
            await asyncio.wait(set(self._connections), timeout=wait_s)

    def admit(self, connection: _Connection) -> bool:
        """Serve a new connection to its end; False: there are too many."""
        if len(self._connections) >= self._max_sessions:
            log.warning("session.refused", reason="max_sessions", limit=self._max_sessions)
            return False
        task = asyncio.create_task(connection.run())
        self._connections[task] = connection
        self._metrics.sessions.inc()
        task.add_done_callback(self._ended)
        return True

    def _connection(self) -> _Connection:
        return _Connection(self, self._service, self._metrics, self._max_requests)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        self._metrics.sessions.dec()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session.failed", exc_info=error)


class _Connection(asyncio.Protocol):
    """One client. What can be answered at once is; the rest runs as tasks, so that a slow one holds up nobody.

    Replies carry the request's id. While the peer does not read its replies, later ones wait in their tasks, and when those are
    all in use nothing more is read.
    """

    def __init__(self, server: ControlServer, service: Service, metrics: Metrics, max_requests: int) -> None:
        self._server = server
        self._service = service
        self._metrics = metrics
        self._max_requests = max_requests
        self._received = bytearray()
        self._resting = False  # frames wait in ``_received`` and nothing is read
        self._running: set[asyncio.Task[None]] = set()
        self._write_lock = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._unread: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[tuple[str, dict[str, str]]] = self._loop.create_future()  # why, and more for the log
        self._session: Session = self._service.open_session(_peer_pid(transport))
        if not self._server.admit(self):
            self._over.set_result(("too many sessions", {}))
            transport.abort()
            return
        self._hello_timer = self._loop.call_later(HELLO_S, self._finish, "no hello in time")

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._gone.set()
        self.resume_writing()
        self._finish("")

    def eof_received(self) -> None:
        """See ``asyncio.Protocol``: a peer that asks nothing more has left, whatever it still reads."""
        self._finish("")

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``: the peer is behind with reading. It has ``WRITE_S`` to catch up."""
        self._writable.clear()
        self._unread = self._loop.call_later(WRITE_S, self._give_up)

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._writable.set()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        if not self._resting:
            self._take_frames()

    async def run(self) -> None:
        """Serve until the peer goes or breaks the protocol, or ``end`` is called."""
        reason, more = await self._over
        self._hello_timer.cancel()
        if not reason:
            log.debug("session.closed", role=self._session.role)
        elif reason in ("hello refused", "the gateway stops"):
            log.info("session.closed", reason=reason)
        else:
            log.warning("session.closed", reason=reason, role=self._session.role, **more)
        await self._close()

    def end(self) -> None:
        """Read no more requests, and close."""
        self._finish("the gateway stops")

    def cut_off(self) -> None:
        """Cancel the requests under way. Only when the gateway stops: their holds end with the pool."""
        for task in self._running:
            task.cancel()

    def _finish(self, reason: str, **more: str) -> None:
        if not self._over.done():
            self._over.set_result((reason, more))
            self._received.clear()

    def _give_up(self) -> None:
        self._finish("a reply was not read in time")
        # Not close(): that waits for the peer to read what it has not read so far.
        self._transport.abort()

    def _take_frames(self) -> None:
        """Take what is whole, a turn's worth; the rest after the others' turn."""
        received, at, taken = self._received, 0, 0
        try:
            while not self._over.done() and not self._resting and len(received) - at >= HEADER.size:
                end = at + HEADER.size + frame_length(bytes(received[at : at + HEADER.size]))
                if len(received) < end:
                    break
                if taken == TURN_FRAMES:
                    self._rest()
                    self._loop.call_soon(self._go_on)
                    break
                frame = parse_frame(bytes(received[at + HEADER.size : end]))
                at, taken = end, taken + 1
                self._take(frame)
        except ContractError as error:
            self._finish("malformed frame", field=error.field, problem=error.problem)
        del received[:at]

    def _rest(self) -> None:
        self._resting = True
        self._transport.pause_reading()

    def _go_on(self) -> None:
        if not self._over.done():
            self._resting = False
            self._take_frames()
            if not self._resting:
                self._transport.resume_reading()

    def _take(self, frame: Frame) -> None:
        greeted = self._session.greeted
        if len(self._running) >= self._max_requests:
            refused = Refused("busy", "too many requests in progress", remedy="wait for replies before sending more")
            if not self._write_now(frame.id, refused.failure):
                self._rest()
                self._spawn(self._write_and_go_on(frame.id, refused.failure))
            return
        kind = frame.type if frame.type in BY_NAME else "unknown"
        begun_s = time.perf_counter()
        answer, outcome = self._begin(frame)
        if isinstance(answer, Record):
            self._count(kind, outcome, begun_s)
            if not self._write_now(frame.id, answer):
                self._spawn(self._deliver(frame.id, kind, answer))
        else:
            self._spawn(self._wait_for(frame.id, kind, begun_s, answer))
        if not greeted:
            if self._session.greeted:
                self._hello_timer.cancel()
            else:
                self._finish("hello refused")

    def _begin(self, frame: Frame) -> tuple[Answer, str]:
        try:
            return self._service.answer(self._session, frame.message()), "ok"
        except Exception as error:  # noqa: BLE001  # all of them are answered, and a bug is logged
            return _failure(frame.type, error)

    async def _wait_for(self, frame_id: int, kind: str, begun_s: float, answer: Coroutine[Any, Any, Record]) -> None:
        try:
            reply, outcome = await answer, "ok"
        except Exception as error:  # noqa: BLE001  # as above
            reply, outcome = _failure(kind, error)
        self._count(kind, outcome, begun_s)
        if not self._write_now(frame_id, reply):
            await self._deliver(frame_id, kind, reply)

    def _count(self, kind: str, outcome: str, begun_s: float) -> None:
        self._metrics.request_seconds.labels(kind).observe(time.perf_counter() - begun_s)
        self._metrics.requests.labels(kind, outcome).inc()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _write_now(self, frame_id: int, reply: Record) -> bool:
        """Send the reply; False: the peer has to read first, or others wait before it, or it is gone."""
        if not self._writable.is_set() or self._write_lock.locked() or self._transport.is_closing():
            return False
        self._transport.write(frame_bytes(frame_id, reply))
        return True

    async def _deliver(self, frame_id: int, kind: str, reply: Record) -> None:
        """Send the reply once the peer has read enough of the earlier ones."""
        async with self._write_lock:
            await self._writable.wait()
            if not self._transport.is_closing():
                self._transport.write(frame_bytes(frame_id, reply))
                return
        log.debug("reply.lost", message=kind)
        await self._service.undelivered(self._session, reply)

    async def _write_and_go_on(self, frame_id: int, reply: Record) -> None:
        await self._deliver(frame_id, "unknown", reply)
        self._go_on()

    async def _close(self) -> None:
        self._transport.close()
        await self._service.leave_session(self._session)
        # Requests under way end by their own deadlines; cancelling them could leave holds behind.
        if self._running:
            await asyncio.wait(set(self._running))
        await self._service.close_session(self._session)
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._gone.wait()
        except TimeoutError:
            self._transport.abort()


def _failure(kind: str, error: Exception) -> tuple[Record, str]:
    """What the peer is told of ``error``."""
    if isinstance(error, Refused):
        problem = error
    elif isinstance(error, ContractError):
        problem = Refused("malformed", error.problem, field=error.field, remedy=error.remedy)
    elif isinstance(error, StorageUnavailable):
        problem = Refused("unavailable", "storage does not answer", remedy="treat it as a miss; see the gateway's log")
    else:
        log.error("request.failed", message=kind if kind in BY_NAME else "unknown", exc_info=error)
        problem = Refused("internal", "a bug in the gateway", remedy="see the gateway's log, and report it")
    return problem.failure, problem.failure.code


def _peer_pid(transport: asyncio.Transport) -> int:
    peer = transport.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, _, _ = _PEER.unpack(raw)
    return int(pid)
