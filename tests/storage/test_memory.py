"""Beyond the shared rules, the memory backend's pool must live as long as it does, and what was held longest ago must go first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvgate.storage.backend import PoolInfo, Refusal, StorageUnavailable
from kvgate.storage.memory import MemoryBackend
from kvgate.storage.pool import SHM_DIR
from tests.storage.harness import SOON_S, Harness, content, new_ref

SLOT = 1 << 16


async def test_the_pool_lives_from_start_to_stop() -> None:
    """The pool's name is new at each start and gone after stop; callbacks hear of both; both are idempotent."""
    backend = MemoryBackend(4 * SLOT)
    heard: list[PoolInfo | None] = []
    backend.on_generation(heard.append)
    await backend.stop(0)
    await backend.start()
    first = backend.pool
    await backend.start()
    assert first is not None
    assert first.name.startswith("kvgate_pool_")
    assert (SHM_DIR / first.name).stat().st_mode & 0o777 == 0o600
    await backend.stop(0)
    await backend.stop(0)
    assert not (SHM_DIR / first.name).exists()
    await backend.start()
    second = backend.pool
    assert second is not None
    assert second.name != first.name
    assert second.generation > first.generation
    await backend.stop(0)
    assert heard == [first, None, second, None]


async def test_a_stopped_backend_refuses_calls() -> None:
    """Before start and after stop calls raise StorageUnavailable; a release is ignored; status answers."""
    backend = MemoryBackend(4 * SLOT)
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            await backend.probe([new_ref()], SOON_S)
        with pytest.raises(StorageUnavailable):
            await backend.acquire([new_ref()], SOON_S)
        with pytest.raises(StorageUnavailable):
            await backend.reserve([new_ref()], SOON_S)
        with pytest.raises(StorageUnavailable):
            await backend.commit([1], SOON_S)
        with pytest.raises(StorageUnavailable):
            await backend.abort([1], SOON_S)
        with pytest.raises(StorageUnavailable):
            await backend.delete([new_ref()], SOON_S)
        await backend.release([1])
        assert (await backend.status(SOON_S))["backend"] == "memory"
        await backend.start()
        await backend.stop(0)


async def test_ids_of_an_older_pool_name_nothing() -> None:
    """Objects, holds and reservations end with their pool, whatever ids the next one gives out."""
    backend = MemoryBackend(8 * SLOT)
    await backend.start()
    store = Harness(backend)
    ref = new_ref(SLOT)
    await store.put(ref)
    held, opened = await store.hold(ref), await store.open(new_ref(SLOT))
    await backend.stop(0)
    await backend.start()
    fresh = [await store.open(new_ref(SLOT)) for _ in range(4)]
    assert await store.probe(ref) == [False]
    assert await store.commit(opened) == [False]
    await store.release(held)
    assert await store.counter("unknown_releases") == 1
    assert await store.commit(*fresh) == [True] * 4
    await backend.stop(0)


async def test_the_least_recently_used_object_goes_first() -> None:
    """Room is made at the expense of what was held longest ago."""
    backend = MemoryBackend(4 * SLOT)
    await backend.start()
    store = Harness(backend)
    refs = [new_ref(SLOT) for _ in range(4)]
    await store.put(*refs)
    await store.read(refs[0])
    await store.put(new_ref(SLOT))
    assert await store.probe(*refs) == [True, False, True, True]
    await backend.stop(0)


async def test_nothing_is_evicted_for_an_object_that_fits_nowhere() -> None:
    """If held objects leave no run long enough, the others stay where they are."""
    backend = MemoryBackend(4 * SLOT)
    await backend.start()
    store = Harness(backend)
    refs = [new_ref(SLOT) for _ in range(4)]
    await store.put(*refs)
    await store.hold(refs[1])
    assert await store.reserve(new_ref(3 * SLOT)) == [Refusal.FULL]
    assert await store.probe(*refs) == [True] * 4
    big = new_ref(2 * SLOT)
    await store.put(big)
    assert await store.read(big) == content(big)
    assert await store.probe(*refs) == [False, True, False, False]
    await backend.stop(0)


async def test_a_start_reaps_the_pool_of_a_killed_daemon(repo_root: Path) -> None:
    """A kill -9 leaves a pool; the next start on the host removes it and no living one's."""
    code = """
import asyncio, os
from kvgate.storage.memory import MemoryBackend
backend = MemoryBackend(1 << 16)
asyncio.run(backend.start())
print(backend.pool.name, flush=True)
os.kill(os.getpid(), 9)
"""
    living = MemoryBackend(4 * SLOT)
    await living.start()
    assert living.pool is not None
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=repo_root, check=False)  # noqa: ASYNC221
    name = done.stdout.decode().split()[-1]
    # Another start on this host may have been first; none may leave it.
    backend = MemoryBackend(4 * SLOT)
    await backend.start()
    assert not (SHM_DIR / name).exists()
    assert (SHM_DIR / living.pool.name).exists()
    await backend.stop(0)
    await living.stop(0)


async def test_a_host_without_room_for_the_pool_is_refused() -> None:
    """Start says that shared memory is too small instead of failing later."""
    backend = MemoryBackend(1 << 60)
    with pytest.raises(StorageUnavailable, match="smaller"):
        await backend.start()
    assert backend.pool is None


async def test_a_failing_callback_does_not_stop_the_backend() -> None:
    """One subscriber's error is logged; the others hear, and the backend serves."""
    backend = MemoryBackend(4 * SLOT)
    heard: list[PoolInfo | None] = []

    def broken(_pool: PoolInfo | None) -> None:
        raise RuntimeError("a subscriber's bug")

    backend.on_generation(broken)
    backend.on_generation(heard.append)
    await backend.start()
    assert heard == [backend.pool]
    await backend.stop(0)
