"""Backends for the storage tests. Starting LMCache takes seconds, so one serves all tests of a module."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvgate.storage.backend import StorageBackend
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from kvgate.storage.memory import MemoryBackend
from tests.storage.harness import POOL_BYTES, Harness

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
needs_lmcache = pytest.mark.skipif(not HAS_LMCACHE, reason="LMCache is not installed in this environment")


def make_backend(kind: str, state_dir: Path, pool_bytes: int = POOL_BYTES) -> StorageBackend:
    """A backend of that kind, not started."""
    if kind == "memory":
        return MemoryBackend(pool_bytes)
    return LMCacheBackend(LMCacheConfig(state_dir=state_dir, pool_bytes=pool_bytes))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", pytest.param("lmcache", marks=needs_lmcache)])
async def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StorageBackend]:
    """A started backend of each kind, shared by the tests of a module."""
    made = make_backend(request.param, tmp_path_factory.mktemp("state"))
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
