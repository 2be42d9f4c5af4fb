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
_PEER = struct.Struct("iII")


class ControlServer:
    """Serves the control protocol on one unix socket."""

    def __init__(self, service: Service, metrics: Metrics, *, max_sessions: int, max_requests_per_session: int) -> None:
        self._service = service
        self._metrics = metrics
        self._max_sessions = max_sessions
        self._max_requests = max_requests_per_session
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen on ``path``, mode 0600."""
        self._server = await asyncio.start_unix_server(self._accept, path=str(path), backlog=128)
        make_private(path)

    async def stop(self) -> None:
        """Accept nobody any more and end all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs the callback in a task"
        if len(self._connections) >= self._max_sessions:
            log.warning("session.refused", reason="max_sessions", limit=self._max_sessions)
            writer.close()
            return
        self._connections.add(task)
        self._metrics.sessions.inc()
        connection = _Connection(self._service, self._metrics, reader, writer, self._max_requests)
        try:
            await connection.run()
        except asyncio.CancelledError:
            log.debug("session.cancelled")
        finally:
            self._connections.discard(task)
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

    async def run(self) -> None:
        """Serve until the peer goes or breaks the protocol."""
        try:
            await self._serve()
        except (asyncio.IncompleteReadError, ConnectionError):
            log.debug("session.closed", role=self._session.role)
        except TimeoutError:
            log.warning("session.closed", reason="no hello, or a reply was not read in time", role=self._session.role)
        except ContractError as error:
            log.warning("session.closed", reason="malformed frame", field=error.field, problem=error.problem)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _serve(self) -> None:
        async with asyncio.timeout(HELLO_S):
            frame = await self._read()
            await self._handle(frame)
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
        try:
            await self._reply(frame.id, reply)
        except (ConnectionError, TimeoutError):
            log.debug("reply.lost", message=kind)
            self._writer.close()

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
        # Requests under way end by their own deadlines; cancelling them could leave holds behind.
        if self._running:
            await asyncio.wait(set(self._running))
        try:
            await self._service.close_session(self._session)
        except StorageUnavailable:
            log.warning("session.release_failed", reason="storage does not answer; its holds end with its pool")


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, _, _ = _PEER.unpack(raw)
    return int(pid)
