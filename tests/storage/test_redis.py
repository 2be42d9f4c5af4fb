"""Redis and Valkey behind the interface: lengths, objects deleted or changed behind our back, servers that die or stall under load."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from redis import Redis

from kvgate.storage.backend import ObjectRef, StorageUnavailable
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, new_ref
from tests.storage.servers import Server, name_in, needs_redis, needs_valkey, redis_adapter, redis_server, valkey_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_lmcache, needs_redis]


@dataclass
class Remote:
    """A backend, the server behind it, and a client of one's own of that server."""

    store: Harness
    server: Server
    client: Redis
    kind: str

    async def in_server_only(self, *refs: ObjectRef) -> None:
        """Store ``refs`` and drive them out of the pool."""
        await self.store.put(*refs)
        await self.store.push_out_of_l1()

    async def works_again(self) -> None:
        """Wait until an object stored now comes back from the server."""
        async with asyncio.timeout(2 * SOON_S):
            while True:
                ref = new_ref()
                await self.store.put(ref)
                await self.store.settle()
                await self.store.push_out_of_l1()
                if await self.store.read(ref) == content(ref):
                    return
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module", params=["redis", pytest.param("valkey", marks=needs_valkey)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """One server, through each of LMCache's two clients for it."""
    with redis_server(tmp_path_factory.mktemp("redis")) as made:
        yield request.param, made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(server: tuple[str, Server], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Remote]:
    """One backend for all tests of a kind: each leaves it working."""
    kind, redis = server
    adapter = redis_adapter(redis) if kind == "redis" else valkey_adapter(redis)
    folder: Path = tmp_path_factory.mktemp("state")
    backend = LMCacheBackend(LMCacheConfig(state_dir=folder, pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
    await backend.start()
    yield Remote(Harness(backend), redis, Redis(port=redis.port), kind)
    await backend.stop(0)


@pytest_asyncio.fixture(loop_scope="module")
async def remote(shared: Remote) -> AsyncIterator[Remote]:
    """The shared one, left without holds and reservations."""
    yield shared
    await shared.store.clean_up()


async def test_no_object_is_ever_asked_for_with_another_length(remote: Remote) -> None:
    """Whatever lengths callers ask for: every name sent to the server holds the length read, and its value has that length.

    A GET of another length would leave bytes in the connection, and the next GET would return them as its own.
    """
    refs = [new_ref(size) for size in (1, 4095, 4096, 70_000, 70_001, 300_000)]
    with remote.client.monitor() as monitor:  # type: ignore[no-untyped-call]  # redis-py
        await remote.in_server_only(*refs)
        asked = [ObjectRef(ref.address, size, ref.domain) for ref in refs for size in (1, 4096, 69_999, 70_000, 300_000)]
        held = await remote.store.acquire(*asked)
        assert await remote.store.probe(*asked) == [ref in refs for ref in asked]
        for ref, one in zip(asked, held, strict=True):
            assert (one is not None) is (ref in refs)
            assert one is None or remote.store.bytes_at(one.slot) == content(ref)
        remote.client.echo("end")
        commands = []
        while "ECHO" not in (command := monitor.next_command()["command"]):
            commands.append(command)
    keys = {word for command in commands for word in command.split()[1:] if word.startswith("kvgate.")}
    gets = [command.split()[1] for command in commands if command.split()[0].upper().startswith("GET")]
    assert gets
    for key in keys:
        size = re.match(r"kvgate\.v1\.(\d+)@", key)
        assert size is not None
        assert remote.client.strlen(key) in (0, int(size[1]))
    assert all(remote.client.strlen(key) for key in gets)


async def test_objects_deleted_behind_our_back_are_misses(remote: Remote) -> None:
    """DEL, and a flush of everything: absent for probe and acquire, and stored anew as if they had never been."""
    refs = [new_ref() for _ in range(4)]
    await remote.in_server_only(*refs)
    remote.client.delete(name_in(remote.client, refs[0]))
    assert await remote.store.probe(*refs) == [False, True, True, True]
    assert [await remote.store.read(ref) for ref in refs] == [None, *(content(ref) for ref in refs[1:])]
    await remote.store.push_out_of_l1()
    remote.client.flushall()
    assert await remote.store.probe(*refs) == [False] * 4
    assert await remote.store.acquire(*refs) == [None] * 4
    await remote.in_server_only(*refs)
    assert [await remote.store.read(ref) for ref in refs] == [content(ref) for ref in refs]


async def test_an_object_deleted_between_probe_and_read_is_a_miss(remote: Remote) -> None:
    """What was there a moment ago and is gone when it is fetched leaves no hold and no other object's bytes."""
    refs = [new_ref() for _ in range(6)]
    await remote.in_server_only(*refs)
    assert await remote.store.probe(*refs) == [True] * 6
    remote.client.delete(*(name_in(remote.client, ref) for ref in refs[::2]))
    held = await remote.store.acquire(*refs)
    assert [one is not None for one in held] == [False, True] * 3
    for ref, one in zip(refs, held, strict=True):
        assert one is None or remote.store.bytes_at(one.slot) == content(ref)
    assert await remote.store.counter("holds") == 3


@pytest.mark.parametrize("left", [0, 1, 69_999, 75_000])
async def test_a_value_whose_length_was_changed_is_never_served(remote: Remote, left: int) -> None:
    """Shortened or lengthened in the server: it is a miss, no other object comes back wrong, and the adapter works again."""
    refs = [new_ref(70_000) for _ in range(4)]
    await remote.in_server_only(*refs)
    key = name_in(remote.client, refs[0])
    remote.client.set(key, (content(refs[0]) * 2)[:left])
    for _ in range(4):
        reads = await asyncio.gather(*(remote.store.read(ref) for ref in refs))
        assert reads[0] is None
        assert all(read in (None, content(ref)) for ref, read in zip(refs, reads, strict=True))
        await remote.store.push_out_of_l1()
    async with asyncio.timeout(SOON_S):
        while remote.client.exists(key):  # else it would be a miss for ever
            assert await remote.store.read(refs[0]) is None
            await asyncio.sleep(0.01)
    await remote.works_again()
    assert await remote.store.counter("holds") == 0


async def work_while(remote: Remote, refs: list[ObjectRef], ended: asyncio.Event) -> int:
    """Read and store as fast as answers come, with short deadlines, until ``ended``; how many reads found their object."""
    found = 0
    turn = 0
    while not ended.is_set():
        turn += 1
        ref = refs[turn % len(refs)]
        async with asyncio.timeout(SOON_S):  # the backend's own deadline is far below
            with contextlib.suppress(StorageUnavailable):
                (held,) = await remote.store.backend.acquire([ref], 0.2)
                if held is not None:
                    assert remote.store.bytes_at(held.slot) == content(ref)
                    await remote.store.backend.release([held.hold])
                    found += 1
                await remote.store.backend.probe([ref], 0.2)
            with contextlib.suppress(AssertionError):  # refused: full of what waits for the server
                await remote.store.put(new_ref(200_000))
        await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("way", ["kill", "stall"])
async def test_a_server_that_fails_under_load_costs_misses_only(remote: Remote, way: str) -> None:
    """Killed and started again, or stalled, amid reads and stores: answers are right or a miss, in time; then it works again."""
    refs = [new_ref() for _ in range(8)]
    await remote.in_server_only(*refs)
    ended = asyncio.Event()
    workers = [asyncio.create_task(work_while(remote, refs[index:], ended)) for index in range(4)]
    await asyncio.sleep(0.3)
    if way == "kill":
        remote.server.kill()
        await asyncio.sleep(1)
        await asyncio.to_thread(remote.server.restart)
    else:
        remote.server.freeze()
        await asyncio.sleep(1)
        remote.server.thaw()
    await asyncio.sleep(0.3)
    ended.set()
    await asyncio.gather(*workers)
    await remote.works_again()
    await remote.store.until("l2_adapters_away", 0)
    await remote.store.until("l2_abandoned_reads", 0)
    assert await remote.store.counter("holds") == 0
    assert await remote.store.counter("reservations") == 0


async def test_a_full_server_refuses_stores_and_keeps_what_it_has(remote: Remote) -> None:
    """At its limit without eviction: commits go on in L1, failed stores are counted, old objects stay; with room it works again."""
    old = [new_ref() for _ in range(3)]
    await remote.in_server_only(*old)
    failed = await remote.store.counter("l2_store_failed_objects")
    remote.client.config_set("maxmemory-policy", "noeviction")
    remote.client.config_set("maxmemory", 1)
    try:
        new = [new_ref() for _ in range(3)]
        await remote.store.put(*new)
        await remote.store.settle()
        assert await remote.store.counter("l2_store_failed_objects") == failed + 3
        assert [await remote.store.read(ref) for ref in new] == [content(ref) for ref in new]
        # LMCache's `resp` client closes its connections over the refusals: away for a moment, and not lost.
        for ref in old:
            assert await remote.store.read(ref) in (None, content(ref))
    finally:
        remote.client.config_set("maxmemory", 0)
    await remote.works_again()
    assert [await remote.store.read(ref) for ref in old] == [content(ref) for ref in old]
