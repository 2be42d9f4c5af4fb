"""Everything stopped and started again on the LMCache backend: the same bytes from L2, for the same secret only."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from blake3 import blake3

from tests.daemon import makers
from tests.daemon.conftest import eventually
from tests.daemon.engine import Engine, payload
from tests.daemon.serve import Serve, children, serve
from tests.daemon.wire import Denied

DEADLINE_MS = 15_000
TEXTS = ("a", "b", "c")


def expected() -> list[bytes]:
    """What a lone worker stored."""
    length = makers.representation().payload_bytes(makers.plan().rectangles[0])
    return [payload(f"{text} rank 0", length) for text in TEXTS]


def lmcache(folder: Path, **settings: str) -> AbstractAsyncContextManager[Serve]:
    """A gateway on LMCache whose probes may take long: a busy machine must not turn a hit into a miss here."""
    return serve(folder, "lmcache", probe_s="60", storage_s="60", **settings)


async def test_same_bytes_after_a_restart(folder: Path) -> None:
    """Nothing is known, the probe finds L2, acquire brings it to L1, and the payloads are what was stored, bit for bit.

    Another model finds nothing of it, and neither does a gateway with another deployment secret.
    """
    async with lmcache(folder) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        await engine.store(*TEXTS)
        handle = engine.handle
        await engine.close()
        assert await gateway.end() == 0
    async with lmcache(folder) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        assert engine.handle == handle
        bound = await engine.bind(*TEXTS, "absent")
        assert bound.probing or bound.present == 3
        assert await engine.acquire(bound.lease, 0, 4, DEADLINE_MS) == 3
        load = await engine.load(bound.lease, 0, 1, 2)
        assert [bytes(engine.view(load, slot)) for slot in load.slots] == expected()
        assert await engine.finish(load.ticket)
        await engine.release(bound.lease)
        other = await Engine.start(gateway.socket, engine=makers.engine_id("changed"), model=makers.model("changed"))
        assert await other.hit(*TEXTS) == 0
        await engine.close()
        await other.close()
        assert await gateway.end() == 0
    async with lmcache(folder, secret_file=str(folder / "other-secret")) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        assert await engine.hit(*TEXTS) == 0
        await engine.close()
        assert await gateway.end() == 0


def damage(folder: Path) -> None:
    """Flip the last bit of one L2 file, cut a byte from the next, empty the third."""
    files = sorted(path for path in (folder / "data" / "l2").rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert len(files) == 3
    first, second, third = files
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(bytes(data))
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(b"")


async def test_damaged_l2_is_never_served(folder: Path) -> None:
    """L2 files that were cut or emptied are misses; a changed payload is exposed by its digest, and then gone (kinds 22, 23)."""
    async with lmcache(folder) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        for text in TEXTS:
            await engine.store(text)
        await engine.close()
        assert await gateway.end() == 0
    damage(folder)
    async with lmcache(folder) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        changed = []
        for text in TEXTS:
            lease = await engine.lease(text)
            if await engine.acquire(lease, 0, 1, DEADLINE_MS):
                load = await engine.load(lease, 0)
                assert blake3(engine.view(load, load.slots[0])).digest() != load.slots[0].digest
                await engine.finish(load.ticket, 0)
                changed.append(text)
            await engine.release(lease)
        assert len(changed) == 1

        async def gone() -> bool:
            return await engine.hit(*changed) == 0

        await eventually("the changed object is gone from every tier", gone)
        await engine.close()
        assert await gateway.end() == 0


async def test_storage_process_killed_during_a_load(folder: Path) -> None:
    """kill -9 of the storage process while a worker copies: verdict invalid; it comes back, and L2 is served from a new pool."""
    async with lmcache(folder) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        await engine.store(*TEXTS)
        lease = await engine.lease(*TEXTS)
        assert await engine.acquire(lease, 0, 3) == 3
        load = await engine.load(lease, 0, 1, 2)
        for pid in children(gateway.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended with its parent

        async def invalid() -> bool:
            return not await engine.finish(load.ticket)

        await eventually("the load is void", invalid)

        async def writable() -> bool:
            try:
                await engine.store("fresh")
            except Denied:
                return False
            return True

        await eventually("storage is back", writable)
        found = await engine.restore("fresh")
        assert len(found) == 1
        await engine.close()
        assert await gateway.end() == 0
