"""A slot that a process may still write to must go to nobody before that process has ended, and only it may commit what it reserved."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blake3 import blake3

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import WrittenPayload
from tests.daemon import makers
from tests.daemon.conftest import no_reservation, ranks_are, reservations
from tests.daemon.engine import Engine
from tests.daemon.wire import WAIT_S, denied


@asynccontextmanager
async def writer_process(
    gateway: Gateway, engine: str, lease: bytes, *chunks: int, tp: int = 1
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The last of an engine's ``tp`` workers, in another process, that has reserved ``chunks``."""
    arguments = ["-m", "tests.daemon.writer_process", str(gateway.config.socket_path), engine, str(tp), lease.hex()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        *map(str, chunks),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def tell(process: asyncio.subprocess.Process, command: str) -> list[int] | int:
    """Have the process do something; what it says."""
    assert process.stdin is not None
    process.stdin.write(f"{command}\n".encode())
    return await line(process)


async def line(process: asyncio.subprocess.Process) -> list[int] | int:
    """One line of JSON from the process."""
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        value: list[int] | int = json.loads(await process.stdout.readline())
    return value


async def test_killed_writer_frees_its_slots_only_at_its_exit(gateway: Gateway) -> None:
    """SIGSTOP does not free an open slot, SIGKILL does: nobody gets a buffer that a process may still write to."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    await engine.workers[0].close()
    await ranks_are(gateway)
    async with writer_process(gateway, "engine", lease, 0, 1) as process:
        assert len(await line(process)) == 2  # type: ignore[arg-type]
        await tell(process, "leave")
        process.send_signal(signal.SIGSTOP)
        await ranks_are(gateway)
        await engine.join(0)
        await asyncio.sleep(0.2)
        assert [slot.status for slot in (await engine.reserve(lease, 0, 1)).slots] == ["busy", "busy"]
        assert await reservations(gateway) == 2
        process.kill()
        await process.wait()
        await no_reservation(gateway)
    assert [slot.status for slot in (await engine.reserve(lease, 0, 1)).slots] == ["slot", "slot"]
    assert await engine.hit("a", "b") == 0
    await engine.close()


async def test_lost_connection_of_a_living_writer_frees_nothing(gateway: Gateway) -> None:
    """Dropping the connection proves nothing about the writes: the slots stay closed while the process lives."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    reserved = await engine.reserve(lease, 0)
    await engine.workers[0].close()
    await engine.join(0)
    assert [slot.status for slot in (await engine.reserve(lease, 0)).slots] == ["busy"]
    assert await reservations(gateway) == 1
    assert await engine.commit((), [reserved.slots[0].reservation]) == 0
    assert await reservations(gateway) == 0
    await engine.close()


async def test_other_process_cannot_commit_my_reservation(gateway: Gateway) -> None:
    """Reservations belong to the process that got them: another one can neither publish nor abort them."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    lease = await engine.lease("chunk 0")
    other = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("other"))
    await engine.workers[1].close()
    await ranks_are(gateway, "1/2", "1/1")
    async with writer_process(gateway, "engine", lease, 0, tp=2) as process:
        (theirs,) = await line(process)  # type: ignore[misc]
        stolen = WrittenPayload(reservation=theirs, digest=blake3(b"").digest())
        for thief in (engine, other):
            for items, aborted in (((stolen,), ()), ((), (theirs,))):
                async with denied("denied", "reservation"):
                    await thief.commit(items, aborted)
        assert await engine.hit("chunk 0") == 0
        assert await tell(process, "commit") == 1
        assert process.stdin is not None
        process.stdin.write(b"end\n")
        await process.wait()
    await engine.close()
    await other.close()
