"""Registration: sealed once all ranks agree, revoked for good."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from kvgate.contract.representation import ComponentFormat
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import (
    Done,
    Failure,
    Opened,
    OpenEngine,
    Registered,
    Revoke,
)
from tests.daemon import makers
from tests.daemon.conftest import Start, eventually, nothing_held, ranks_are
from tests.daemon.engine import Engine
from tests.daemon.test_hello import credentials
from tests.daemon.wire import Denied, Wire, denied


async def worker(gateway: Gateway) -> Wire:
    """A worker's connection that has not registered."""
    return await Wire.open(gateway.config.socket_path, "worker")


async def test_sealed_only_when_all_ranks_agreed(gateway: Gateway) -> None:
    """Until the last rank has reported, the handle opens nothing and binds nothing."""
    engine = Engine(gateway.config.socket_path, makers.report(plan=makers.plan(2)), None)
    first = await engine.join(0)
    assert (first.sealed, first.missing_ranks) == (False, 1)
    scheduler = engine.scheduler = await Wire.open(engine.path)
    async with denied("unsealed"):
        await scheduler.call(OpenEngine(handle=engine.handle), Opened)
    async with denied("unsealed"):
        await engine.bind("x")
    second = await engine.join(1)
    assert (second.sealed, second.missing_ranks) == (True, 0)
    assert second.handle == first.handle
    await scheduler.call(OpenEngine(handle=engine.handle), Opened)
    assert (await engine.bind("x")).present == 0
    await engine.close()


async def test_unregistered_worker_can_do_nothing(gateway: Gateway) -> None:
    """A worker's connection without a registration neither loads, stores, commits nor confirms."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("x")
    lease = await engine.lease("x", "y")
    await engine.acquire(lease, 0, 1)
    engine.workers.append(await worker(gateway))
    for attempt in (engine.load(lease, 0, rank=1), engine.reserve(lease, 1, rank=1), engine.commit((), rank=1)):
        async with denied("denied"):
            await attempt
    await engine.close()


async def test_one_rank_twice_does_not_seal(gateway: Gateway) -> None:
    """The same rank reported by two connections is one rank."""
    path, report = gateway.config.socket_path, makers.report(plan=makers.plan(2))
    wires = [await Wire.open(path, "worker") for _ in range(2)]
    replies = [await wire.call(report, Registered) for wire in wires]
    assert [reply.missing_ranks for reply in replies] == [1, 1]
    for wire in wires:
        await wire.close()


DISAGREEMENTS: dict[str, Any] = {
    "model": makers.model("other weights"),
    "representation": makers.representation(
        k_format=ComponentFormat(dtype="float16", group=None, scale_dtype=None),
    ),
    "plan": makers.plan(1, pp=2),
}


@pytest.mark.parametrize("field", list(DISAGREEMENTS))
async def test_disagreeing_rank_revokes(gateway: Gateway, field: str) -> None:
    """One rank that loaded something else revokes the registration for all, also for ranks that agreed, for good."""
    engine = Engine(gateway.config.socket_path, makers.report(plan=makers.plan(2)), None)
    await engine.join(0)
    rank = {"pp_rank": 1, "tp_rank": 0} if field == "plan" else {"tp_rank": 1}
    async with denied("disagree", field):
        await engine.join(1, **{field: DISAGREEMENTS[field]} | rank)
    async with denied("revoked"):
        await engine.join(1)
    async with denied("revoked"):
        await engine.workers[0].call(engine.report_of(0), Registered)
    engine.scheduler = await Wire.open(engine.path)
    async with denied("revoked"):
        await engine.bind("x")
    await engine.close()


async def test_late_disagreement_voids_what_was_sealed(gateway: Gateway) -> None:
    """A rank that comes back with other weights revokes an engine that was sealed and busy."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("x")
    lease = await engine.lease("x")
    assert await engine.acquire(lease, 0, 1) == 1
    await engine.workers[1].close()
    async with denied("disagree", "model"):
        await engine.join(1, model=makers.model("other weights"))
    for attempt in (engine.load(lease, 0), engine.reserve(lease, 0), engine.bind("x"), engine.acquire(lease, 0, 1)):
        async with denied("revoked"):
            await attempt
    await engine.close()
    await nothing_held(gateway)


async def test_higher_generation_revokes_the_old(gateway: Gateway) -> None:
    """After new weights the old handle, its leases, its open loads and its open writes are worth nothing."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("x")
    old_handle, lease = engine.handle, await engine.lease("x", "y")
    assert await engine.acquire(lease, 0, 1) == 1
    load, reserved = await engine.load(lease, 0), await engine.reserve(lease, 1)
    written = engine.fill(reserved, ("x", "y"))
    newer = await engine.workers[0].call(engine.report_of(0, generation=1, model=makers.model("new weights")), Registered)
    assert newer.handle != old_handle
    assert not await engine.finish(load.ticket)
    assert await engine.commit(written) == 0
    attempts: list[Awaitable[Any]] = [engine.acquire(lease, 0, 2), engine.bind("x")]
    for attempt in attempts:
        async with denied("revoked"):
            await attempt
    attempts = [engine.load(lease, 0), engine.reserve(lease, 1)]
    for attempt in attempts:
        async with denied("denied", "lease"):
            await attempt
    engine.handle = newer.handle
    assert await engine.hit("x") == 0
    await engine.release(lease)
    await nothing_held(gateway)
    await engine.close()


async def test_old_generation_is_refused(gateway: Gateway) -> None:
    """A rank that still has the old weights can't register them once newer ones were reported."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.workers[0].call(engine.report_of(0, generation=5), Registered)
    late = await worker(gateway)
    async with denied("revoked", "generation"):
        await late.call(engine.report_of(0, generation=4), Registered)
    await late.close()
    await engine.close()


async def test_refused_newer_report_still_revokes_the_old(gateway: Gateway) -> None:
    """A worker that loaded new weights the gateway won't register must not go on under the old contract."""
    engine = await Engine.start(gateway.config.socket_path)
    async with denied("malformed", "block_tokens"):
        await engine.workers[0].call(engine.report_of(0, generation=1, block_tokens=3), Registered)
    async with denied("revoked"):
        await engine.bind("x")
    await engine.close()


async def test_generations_of_a_long_run_leave_nothing(gateway: Gateway) -> None:
    """An engine that reloads its weights over and over keeps one live registration, not one a reload."""
    engine = await Engine.start(gateway.config.socket_path)
    for generation in range(1, 200):
        await engine.workers[0].call(engine.report_of(0, generation=generation), Registered)
    status = await gateway.status()
    assert [entry["generation"] for entry in status["registrations"]] == [199]
    await engine.close()


async def test_generations_belong_to_a_domain(start: Start, folder: Any) -> None:
    """Another domain that uses the same engine id can neither revoke nor outdate this one's registration."""
    path = (await start(credentials_file=credentials(folder, a="tenant-a", b="tenant-b"))).config.socket_path
    ours = await Engine.start(path, credential=b"a")
    theirs = await Engine.start(path, credential=b"b", generation=1000)
    assert (await ours.bind("x")).present == 0
    assert (await ours.workers[0].call(ours.report_of(0, generation=1), Registered)).sealed
    for engine in (ours, theirs):
        await engine.close()


async def test_revoked_stays_revoked(gateway: Gateway) -> None:
    """Weights changed in place: handle, leases, loads and writes are void, and the same report is refused."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("x")
    lease = await engine.lease("x", "y")
    assert await engine.acquire(lease, 0, 1) == 1
    load, reserved = await engine.load(lease, 0), await engine.reserve(lease, 1)
    written = engine.fill(reserved, ("x", "y"))
    for _ in range(2):
        await engine.workers[0].call(Revoke(handle=engine.handle), Done)
    assert not await engine.finish(load.ticket)
    assert await engine.commit(written) == 0
    opening = engine.scheduler.call(OpenEngine(handle=engine.handle), Opened)
    for attempt in (engine.load(lease, 0), engine.reserve(lease, 1), engine.acquire(lease, 0, 1), engine.bind("x"), opening):
        async with denied("revoked"):
            await attempt
    async with denied("revoked"):
        await engine.workers[0].call(engine.report_of(0), Registered)
    await engine.close()
    await nothing_held(gateway)


async def test_reconnecting_does_not_undo_a_revocation(gateway: Gateway) -> None:
    """A process whose registration was revoked can't get it back by dropping its connection and registering again."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.workers[0].call(Revoke(handle=engine.handle), Done)
    await engine.close()

    async def forgotten() -> bool:
        return not (await gateway.status())["registrations"]

    await eventually("the sessions are gone", forgotten)
    async with denied("revoked"):
        await engine.join(0)
    assert (await engine.join(0, generation=1, model=makers.model("hashed again"))).sealed
    await engine.open()
    await engine.close()


async def test_foreign_domain_cannot_revoke(start: Start, folder: Any) -> None:
    """Revoke with another domain's handle does nothing."""
    path = (await start(credentials_file=credentials(folder, a="tenant-a", b="tenant-b"))).config.socket_path
    ours = await Engine.start(path, credential=b"a")
    stranger = await Wire.open(path, "worker", b"b")
    with pytest.raises(Denied):
        await stranger.call(Revoke(handle=ours.handle), Done)
    assert (await ours.bind("x")).present == 0
    await ours.close()
    await stranger.close()


async def test_lost_worker_unseals(gateway: Gateway) -> None:
    """With one rank gone nothing is bound, loaded or reserved, a load under way is void; when it is back, all works again."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("x")
    lease = await engine.lease("x", "y")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    await engine.workers[1].close()
    await ranks_are(gateway, "1/2")
    assert not await engine.finish(load.ticket)
    for attempt in (engine.load(lease, 0), engine.reserve(lease, 1), engine.bind("x"), engine.acquire(lease, 0, 1)):
        async with denied("unsealed"):
            await attempt
    assert (await engine.join(1)).sealed
    again = await engine.load(lease, 0)
    assert await engine.finish(again.ticket)
    await engine.release(lease)
    await nothing_held(gateway)
    await engine.close()


async def test_registration_without_workers_gives_way(gateway: Gateway) -> None:
    """When the last rank is gone nothing can be bound; a later start may use the same engine id from generation 0."""
    engine = await Engine.start(gateway.config.socket_path, generation=7)
    await engine.workers[0].close()

    async def forgotten() -> bool:
        return not (await gateway.status())["registrations"]

    await eventually("forgotten", forgotten)
    async with denied("unsealed"):
        await engine.bind("x")
    assert (await engine.join(0, generation=0, model=makers.model("another"))).sealed
    await engine.close()


async def test_handle_survives_a_gateway_restart(start: Start) -> None:
    """The same engine start gets the same handle from a restarted gateway; another start, contract or secret gets another."""
    handles = []
    for secret in ("one", "one", "two"):
        gateway = await start(secret_file=f"{(await _folder(start))}/{secret}")
        engine = await Engine.start(gateway.config.socket_path)
        handles.append(engine.handle)
        for changes in ({"engine": makers.engine_id("other")}, {"generation": 1, "model": makers.model("other")}):
            other = await worker(gateway)
            assert (await other.call(engine.report_of(0, **changes), Registered)).handle not in handles
            await other.close()
        await engine.close()
        await gateway.stop()
    assert handles[0] == handles[1]
    assert handles[2] != handles[0]


async def _folder(start: Start) -> str:
    gateway = await start()
    await gateway.stop()
    return gateway.config.data_dir


async def test_scheduler_cannot_register(gateway: Gateway) -> None:
    """Only a connection that said it is a worker may report what was loaded."""
    for role in ("scheduler", "admin", "client"):
        wire = await Wire.open(gateway.config.socket_path, role)
        async with denied("denied", "role"):
            await wire.call(makers.report(), Registered)
        await wire.close()


async def test_lease_of_another_engine_is_useless_to_a_worker(gateway: Gateway) -> None:
    """A worker loads and stores under leases of its own registration only, however equal the contracts."""
    path = gateway.config.socket_path
    first = await Engine.start(path)
    other = await Engine.start(path, engine=makers.engine_id("other"))
    await first.store("x")
    lease = await first.lease("x", "y")
    assert await first.acquire(lease, 0, 1) == 1
    for attempt in (other.load(lease, 0), other.reserve(lease, 1)):
        async with denied("denied", "lease"):
            await attempt
    await first.close()
    await other.close()


async def test_unknown_handle_is_answered_without_naming_it(gateway: Gateway) -> None:
    """A made-up handle opens, binds and revokes nothing."""
    wire = await Wire.open(gateway.config.socket_path)
    made_up = makers.name("made up")
    engine = Engine(gateway.config.socket_path, makers.report(), None)
    engine.handle = made_up
    for message in (OpenEngine(handle=made_up), Revoke(handle=made_up), engine.bind_message("x")):
        reply = await wire.ask(message)
        assert isinstance(reply, Failure)
        assert reply.code == "unsealed"
        assert made_up.hex()[:8] not in str(reply)
    await wire.close()
