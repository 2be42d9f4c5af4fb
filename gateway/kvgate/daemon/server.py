"""The control socket: connections, frames, one task a request, and bounds on all of them."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

import structlog

from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.daemon.errors import Refused
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.service import Service, Session
from kvgate.daemon.state_dir import make_private
from kvgate.protocol.framing import HEADER, Frame, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import BY_NAME
from kvgate.storage.backend import StorageUnavailable

log = structlog.get_logger(__name__)

HELLO_S = 5.0
WRITE_S = 10.0
FLUSH_S = 1.0
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
        self._server = await asyncio.start_unix_server(self._accept, path=str(path), backlog=128)
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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs the callback in a task"
        if len(self._connections) >= self._max_sessions:
            log.warning("session.refused", reason="max_sessions", limit=self._max_sessions)
            writer.transport.abort()
            return
        connection = _Connection(self._service, self._metrics, reader, writer, self._max_requests)
        self._connections[task] = connection
        self._metrics.sessions.inc()
        try:
            await connection.run()
        finally:
            del self._connections[task]
            self._metrics.sessions.dec()


class _Connection:
    """One client. Requests run as tasks, so that a slow one holds up nobody; replies carry the request's id."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_requests: int,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._reader = reader
        self._writer = writer
        self._max_requests = max_requests
        self._session: Session = service.open_session(_peer_pid(writer))
        self._running: set[asyncio.Task[None]] = set()
        self._write_lock = asyncio.Lock()
        self._serving = asyncio.create_task(self._serve())

    async def run(self) -> None:
        """Serve until the peer goes or breaks the protocol, or ``end`` is called."""
        await asyncio.wait({self._serving})
        try:
            self._serving.result()
            log.info("session.closed", reason="hello refused")
        except asyncio.CancelledError:
            log.debug("session.closed", reason="the gateway stops")
        except (asyncio.IncompleteReadError, ConnectionError):
            log.debug("session.closed", role=self._session.role)
        except TimeoutError:
            log.warning("session.closed", reason="no hello, or a reply was not read in time", role=self._session.role)
        except ContractError as error:
            log.warning("session.closed", reason="malformed frame", field=error.field, problem=error.problem)
        finally:
            await self._close()

    def end(self) -> None:
        """Read no more requests, and close."""
        self._serving.cancel()

    def cut_off(self) -> None:
        """Cancel the requests under way. Only when the gateway stops: their holds end with the pool."""
        for task in self._running:
            task.cancel()

    async def _serve(self) -> None:
        async with asyncio.timeout(HELLO_S):
            await self._handle(await self._read())
        if not self._session.greeted:
            return
        while True:
            frame = await self._read()
            if len(self._running) >= self._max_requests:
                refused = Refused("busy", "too many requests in progress", remedy="wait for replies before sending more")
                await self._reply(frame.id, refused.failure)
                continue
            task = asyncio.create_task(self._handle(frame))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _read(self) -> Frame:
        length = frame_length(await self._reader.readexactly(HEADER.size))
        return parse_frame(await self._reader.readexactly(length))

    async def _handle(self, frame: Frame) -> None:
        kind = frame.type if frame.type in BY_NAME else "unknown"
        with self._metrics.request_seconds.labels(kind).time():
            reply, outcome = await self._answer(frame)
        self._metrics.requests.labels(kind, outcome).inc()
        if self._writer.is_closing():
            await self._service.undelivered(self._session, reply)
            return
        try:
            await self._reply(frame.id, reply)
        except (ConnectionError, TimeoutError):
            log.debug("reply.lost", message=kind)
            # Not close(): that waits for the peer to read what it has not read so far.
            self._writer.transport.abort()

    async def _answer(self, frame: Frame) -> tuple[Record, str]:
        try:
            return await self._service.answer(self._session, frame.message()), "ok"
        except Refused as refused:
            problem = refused
        except ContractError as error:
            problem = Refused("malformed", error.problem, field=error.field, remedy=error.remedy)
        except StorageUnavailable:
            problem = Refused("unavailable", "storage does not answer", remedy="treat it as a miss; see the gateway's log")
        except Exception:
            log.exception("request.failed", message=frame.type if frame.type in BY_NAME else "unknown")
            problem = Refused("internal", "a bug in the gateway", remedy="see the gateway's log, and report it")
        return problem.failure, problem.failure.code

    async def _reply(self, frame_id: int, reply: Record) -> None:
        data = frame_bytes(frame_id, reply)
        async with self._write_lock, asyncio.timeout(WRITE_S):
            self._writer.write(data)
            await self._writer.drain()

    async def _close(self) -> None:
        self._writer.close()
        await self._service.leave_session(self._session)
        # Requests under way end by their own deadlines; cancelling them could leave holds behind.
        if self._running:
            await asyncio.wait(set(self._running))
        await self._service.close_session(self._session)
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, _, _ = _PEER.unpack(raw)
    return int(pid)
