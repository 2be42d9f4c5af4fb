"""Admin HTTP: health, readiness, metrics, status; reads only."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvgate.daemon.app import Gateway
from tests.daemon.admin_client import get
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start
from tests.daemon.engine import Engine
from tests.daemon.wire import WAIT_S


async def test_health_and_readiness(start: Start) -> None:
    """Healthy means the loop runs; ready means there is a pool: without one /readyz is 503 and says why."""
    backend = FaultyBackend()
    gateway = await start(backend)
    assert await get(gateway, "/healthz") == (200, "ok\n")
    assert await get(gateway, "/readyz") == (200, "ready\n")
    await backend.die()
    assert await get(gateway, "/healthz") == (200, "ok\n")
    status, text = await get(gateway, "/readyz")
    assert status == 503
    assert "restarting" in text
    assert json.loads((await get(gateway, "/status"))[1])["ready"] != "yes"
    await backend.revive()
    assert await get(gateway, "/readyz") == (200, "ready\n")


async def test_status_counts_what_is_there(gateway: Gateway) -> None:
    """The status page counts registrations, leases, holds and loads, and shows no full digest."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a", "b")
    await engine.acquire(lease, 0, 1)
    await engine.load(lease, 0)
    await engine.reserve(lease, 1)
    code, text = await get(gateway, "/status")
    status = json.loads(text)
    assert code == 200
    assert (status["ready"], status["leases"], status["held_chunks"]) == ("yes", 1, 1)
    assert (status["open_loads"], status["open_writes"], status["known_chunks"]) == (1, 1, 1)
    (registration,) = status["registrations"]
    assert (registration["ranks"], registration["sealed"], registration["revoked"]) == ("1/1", True, "")
    assert engine.handle.hex() not in text
    assert lease.hex() not in text
    await engine.close()


async def test_metrics_page_is_valid(gateway: Gateway) -> None:
    """The metrics page parses as Prometheus text, and counts what happened."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    assert len(await engine.restore("a")) == 1
    _, page = await get(gateway, "/metrics")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["kvgate_sessions",] == 2
    assert samples["kvgate_registrations",] == 1
    assert samples["kvgate_requests_total", "Bind", "ok"] == 2
    assert samples["kvgate_committed_shards_total", "visible"] == 1
    assert samples["kvgate_loaded_chunks_total", "good"] == 1
    await engine.close()


@pytest.mark.parametrize("path", ["/", "/admin", "/metrics/x", "/../secret", "/status%00"])
async def test_unknown_page_is_404(gateway: Gateway, path: str) -> None:
    """Only the four pages exist."""
    assert (await get(gateway, path))[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_admin_only_reads(gateway: Gateway, method: str) -> None:
    """No page takes anything but GET and HEAD."""
    connector = aiohttp.UnixConnector(path=str(gateway.config.admin_path))
    async with aiohttp.ClientSession(connector=connector) as session:
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            async with session.request(method, f"http://kvgate{path}") as reply:
                assert reply.status == 405


@pytest.mark.parametrize(
    "junk", [b"\0" * 100, b"GET\r\n\r\n", b"GET /status HTTP/9.9\r\n\r\n", b"A" * 100_000, b"\x16\x03\x01" + b"x" * 50]
)
async def test_junk_on_the_admin_socket(gateway: Gateway, junk: bytes) -> None:
    """What is no HTTP gets an error or a hang-up, and the next probe is answered."""
    reader, writer = await asyncio.open_unix_connection(str(gateway.config.admin_path))
    try:
        writer.write(junk)
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read(4096)
        assert not answer.startswith(b"HTTP/1.1 2")
    except ConnectionError:
        pass  # hung up before it had read all
    finally:
        writer.transport.abort()
    assert await get(gateway, "/healthz") == (200, "ok\n")


async def test_admin_on_tcp_where_asked(start: Start) -> None:
    """With admin_tcp the same pages are served on TCP; without it nothing listens there."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    await start(admin_tcp=f"127.0.0.1:{port}")
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as reply:
        assert reply.status == 200
