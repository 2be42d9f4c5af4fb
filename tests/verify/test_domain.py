"""The domain of a run: a way in, none out, and no hands on anybody else's objects."""

from __future__ import annotations

import pytest

from kvgate.contract import keys
from kvgate.daemon.app import Gateway
from kvgate.daemon.secret import load_or_create
from kvgate.daemon.verify import verify_domain
from kvgate.protocol.messages import Bind, Bound, Explained, Opened, OpenEngine
from kvgate.protocol.verify_messages import (
    EnterVerify,
    Forget,
    Forgotten,
    Inspect,
    Inspected,
    LeaveOnly,
    LeftOnly,
    VerifyEntered,
)
from kvgate.protocol.versions import WIRE_VERSIONS
from tests.daemon import makers
from tests.daemon.engine import Engine
from tests.daemon.explaining import miss
from tests.daemon.wire import Wire, denied, hello

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE, TWO = b"1" * 32, b"2" * 32
HIGHEST = WIRE_VERSIONS[-1]


async def entered(gateway: Gateway, run: bytes = ONE, role: str = "scheduler") -> Wire:
    """A connection in the verify domain of ``run``."""
    wire = await Wire.connect(gateway.config.socket_path)
    await wire.ask(hello(role, wire_highest=HIGHEST))
    await wire.call(EnterVerify(run=run), VerifyEntered)
    return wire


async def engine_in(gateway: Gateway, run: bytes = ONE, name: str = "verified") -> Engine:
    """An engine of which scheduler and worker are in the verify domain."""
    engine = Engine(gateway.config.socket_path, makers.report(engine=makers.engine_id(name)), None)
    engine.workers = [await entered(gateway, run, "worker")]
    engine.handle = (await engine.workers[0].ask(engine.report)).handle  # type: ignore[attr-defined]
    engine.scheduler = await entered(gateway, run)
    await engine.scheduler.call(OpenEngine(handle=engine.handle), Opened)
    return engine


async def greeted(gateway: Gateway, role: str = "scheduler") -> Wire:
    """A connection in the default domain that speaks all there is."""
    wire = await Wire.connect(gateway.config.socket_path)
    await wire.ask(hello(role, wire_highest=HIGHEST))
    return wire


async def test_runs_and_domains_are_told_apart(gateway: Gateway) -> None:
    """Another run is another domain, and none of them is one that a configuration can name, whatever the name."""
    secret = load_or_create(gateway.config.secret_path).secret
    found = {verify_domain(secret, run).id for run in (ONE, TWO)}
    names = ["default", "kvgate verify", "\xffkvgate verify\xff" + "1" * 32, "kvgate verify " + ONE.hex()]
    assert len(found) == 2
    assert not found & {keys.domain_id(keys.domain_key(secret, name)) for name in names}


async def test_the_way_in_is_the_same_again(gateway: Gateway) -> None:
    """The number alone decides: a check after any restart finds the domain that was planted in."""
    first, second = await engine_in(gateway), await entered(gateway)
    opened = await second.call(OpenEngine(handle=first.handle), Opened)
    assert opened.domain == verify_domain(load_or_create(gateway.config.secret_path).secret, ONE).id
    await first.close()
    await second.close()


async def test_what_others_stored_is_not_there(gateway: Gateway) -> None:
    """The same contract and tokens in the default domain, in one run and in another share nothing; no handle is known elsewhere."""
    outside = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("outside"))
    one, two = await engine_in(gateway), await engine_in(gateway, TWO)
    await outside.store("a")
    assert await one.hit("a") == 0
    await one.store("a")
    assert await two.hit("a") == 0
    assert await one.hit("a") == 1
    assert len({(await engine.bind("a")).addresses for engine in (outside, one, two)}) == 3
    for wire in (outside.scheduler, two.scheduler):
        async with denied("unsealed", "handle"):
            await wire.call(OpenEngine(handle=one.handle), Opened)
    async with denied("unsealed", "handle"):
        await one.scheduler.call(OpenEngine(handle=outside.handle), Opened)
    for engine in (outside, one, two):
        await engine.close()


async def test_entering_comes_first_and_once(gateway: Gateway) -> None:
    """A connection that has entered, registered or bound already stays where it is."""
    wire = await entered(gateway)
    async with denied("malformed", "type"):
        await wire.call(EnterVerify(run=TWO), VerifyEntered)
    worker = await greeted(gateway, "worker")
    await worker.ask(makers.report(engine=makers.engine_id("registered")))
    async with denied("malformed", "type"):
        await worker.call(EnterVerify(run=ONE), VerifyEntered)
    outside = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("binding"))
    scheduler = await greeted(gateway)
    await scheduler.call(outside.bind_message("a"), Bound)
    async with denied("malformed", "type"):
        await scheduler.call(EnterVerify(run=ONE), VerifyEntered)
    for one in (wire, worker, scheduler):
        await one.close()
    await outside.close()


async def test_an_older_wire_has_no_way_in(gateway: Gateway) -> None:
    """A connection that agreed on wire version 1 is told that this is no message of it."""
    wire = await Wire.open(gateway.config.socket_path)
    async with denied("malformed", "type"):
        await wire.call(EnterVerify(run=ONE), VerifyEntered)
    await wire.close()


async def test_before_hello_nothing_is_entered(gateway: Gateway) -> None:
    """The first message is still Hello."""
    wire = await Wire.connect(gateway.config.socket_path)
    async with denied("malformed", "type"):
        await wire.call(EnterVerify(run=ONE), VerifyEntered)
    await wire.close()


async def test_outside_nothing_can_be_removed(gateway: Gateway) -> None:
    """A client of any other domain can neither inspect, move nor remove objects, its own included."""
    outside = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("outside"))
    await outside.store("a")
    wire = await greeted(gateway)
    lease = (await wire.call(outside.bind_message("a"), Bound)).lease
    for message, reply in (
        (Forget(lease=lease), Forgotten),
        (Inspect(lease=lease), Inspected),
        (LeaveOnly(lease=lease, tier="l1"), LeftOnly),
    ):
        async with denied("denied"):
            await wire.call(message, reply)
    assert await outside.hit("a") == 1
    await wire.close()
    await outside.close()


async def test_inside_only_ones_own_leases_can_be_used(gateway: Gateway) -> None:
    """A lease of another connection, of the same run or of another domain, opens nothing here."""
    one, outside = await engine_in(gateway), await Engine.start(gateway.config.socket_path, engine=makers.engine_id("outside"))
    await one.store("a")
    await outside.store("a")
    same, other = await entered(gateway), await entered(gateway, TWO)
    for lease in (await one.lease("a"), await outside.lease("a")):
        for wire in (same, other):
            async with denied("denied", "lease"):
                await wire.call(Forget(lease=lease), Forgotten)
    assert await one.hit("a") == 1
    assert await outside.hit("a") == 1
    for wire in (same, other):
        await wire.close()
    await one.close()
    await outside.close()


async def test_a_memory_backend_has_no_second_tier(gateway: Gateway) -> None:
    """Asking for objects in an L2 that does not exist is refused, and removes nothing."""
    one = await engine_in(gateway)
    await one.store("b")
    lease = await one.lease("b")
    async with denied("denied", "tier"):
        await one.scheduler.call(LeaveOnly(lease=lease, tier="l2.0 fs"), LeftOnly)
    assert await one.hit("b") == 1
    await one.close()


async def test_forgetting_removes_exactly_the_leases_objects(gateway: Gateway) -> None:
    """What is forgotten is absent, as if it had never been there; another prompt of the run stays; it can be stored anew."""
    one = await engine_in(gateway)
    await one.store("c", "d")
    await one.store("e")
    lease = await one.lease("c", "d")
    assert await one.scheduler.call(Forget(lease=lease), Forgotten) == Forgotten(objects=2)
    await one.release(lease)
    assert (await miss(one, "c", "d"))[1] == Explained(reasons=("absent",), chunk=0)
    assert await one.hit("e") == 1
    await one.store("c", "d")
    assert len(await one.restore("c", "d")) == 2
    await one.close()


async def test_a_bind_of_too_many_objects_is_refused(gateway: Gateway) -> None:
    """The messages are answered for a bounded number of objects."""
    one = await engine_in(gateway)
    message = one.bind_message()
    long = Bind(**{name: getattr(message, name) for name, _ in Bind._specs} | {"tokens": b"t" * 32 * 4097})
    lease = (await one.scheduler.call(long, Bound)).lease
    async with denied("malformed", "lease"):
        await one.scheduler.call(Inspect(lease=lease), Inspected)
    await one.close()
