"""Bind, acquire, extend, release: whole chunks without a hole, and everything given back exactly once."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import (
    MAX_CHUNKS,
    Acquire,
    Acquired,
    Bound,
    Done,
    Extend,
    Extended,
    Release,
    Reserve,
    Reserved,
)
from tests.daemon import makers
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, nothing_held
from tests.daemon.engine import Engine
from tests.daemon.wire import Wire, denied


async def holds(gateway: Gateway) -> int:
    """Read holds in storage."""
    return int((await gateway.status())["storage"]["holds"])


async def test_bind_holds_nothing(gateway: Gateway) -> None:
    """Bind gives addresses, an empty lease and a hint; it pins nothing."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    bound = await engine.bind("a", "b", "c")
    assert (bound.present, len(bound.addresses)) == (2, 96)
    assert await holds(gateway) == 0
    assert (await gateway.status())["held_chunks"] == 0
    await engine.close()


async def test_only_the_contiguous_prefix_hits(gateway: Gateway) -> None:
    """With a chunk missing in the middle, only what lies before it is present and held."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b", "c")
    reserved = await engine.reserve(lease, 0, 2)
    assert await engine.commit(engine.fill(reserved, ("a", "b", "c"))) == 2
    bound = await engine.bind("a", "b", "c")
    assert bound.present == 1
    assert await engine.acquire(bound.lease, 0, 3) == 1
    assert await holds(gateway) == 1
    async with denied("denied", "chunks"):
        await engine.load(bound.lease, 2)
    await engine.close()


@pytest.mark.parametrize("missing", [0, 1])
async def test_one_of_two_rectangles_missing_is_a_miss(gateway: Gateway, missing: int) -> None:
    """A chunk is a hit only if every rectangle of the plan is there; nothing stays held for a half."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a")
    await engine.store("a", "b", ranks=[1 - missing])
    bound = await engine.bind("a", "b")
    assert bound.present == 1
    assert await engine.acquire(bound.lease, 0, 2) == 1
    assert await holds(gateway) == 2
    await engine.store("a", "b", ranks=[missing])
    assert await engine.acquire(bound.lease, 0, 2) == 2
    await engine.release(bound.lease)
    assert await holds(gateway) == 0
    await engine.close()


async def test_lost_rectangle_is_found_out(start: Start) -> None:
    """Where the index believes a chunk whole and storage has lost one rectangle, acquire is a miss and holds nothing of it."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a", "b")
    await backend.lose_newest()
    bound = await engine.bind("a", "b")
    assert bound.present == 2
    assert await engine.acquire(bound.lease, 0, 2) == 1
    assert await holds(gateway) == 2
    assert (await engine.bind("a", "b")).present == 1
    await engine.close()


async def test_acquire_is_idempotent(gateway: Gateway) -> None:
    """Asking again for what is held takes no second hold, and one release gives all back."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    for _ in range(3):
        assert await engine.acquire(lease, 0, 2) == 2
    assert await engine.acquire(lease, 1, 2) == 2
    assert await holds(gateway) == 2
    await engine.release(lease)
    assert await holds(gateway) == 0
    await engine.close()


async def test_parallel_acquires_take_one_hold_each_chunk(gateway: Gateway) -> None:
    """Many acquires of one lease at once agree, and take each hold once."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    assert await asyncio.gather(*(engine.acquire(lease, 0, 2) for _ in range(20))) == [2] * 20
    assert await holds(gateway) == 2
    await engine.close()


async def test_acquire_can_be_polled(start: Start) -> None:
    """An acquire that came too early is a miss; asked again after the store it hits."""
    engine = await Engine.start((await start()).config.socket_path)
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 0
    await engine.store("a")
    assert await engine.acquire(lease, 0, 1) == 1
    await engine.close()


async def test_acquire_within_the_local_hit(gateway: Gateway) -> None:
    """Only the range asked for is held: what vLLM has itself is not."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b", "c")
    lease = await engine.lease("a", "b", "c")
    assert await engine.acquire(lease, 2, 3) == 3
    assert await holds(gateway) == 1
    async with denied("denied", "chunks"):
        await engine.load(lease, 0)
    await engine.close()


@pytest.mark.parametrize(("first", "last"), [(0, 3), (2, 3), (2, 1), (0, MAX_CHUNKS), (3, 3)])
async def test_acquire_beyond_the_lease_is_refused(gateway: Gateway, first: int, last: int) -> None:
    """A range outside the bound chunks, or turned round, is refused by name and holds nothing."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b", "c")
    lease = await engine.lease("a", "b")
    async with denied("denied", "last"):
        await engine.acquire(lease, first, last)
    assert await holds(gateway) == 0
    await engine.close()


@pytest.mark.parametrize("chunk", [2, 3, MAX_CHUNKS])
async def test_chunks_beyond_the_lease_are_refused(gateway: Gateway, chunk: int) -> None:
    """A worker can neither load nor store a chunk that the lease does not know."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    for attempt in (engine.load(lease, chunk), engine.reserve(lease, chunk), engine.reserve(lease, 0, chunk)):
        async with denied("denied", "chunks"):
            await attempt
    assert (await gateway.status())["storage"]["reservations"] == 0
    await engine.close()


async def test_release_gives_back_once(gateway: Gateway) -> None:
    """A second release is answered and does nothing; the lease is worth nothing after the first."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease, other = await engine.lease("a"), await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == await engine.acquire(other, 0, 1) == 1
    for _ in range(3):
        await engine.release(lease)
    storage = (await gateway.status())["storage"]
    assert (storage["holds"], storage["unknown_releases"]) == (1, 0)
    for attempt in (engine.acquire(lease, 0, 1), engine.extend(lease, 1, "b"), engine.load(lease, 0), engine.reserve(lease, 0)):
        async with denied("denied", "lease"):
            await attempt
    await engine.close()
    await nothing_held(gateway)


async def test_each_reader_gives_back_its_own(gateway: Gateway) -> None:
    """Two readers of one object: the first one's release leaves the second one's hold, and its load stays good (kind 19)."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    leases = [await engine.lease("a", "b") for _ in range(2)]
    for lease in leases:
        assert await engine.acquire(lease, 0, 2) == 2
    assert await holds(gateway) == 4
    await engine.release(leases[0])
    assert await holds(gateway) == 2
    load = await engine.load(leases[1], 0, 1)
    assert await engine.finish(load.ticket)
    await engine.release(leases[1])
    assert await holds(gateway) == 0
    await engine.close()


@pytest.mark.parametrize("salted", [False, True])
async def test_nothing_is_locked_afterwards(gateway: Gateway, salted: bool) -> None:
    """Look up with a salt, release: no hold is left, for a hit and for a miss (kind 18)."""
    engine = await Engine.start(gateway.config.socket_path)
    salt = makers.name("salt") if salted else None
    await engine.store("a", salt=salt)
    assert await engine.hit("a", "absent", salt=salt) == 1
    assert await engine.hit("absent", salt=salt) == 0
    assert await holds(gateway) == 0
    await nothing_held(gateway)
    await engine.close()


async def test_lease_of_another_connection_is_useless(gateway: Gateway) -> None:
    """Only the connection that bound a lease may acquire, extend or release it; a release by another is ignored."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    other = await Wire.open(gateway.config.socket_path)
    async with denied("denied", "lease"):
        await other.call(Acquire(lease=lease, first=0, last=1, deadline_ms=1000), Acquired)
    async with denied("denied", "lease"):
        await other.call(Extend(lease=lease, first=1, tokens=makers.tokens("b")), Extended)
    for wire in (other, engine.workers[0]):
        await wire.call(Release(lease=lease), Done)
    assert await holds(gateway) == 1
    assert await engine.finish((await engine.load(lease, 0)).ticket)
    await other.close()
    await engine.close()


@pytest.mark.parametrize("flip", [0, 15, 16, 31])
async def test_made_up_lease_is_refused(gateway: Gateway, flip: int) -> None:
    """A token with any byte changed is no lease of this deployment."""
    engine = await Engine.start(gateway.config.socket_path)
    changed = bytearray(await engine.lease("a"))
    changed[flip] ^= 1
    lease = bytes(changed)
    for message, kind in (
        (Acquire(lease=lease, first=0, last=1, deadline_ms=1000), Acquired),
        (Release(lease=lease), Done),
    ):
        async with denied("denied", "lease"):
            await engine.scheduler.call(message, kind)
    async with denied("denied", "lease"):
        await engine.workers[0].call(Reserve(lease=lease, chunks=(0,)), Reserved)
    await engine.close()


async def test_release_keeps_holds_of_an_open_load(gateway: Gateway) -> None:
    """A request that ends while a worker copies gives its holds back when the copy is done, not before."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    assert await engine.acquire(lease, 0, 2) == 2
    first, second = await engine.load(lease, 0), await engine.load(lease, 1)
    await engine.release(lease)
    assert await holds(gateway) == 2
    async with denied("denied", "lease"):
        await engine.load(lease, 0)
    assert await engine.finish(first.ticket)
    assert await holds(gateway) == 2
    assert await engine.finish(second.ticket)
    assert await holds(gateway) == 0
    await engine.close()


async def test_lost_scheduler_gives_back_its_leases(gateway: Gateway) -> None:
    """When the scheduler's connection is gone all its leases are released; another scheduler's stay."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    for _ in range(5):
        assert await engine.acquire(await engine.lease("a"), 0, 1) == 1
    other = await Wire.open(gateway.config.socket_path)
    kept = (await other.call(engine.bind_message("a"), Bound)).lease
    assert (await other.call(Acquire(lease=kept, first=0, last=1, deadline_ms=1000), Acquired)).end == 1
    await engine.scheduler.close()

    async def rest() -> bool:
        status = await gateway.status()
        return bool(status["leases"] == 1 and status["storage"]["holds"] == 1)

    await eventually("only the other scheduler's lease is left", rest)
    await other.close()
    await engine.workers[0].close()
    await nothing_held(gateway)


async def test_lost_scheduler_does_not_pull_a_load(gateway: Gateway) -> None:
    """The scheduler dies while a worker copies: the slots stay until the worker is done, and its verdict is good."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    await engine.scheduler.close()
    await asyncio.sleep(0.05)
    assert await holds(gateway) == 1
    assert await engine.finish(load.ticket)
    await nothing_held(gateway)
    await engine.workers[0].close()


async def test_lost_worker_closes_its_loads(gateway: Gateway) -> None:
    """A worker that dies while it copies leaves no load open; the released lease's holds are free."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    await engine.release(lease)
    await engine.workers[0].close()
    await nothing_held(gateway)
    await engine.join(0)
    assert not await engine.finish(load.ticket)
    await engine.close()


async def test_held_objects_are_not_evicted(start: Start) -> None:
    """Under pressure a held object stays; after its release it goes."""
    gateway = await start()
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("kept")
    lease = await engine.lease("kept")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    before = bytes(engine.view(load, load.slots[0]))
    for number in range(200):
        await engine.store(f"pressure {number}")
    assert (await gateway.status())["storage"]["evicted_objects"] > 0
    assert bytes(engine.view(load, load.slots[0])) == before
    assert await engine.finish(load.ticket)
    await engine.release(lease)
    for number in range(200):
        await engine.store(f"more {number}")
    assert await engine.hit("kept") == 0
    await engine.close()
