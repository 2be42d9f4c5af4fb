"""L2 at its limits: caps that evict, a disk that is full, files removed behind our back, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvgate.storage.backend import ObjectRef
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from tests import mounts
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, new_ref
from tests.storage.servers import needs_redis, redis_adapter, redis_server

pytestmark = needs_lmcache
OBJECT_BYTES = 1 << 20
TWO_OBJECTS_GB = 2 * OBJECT_BYTES / (1 << 30)
EVICTION = {"eviction_policy": "LRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}


@asynccontextmanager
async def store_on(folder: Path, **adapter: Any) -> AsyncIterator[Harness]:
    """A started backend with one L2 adapter."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=folder / "state", pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
    await backend.start()
    try:
        yield Harness(backend)
    finally:
        await backend.stop(0)


async def three_in_a_cap_of_two(store: Harness) -> None:
    """Store three objects one after the other; at most two stay, the last among them, and what is left is whole."""
    refs = [new_ref(OBJECT_BYTES) for _ in range(3)]
    for ref in refs:
        await store.put(ref)
        await store.settle()
    await store.push_out_of_l1()
    async with asyncio.timeout(SOON_S):
        while sum(map(bool, await store.probe(*refs))) > 2:  # noqa: ASYNC110  # LMCache looks once a second
            await asyncio.sleep(0.05)
    left = await store.probe(*refs)
    assert left[0] is False
    reads = [await store.read(ref) for ref in refs]
    assert [read is not None for read in reads] == left
    assert all(read in (None, content(ref)) for ref, read in zip(refs, reads, strict=True))
    await store.clean_up()
    again = new_ref(OBJECT_BYTES)
    await store.put(again)
    await store.push_out_of_l1()
    assert await store.read(again) == content(again)


async def test_a_capped_folder_evicts_the_oldest(tmp_path: Path) -> None:
    """`fs_native` with room for two objects and LRU eviction: of three stored ones the first goes, from the disk too."""
    folder = tmp_path / "l2"
    cap = {"max_capacity_gb": TWO_OBJECTS_GB, "eviction": EVICTION}
    async with store_on(tmp_path, type="fs_native", base_path=str(folder), **cap) as store:
        await three_in_a_cap_of_two(store)
        async with asyncio.timeout(SOON_S):
            while sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 2 * OBJECT_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@needs_redis
async def test_a_capped_redis_evicts_the_oldest(tmp_path: Path) -> None:
    """`resp` with LMCache's cap, on a server without one of its own."""
    with redis_server(tmp_path) as server:
        async with store_on(tmp_path, **redis_adapter(server), max_capacity_gb=TWO_OBJECTS_GB, eviction=EVICTION) as store:
            await three_in_a_cap_of_two(store)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounts.small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
async def test_a_full_disk_loses_nothing_and_is_told(small_disk: Path, tmp_path: Path, kind: str, capfd: Any) -> None:
    """Commits go on in L1, old objects stay, no half-written file is left, counter and log tell; with room again L2 works."""
    async with store_on(tmp_path, type=kind, base_path=str(small_disk / "l2")) as store:
        old = [new_ref(OBJECT_BYTES) for _ in range(2)]
        await store.put(*old)
        await store.settle()
        filler = small_disk / "filler"
        filler.write_bytes(bytes((3 << 19) - (64 << 10)))
        new = [new_ref(OBJECT_BYTES) for _ in range(3)]
        await store.put(*new)
        await store.settle()
        assert await store.counter("l2_store_failed_objects") == 3
        assert [await store.read(ref) for ref in new] == [content(ref) for ref in new]
        assert len(whole_files(small_disk / "l2", old)) == len(all_files(small_disk / "l2")) == 2
        assert '"event": "l2_store_failed"' in capfd.readouterr().err
        await store.push_out_of_l1()
        assert await store.probe(*old, *new) == [True] * 2 + [False] * 3
        assert [await store.read(ref) for ref in old] == [content(ref) for ref in old]
        filler.unlink()
        again = new_ref(OBJECT_BYTES)
        await store.put(again)
        await store.push_out_of_l1()
        assert await store.read(again) == content(again)


def all_files(folder: Path) -> list[Path]:
    """Every file below ``folder``."""
    return [path for path in folder.rglob("*") if path.is_file()]


def whole_files(folder: Path, refs: list[ObjectRef]) -> list[Path]:
    """The files that hold one of ``refs``, whole."""
    contents = [content(ref) for ref in refs]
    return [path for path in all_files(folder) if path.read_bytes() in contents]
