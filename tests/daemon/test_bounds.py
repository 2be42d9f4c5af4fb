"""Sessions, requests, leases, writes, loads and silent peers must be bounded, and nothing may pile up."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest

from kvgate.daemon import leases, reads, registry, server, writers
from kvgate.daemon.app import Gateway
from kvgate.protocol.framing import HEADER, frame_bytes
from kvgate.protocol.messages import MAX_CHUNKS, Acquire, Bound
from tests.daemon import makers
from tests.daemon.admin_client import counter
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, nothing_held, own_tasks
from tests.daemon.engine import Engine
from tests.daemon.wire import Wire, denied, hello


async def sessions(gateway: Gateway) -> float:
    """Open connections, as the metrics page counts them."""
    return await counter(gateway, "sessions")


async def eventually_sessions(gateway: Gateway, count: int) -> None:
    """Wait until ``count`` connections are open."""

    async def reached() -> bool:
        return await sessions(gateway) == count

    await eventually(f"{count} sessions", reached)


async def test_sessions_are_bounded(start: Start) -> None:
    """One connection more than max_sessions is hung up on; when one leaves, the next gets in."""
    gateway = await start(max_sessions=3)
    path = gateway.config.socket_path
    wires = [await Wire.open(path) for _ in range(3)]
    extra = await Wire.connect(path)
    await extra.hung_up()
    assert await sessions(gateway) == 3
    await wires[0].close()
    await eventually_sessions(gateway, 2)
    wires[0] = await Wire.open(path)
    for wire in wires:
        await wire.close()
    await eventually_sessions(gateway, 0)


async def test_requests_of_a_session_are_bounded(start: Start) -> None:
    """Requests beyond max_requests_per_session are answered busy at once; those under way still get their answers."""
    backend = FaultyBackend()
    gateway = await start(backend, max_requests_per_session=4)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    held = [await engine.lease("a") for _ in range(4)]
    backend.stalled = {"acquire"}
    waiting = [engine.scheduler.post(Acquire(lease=lease, first=0, last=1, deadline_ms=60_000)) for lease in held]

    async def all_wait() -> bool:
        return backend.waiting == 4

    await eventually("four acquires wait", all_wait)
    for _ in range(20):
        async with denied("busy"):
            await engine.bind("a")
    backend.resume()
    assert [getattr(await reply, "end", None) for reply in waiting] == [1] * 4
    assert (await engine.bind("a")).present == 1
    await engine.close()
    await nothing_held(gateway)


async def test_one_busy_session_does_not_hold_up_another(start: Start) -> None:
    """While one connection has used up its requests on stalled storage, another is served."""
    backend = FaultyBackend()
    gateway = await start(backend, max_requests_per_session=2)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    backend.stalled = {"acquire"}
    for _ in range(2):
        lease = await engine.lease("a")
        engine.scheduler.post(Acquire(lease=lease, first=0, last=1, deadline_ms=60_000))
    other = await Wire.open(gateway.config.socket_path)
    assert (await other.call(engine.bind_message("a"), Bound)).present == 1
    backend.resume()
    await other.close()
    await engine.close()


async def test_leases_are_bounded(start: Start) -> None:
    """One bind more than max_leases is busy; a release makes room."""
    gateway = await start(max_leases=5)
    engine = await Engine.start(gateway.config.socket_path)
    held = [await engine.lease("a") for _ in range(5)]
    async with denied("busy"):
        await engine.bind("a")
    await engine.release(held[0])
    await engine.bind("a")
    await engine.close()
    await nothing_held(gateway)


async def test_open_writes_of_a_process_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with too many open writes is told so, and gets slots again when it has committed or aborted some."""
    monkeypatch.setattr(writers, "MAX_OPEN_WRITES", 3)
    engine = await Engine.start((await start()).config.socket_path)
    lease = await engine.lease("a", "b", "c", "d")
    reserved = await engine.reserve(lease, 0, 1)
    async with denied("busy"):
        await engine.reserve(lease, 2, 3)
    assert await engine.commit((), [slot.reservation for slot in reserved.slots]) == 0
    assert len((await engine.reserve(lease, 0, 1, 2)).slots) == 3
    await engine.close()


async def test_presence_index_is_bounded(start: Start) -> None:
    """The index never knows more than max_known_chunks; what it forgot is found by asking storage."""
    gateway = await start(max_known_chunks=10)
    engine = await Engine.start(gateway.config.socket_path)
    for number in range(30):
        await engine.store(f"{number}")
    assert (await gateway.status())["known_chunks"] == 10
    assert await engine.hit("0") == 1
    await engine.close()


async def test_largest_bind_is_served(gateway: Gateway) -> None:
    """The longest prompt the protocol allows gets all its addresses."""
    engine = await Engine.start(gateway.config.socket_path)
    many = b"".join(index.to_bytes(32, "big") for index in range(1, MAX_CHUNKS + 1))
    bound = await engine.bind(tokens=many)
    assert len(bound.addresses) == len(many)
    await engine.release(bound.lease)
    await engine.close()
    await nothing_held(gateway)


@pytest.mark.parametrize("sent", [b"", b"\x10", HEADER.pack(100) + b"abc"])
async def test_connection_without_hello_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """A peer that says nothing, or half a hello, loses its connection at the hello deadline."""
    monkeypatch.setattr(server, "HELLO_S", 0.1)
    gateway = await start()
    wire = await Wire.connect(gateway.config.socket_path)
    await wire.raw(sent)
    await wire.hung_up()
    await eventually_sessions(gateway, 0)


async def test_hello_byte_by_byte_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending a byte now and then does not extend the hello deadline."""
    monkeypatch.setattr(server, "HELLO_S", 0.2)
    gateway = await start()
    wire = await Wire.connect(gateway.config.socket_path)

    async def drip() -> None:
        for byte in frame_bytes(1, hello()):
            await wire.raw(bytes([byte]))
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    await wire.hung_up()
    dripping.cancel()
    await eventually_sessions(gateway, 0)


async def test_peer_that_never_reads_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and never reads replies loses its connection and all its leases; nobody else notices."""
    monkeypatch.setattr(server, "WRITE_S", 0.2)
    gateway = await start()
    engine = await Engine.start(gateway.config.socket_path)
    deaf = await Wire.connect(gateway.config.socket_path, listen=False)
    deaf.writer.write(frame_bytes(1, hello()))
    many = engine.bind_message(tokens=b"".join(index.to_bytes(32, "big") for index in range(1, 2001)))
    for number in range(2, 42):
        deaf.writer.write(frame_bytes(number, many))
    await eventually_sessions(gateway, 2)
    assert (await engine.bind("a")).present == 0

    async def only_ours() -> bool:
        return bool((await gateway.status())["leases"] == 1)

    await eventually("the deaf client's leases are gone", only_ours)
    await deaf.close()
    await engine.close()
    await nothing_held(gateway)


async def test_half_frame_then_gone_leaves_nothing(gateway: Gateway) -> None:
    """A client that dies inside a frame is forgotten, with what it had bound."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.lease("a")
    await engine.scheduler.raw(frame_bytes(77, engine.bind_message("b"))[:-5])
    await engine.scheduler.close()
    await nothing_held(gateway)
    await engine.workers[0].close()
    await eventually_sessions(gateway, 0)


async def test_many_requests_leave_nothing_behind(start: Start) -> None:
    """Ten thousand requests bound, acquired and released: no lease, hold, task or object is left of them."""
    gateway = await start(explain_misses=16)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    tasks, before = len(own_tasks()), len(gc.get_objects())

    async def request(number: int) -> None:
        lease = await engine.lease("a", "b" if number % 2 else "absent")
        if number % 3:
            assert await engine.acquire(lease, 0, 2) == 1 + number % 2
        await engine.release(lease)

    for begin in range(0, 10_000, 100):
        await asyncio.gather(*(request(number) for number in range(begin, begin + 100)))
    await nothing_held(gateway)
    assert len(own_tasks()) == tasks

    async def few_objects() -> bool:
        gc.collect()
        return len(gc.get_objects()) - before < 2000

    await eventually("few objects left", few_objects)  # misses are explained behind the requests
    assert (await gateway.status())["storage"]["unknown_releases"] == 0
    await engine.close()


def descriptors() -> list[str]:
    """What this process has open, but for the explain index, whose thread opens its files when it gets to it."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
        except FileNotFoundError:
            continue  # the listing's own
    return [path for path in found if "explain.sqlite" not in path]


async def test_connections_leave_nothing_behind(gateway: Gateway) -> None:
    """Hundreds of connections that came, registered, bound and went leave no session, registration, lease or watcher."""
    tasks, before = len(own_tasks()), descriptors()
    for number in range(200):
        engine = await Engine.start(gateway.config.socket_path, engine=makers.engine_id(f"engine {number}"))
        await engine.lease("a")
        await engine.close()
    await nothing_held(gateway)
    await eventually_sessions(gateway, 0)
    assert (await gateway.status())["registrations"] == []
    assert len(own_tasks()) == tasks
    assert len(descriptors()) <= len(before)


async def test_engines_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine more than the limit is busy; when one has gone there is room."""
    monkeypatch.setattr(registry, "MAX_REGISTRATIONS", 2)
    gateway = await start()
    engines = [await Engine.start(gateway.config.socket_path, engine=makers.engine_id(f"engine {n}")) for n in range(2)]
    async with denied("busy"):
        await Engine.start(gateway.config.socket_path, engine=makers.engine_id("engine 2"))
    await engines[0].close()

    async def room() -> bool:
        return len((await gateway.status())["registrations"]) == 1

    await eventually("one engine is gone", room)
    third = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("engine 3"))
    await third.close()
    await engines[1].close()


async def test_open_loads_are_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One load more than the limit is busy; closing one makes room."""
    monkeypatch.setattr(reads, "MAX_OPEN_LOADS", 2)
    engine = await Engine.start((await start()).config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    await engine.acquire(lease, 0, 1)
    tickets = [(await engine.load(lease, 0)).ticket for _ in range(2)]
    async with denied("busy"):
        await engine.load(lease, 0)
    assert await engine.finish(tickets[0])
    assert await engine.finish((await engine.load(lease, 0)).ticket)
    await engine.close()


async def test_one_connection_keeps_nobody_from_loading(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that closes no load is stopped long before all loads are taken; with the connection they are closed."""
    monkeypatch.setattr(reads, "MAX_SESSION_LOADS", 2)
    greedy = await Engine.start(gateway.config.socket_path)
    other = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("other"))
    await greedy.store("a")
    for engine in (greedy, other):
        lease = await engine.lease("a")
        await engine.acquire(lease, 0, 1)
        for _ in range(2):
            await engine.load(lease, 0)
        async with denied("busy"):
            await engine.load(lease, 0)
    await greedy.close()
    await other.close()
    await nothing_held(gateway)


async def test_bound_chunks_are_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all requests, and half of that for one connection: however it binds or extends; a release makes room."""
    monkeypatch.setattr(leases, "MAX_BOUND_CHUNKS", 8)
    one = await Engine.start(gateway.config.socket_path)
    lease = await one.lease("a", "b")
    await one.extend(lease, 2, "c")
    await one.extend(lease, 0, "a", "b", "c")
    for texts in (("a", "b"), ("a", "b", "c", "d", "e")):
        async with denied("busy"):
            await one.bind(*texts)
    async with denied("busy"):
        await one.extend(lease, 3, "d", "e")
    two = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("two"))
    await two.bind("a", "b", "c", "d")
    assert await one.extend(lease, 3, "d") == 4
    third = await Wire.open(gateway.config.socket_path)
    async with denied("busy"):
        await third.call(one.bind_message("a"), Bound)
    await one.release(lease)
    await third.call(one.bind_message("a", "b", "c", "d"), Bound)
    for connection in (one, two, third):
        await connection.close()
    await nothing_held(gateway)
