"""Connections that take descriptors and say nothing: they keep no engine out, and fill no log."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from kvgate.daemon import admin
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Welcome
from tests.daemon.admin_client import get
from tests.daemon.conftest import eventually
from tests.daemon.engine import Engine
from tests.daemon.serve import serve
from tests.daemon.wire import WAIT_S, Wire, hello

HALF = b"GET /healthz HTTP/1.1\r\n"


async def half_request(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the admin socket that never asks to the end."""
    reader, writer = await asyncio.open_unix_connection(str(gateway.config.admin_path))
    writer.write(HALF)
    return reader, writer


def open_files(pid: int) -> int:
    """How many descriptors a process has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def hung_up(reader: asyncio.StreamReader) -> bool:
    """Whether the gateway closes this connection."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def test_half_requests_on_the_admin_socket_are_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection more than the limit is hung up on, engines are served all the same, and with the others gone probes are too."""
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 3)
    held = [await half_request(gateway) for _ in range(3)]
    refused, kept = await half_request(gateway)
    assert await hung_up(refused)
    kept.transport.abort()
    await (await Wire.open(gateway.config.socket_path)).close()
    for _, writer in held:
        writer.transport.abort()

    async def answered() -> bool:
        try:
            return await get(gateway, "/healthz") == (200, "ok\n")
        except OSError:
            return False

    await eventually("a probe is answered", answered)


async def test_half_a_request_ends(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that never asks to the end is closed by the gateway."""
    monkeypatch.setattr(admin, "LIFE_S", 0.1)
    monkeypatch.setattr(admin, "SWEEP_S", 0.05)
    reader, _ = await half_request(gateway)
    assert await hung_up(reader)
    assert await get(gateway, "/healthz") == (200, "ok\n")


async def test_without_a_descriptor_left(folder: Path) -> None:
    """A gateway that can open no more files serves the engines it has, logs that once, and takes connections again afterwards."""
    async with serve(folder, log_level="warning") as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        await engine.store("a")
        pid = gateway.process.pid
        left = open_files(pid) + 4
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (left, left))
        waiting = [await Wire.connect(gateway.socket) for _ in range(12)]
        await asyncio.sleep(2.5)  # asyncio tries again every second
        assert await engine.hit("a") == 1
        for wire in waiting:
            await wire.close()
        await eventually("connections are taken again", lambda: greeted(gateway.socket))
        await engine.close()
        await gateway.end()
    assert gateway.output.count(b"accept.failed") == 1
    assert b"Traceback" not in gateway.output


async def greeted(path: Path) -> bool:
    """Whether a hello is answered soon."""
    wire = await Wire.connect(path)
    try:
        async with asyncio.timeout(1):
            return isinstance(await wire.post(hello()), Welcome)
    except (TimeoutError, ConnectionError):
        return False
    finally:
        await wire.close()
