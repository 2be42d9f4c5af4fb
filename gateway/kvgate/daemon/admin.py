"""Admin HTTP: /healthz, /readyz, /metrics, /status, /explain. Reads only; on a unix socket, and where asked for on TCP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from kvgate.daemon.state_dir import make_private

Status = Callable[[], Awaitable[dict[str, Any]]]
Explain = Callable[[str | None, int], Awaitable[list[dict[str, Any]]]]
LAST: Final = 10


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

    async def start(self, path: Path, tcp: str) -> None:
        """Listen on the unix socket ``path`` (mode 0600) and, where given, on ``tcp`` (HOST:PORT)."""
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path)).start()
        make_private(path)
        if tcp:
            host, _, port = tcp.rpartition(":")
            await web.TCPSite(self._runner, host.strip("[]") or "127.0.0.1", int(port)).start()

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

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
