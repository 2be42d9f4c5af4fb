"""A worker that comes back says which slots it still writes to; what it never heard of does not stay taken until its end."""

from __future__ import annotations

import dataclasses

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Done, Registered
from kvgate.protocol.page_messages import KeepWrites
from tests.daemon import makers
from tests.daemon.conftest import nothing_held
from tests.daemon.engine import Engine
from tests.daemon.wire import Wire, denied


async def open_writes(gateway: Gateway) -> int:
    """Reservations that are open."""
    return int((await gateway.status())["open_writes"])


async def come_back(engine: Engine, rank: int = 0) -> Wire:
    """Lose a worker's connection, connect and register again with wire version 2."""
    await engine.workers[rank].close()
    worker = await Wire.open(engine.path, "worker", engine.credential, wire_highest=2)
    engine.workers[rank] = worker
    await worker.call(engine.report_of(rank), Registered)
    return worker


async def keep(worker: Wire, *reservations: int) -> None:
    """Say what is still written to."""
    await worker.call(KeepWrites(reservations=reservations), Done)


async def test_what_is_not_named_is_dropped(gateway: Gateway) -> None:
    """A reply that was lost with its connection: its slot can be reserved anew at once; what is named can still be committed."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    reserved = await engine.reserve(lease, 0, 1)
    worker = await come_back(engine)
    await keep(worker, reserved.slots[0].reservation)
    assert await open_writes(gateway) == 1
    written = engine.fill(reserved, ["a", "b"])
    assert await engine.commit(written[:1]) == 1
    async with denied("denied", "reservation"):
        await engine.commit(written[1:])
    again = await engine.reserve(lease, 1)
    assert again.slots[0].status == "slot"
    await engine.commit([], [again.slots[0].reservation])
    await engine.close()
    await nothing_held(gateway)


async def test_the_present_connections_writes_stay(gateway: Gateway) -> None:
    """Only what was reserved on earlier connections is meant."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    await engine.reserve(lease, 0)
    worker = await come_back(engine)
    reserved = await engine.reserve(lease, 1)
    await keep(worker)
    assert await open_writes(gateway) == 1
    assert await engine.commit(engine.fill(reserved, ["a", "b"])) == 1


async def test_other_ranks_and_engines_of_the_process_are_not_meant(gateway: Gateway) -> None:
    """One process may hold several workers: each speaks for itself."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    other = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("another start"))
    await engine.reserve(await engine.lease("a"), 0, rank=1)
    await other.reserve(await other.lease("a"), 0)
    await keep(await come_back(engine))
    assert await open_writes(gateway) == 2
    await keep(await come_back(engine, 1))
    assert await open_writes(gateway) == 1
    await keep(await come_back(other))
    assert await open_writes(gateway) == 0


async def test_numbers_that_are_nobodys_change_nothing(gateway: Gateway) -> None:
    """Of an earlier gateway, or made up: they keep nothing alive and drop nothing else."""
    engine = await Engine.start(gateway.config.socket_path)
    reserved = await engine.reserve(await engine.lease("a"), 0)
    worker = await come_back(engine)
    await keep(worker, 7, 2**40, reserved.slots[0].reservation)
    assert await open_writes(gateway) == 1


async def test_only_a_registered_worker_says_so(gateway: Gateway) -> None:
    """Before RegisterWorker it is refused, and on wire version 1 there is no such message."""
    engine = await Engine.start(gateway.config.socket_path)
    stranger = await Wire.open(engine.path, "worker", wire_highest=2)
    async with denied("denied"):
        await keep(stranger)
    old = await Wire.open(engine.path, "worker")
    await old.call(dataclasses.replace(engine.report_of(0), engine=makers.engine_id("another start")), Registered)
    async with denied("malformed", "type"):
        await keep(old)
