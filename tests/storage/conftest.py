"""Backends for the storage tests. Starting LMCache takes seconds, so one serves all tests of a module."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from kvgate.storage.attach import AttachedBackend
from kvgate.storage.backend import StorageBackend
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from kvgate.storage.memory import MemoryBackend
from tests.storage.harness import POOL_BYTES, Harness
from tests.storage.servers import lmcache_server, needs_redis, needs_valkey, redis_adapter, redis_server, valkey_adapter

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
needs_lmcache = pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed in this environment")


def make_backend(kind: str, state_dir: Path, pool_bytes: int = POOL_BYTES) -> StorageBackend:
    """A backend of that kind, not started."""
    if kind == "memory":
        return MemoryBackend(pool_bytes)
    return LMCacheBackend(LMCacheConfig(state_dir=state_dir, pool_bytes=pool_bytes))


@contextmanager
def made_backend(kind: str, folder: Path, pool_bytes: int = POOL_BYTES) -> Iterator[StorageBackend]:
    """A backend of that kind, not started; the server it needs runs as long as the block."""
    if kind in ("redis", "valkey"):
        with redis_server(folder) as redis:
            adapter = redis_adapter(redis) if kind == "redis" else valkey_adapter(redis)
            yield LMCacheBackend(LMCacheConfig(state_dir=folder, pool_bytes=pool_bytes, l2_adapters=(adapter,)))
    elif kind == "attach":
        l2 = json.dumps({"type": "fs", "base_path": str(folder / "l2")})
        with lmcache_server(folder, pool_bytes, l2) as server:
            url = f"tcp://127.0.0.1:{server.port}"
            yield AttachedBackend(LMCacheConfig(state_dir=folder, pool_bytes=pool_bytes, attach_url=url))
    else:
        yield make_backend(kind, folder, pool_bytes)


KINDS = [
    "memory",
    pytest.param("lmcache", marks=needs_lmcache),
    pytest.param("redis", marks=[needs_lmcache, needs_redis]),
    pytest.param("valkey", marks=[needs_lmcache, needs_redis, needs_valkey]),
    pytest.param("attach", marks=needs_lmcache),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StorageBackend]:
    """A started backend of each kind, shared by the tests of a module."""
    with made_backend(request.param, tmp_path_factory.mktemp("state")) as made:
        await made.start()
        yield made
        await made.stop(0)


@pytest_asyncio.fixture(loop_scope="module")
async def store(backend: StorageBackend) -> AsyncIterator[Harness]:
    """The shared backend, left without holds and reservations after each test."""
    harness = Harness(backend)
    yield harness
    await harness.clean_up()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lmcache_backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LMCacheBackend]:
    """A started LMCache backend with a folder as L2, shared by the tests of a module."""
    made = LMCacheBackend(LMCacheConfig(state_dir=tmp_path_factory.mktemp("state"), pool_bytes=POOL_BYTES))
    await made.start()
    yield made
    await made.stop(0)


@pytest_asyncio.fixture(loop_scope="module")
async def tiers(lmcache_backend: LMCacheBackend) -> AsyncIterator[Harness]:
    """The shared LMCache backend, left without holds and reservations after each test."""
    harness = Harness(lmcache_backend)
    yield harness
    await harness.clean_up()
