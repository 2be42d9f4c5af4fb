"""A rank must belong to one process at a time: a living engine keeps it, and it is free at once when its process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import (
    Load,
    LoadPlan,
    Reserve,
    Reserved,
)
from tests.daemon import makers
from tests.daemon.conftest import ranks_are
from tests.daemon.engine import Engine
from tests.daemon.wire import WAIT_S, Denied, denied


async def test_second_worker_of_a_rank_takes_its_place(gateway: Gateway) -> None:
    """Where two connections report one rank, only the later one may load, store or confirm: nobody confirms for another."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("x")
    lease = await engine.lease("x", "y")
    assert await engine.acquire(lease, 0, 1) == 1
    displaced = engine.workers[0]
    await engine.join(0)
    for message, kind in (
        (Reserve(lease=lease, chunks=(1,)), Reserved),
        (Load(lease=lease, chunks=(0,)), LoadPlan),
    ):
        with pytest.raises(Denied):
            await displaced.call(message, kind)
    assert await engine.finish((await engine.load(lease, 0)).ticket)
    await displaced.close()
    assert (await engine.bind("x")).present == 1
    await engine.close()


@asynccontextmanager
async def worker_process(gateway: Gateway, what: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The engine's only worker in another process (see ``worker_process.py``), and what it was told."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.daemon.worker_process", str(gateway.config.socket_path), what),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            yield process, (await process.stdout.readline()).decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("what", ["same", "newer", "other", "second"])
async def test_live_engine_keeps_its_rank(gateway: Gateway, what: str) -> None:
    """Another process with the engine_id of a live engine is refused with what mends it, whatever it loaded; the first one works on."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("x")
    async with worker_process(gateway, what) as (_, said):
        assert said.startswith("denied engine another running process")
        assert "engine_id of its own in --kv-transfer-config" in said
    assert len(await engine.restore("x")) == 1
    assert (await engine.join(0)).handle == engine.handle
    assert len(await engine.restore("x")) == 1
    await engine.close()


async def test_rank_is_free_once_its_process_left(gateway: Gateway) -> None:
    """When the process that has the rank closes its connection, the next one gets it, though the first one lives."""
    async with worker_process(gateway, "same") as (process, said):
        assert said.startswith("registered")
        engine = Engine(gateway.config.socket_path, makers.report(), None)
        async with denied("denied", "engine"):
            await engine.join(0)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await ranks_are(gateway)
        assert (await engine.join(0)).sealed


@pytest.mark.parametrize("changes", [{}, {"model": makers.model("other weights")}])
async def test_killed_engine_starts_again_at_once(gateway: Gateway, changes: dict[str, Any]) -> None:
    """After a kill -9 the next start with the same engine_id registers at the first try, also with other weights, and also where a
    child of the killed process keeps its connection open."""
    async with worker_process(gateway, "share") as (process, said):
        child = int(said.split()[1])
        try:
            process.kill()
            await process.wait()
            os.kill(child, 0)
            await ranks_are(gateway, "1/1")
            engine = await Engine.start(gateway.config.socket_path, **changes)
            await engine.store("x")
            assert len(await engine.restore("x")) == 1
        finally:
            os.kill(child, signal.SIGKILL)
    await asyncio.sleep(0.1)
    assert len(await engine.restore("x")) == 1
    await engine.close()


async def test_start_waits_for_what_is_left_of_the_one_before(gateway: Gateway) -> None:
    """While a rank of a killed engine still dies, the next start is told to ask again, and mixes with nothing; then it registers."""
    path, plan = gateway.config.socket_path, makers.plan(2)
    async with worker_process(gateway, "first") as (first, _), worker_process(gateway, "second") as (second, said):
        assert said.startswith("registered")
        await ranks_are(gateway, "2/2")
        first.kill()
        await first.wait()
        for changes in ({}, {"generation": 1}, {"generation": 1, "model": makers.model("other weights")}):
            async with denied("denied", "engine"):
                await Engine(path, makers.report(plan=plan, **changes), None).join(0)
        second.kill()
        await second.wait()
    engine = await Engine.start(path, tp=2)
    await engine.store("x")
    assert len(await engine.restore("x", rank=1)) == 1
    await engine.close()
