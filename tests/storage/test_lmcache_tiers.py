"""LMCache's second tier behind the interface: what comes back from a folder, what does not, and what is said of failures."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kvgate.storage.backend import ObjectRef, StorageUnavailable
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, new_ref

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_lmcache]


def l2_folder(tiers: Harness) -> Path:
    """The folder the shared backend has as L2."""
    assert isinstance(tiers.backend, LMCacheBackend)
    (spec,) = tiers.backend.config.adapters()
    return Path(spec["base_path"])


def l2_file(tiers: Harness, ref: ObjectRef) -> Path:
    """The one file of ``ref`` there."""
    (path,) = l2_folder(tiers).glob(f"*{ref.address.hex()}*")
    return path


async def in_l2_only(tiers: Harness, *refs: ObjectRef) -> None:
    """Store ``refs`` and drive them out of L1."""
    await tiers.put(*refs)
    await tiers.push_out_of_l1()


@pytest.mark.parametrize("object_bytes", [1, 4095, 4096, 4097, 100_003, (1 << 20) + 17])
async def test_bytes_are_equal_through_l2(tiers: Harness, object_bytes: int) -> None:
    """An object evicted from L1 exists, and comes back from L2 with its exact bytes."""
    ref = new_ref(object_bytes)
    await in_l2_only(tiers, ref)
    assert await tiers.probe(ref) == [True]
    held = await tiers.hold(ref)
    assert held.tier == "l2"
    assert tiers.bytes_at(held.slot) == content(ref)
    assert (await tiers.hold(ref)).tier == "l1"


async def test_objects_of_many_lengths_come_from_l2_in_one_call(tiers: Harness) -> None:
    """One acquire over mixed lengths, absent ones and duplicates brings each what it asked for."""
    refs = [new_ref(size) for size in (5000, 70_000, 5000, 300_000, 4096)]
    away = new_ref(5000)
    await in_l2_only(tiers, *refs)
    asked = [refs[0], away, refs[1], refs[2], refs[0], refs[3], refs[4]]
    held = await tiers.acquire(*asked)
    assert [answer is not None for answer in held] == [True, False, True, True, True, True, True]
    assert len({answer.hold for answer in held if answer is not None}) == 6
    for ref, answer in zip(asked, held, strict=True):
        assert answer is None or tiers.bytes_at(answer.slot) == content(ref)


@pytest.mark.parametrize("asked", [1, 4096, 69_999, 70_001, 140_000])
async def test_another_length_is_absent_in_l2(tiers: Harness, asked: int) -> None:
    """L2 too knows an object under its exact length only: LMCache by itself would serve the first bytes."""
    ref = new_ref(70_000)
    await in_l2_only(tiers, ref)
    other = ObjectRef(ref.address, asked, ref.domain)
    assert await tiers.probe(other) == [False]
    assert await tiers.acquire(other) == [None]
    assert await tiers.read(ref) == content(ref)


async def test_another_domain_is_absent_in_l2(tiers: Harness) -> None:
    """L2 keeps domains apart."""
    ref = new_ref()
    await in_l2_only(tiers, ref)
    other = ObjectRef(ref.address, ref.object_bytes, b"e" * 32)
    assert await tiers.probe(other) == [False]
    assert await tiers.acquire(other) == [None]


async def test_a_deleted_object_is_gone_from_l2(tiers: Harness) -> None:
    """Delete removes the file too; nothing brings the object back."""
    here, away = new_ref(), new_ref()
    await in_l2_only(tiers, away)
    await tiers.put(here)
    await tiers.settle()
    await tiers.delete(here, away)
    await tiers.push_out_of_l1()
    assert await tiers.probe(here, away) == [False, False]
    assert await tiers.acquire(here, away) == [None, None]
    assert not [path for ref in (here, away) for path in l2_folder(tiers).glob(f"*{ref.address.hex()}*")]


async def test_a_delete_right_after_commit_outlives_the_store_under_way(tiers: Harness) -> None:
    """The write to L2 that commit began must not bring a deleted object back."""
    refs = [new_ref(600_000) for _ in range(8)]
    await tiers.put(*refs)
    await tiers.delete(*refs)
    await tiers.settle()
    assert await tiers.probe(*refs) == [False] * len(refs)
    assert await tiers.acquire(*refs) == [None] * len(refs)


async def test_readers_at_once_share_one_fetch(tiers: Harness) -> None:
    """Many acquires of one L2 object at the same time all get it, each with a hold of its own, in one place."""
    ref = new_ref(1 << 20)
    await in_l2_only(tiers, ref)
    answers = await asyncio.gather(*(tiers.hold(ref) for _ in range(8)))
    assert len({held.hold for held in answers}) == 8
    assert len({held.slot for held in answers}) == 1
    assert tiers.bytes_at(answers[0].slot) == content(ref)
    assert await tiers.counter("holds") == 8


async def test_l2_is_reached_through_a_full_pool(tiers: Harness) -> None:
    """With the pool full of objects nobody holds, an L2 object still finds room."""
    ref = new_ref(1 << 20)
    await in_l2_only(tiers, ref)
    await tiers.put(*(new_ref(1 << 20) for _ in range(POOL_BYTES >> 20)))
    await tiers.settle()
    assert await tiers.read(ref) == content(ref)


async def test_a_pool_without_room_makes_l2_a_miss_and_leaves_no_hold(tiers: Harness) -> None:
    """If nothing can be evicted the object is absent for now, and back when there is room."""
    ref = new_ref(1 << 20)
    await in_l2_only(tiers, ref)
    opened = [*await tiers.fill(1 << 20), *await tiers.fill(1 << 16), *await tiers.fill(4096)]
    assert await tiers.acquire(ref) == [None]
    assert await tiers.counter("holds") == 0
    await tiers.abort(*opened)
    assert await tiers.read(ref) == content(ref)


async def test_an_object_being_written_is_not_fetched_meanwhile(tiers: Harness) -> None:
    """While a reservation is open its L2 predecessor is a miss; after commit the new bytes are served."""
    ref = new_ref()
    await in_l2_only(tiers, ref)
    opened = await tiers.open(ref)
    tiers.mapping.slice(opened.slot)[:] = content(ref, 1)
    assert await tiers.acquire(ref) == [None]
    assert await tiers.commit(opened) == [True]
    assert await tiers.read(ref) == content(ref, 1)


async def test_a_file_removed_behind_our_back_is_a_miss(tiers: Harness) -> None:
    """What somebody deleted from the folder is absent, and can be stored anew."""
    ref = new_ref()
    await in_l2_only(tiers, ref)
    l2_file(tiers, ref).unlink()
    assert await tiers.probe(ref) == [False]
    assert await tiers.acquire(ref) == [None]
    await tiers.put(ref)
    assert await tiers.read(ref) == content(ref)


@pytest.mark.parametrize("left", [0, 1, 4096, 69_999])
async def test_a_truncated_file_is_absent_and_is_replaced(tiers: Harness, left: int) -> None:
    """A shortened file never yields short bytes; a new store replaces it, which LMCache by itself would skip."""
    ref = new_ref(70_000)
    await in_l2_only(tiers, ref)
    with l2_file(tiers, ref).open("r+b") as file:
        file.truncate(left)
    assert await tiers.acquire(ref) == [None]
    assert await tiers.probe(ref) == [False]
    async with asyncio.timeout(30):
        while list(l2_folder(tiers).glob(f"*{ref.address.hex()}*")):  # noqa: ASYNC110  # another process removes it
            await asyncio.sleep(0.01)
    await in_l2_only(tiers, ref)
    assert await tiers.read(ref) == content(ref)


async def test_a_lengthened_file_is_absent(tiers: Harness) -> None:
    """A file with bytes behind the object is not the object."""
    ref = new_ref()
    await in_l2_only(tiers, ref)
    with l2_file(tiers, ref).open("ab") as file:
        file.write(b"x")
    assert await tiers.probe(ref) == [False]
    assert await tiers.acquire(ref) == [None]


async def test_flipped_bits_come_back_as_they_are(tiers: Harness) -> None:
    """The backend does not look into objects: damage of equal length is the envelope's to find, and delete removes it."""
    ref = new_ref()
    await in_l2_only(tiers, ref)
    with l2_file(tiers, ref).open("r+b") as file:
        file.seek(12_345)
        file.write(bytes([content(ref)[12_345] ^ 1]))
    read = await tiers.read(ref)
    assert read is not None
    assert read != content(ref)
    assert len(read) == len(content(ref))
    await tiers.delete(ref)
    await tiers.put(ref)
    await tiers.push_out_of_l1()
    assert await tiers.read(ref) == content(ref)


async def test_files_are_private_and_no_temporary_ones_are_left(tiers: Harness) -> None:
    """Nobody else can read stored KV, and a settled folder holds whole objects only."""
    await tiers.put(new_ref(), new_ref())
    await tiers.settle()
    files = [path for path in l2_folder(tiers).rglob("*") if path.is_file()]
    assert files
    assert all(path.stat().st_mode & 0o077 == 0 for path in [l2_folder(tiers), *files])
    assert all(path.suffix == ".data" for path in files)


async def test_a_failed_l2_write_is_counted(tmp_path: Path) -> None:
    """LMCache answers a commit before L2 has the object; if that fails, status says so and the object stays in L1."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path / "state", pool_bytes=POOL_BYTES))
    await backend.start()
    try:
        store = Harness(backend)
        shutil.rmtree(tmp_path / "state" / "l2")  # as a disk that went away
        refs = [new_ref(), new_ref()]
        await store.put(*refs)
        await store.until("l2_store_failed_objects", 2)
        assert await store.counter("l2_pending_objects") == 0
        assert [await store.read(ref) for ref in refs] == [content(ref) for ref in refs]
        await store.push_out_of_l1()
        assert await store.probe(*refs) == [False, False]
    finally:
        await backend.stop(0)


async def test_without_l2_everything_lives_in_the_pool(tmp_path: Path) -> None:
    """An empty list of adapters is L1 only: what is evicted is gone."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES, l2_adapters=()))
    await backend.start()
    try:
        store = Harness(backend)
        ref = new_ref()
        await store.put(ref)
        assert await store.read(ref) == content(ref)
        await store.push_out_of_l1()
        assert await store.probe(ref) == [False]
        assert await store.acquire(ref) == [None]
        await store.delete(ref)
    finally:
        await backend.stop(0)


async def test_two_folders_each_get_every_object(tmp_path: Path) -> None:
    """With two adapters an object lost in one is served by the other, one can be left alone in either, and delete empties both."""
    folders = [tmp_path / "a", tmp_path / "b"]
    adapters = tuple({"type": "fs", "base_path": str(folder)} for folder in folders)
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path / "state", pool_bytes=POOL_BYTES, l2_adapters=adapters))
    await backend.start()
    try:
        store = Harness(backend)
        ref = new_ref()
        await store.put(ref)
        await store.push_out_of_l1()
        (first,) = folders[0].glob(f"*{ref.address.hex()}*")
        first.unlink()
        assert await store.read(ref) == content(ref)
        await store.delete(ref)
        assert not [path for folder in folders for path in folder.glob(f"*{ref.address.hex()}*")]
        assert await backend.tiers(SOON_S) == ["l1", "l2.0 fs", "l2.1 fs"]
        alone = new_ref()
        await store.put(alone)
        assert await backend.leave_only([alone], "l2.1 fs", SOON_S) == [True]
        assert [len(list(folder.glob(f"*{alone.address.hex()}*"))) for folder in folders] == [0, 1]
        assert await store.read(alone) == content(alone)
        assert await backend.leave_only([alone], "l2.0 fs", SOON_S) == [False]
    finally:
        await backend.stop(0)


async def test_an_object_can_be_left_in_l2_alone(tiers: Harness) -> None:
    """Of the objects asked for, those the tier has are dropped from L1 and come back from it; a held one stays; others are absent."""
    assert isinstance(tiers.backend, LMCacheBackend)
    assert await tiers.backend.tiers(SOON_S) == ["l1", "l2.0 fs"]
    ref, held, away, other = new_ref(), new_ref(), new_ref(), new_ref()
    await tiers.put(ref, held, other)
    await tiers.hold(held)
    assert await tiers.backend.leave_only([ref, held, away], "l2.0 fs", SOON_S) == [True, None, False]
    assert (await tiers.hold(ref)).tier == "l2"
    assert (await tiers.hold(other)).tier == "l1"
    with pytest.raises(StorageUnavailable):
        await tiers.backend.leave_only([ref], "l2.1 fs", SOON_S)
