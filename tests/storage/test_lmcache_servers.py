"""An L2 that is slow, hangs or dies must cost its deadline and no more, and serve again when it is back."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvgate.storage.backend import ObjectRef, StorageUnavailable
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, freeze, new_ref

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_lmcache]
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on this machine")


class Redis:
    """A Redis of the test's own, without persistence, on a port that was free."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._folder = folder
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return process
            except ConnectionRefusedError:
                signal.sigtimedwait([], 0.01)
        raise AssertionError("redis-server does not come up")

    def restart(self) -> None:
        """Start it again, empty."""
        self.process = self._start()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A running Redis."""
    made = Redis(tmp_path)
    yield made
    made.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def remote(redis: Redis, tmp_path: Path) -> AsyncIterator[Harness]:
    """A backend with that Redis as its L2."""
    adapter = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path / "state", pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
    await backend.start()
    yield Harness(backend)
    await backend.stop(0)


@needs_redis
async def test_bytes_are_equal_through_redis(remote: Harness) -> None:
    """Objects of many lengths come back from Redis whole; other lengths and deleted objects are absent."""
    refs = [new_ref(size) for size in (1, 4095, 4096, 70_000, 1 << 20)]
    await remote.put(*refs)
    await remote.push_out_of_l1()
    assert await remote.probe(*refs) == [True] * len(refs)
    longer = [ObjectRef(ref.address, ref.object_bytes + 1, ref.domain) for ref in refs]
    assert await remote.probe(*longer) == [False] * len(refs)
    assert await remote.acquire(*longer) == [None] * len(refs)
    held = await remote.acquire(*refs)
    for ref, one in zip(refs, held, strict=True):
        assert one is not None
        assert one.tier == "l2"
        assert remote.bytes_at(one.slot) == content(ref)
    await remote.clean_up()
    await remote.delete(*refs[:2])
    await remote.push_out_of_l1()
    assert await remote.probe(*refs) == [False, False, True, True, True]


@needs_redis
async def test_an_l2_that_hangs_costs_deadlines_and_no_hold(remote: Harness, redis: Redis) -> None:
    """While Redis does not answer, L2 is "not known" in time and L1 goes on; afterwards nothing is held or lost."""
    here, away = new_ref(), [new_ref() for _ in range(4)]
    await remote.put(*away)
    await remote.push_out_of_l1()
    await remote.put(here)
    await remote.settle()
    freeze(redis.process.pid)
    assert await remote.backend.probe(away, 0.1) == [None] * 4
    assert await remote.backend.acquire(away, 0.1) == [None] * 4
    with pytest.raises(StorageUnavailable):
        await remote.backend.delete(away[:1], 0.1)
    assert await remote.read(here) == content(here)
    assert await remote.counter("holds") == 0
    redis.process.send_signal(signal.SIGCONT)
    await remote.until("l2_abandoned_reads", 0)
    await remote.until("condemned_objects", 0)
    assert await remote.counter("holds") == 0
    assert [await remote.read(ref) for ref in away[1:]] == [content(ref) for ref in away[1:]]
    assert await remote.probe(away[0]) == [False]
    await remote.push_out_of_l1()
    assert len(await remote.fill(1 << 20)) == POOL_BYTES >> 20


@needs_redis
async def test_an_unreachable_l2_is_not_taken_for_an_empty_one(remote: Harness, redis: Redis) -> None:
    """With Redis dead probe says "not known", a removal is not confirmed, stores are counted as failed, L1 goes on."""
    here, away = new_ref(), new_ref()
    await remote.put(away)
    await remote.push_out_of_l1()
    redis.kill()
    assert await remote.probe(away) == [None]
    assert await remote.acquire(away) == [None]
    with pytest.raises(StorageUnavailable, match="confirm"):
        await remote.delete(away)
    await remote.put(here)
    assert await remote.read(here) == content(here)
    async with asyncio.timeout(SOON_S):
        while not await remote.counter("l2_store_failed_objects") + await remote.counter("l2_store_lost_objects"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@needs_redis
async def test_an_l2_that_comes_back_is_used_again(remote: Harness, redis: Redis) -> None:
    """LMCache's Redis client never reconnects; here the adapter is made anew, and objects stored since are found."""
    redis.kill()
    await remote.put(new_ref())
    await remote.until("l2_adapters_away", 1)
    redis.restart()
    await remote.until("l2_adapters_away", 0)
    assert await remote.counter("l2_adapter_renewals") == 1
    ref = new_ref()
    await remote.put(ref)
    await remote.push_out_of_l1()
    assert await remote.probe(ref) == [True]
    assert await remote.read(ref) == content(ref)


@needs_redis
async def test_a_start_without_its_l2_serves_from_l1_until_it_is_there(redis: Redis, tmp_path: Path) -> None:
    """A Redis that is down at start is an L2 that is away, not a gateway that does not start."""
    redis.kill()
    adapter = {"type": "resp", "host": "127.0.0.1", "port": redis.port, "num_workers": 2}
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path / "state", pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
    await backend.start()
    try:
        store = Harness(backend)
        ref, unknown = new_ref(), new_ref()
        await store.put(ref)
        assert await store.read(ref) == content(ref)
        assert await store.probe(unknown) == [None]
        redis.restart()
        await store.until("l2_adapters_away", 0)
        assert await store.probe(unknown) == [False]
    finally:
        await backend.stop(0)


async def test_a_read_that_takes_longer_than_the_deadline_leaves_no_hold(tmp_path: Path) -> None:
    """From an L2 of half a megabyte a second: absent at the deadline, no hold left, and there when asked again later."""
    adapter = {"type": "mock", "max_size_gb": 0.1, "mock_bandwidth_gb": 0.0005}
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
    await backend.start()
    try:
        store = Harness(backend)
        ref = new_ref(700_000)
        await store.put(ref)
        await store.push_out_of_l1()
        assert await store.acquire(ref, deadline_s=0.2) == [None]
        assert await store.counter("holds") == 0
        await store.until("l2_abandoned_reads", 0)
        held = await store.hold(ref)
        assert held.tier == "l1"
        assert store.bytes_at(held.slot) == content(ref)
        await store.release(held)
        await store.push_out_of_l1()
        assert len(await store.fill(1 << 20)) == POOL_BYTES >> 20
    finally:
        await backend.stop(0)


async def test_objects_an_adapter_cannot_load_are_counted_and_kept(tmp_path: Path) -> None:
    """An adapter that says it has an object and cannot load it: a miss and a count. The object may be whole, so it stays."""
    inner = {"type": "fs", "base_path": str(tmp_path / "l2")}
    adapter = {"type": "fault_inject", "inner": inner, "rate": 1.0}
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path / "state", pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
    await backend.start()
    try:
        store = Harness(backend)
        refs = [new_ref(), new_ref()]
        await store.put(*refs)
        await store.push_out_of_l1()
        assert await store.probe(*refs) == [True, True]
        assert await store.acquire(*refs) == [None, None]
        assert await store.counter("l2_load_failed_objects") == 2
        await asyncio.sleep(0.3)  # the sweep is woken by the failure
        assert await store.probe(*refs) == [True, True]
        assert await store.counter("holds") == 0
    finally:
        await backend.stop(0)
