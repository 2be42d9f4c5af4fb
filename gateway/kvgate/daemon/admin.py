"""Admin HTTP: /healthz, /readyz, /metrics, /status, /explain. Reads only; on a unix socket, and where asked for on TCP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvgate.config import ConfigError
from kvgate.daemon.listening import ACCEPTS_A_TURN, let_wait
from kvgate.daemon.state_dir import make_private

log = structlog.get_logger(__name__)

Status = Callable[[], Awaitable[dict[str, Any]]]
Explain = Callable[[str | None, int], Awaitable[list[dict[str, Any]]]]
LAST: Final = 10
MAX_CONNECTIONS: Final = 64
"""At a time: over TCP anybody on the host can open some, and each takes a descriptor that an engine's connection needs."""
LIFE_S: Final = 30.0
"""A connection is closed after that, once it has its answer; one that does not read its answer, after twice that."""
SWEEP_S: Final = 1.0


class AdminServer:
    """Serves what an operator or a probe asks for."""

    def __init__(self, status: Status, ready: Callable[[], str], metrics_page: Callable[[], bytes], explain: Explain) -> None:
        self._status = status
        self._ready = ready
        self._metrics_page = metrics_page
        self._explain = explain
        app = web.Application(client_max_size=1024)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status_page)
        app.router.add_get("/explain", self._last_misses)
        app.router.add_get("/explain/{reference:[0-9a-f]{16}}", self._one_miss)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=2.0)
        self._servers: list[asyncio.Server] = []
        self._sweeping: asyncio.Task[None] | None = None

    async def take_port(self, tcp: str) -> None:
        """Have ``tcp`` (HOST:PORT) where given, without answering there yet. Raises ``ConfigError``."""
        if not tcp:
            return
        host, _, port = tcp.rpartition(":")
        address = (host.strip("[]") or "127.0.0.1", int(port))
        try:
            server = await asyncio.get_running_loop().create_server(
                self._connection, *address, backlog=ACCEPTS_A_TURN, start_serving=False
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "another program listens there; name another port" if taken else "name an address and a port of this host"
            # What asyncio says of a bind has the address in it once more; a name that is not found has no errno of the system's.
            problem = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise ConfigError(f"{tcp}: {problem}; {remedy}", "admin_tcp") from error
        self._servers.append(server)

    async def start(self, path: Path) -> None:
        """Listen on the unix socket ``path`` (mode 0600), and on the port that was taken."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._connection, str(path), backlog=ACCEPTS_A_TURN))
        make_private(path)
        for server in self._servers:
            await server.start_serving()
            let_wait(server)
        self._sweeping = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Stop listening."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeping
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    @property
    def _connections(self) -> list[RequestHandler]:
        return self._runner.server.connections if self._runner.server is not None else []

    def _connection(self) -> asyncio.Protocol:
        if self._runner.server is None or len(self._connections) >= MAX_CONNECTIONS:
            log.debug("admin.refused", limit=MAX_CONNECTIONS)
            return _Refused()
        return self._runner.server()

    async def _sweep(self) -> None:
        """End connections that had time enough: aiohttp waits for the rest of a request for ever."""
        loop = asyncio.get_running_loop()
        since_s: dict[RequestHandler, float] = {}
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = loop.time()
            since_s = {one: since_s.get(one, now_s) for one in self._connections}
            for one, at_s in since_s.items():
                if now_s - at_s >= 2 * LIFE_S:
                    one.force_close()
                elif now_s - at_s >= LIFE_S:
                    one.close()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        problem = self._ready()
        return web.Response(text=f"{problem or 'ready'}\n", status=503 if problem else 200)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics_page(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _status_page(self, _request: web.Request) -> web.Response:
        return web.json_response(await self._status())

    async def _last_misses(self, request: web.Request) -> web.Response:
        last = request.query.get("last", str(LAST))
        if not (last.isascii() and last.isdigit() and len(last) <= 5):
            return web.json_response({"problem": "last: must be a number up to 99999"}, status=400)
        return web.json_response(await self._explain(None, int(last)))

    async def _one_miss(self, request: web.Request) -> web.Response:
        found = await self._explain(request.match_info["reference"], 1)
        return web.json_response(found, status=200 if found else 404)


class _Refused(asyncio.Protocol):
    """One connection too many: hung up on."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
