"""Gateways for tests: in this process, on real sockets, in short private folders."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvgate.config import Config
from kvgate.daemon.app import Gateway
from kvgate.storage.backend import StorageBackend
from tests.daemon import makers
from tests.daemon.wire import WAIT_S


class Start(Protocol):
    """Starts a gateway with settings changed from the small defaults."""

    def __call__(self, backend: StorageBackend | None = None, /, **settings: Any) -> Awaitable[Gateway]: ...


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short private folder: a unix socket's name has room for about 100 bytes."""
    made = Path(tempfile.mkdtemp(prefix="kvg-"))
    yield made
    shutil.rmtree(made)


def small_config(folder: Path, **settings: Any) -> Config:
    """A configuration for small records in ``folder``."""
    values: dict[str, Any] = {
        "state_dir": str(folder / "state"),
        "data_dir": str(folder / "data"),
        "backend": "memory",
        "pool_bytes": 1 << 20,
        "chunk_tokens": makers.CHUNK_TOKENS,
        "adapter_wait_s": 0.3,
        "drain_s": 1.0,
    }
    return Config(**(values | settings))


@pytest.fixture
async def start(folder: Path) -> AsyncIterator[Start]:
    """Start gateways; all are stopped at the end, and must leave nothing behind."""
    running: list[Gateway] = []

    async def begin(backend: StorageBackend | None = None, /, **settings: Any) -> Gateway:
        gateway = Gateway(small_config(folder, **settings), backend)
        await gateway.start()
        running.append(gateway)
        return gateway

    yield begin
    for gateway in running:
        async with asyncio.timeout(WAIT_S):
            await gateway.stop()
    for gateway in running:
        assert not left_in(gateway.config.state_dir)
    assert not own_tasks()


@pytest.fixture
async def gateway(start: Start) -> Gateway:
    """A gateway on the memory backend."""
    return await start()


def left_in(state_dir: str) -> list[str]:
    """Sockets and locks in a state directory."""
    return [path.name for path in Path(state_dir).iterdir() if path.suffix == ".sock" or path.name == "lock"]


def own_tasks() -> list[str]:
    """Tasks of the daemon that still run in this loop."""
    found = []
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and "/gateway/kvgate/" in code.co_filename:
            found.append(code.co_qualname)
    return found


async def eventually(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until ``holds()``; fails naming ``what``."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not await holds():  # noqa: ASYNC110  # what is waited for is another process, or a socket's other end
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"never happened: {what}")


async def ranks_are(gateway: Gateway, *live: str) -> None:
    """Wait until the registrations count these live ranks, e.g. ``1/2``; one without any is not listed."""

    async def seen() -> bool:
        return sorted(entry["ranks"] for entry in (await gateway.status())["registrations"]) == sorted(live)

    await eventually(f"{live} ranks", seen)


async def reservations(gateway: Gateway) -> int:
    """Open writes in storage."""
    return int((await gateway.status())["storage"]["reservations"])


async def no_reservation(gateway: Gateway) -> None:
    """Wait until storage has no open write."""

    async def none() -> bool:
        return await reservations(gateway) == 0

    await eventually("no reservation", none)


async def nothing_held(gateway: Gateway) -> None:
    """Wait until no lease, hold, load or write is left."""

    async def idle() -> bool:
        status = await gateway.status()
        storage = status["storage"]
        counts = [status[name] for name in ("leases", "held_chunks", "open_loads", "open_writes")]
        return not any([*counts, storage["holds"], storage["reservations"]])

    await eventually("nothing held", idle)
