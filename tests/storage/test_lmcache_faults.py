"""Processes that die, hang or come back must cost the LMCache backend holds and time, never bytes, and leave nothing with nobody."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvgate.storage.backend import ObjectRef, PoolInfo, Reservation, StorageUnavailable
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from kvgate.storage.pool import SHM_DIR
from kvgate.storage.run_folder import RunFolder, process_started
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, freeze, new_ref

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_lmcache]

# Long deadlines beside a short patience: a call that fails only at its deadline fails the test.
LONG_S = 600.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mortal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LMCacheBackend]:
    """An LMCache backend whose process the tests of this module kill."""
    state_dir = tmp_path_factory.mktemp("state")
    config = LMCacheConfig(state_dir=state_dir, pool_bytes=POOL_BYTES, restart_pause_s=0.01, max_restart_pause_s=0.05)
    backend = LMCacheBackend(config)
    await backend.start()
    yield backend
    await backend.stop(0)


@pytest_asyncio.fixture(loop_scope="module")
async def own(mortal: LMCacheBackend) -> AsyncIterator[Harness]:
    """That backend, serving, without holds and reservations."""
    async with asyncio.timeout(SOON_S):
        while mortal.pool is None:  # noqa: ASYNC110  # the test before may have killed it
            await asyncio.sleep(0.01)
    harness = Harness(mortal)
    yield harness
    if mortal.pool is not None:
        await harness.clean_up()


def lmcache_of(store: Harness) -> LMCacheBackend:
    """The harness's backend with its own type."""
    assert isinstance(store.backend, LMCacheBackend)
    return store.backend


def l2_folder(store: Harness) -> Path:
    """The folder the backend has as L2."""
    (spec,) = lmcache_of(store).config.adapters()
    return Path(spec["base_path"])


def send(store: Harness, number: signal.Signals) -> int:
    """Signal the storage process; its pid."""
    pid = lmcache_of(store).process_pid
    assert pid is not None
    if number is signal.SIGSTOP:
        freeze(pid)
    else:
        os.kill(pid, number)
    return pid


async def next_generation(store: Harness, old: PoolInfo) -> PoolInfo:
    """Wait until another pool than ``old`` is up."""
    async with asyncio.timeout(SOON_S):
        while (pool := store.backend.pool) is None or pool == old:  # noqa: ASYNC110  # the callback has its own test
            await asyncio.sleep(0.01)
    return pool


def pool_of(store: Harness) -> PoolInfo:
    """The live pool."""
    pool = store.backend.pool
    assert pool is not None
    return pool


async def test_the_death_of_the_process_is_told_and_a_new_generation_serves(own: Harness) -> None:
    """Callbacks hear of the loss, then of the new pool; the old pool is gone, the new one has another name."""
    heard: list[PoolInfo | None] = []
    own.backend.on_generation(heard.append)
    old = pool_of(own)
    send(own, signal.SIGKILL)
    new = await next_generation(own, old)
    assert heard == [None, new]
    assert new.generation > old.generation
    assert new.name != old.name
    assert not (SHM_DIR / old.name).exists()
    ref = new_ref()
    await own.put(ref)
    assert await own.read(ref) == content(ref)


async def test_calls_under_way_fail_at_once_when_the_process_dies(own: Harness) -> None:
    """Calls a stopped process never answers end with its death, long before their deadline."""
    ref = new_ref()
    await own.put(ref)
    opened = await own.open(new_ref())
    send(own, signal.SIGSTOP)
    refs = [ref]
    calls = [
        own.backend.probe(refs, LONG_S),
        own.backend.acquire(refs, LONG_S),
        own.backend.reserve([new_ref()], LONG_S),
        own.backend.commit([opened.reservation], LONG_S),
        own.backend.abort([opened.reservation], LONG_S),
        own.backend.delete(refs, LONG_S),
        own.backend.status(LONG_S),
    ]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    send(own, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StorageUnavailable] * len(calls)


async def test_while_no_process_serves_calls_fail_at_once(own: Harness) -> None:
    """Between death and new start every call raises StorageUnavailable, and status still answers."""
    send(own, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        while own.backend.pool is not None:  # noqa: ASYNC110  # the point is to look without a callback
            await asyncio.sleep(0.001)
    with pytest.raises(StorageUnavailable):
        await own.backend.probe([new_ref()], LONG_S)
    with pytest.raises(StorageUnavailable):
        await own.backend.reserve([new_ref()], LONG_S)
    with pytest.raises(StorageUnavailable):
        await own.backend.commit([1], LONG_S)
    await own.backend.release([1])
    assert (await own.backend.status(LONG_S))["state"] == "restarting"


async def test_ids_of_an_older_generation_name_nothing(own: Harness) -> None:
    """Reservations and holds of a dead process are unknown to the next, whatever ids that one gives out."""
    ref, writing = new_ref(), new_ref()
    await own.put(ref)
    held = await own.hold(ref)
    opened = await own.open(writing)
    old = pool_of(own)
    send(own, signal.SIGKILL)
    await next_generation(own, old)
    fresh = [await own.open(new_ref()) for _ in range(8)]
    assert await own.commit(opened) == [False]
    await own.abort(opened)
    before = await own.counter("unknown_releases")
    await own.release(held)
    assert await own.counter("unknown_releases") == before + 1
    assert await own.probe(writing) == [False]
    assert await own.commit(*fresh) == [True] * 8


@pytest.mark.parametrize("written", [350_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 700_000))])
async def test_what_was_never_committed_is_invisible_after_a_kill(own: Harness, written: int) -> None:
    """A writer that got to byte n when everything died left nothing."""
    ref = new_ref(700_000)
    opened = await own.open(ref)
    own.mapping.slice(opened.slot)[:written] = content(ref)[:written]
    old = pool_of(own)
    send(own, signal.SIGKILL)
    await next_generation(own, old)
    assert await own.probe(ref) == [False]
    assert await own.acquire(ref) == [None]
    await own.put(ref)
    assert await own.read(ref) == content(ref)


@pytest.mark.parametrize("round_number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
async def test_a_kill_during_stores_leaves_whole_objects_or_none(own: Harness, round_number: int) -> None:
    """After a kill -9 in the middle of L2 writes each object is absent or has exactly its bytes."""
    settled = [new_ref(300_000) for _ in range(4)]
    await own.put(*settled)
    await own.settle()
    refs = [new_ref(900_000) for _ in range(12)]
    await own.put(*refs)
    await asyncio.sleep(random.Random(round_number).uniform(0, 0.02))
    old = pool_of(own)
    send(own, signal.SIGKILL)
    await next_generation(own, old)
    assert [await own.read(ref) for ref in settled] == [content(ref) for ref in settled]
    for ref in refs:
        (there,) = await own.probe(ref)
        assert await own.read(ref) == (content(ref) if there else None)
    live = pool_of(own).name.removeprefix("lmcache_l1_pool_kvgate_")
    folders = [path.name for path in l2_folder(own).iterdir() if path.is_dir()]
    assert folders == [f"kvgate-tmp-{live}"]


@pytest.mark.parametrize("round_number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
async def test_a_kill_during_loads_fails_them_and_loses_nothing(own: Harness, round_number: int) -> None:
    """Loads under way when the process dies end with StorageUnavailable; the next process serves the objects whole."""
    refs = [new_ref(900_000) for _ in range(12)]
    await own.put(*refs)
    await own.push_out_of_l1()
    old = pool_of(own)
    load = asyncio.ensure_future(own.backend.acquire(refs, LONG_S))
    await asyncio.sleep(random.Random(round_number).uniform(0, 0.004))
    send(own, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        (answer,) = await asyncio.gather(load, return_exceptions=True)
    assert isinstance(answer, StorageUnavailable | list)
    await next_generation(own, old)
    assert [await own.read(ref) for ref in refs] == [content(ref) for ref in refs]


@pytest.mark.slow
async def test_a_process_that_keeps_dying_is_started_again_each_time(own: Harness) -> None:
    """Three kills, three new generations, and what L2 has is still there."""
    ref = new_ref()
    await own.put(ref)
    await own.settle()
    before = await own.counter("restarts")
    for _ in range(3):
        old = pool_of(own)
        send(own, signal.SIGKILL)
        await next_generation(own, old)
    assert await own.read(ref) == content(ref)
    assert await own.counter("restarts") == before + 3


async def test_a_process_that_hangs_costs_a_deadline_and_no_hold(own: Harness) -> None:
    """Answers that come after the deadline are given back: no hold and no reservation stays with nobody."""
    ref = new_ref()
    await own.put(ref)
    late = await own.counter("late_answers")
    pid = send(own, signal.SIGSTOP)
    assert await own.backend.acquire([ref], 0.05) == [None]
    assert await own.backend.probe([ref], 0.05) == [None]
    with pytest.raises(StorageUnavailable):
        await own.backend.reserve([new_ref()], 0.05)
    with pytest.raises(StorageUnavailable):
        await own.backend.status(0.05)
    os.kill(pid, signal.SIGCONT)
    await own.until("late_answers", late + 2)
    await own.until("holds", 0)
    await own.until("reservations", 0)
    assert await own.read(ref) == content(ref)


async def test_a_caller_that_gives_up_leaves_no_hold(own: Harness) -> None:
    """A cancelled acquire or reserve is given back when its answer comes."""
    ref = new_ref()
    await own.put(ref)
    late = await own.counter("late_answers")
    pid = send(own, signal.SIGSTOP)
    tasks = [
        asyncio.ensure_future(own.backend.acquire([ref], LONG_S)),
        asyncio.ensure_future(own.backend.reserve([new_ref()], LONG_S)),
    ]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError] * 2
    os.kill(pid, signal.SIGCONT)
    await own.until("late_answers", late + 2)
    await own.until("holds", 0)
    await own.until("reservations", 0)


async def test_a_cancelled_caller_whose_answer_has_come_leaves_no_hold(own: Harness) -> None:
    """Also where the answer arrived in the very turn of the loop in which the caller was cancelled."""
    ref = new_ref()
    await own.put(ref)
    for _ in range(50):
        task = asyncio.ensure_future(own.backend.acquire([ref], LONG_S))
        for _ in range(random.randrange(1, 40)):
            await asyncio.sleep(0)
        task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(answer, list):
            await own.backend.release([held.hold for held in answer if held is not None])
    await own.until("holds", 0)


async def test_calls_in_flight_are_bounded(tmp_path: Path) -> None:
    """Beyond the limit a call waits for a place until its own deadline, and is refused."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES, max_calls=2))
    await backend.start()
    try:
        pid = backend.process_pid
        assert pid is not None
        freeze(pid)
        waiting = [asyncio.ensure_future(backend.status(LONG_S)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(StorageUnavailable, match="too many"):
            await backend.reserve([new_ref()], 0.05)
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*waiting)
        assert isinstance((await backend.reserve([new_ref()], SOON_S))[0], Reservation)
    finally:
        await backend.stop(0)


async def test_a_stopped_process_does_not_keep_stop_waiting_for_ever(tmp_path: Path) -> None:
    """Stop ends a process that does not answer, and leaves neither pool nor socket."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES))
    await backend.start()
    pool, pid = backend.pool, backend.process_pid
    assert pool is not None
    assert pid is not None
    freeze(pid)
    async with asyncio.timeout(2 * SOON_S):
        await backend.stop(0)
    assert not (SHM_DIR / pool.name).exists()
    assert process_started(pid) == 0
    assert not list((tmp_path / "storage").glob("*.sock"))


async def test_a_stop_during_a_restart_leaves_nothing(tmp_path: Path) -> None:
    """Stopping while the next process is still coming up ends that one too."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES, restart_pause_s=0.01))
    await backend.start()
    store = Harness(backend)
    pool = pool_of(store)
    send(store, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        while backend.pool is not None:  # noqa: ASYNC110  # the point is to look without a callback
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.5)
    await backend.stop(0)
    assert not (SHM_DIR / pool.name).exists()
    assert not list((tmp_path / "storage").glob("*.sock"))
    record = RunFolder(tmp_path).read()
    assert record is not None
    assert not list(SHM_DIR.glob(f"*{record.start_id}*"))
    assert record.pid == 0 or process_started(record.pid) == 0


async def test_a_full_restart_finds_what_was_stored(tmp_path: Path) -> None:
    """Stop, start on the same state: every settled object is there, byte for byte, under a higher generation."""
    refs = [ObjectRef(os.urandom(32), size, b"d" * 32) for size in (1, 4096, 70_001, 1 << 20)]
    generations = []
    for _ in range(2):
        backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES))
        await backend.start()
        store = Harness(backend)
        generations.append(pool_of(store).generation)
        if len(generations) == 1:
            await store.put(*refs)
        else:
            held = [await store.hold(ref) for ref in refs]
            assert [one.tier for one in held] == ["l2"] * len(refs)
            assert [store.bytes_at(one.slot) for one in held] == [content(ref) for ref in refs]
        await backend.stop(SOON_S)
    assert generations[1] > generations[0]


async def test_a_process_that_hangs_for_good_is_replaced(tmp_path: Path) -> None:
    """A process that answers nothing any more is killed, and a new generation serves."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES, hang_s=0.3, restart_pause_s=0.01))
    await backend.start()
    try:
        store = Harness(backend)
        ref = new_ref()
        await store.put(ref)
        await store.settle()
        old = pool_of(store)
        send(store, signal.SIGSTOP)
        await next_generation(store, old)
        assert not (SHM_DIR / old.name).exists()
    finally:
        await backend.stop(0)
