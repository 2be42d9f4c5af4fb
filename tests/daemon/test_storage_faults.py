"""Storage that dies, stalls or fails under reads: a miss by the deadline, nothing held, nothing stuck."""

from __future__ import annotations

import asyncio

import pytest

from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, nothing_held
from tests.daemon.engine import Engine
from tests.daemon.wire import Denied, denied


async def test_storage_death_during_a_load_voids_it(start: Start) -> None:
    """The pool goes while a worker copies: the verdict is invalid, holds and presence are void, a new acquire is a miss."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    old = await engine.load(lease, 0)
    await backend.die()
    assert not await engine.finish(old.ticket)
    assert await engine.acquire(lease, 0, 1) == 0
    with pytest.raises(Denied):
        await engine.load(lease, 0)
    await backend.revive()
    assert (await engine.bind("a")).present == 0
    assert await engine.hit("a") == 0
    async with denied("denied", "chunks"):
        await engine.load(lease, 0)
    await engine.store("a")
    new = await engine.load(lease, 0) if await engine.acquire(lease, 0, 1) else None
    assert new is not None
    assert new.pool != old.pool
    assert await engine.finish(new.ticket)
    await engine.close()
    await nothing_held(gateway)


async def test_load_over_a_storage_restart_is_invalid(start: Start) -> None:
    """Died and back again within one copy: still invalid, though there is a pool again."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    await backend.die()
    await backend.revive()
    assert not await engine.finish(load.ticket)
    await engine.close()
    await nothing_held(gateway)


@pytest.mark.parametrize("when", ["stalled", "late"])
async def test_pool_that_changed_during_acquire_is_a_miss(start: Start, when: str) -> None:
    """Holds that were taken in a pool that is gone when they arrive are not taken for a hit."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    setattr(backend, when, {"acquire"})
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 1))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    await backend.die()
    await backend.revive()
    # The same object at the same place of the new pool: its envelope is good, but the hold that arrives does not keep it there.
    await engine.store("a")
    backend.resume()
    assert await acquiring == 0
    assert (await gateway.status())["held_chunks"] == 0
    await engine.close()
    await nothing_held(gateway)


async def test_stalled_storage_answers_by_the_deadline(start: Start) -> None:
    """A storage read that hangs is a miss at the deadline that the request gave, and leaves no hold behind (kind 23)."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    backend.stalled = {"acquire"}
    assert await engine.acquire(lease, 0, 1, deadline_ms=50) == 0
    backend.resume()
    await engine.release(lease)
    await nothing_held(gateway)
    assert await engine.hit("a") == 1
    await engine.close()


async def test_stalled_probe_does_not_stall_a_bind(start: Start) -> None:
    """Bind answers soon; an acquire waits for the probe no longer than its own deadline, or the probe's."""
    backend = FaultyBackend()
    gateway = await start(backend, probe_s=0.1)
    engine = await Engine.start(gateway.config.socket_path)
    backend.stalled = {"probe"}
    bound = await engine.bind("a")
    assert (bound.present, bound.probing) == (0, True)
    assert await engine.acquire(bound.lease, 0, 1, deadline_ms=10) == 0
    assert await engine.acquire(bound.lease, 0, 1, deadline_ms=5000) == 0
    await engine.release(bound.lease)
    await engine.close()
    await nothing_held(gateway)


async def test_probe_finds_what_the_index_forgot(start: Start) -> None:
    """A chunk that is stored but unknown to the bounded index is found by the probe and held."""
    gateway = await start(max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b", "c")
    bound = await engine.bind("a", "b", "c")
    assert await engine.acquire(bound.lease, 0, 3) == 3
    await engine.close()


@pytest.mark.parametrize("call", ["probe", "acquire"])
async def test_broken_storage_read_is_a_miss(start: Start, call: str) -> None:
    """Storage that fails a read makes a miss, never a failed request, and works again when storage does."""
    backend = FaultyBackend()
    gateway = await start(backend, max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    backend.broken = {call}
    assert await engine.hit("a", "b") == 0
    backend.broken = set()
    assert await engine.hit("a", "b") == 2
    await engine.close()
    await nothing_held(gateway)


async def test_failed_release_does_not_keep_leases(start: Start) -> None:
    """Where storage can't take holds back, the release is answered, and a lost connection still frees all its leases."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    leases = [await engine.lease("a") for _ in range(3)]
    for lease in leases:
        assert await engine.acquire(lease, 0, 1) == 1
    backend.broken = {"release"}
    await engine.release(leases[0])
    await engine.close()

    async def none() -> bool:
        status = await gateway.status()
        return not status["leases"] and not status["held_chunks"] and not status["registrations"]

    await eventually("no lease is left", none)


async def test_connection_lost_during_a_stalled_acquire(start: Start) -> None:
    """The registration is unsealed at once, not when storage answers; and nothing is held when it does."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease, other = await engine.lease("a"), await engine.lease("a")
    assert await engine.acquire(other, 0, 1) == 1
    backend.stalled = {"acquire"}
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 1, deadline_ms=600_000))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    await engine.close()
    with pytest.raises(ConnectionError):
        await acquiring

    async def noticed() -> bool:
        status = await gateway.status()
        return status["leases"] == 1 and not status["registrations"] and status["storage"]["holds"] == 0

    await eventually("all but the waiting lease is given back", noticed)
    backend.resume()
    await nothing_held(gateway)


async def test_released_lease_stops_a_long_acquire(start: Start) -> None:
    """A request that is aborted while it acquires many chunks holds none of them afterwards."""
    backend = FaultyBackend(4 << 20)
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    texts = [f"{number}" for number in range(130)]
    await engine.store(*texts)
    lease = await engine.lease(*texts)
    backend.stalled = {"acquire"}
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 130))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    releasing = asyncio.create_task(engine.release(lease))
    await asyncio.sleep(0.05)
    calls = backend.calls.count("acquire")
    backend.resume()
    assert await acquiring == 0
    await releasing
    assert backend.calls.count("acquire") == calls
    await nothing_held(gateway)
    await engine.close()


async def test_stop_does_not_wait_for_stalled_storage(start: Start) -> None:
    """A stop is bounded by drain_s, also while a request waits for storage for ten minutes."""
    backend = FaultyBackend()
    gateway = await start(backend, drain_s=0.2)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    backend.stalled = {"acquire"}
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 1, deadline_ms=600_000))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    async with asyncio.timeout(10):
        await gateway.stop()
    with pytest.raises(ConnectionError):
        await acquiring
    assert backend.waiting == 0
    await engine.close()
