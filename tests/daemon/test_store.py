"""The write path: reserve, write, commit; visible only whole and only after the commit."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Commit, Committed, Reserve, Reserved, WrittenPayload
from tests.daemon import makers
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, no_reservation, nothing_held, reservations
from tests.daemon.engine import Engine, payload
from tests.daemon.wire import denied


async def test_stored_bytes_come_back(gateway: Gateway) -> None:
    """What was committed is loaded bit for bit, on every rank."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a", "b", "c")
    for rank in range(2):
        length = makers.representation().payload_bytes(makers.plan(2).rectangles[rank])
        expected = [payload(f"{text} rank {rank}", length) for text in ("a", "b", "c")]
        assert await engine.restore("a", "b", "c", rank=rank) == expected
    await engine.close()


async def test_not_visible_before_commit(gateway: Gateway) -> None:
    """A reserved and fully written slot is a miss for everybody until its commit."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    written = engine.fill(await engine.reserve(lease, 0), ("a",))
    bound = await engine.bind("a")
    assert bound.present == 0
    assert await engine.acquire(bound.lease, 0, 1) == 0
    assert await engine.commit(written) == 1
    assert await engine.acquire(bound.lease, 0, 1) == 1
    await engine.close()


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99, 1.0])
async def test_writer_that_fails_at_byte_n_is_never_visible(gateway: Gateway, part: float) -> None:
    """A writer that stops anywhere, also after the last byte, and aborts or never commits leaves a miss (kind 21)."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    reserved = await engine.reserve(lease, 0, 1)
    for slot in reserved.slots:
        count = int(slot.length * part)
        engine.view(reserved, slot)[:count] = payload("partial", slot.length)[:count]
    assert await engine.commit((), [reserved.slots[0].reservation]) == 0
    assert await engine.hit("a", "b") == 0
    await engine.workers[0].close()
    await engine.join(0)
    assert await engine.hit("a", "b") == 0
    await engine.close()


async def test_aborted_slot_is_free_again(gateway: Gateway) -> None:
    """After an abort the chunk can be reserved anew; an aborted reservation can't be committed."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    first = await engine.reserve(lease, 0)
    written = engine.fill(first, ("a",))
    assert await engine.commit((), [first.slots[0].reservation]) == 0
    assert await reservations(gateway) == 0
    async with denied("denied", "reservation"):
        await engine.commit(written)
    assert [slot.status for slot in (await engine.reserve(lease, 0)).slots] == ["slot"]
    assert await engine.hit("a") == 0
    await engine.close()


async def test_reservation_is_committed_once(gateway: Gateway) -> None:
    """A second commit, the same reservation twice in one commit, or both committed and aborted: refused, nothing changes."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    written = engine.fill(await engine.reserve(lease, 0, 1), ("a", "b"))
    for items, aborted in (
        ((written[0], written[0]), ()),
        (written, (written[1].reservation,)),
        ((), (written[0].reservation, written[0].reservation)),
        ((*written, WrittenPayload(reservation=12345, digest=makers.name("x"))), ()),
    ):
        async with denied("denied", "reservation"):
            await engine.commit(items, aborted)
    assert await engine.hit("a", "b") == 0
    assert await engine.commit(written) == 2
    async with denied("denied", "reservation"):
        await engine.commit(written)
    assert await engine.hit("a", "b") == 2
    await engine.close()


async def test_resident_chunk_is_skipped(gateway: Gateway) -> None:
    """What is stored already is named resident, what is being written busy; neither gives a slot."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a", "b")
    first = await engine.reserve(lease, 0, 1)
    second = await engine.reserve(lease, 0, 1, 1)
    assert [slot.status for slot in first.slots] == ["resident", "slot"]
    assert [slot.status for slot in second.slots] == ["resident", "busy", "busy"]
    assert all((slot.reservation, slot.offset, slot.length) == (0, 0, 0) for slot in second.slots)
    await engine.close()


async def test_replicated_rectangle_is_stored_once(gateway: Gateway) -> None:
    """Workers that hold copies of one rectangle: the second gets busy while the first writes, resident afterwards."""
    engine = await Engine.start(gateway.config.socket_path, tp=4)
    lease = await engine.lease("a")
    first = await engine.reserve(lease, 0, rank=0)
    assert [slot.status for slot in (await engine.reserve(lease, 0, rank=1)).slots] == ["busy"]
    assert await engine.commit(engine.fill(first, ("a",), 0), rank=0) == 1
    assert [slot.status for slot in (await engine.reserve(lease, 0, rank=1)).slots] == ["resident"]
    assert await engine.hit("a") == 0
    other = await engine.reserve(lease, 0, rank=3)
    assert await engine.commit(engine.fill(other, ("a",), 2), rank=3) == 1
    assert await engine.hit("a") == 1
    assert await engine.restore("a", rank=0) == await engine.restore("a", rank=1)
    assert await engine.restore("a", rank=2) == await engine.restore("a", rank=3)
    assert await engine.restore("a", rank=0) != await engine.restore("a", rank=3)
    await engine.close()


async def test_full_pool_refuses_and_loses_nothing(gateway: Gateway) -> None:
    """With every slot held or open, a store is refused as full; what is there stays."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease(*(f"{number}" for number in range(200)))
    reserved = await engine.reserve(lease, *range(200))
    granted = [slot for slot in reserved.slots if slot.status == "slot"]
    assert 0 < len(granted) < 200
    assert {slot.status for slot in reserved.slots if slot not in granted} == {"full"}
    assert len({slot.offset for slot in granted}) == len(granted)
    assert await engine.commit((), [slot.reservation for slot in granted]) == 0
    await no_reservation(gateway)
    await engine.close()


async def test_reconnected_process_may_still_commit(gateway: Gateway) -> None:
    """A worker whose connection broke while it wrote commits on its next one: the bytes are whole, the process is the same."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    reserved = await engine.reserve(lease, 0, 1)
    written = engine.fill(reserved, ("a", "b"))
    await engine.workers[0].close()

    async def noticed() -> bool:
        return not (await gateway.status())["registrations"]

    await eventually("the loss is noticed", noticed)
    assert await reservations(gateway) == 2
    await engine.join(0)
    assert await engine.commit(written[:1], [written[1].reservation]) == 1
    assert await engine.hit("a", "b") == 1
    await engine.close()
    await nothing_held(gateway)


async def test_reconnected_process_with_new_weights_commits_nothing(gateway: Gateway) -> None:
    """A worker that comes back with a newer generation may have written either weights' pages: its old slots are dropped."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    written = engine.fill(await engine.reserve(lease, 0), ("a",))
    await engine.workers[0].close()

    async def noticed() -> bool:
        return not (await gateway.status())["registrations"]

    await eventually("the loss is noticed", noticed)
    await engine.join(0, generation=1, model=makers.model("new weights"))
    assert await engine.commit(written) == 0
    await engine.close()
    await nothing_held(gateway)


async def test_undelivered_slots_are_free_again(start: Start) -> None:
    """A reserve whose connection was gone before the reply: the process never heard of the slots, so they don't wait for its end."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    backend.stalled = {"reserve"}
    engine.workers[0].post(Reserve(lease=lease, chunks=(0,)))
    await eventually_waiting(backend)
    await engine.workers[0].close()

    async def noticed() -> bool:
        return not (await gateway.status())["registrations"]

    await eventually("the loss is noticed", noticed)
    backend.resume()

    async def aborted() -> bool:
        return "abort" in backend.calls

    # Not "no reservation": that is so before storage has answered, too.
    await eventually("the slot is given back", aborted)
    await no_reservation(gateway)
    await engine.close()


async def eventually_waiting(backend: FaultyBackend) -> None:
    """Wait until a call of the backend waits."""

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("a storage call waits", waits)


async def test_failed_commit_leaves_no_slot_behind(start: Start) -> None:
    """Where storage fails a commit, the reply is a failure, nothing is visible, and the slots are free again."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    written = engine.fill(await engine.reserve(lease, 0, 1), ("a", "b"))
    backend.broken = {"commit"}
    async with denied("unavailable"):
        await engine.commit(written)
    await no_reservation(gateway)
    assert (await gateway.status())["open_writes"] == 0
    assert await engine.hit("a", "b") == 0
    await engine.close()


async def test_failed_abort_does_not_take_a_commit_along(start: Start) -> None:
    """Where storage fails the aborts of a message, the payloads written in the same message become visible all the same."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    written = engine.fill(await engine.reserve(lease, 0, 1), ("a", "b"))
    backend.broken = {"abort"}
    assert await engine.commit(written[:1], [written[1].reservation]) == 1
    assert await engine.hit("a", "b") == 1
    await engine.close()


async def test_commit_of_another_generation_is_lost(start: Start) -> None:
    """A storage process that died between reserve and commit: the reservation is void, also in the new pool."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    written = engine.fill(await engine.reserve(lease, 0), ("a",))
    await backend.die()
    await backend.revive()
    async with denied("denied", "reservation"):
        await engine.commit(written)
    assert await engine.hit("a") == 0
    assert [slot.status for slot in (await engine.reserve(lease, 0)).slots] == ["slot"]
    await engine.close()


async def test_pool_that_changed_during_reserve_gives_no_slots(start: Start) -> None:
    """Slots of a pool that is gone when storage answers are never handed out."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    backend.stalled = {"reserve"}
    reserving = asyncio.create_task(engine.reserve(lease, 0))
    await eventually_waiting(backend)
    await backend.die()
    await backend.revive()
    backend.resume()
    async with denied("unavailable"):
        await reserving
    await no_reservation(gateway)
    await engine.close()


async def test_no_store_without_a_pool(start: Start) -> None:
    """While the storage process restarts a store is refused as unavailable, and nothing waits for it."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    await backend.die()
    async with denied("unavailable"):
        await engine.reserve(lease, 0)
    await backend.revive()
    assert [slot.status for slot in (await engine.reserve(lease, 0)).slots] == ["slot"]
    await engine.close()


async def test_scheduler_cannot_store(gateway: Gateway) -> None:
    """A connection that registered no worker reserves and commits nothing."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    async with denied("denied"):
        await engine.scheduler.call(Reserve(lease=lease, chunks=(0,)), Reserved)
    async with denied("denied"):
        await engine.scheduler.call(Commit(written=(), aborted=(1,)), Committed)
    await engine.close()
