"""Loads: only what was acquired, each rank its own rectangle, each ticket closed once."""

from __future__ import annotations

import pytest

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import FinishLoad, Load, LoadPlan, LoadVerdict, WrittenPayload
from tests.daemon import makers
from tests.daemon.conftest import nothing_held
from tests.daemon.engine import Engine
from tests.daemon.wire import Denied, denied


async def test_load_needs_an_acquire(gateway: Gateway) -> None:
    """Present is a hint: a chunk that was not acquired can't be loaded, nor can a partly acquired batch."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    async with denied("denied", "chunks"):
        await engine.load(lease, 0)
    assert await engine.acquire(lease, 0, 1) == 1
    async with denied("denied", "chunks"):
        await engine.load(lease, 0, 1)
    assert (await gateway.status())["open_loads"] == 0
    await engine.close()


async def test_ticket_closes_once_and_only_for_its_worker(gateway: Gateway) -> None:
    """A made-up ticket, a closed one, and another connection's ticket all get the verdict invalid, and close nothing."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    assert not await engine.finish(load.ticket + 1000)
    assert not await engine.finish(load.ticket, rank=1)
    assert not await engine.finish(load.ticket, 0, rank=1)
    assert (await engine.scheduler.call(FinishLoad(ticket=load.ticket, mismatched=()), LoadVerdict)).valid is False
    assert (await gateway.status())["open_loads"] == 1
    assert await engine.hit("a") == 1
    assert await engine.finish(load.ticket)
    assert not await engine.finish(load.ticket)
    await engine.close()
    await nothing_held(gateway)


async def test_mismatch_of_a_chunk_that_was_not_loaded_is_refused(gateway: Gateway) -> None:
    """It is refused by name, quarantines nothing, and the load can still be closed: no hold leaks."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    assert await engine.acquire(lease, 0, 2) == 2
    load = await engine.load(lease, 0)
    for mismatched in ((1,), (0, 1), (2**40,)):
        async with denied("malformed", "mismatched"):
            await engine.finish(load.ticket, *mismatched)
    assert await engine.hit("a", "b") == 2
    await engine.release(lease)
    assert await engine.finish(load.ticket)
    await nothing_held(gateway)
    await engine.close()


async def test_refused_mismatch_does_not_keep_a_lost_workers_holds(gateway: Gateway) -> None:
    """The same, where the worker never closes the load but goes away."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    with pytest.raises(Denied):
        await engine.finish(load.ticket, 5)
    await engine.release(lease)
    await engine.workers[0].close()
    await nothing_held(gateway)
    await engine.scheduler.close()


async def test_same_chunk_twice_in_one_load(gateway: Gateway) -> None:
    """Asking twice for one chunk gives the same slot twice and closes with one ticket."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0, 0)
    assert load.slots[0] == load.slots[1]
    assert await engine.finish(load.ticket, 0, 0) is True
    await engine.close()
    await nothing_held(gateway)


async def test_each_rank_gets_its_own_rectangle(gateway: Gateway) -> None:
    """The gateway takes the rectangle from the registration: ranks of one lease get different slots and digests."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    loads = [await engine.load(lease, 0, rank=rank) for rank in range(2)]
    assert loads[0].slots[0].offset != loads[1].slots[0].offset
    assert loads[0].slots[0].digest != loads[1].slots[0].digest
    await engine.close()


async def test_committed_digest_is_what_a_load_names(gateway: Gateway) -> None:
    """The digest a writer gave is the one a reader must find; a writer that lied about it gets a mismatch, not wrong bytes."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    (written,) = engine.fill(await engine.reserve(lease, 0), ("a",))
    lie = WrittenPayload(reservation=written.reservation, digest=makers.name("lie"))
    assert await engine.commit((lie,)) == 1
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    assert load.slots[0].digest == makers.name("lie")
    assert load.slots[0].digest != written.digest
    await engine.close()


async def test_scheduler_cannot_load(gateway: Gateway) -> None:
    """A connection that registered no worker gets no slot."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    async with denied("denied"):
        await engine.scheduler.call(Load(lease=lease, chunks=(0,)), LoadPlan)
    await engine.close()
