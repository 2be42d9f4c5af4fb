"""Adapters: provisional at bind, loaded and stored only after every rank confirmed the very files."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.contract.artifacts import ArtifactSet
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import AdapterRegistered, ConfirmAdapter, Done, Load, RegisterAdapter, Revoke
from tests.daemon import makers
from tests.daemon.admin_client import counter
from tests.daemon.conftest import Start, eventually, nothing_held
from tests.daemon.engine import Engine
from tests.daemon.wire import denied


async def register(engine: Engine, adapter: ArtifactSet) -> AdapterRegistered:
    """Tell the gateway of an adapter, from the scheduler."""
    return await engine.scheduler.call(RegisterAdapter(handle=engine.handle, adapter=adapter), AdapterRegistered)


async def confirm(engine: Engine, adapter: ArtifactSet, rank: int = 0) -> None:
    """One rank has loaded it."""
    await engine.workers[rank].call(ConfirmAdapter(adapter=adapter), Done)


async def both(engine: Engine, text: str) -> bytes:
    """An adapter that every rank has confirmed."""
    digest = (await register(engine, makers.adapter(text))).adapter
    for rank in range(len(engine.workers)):
        await confirm(engine, makers.adapter(text), rank)
    return digest


async def test_provisional_adapter_may_be_bound(gateway: Gateway) -> None:
    """Before any rank loaded it, an adapter can be bound and asked for, but neither stored nor loaded by the deadline."""
    engine = await Engine.start(gateway.config.socket_path)
    registered = await register(engine, makers.adapter("a"))
    assert not registered.confirmed
    lease = await engine.lease("x", adapter=registered.adapter)
    assert await engine.acquire(lease, 0, 1) == 0
    for attempt in (engine.reserve(lease, 0), engine.load(lease, 0)):
        async with denied("adapter"):
            await attempt
    await engine.close()
    await nothing_held(gateway)


async def test_unregistered_adapter_cannot_be_bound(gateway: Gateway) -> None:
    """An adapter digest that nobody registered on this engine is refused; so is one of another engine."""
    engine = await Engine.start(gateway.config.socket_path)
    other = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("other"))
    known = (await register(other, makers.adapter("a"))).adapter
    for digest in (known, makers.name("made up")):
        async with denied("denied", "adapter"):
            await engine.bind("x", adapter=digest)
    await engine.close()
    await other.close()


async def test_store_waits_for_the_last_rank(start: Start) -> None:
    """A reserve that comes before the confirmations is answered when the last rank confirms."""
    gateway = await start(adapter_wait_s=15.0)
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    adapter = makers.adapter("a")
    lease = await engine.lease("x", adapter=(await register(engine, adapter)).adapter)
    waiting = asyncio.create_task(engine.reserve(lease, 0))
    await confirm(engine, adapter, 0)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not (await register(engine, adapter)).confirmed
    await confirm(engine, adapter, 1)
    reserved = await waiting
    assert [slot.status for slot in reserved.slots] == ["slot"]
    assert (await register(engine, adapter)).confirmed
    assert await engine.commit((), [reserved.slots[0].reservation]) == 0
    await engine.close()


async def test_one_rank_cannot_confirm_for_all(gateway: Gateway) -> None:
    """Confirming twice from one rank does not stand for the other rank."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    adapter = makers.adapter("a")
    lease = await engine.lease("x", adapter=(await register(engine, adapter)).adapter)
    for _ in range(2):
        await confirm(engine, adapter, 0)
    async with denied("adapter"):
        await engine.reserve(lease, 0)
    await engine.close()


async def test_confirmation_of_other_files_does_not_count(gateway: Gateway) -> None:
    """A rank that loaded other bytes under the same name has not confirmed what was bound."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("x", adapter=(await register(engine, makers.adapter("v1"))).adapter)
    await confirm(engine, makers.adapter("v2"))
    for attempt in (engine.reserve(lease, 0), engine.load(lease, 0)):
        async with denied("adapter"):
            await attempt
    await engine.close()


async def test_lost_rank_takes_its_confirmation_along(gateway: Gateway) -> None:
    """A rank that comes back has to confirm again: it may be another process, with other files."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    digest = await both(engine, "a")
    await engine.store("x", adapter=digest)
    await engine.workers[1].close()
    await engine.join(1)
    lease = await engine.lease("x", adapter=digest)
    assert await engine.acquire(lease, 0, 1) == 1
    async with denied("adapter"):
        await engine.load(lease, 0)
    await confirm(engine, makers.adapter("a"), 1)
    assert await engine.finish((await engine.load(lease, 0)).ticket)
    await engine.close()


async def test_taken_over_rank_has_confirmed_nothing(gateway: Gateway) -> None:
    """A second connection that reports a rank does not inherit the first one's confirmations."""
    engine = await Engine.start(gateway.config.socket_path)
    digest = await both(engine, "a")
    await engine.store("x", adapter=digest)
    first = engine.workers[0]
    await engine.join(0)
    lease = await engine.lease("x", adapter=digest)
    assert await engine.acquire(lease, 0, 1) == 1
    async with denied("adapter"):
        await engine.load(lease, 0)
    await first.close()
    await engine.close()


async def test_no_adapter_is_not_any_adapter(gateway: Gateway) -> None:
    """Base, adapter A and adapter B share nothing, whoever stored first; each finds its own bytes again."""
    engine = await Engine.start(gateway.config.socket_path)
    a, b = await both(engine, "a"), await both(engine, "b")
    for stored in (None, a, b):
        text = f"stored by {stored!r}"
        await engine.store(text, adapter=stored)
        assert [await engine.hit(text, adapter=asked) for asked in (None, a, b)] == [
            int(asked == stored) for asked in (None, a, b)
        ]
    await engine.close()


async def test_reloaded_adapter_is_another_adapter(gateway: Gateway) -> None:
    """Adapter bytes v1 stored, v2 loaded under the same name: a miss for v2; v1 is still found."""
    engine = await Engine.start(gateway.config.socket_path)
    v1 = await both(engine, "v1")
    await engine.store("x", adapter=v1)
    v2 = await both(engine, "v2")
    assert v1 != v2
    assert await engine.hit("x", adapter=v2) == 0
    assert await engine.hit("x", adapter=v1) == 1
    await engine.close()


async def test_salt_is_not_an_adapter(gateway: Gateway) -> None:
    """An adapter and a salt of the same digest, and both at once, are four different addresses."""
    engine = await Engine.start(gateway.config.socket_path)
    digest = await both(engine, "a")
    asked = [(None, None), (digest, None), (None, digest), (digest, digest)]
    addresses = {(await engine.bind("x", adapter=adapter, salt=salt)).addresses for adapter, salt in asked}
    assert len(addresses) == 4
    await engine.close()


async def test_engine_without_lora_takes_no_adapter(gateway: Gateway) -> None:
    """An engine that was started without LoRA can't register one."""
    plain = makers.model(numerics=makers.numerics(lora_max_rank=None))
    engine = await Engine.start(gateway.config.socket_path, model=plain)
    async with denied("malformed", "adapter"):
        await register(engine, makers.adapter("a"))
    async with denied("malformed", "adapter"):
        await confirm(engine, makers.adapter("a"))
    await engine.close()


@pytest.mark.parametrize("role", ["weights", "remote_code"])
async def test_base_files_are_no_adapter(gateway: Gateway, role: str) -> None:
    """Files in a role of the base can't be passed off as an adapter."""
    engine = await Engine.start(gateway.config.socket_path)
    async with denied("malformed", "adapter"):
        await register(engine, makers.artifacts(role, "a"))
    await engine.close()


async def test_revoked_engine_answers_waiting_stores_at_once(start: Start) -> None:
    """A store that waits for confirmations ends with the revocation, not with its own deadline."""
    gateway = await start(adapter_wait_s=600.0)
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    lease = await engine.lease("x", adapter=(await register(engine, makers.adapter("a"))).adapter)
    waiting = asyncio.create_task(engine.reserve(lease, 0))
    await confirm(engine, makers.adapter("a"), 0)
    await engine.scheduler.call(Revoke(handle=engine.handle), Done)
    async with denied("revoked"):
        await waiting
    await engine.close()


async def test_load_of_a_lost_connection_is_not_left_open(start: Start) -> None:
    """A load that waits for confirmations while its connection goes, and is granted later, keeps no hold for nobody."""
    gateway = await start(adapter_wait_s=15.0)
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    digest = await both(engine, "a")
    await engine.store("x", adapter=digest)
    await engine.workers[1].close()
    await engine.join(1)
    lease = await engine.lease("x", adapter=digest)
    assert await engine.acquire(lease, 0, 1) == 1
    engine.workers[0].post(Load(lease=lease, chunks=(0,)))

    async def counted() -> bool:
        return await counter(gateway, "sessions") == 3

    await engine.workers[0].call(ConfirmAdapter(adapter=makers.adapter("a")), Done)  # answered after the load was begun
    await engine.workers[0].close()
    await engine.join(0)
    for rank in range(2):
        await confirm(engine, makers.adapter("a"), rank)
    await eventually("the old connection is gone", counted)
    assert (await gateway.status())["open_loads"] == 0
    await engine.release(lease)
    await nothing_held(gateway)
    await engine.close()
