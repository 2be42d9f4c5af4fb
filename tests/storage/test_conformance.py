"""Every backend must keep every rule of ``kvgate.storage.backend``."""

from __future__ import annotations

import asyncio

import pytest

from kvgate.storage.backend import ObjectRef, Refusal, Reservation
from tests.storage.harness import DOMAIN, POOL_BYTES, SOON_S, Harness, content, disjoint, new_ref, overlap

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES = [1, 4095, 4096, 4097, 100_003, (1 << 20) + 17]


async def test_an_object_is_invisible_before_its_commit(store: Harness) -> None:
    """A reserved and fully written object is absent for probe and acquire until commit."""
    ref = new_ref()
    opened = await store.open(ref)
    store.mapping.slice(opened.slot)[:] = content(ref)
    assert await store.probe(ref) == [False]
    assert await store.acquire(ref) == [None]


@pytest.mark.parametrize("object_bytes", SIZES)
async def test_an_object_has_its_bytes_after_commit(store: Harness, object_bytes: int) -> None:
    """After commit the object exists and has, byte for byte, what lay in its slot."""
    ref = new_ref(object_bytes)
    await store.put(ref)
    assert await store.probe(ref) == [True]
    assert await store.read(ref) == content(ref)


@pytest.mark.parametrize("asked", [1, 4096, 69_999, 70_001, 73_728, 140_000])
async def test_another_length_under_the_address_is_absent(store: Harness, asked: int) -> None:
    """Asked with a shorter or longer length the object is absent, never truncated or padded."""
    ref = new_ref(70_000)
    await store.put(ref)
    other = ObjectRef(ref.address, asked, ref.domain)
    assert await store.probe(other) == [False]
    assert await store.acquire(other) == [None]
    assert await store.read(ref) == content(ref)


async def test_another_domain_is_absent(store: Harness) -> None:
    """The address and length of another domain's object find nothing."""
    ref = new_ref()
    await store.put(ref)
    other = ObjectRef(ref.address, ref.object_bytes, b"e" * 32)
    assert await store.probe(other) == [False]
    assert await store.acquire(other) == [None]


@pytest.mark.parametrize("written", [0, 1, 4096, 69_999, 70_000])
async def test_a_writer_that_failed_at_byte_n_left_nothing(store: Harness, written: int) -> None:
    """However much was written, an aborted object never appears, and its address can be written anew."""
    ref = new_ref(70_000)
    opened = await store.open(ref)
    store.mapping.slice(opened.slot)[:written] = content(ref)[:written]
    await store.abort(opened)
    assert await store.probe(ref) == [False]
    assert await store.acquire(ref) == [None]
    await store.put(ref, version=1)
    assert await store.read(ref) == content(ref, 1)


async def test_the_slot_of_an_open_reservation_goes_to_nobody_else(store: Harness) -> None:
    """While a reservation is open no other slot overlaps its own, however full the pool gets."""
    ref = new_ref(300_000)
    opened = await store.open(ref)
    store.mapping.slice(opened.slot)[:] = content(ref)
    for object_bytes in (1 << 20, 50_000):
        others = await store.fill(object_bytes)
        assert not any(overlap(opened.slot, other.slot) for other in others)
        for other in others:
            store.mapping.slice(other.slot)[:] = b"\xff" * object_bytes
        await store.abort(*others)
    assert store.bytes_at(opened.slot) == content(ref)
    assert await store.commit(opened) == [True]
    assert await store.read(ref) == content(ref)


async def test_all_slots_lie_aligned_inside_the_pool_and_apart(store: Harness) -> None:
    """Slots of open reservations and of held objects start at multiples of the alignment and share no byte."""
    pool = store.backend.pool
    assert pool is not None
    refs = [new_ref(size) for size in SIZES]
    await store.put(*refs)
    held = await store.acquire(*refs)
    opened = await store.reserve(*(new_ref(size) for size in SIZES))
    slots = [answer.slot for answer in [*held, *opened] if answer is not None and not isinstance(answer, Refusal)]
    assert len(slots) == 2 * len(SIZES)
    assert all(slot.offset % pool.align_bytes == 0 for slot in slots)
    assert all(0 <= slot.offset <= pool.pool_bytes - slot.object_bytes for slot in slots)
    assert disjoint(slots)


async def test_a_second_commit_is_refused(store: Harness) -> None:
    """A reservation is committed once; the object stays as it is."""
    ref = new_ref()
    opened = await store.open(ref)
    store.mapping.slice(opened.slot)[:] = content(ref)
    assert await store.commit(opened) == [True]
    assert await store.commit(opened) == [False]
    assert await store.read(ref) == content(ref)


async def test_a_commit_after_abort_is_refused(store: Harness) -> None:
    """An aborted reservation cannot be committed any more."""
    ref = new_ref()
    opened = await store.open(ref)
    await store.abort(opened)
    assert await store.commit(opened) == [False]
    assert await store.probe(ref) == [False]


async def test_unknown_reservations_are_refused_one_by_one(store: Harness) -> None:
    """In one commit each reservation is answered by itself, in the order asked."""
    refs = [new_ref(), new_ref()]
    opened = [await store.open(ref) for ref in refs]
    for ref, reservation in zip(refs, opened, strict=True):
        store.mapping.slice(reservation.slot)[:] = content(ref)
    ids = [1, opened[0].reservation, (1 << 60) + 5, opened[1].reservation]
    assert await store.backend.commit(ids, SOON_S) == [False, True, False, True]
    assert [await store.read(ref) for ref in refs] == [content(ref) for ref in refs]


async def test_an_abort_of_unknown_reservations_does_nothing(store: Harness) -> None:
    """Aborting what is not open, or twice, neither fails nor touches an open reservation."""
    ref = new_ref()
    opened = await store.open(ref)
    gone = await store.open(new_ref())
    await store.abort(gone)
    await store.abort(gone)
    await store.backend.abort([1, (1 << 60) + 5], SOON_S)
    store.mapping.slice(opened.slot)[:] = content(ref)
    assert await store.commit(opened) == [True]


async def test_an_address_has_one_writer_at_a_time(store: Harness) -> None:
    """A second reservation of an address is BUSY, with the same length or another, until the first is closed."""
    ref = new_ref()
    opened = await store.open(ref)
    assert await store.reserve(ref) == [Refusal.BUSY]
    assert await store.reserve(ObjectRef(ref.address, 4096, ref.domain)) == [Refusal.BUSY]
    await store.abort(opened)
    assert isinstance(await store.open(ref), Reservation)


async def test_a_duplicate_within_one_call_is_busy(store: Harness) -> None:
    """Of two equal addresses in one reserve the first gets a slot and the second is BUSY."""
    ref, other = new_ref(), new_ref()
    answers = await store.reserve(ref, other, ref)
    assert [isinstance(answer, Reservation) for answer in answers[:2]] == [True, True]
    assert answers[2] is Refusal.BUSY


async def test_a_resident_object_is_not_reserved_again(store: Harness) -> None:
    """An object in L1 is RESIDENT, and its bytes stay those of the first commit."""
    ref = new_ref()
    await store.put(ref)
    assert await store.reserve(ref) == [Refusal.RESIDENT]
    assert await store.read(ref) == content(ref)


async def test_a_full_pool_refuses_and_recovers(store: Harness) -> None:
    """With every byte reserved the next object is FULL; after one abort it fits."""
    await store.push_out_of_l1()
    opened = await store.fill(1 << 20)
    assert len(opened) == POOL_BYTES >> 20
    ref = new_ref(1 << 20)
    assert await store.reserve(ref) == [Refusal.FULL]
    await store.abort(opened[3])
    await store.put(ref)
    assert await store.read(ref) == content(ref)


@pytest.mark.parametrize("object_bytes", [POOL_BYTES + 1, 1 << 40])
async def test_an_object_larger_than_the_pool_is_full(store: Harness, object_bytes: int) -> None:
    """An object that can never fit is refused as FULL and drives nothing out."""
    ref = new_ref()
    await store.put(ref)
    assert await store.reserve(new_ref(object_bytes)) == [Refusal.FULL]
    assert await store.read(ref) == content(ref)


async def test_what_fits_is_granted_although_the_rest_of_the_call_does_not(store: Harness) -> None:
    """In one reserve of more than the pool has, some are granted and the others are FULL."""
    await store.push_out_of_l1()
    refs = [new_ref(1 << 20) for _ in range((POOL_BYTES >> 20) + 4)]
    answers = await store.reserve(*refs)
    assert sum(isinstance(answer, Reservation) for answer in answers) == POOL_BYTES >> 20
    assert sum(answer is Refusal.FULL for answer in answers) == 4


async def test_unheld_objects_make_room(store: Harness) -> None:
    """A pool full of committed objects that nobody holds takes new ones."""
    old = [new_ref(1 << 20) for _ in range(POOL_BYTES >> 20)]
    await store.put(*old)
    await store.settle()
    new = [new_ref(1 << 20) for _ in range(POOL_BYTES >> 21)]
    await store.put(*new)
    assert [await store.read(ref) for ref in new] == [content(ref) for ref in new]


async def test_a_held_object_is_neither_moved_nor_evicted(store: Harness) -> None:
    """Under pressure from many writers a held object keeps its slot and its bytes."""
    refs = [new_ref(500_000) for _ in range(4)]
    await store.put(*refs)
    held = [await store.hold(ref) for ref in refs]
    for _ in range(2):
        others = await store.fill(1 << 20)
        for other in others:
            store.mapping.slice(other.slot)[:] = b"\xff" * (1 << 20)
        assert not any(overlap(mine.slot, other.slot) for mine in held for other in others)
        await store.abort(*others)
    assert [store.bytes_at(mine.slot) for mine in held] == [content(ref) for ref in refs]
    assert [(await store.hold(ref)).slot for ref in refs] == [mine.slot for mine in held]


async def test_two_readers_each_release_their_own_hold(store: Harness) -> None:
    """Releasing one reader's hold, even twice, leaves the other reader's in force."""
    ref = new_ref(500_000)
    await store.put(ref)
    first, second = await store.hold(ref), await store.hold(ref)
    assert first.hold != second.hold
    await store.release(first)
    await store.release(first)
    others = await store.fill(1 << 20)
    assert not any(overlap(second.slot, other.slot) for other in others)
    assert store.bytes_at(second.slot) == content(ref)


async def test_an_object_asked_for_twice_in_one_call_has_two_holds(store: Harness) -> None:
    """Each answer of an acquire is a hold of its own."""
    ref = new_ref(500_000)
    await store.put(ref)
    first, second = await store.acquire(ref, ref)
    assert first is not None
    assert second is not None
    assert first.hold != second.hold
    assert first.slot == second.slot
    await store.release(first)
    others = await store.fill(1 << 20)
    assert not any(overlap(second.slot, other.slot) for other in others)


async def test_unknown_releases_are_counted_and_ignored(store: Harness) -> None:
    """A hold given back twice, or never given, changes nothing but a counter."""
    ref = new_ref()
    await store.put(ref)
    held = await store.hold(ref)
    before = await store.counter("unknown_releases")
    await store.release(held)
    await store.release(held)
    await store.backend.release([1, (1 << 60) + 5])
    assert await store.counter("unknown_releases") == before + 3
    assert await store.read(ref) == content(ref)


async def test_a_deleted_object_is_gone(store: Harness) -> None:
    """After delete the object is absent for probe and acquire, and stays so."""
    ref, other = new_ref(), new_ref()
    await store.put(ref, other)
    await store.delete(ref)
    await store.settle()
    assert await store.probe(ref, other) == [False, True]
    assert await store.acquire(ref) == [None]
    assert await store.read(other) == content(other)


async def test_a_deleted_object_can_be_stored_anew(store: Harness) -> None:
    """Delete is not for ever: the address takes a new object, with the new bytes."""
    ref = new_ref()
    await store.put(ref)
    await store.delete(ref)
    await store.put(ref, version=1)
    await store.settle()
    assert await store.read(ref) == content(ref, 1)


async def test_deleting_what_is_not_there_does_nothing(store: Harness) -> None:
    """A delete of unknown objects succeeds, also twice and also with duplicates in the call."""
    ref = new_ref()
    await store.delete(ref, ref)
    await store.delete(ref)
    assert await store.probe(ref) == [False]


async def test_a_held_object_vanishes_from_lookup_at_once_when_deleted(store: Harness) -> None:
    """Its reader keeps bytes and slot until release; everyone else finds nothing; then its memory is free again."""
    ref = new_ref(1 << 20)
    await store.put(ref)
    held = await store.hold(ref)
    await store.delete(ref)
    assert await store.probe(ref) == [False]
    assert await store.acquire(ref) == [None]
    others = await store.fill(1 << 20)
    assert not any(overlap(held.slot, other.slot) for other in others)
    assert store.bytes_at(held.slot) == content(ref)
    await store.abort(*others)
    await store.release(held)
    await store.until("condemned_objects", 0)
    await store.push_out_of_l1()
    assert len(await store.fill(1 << 20)) == POOL_BYTES >> 20


async def test_a_delete_leaves_an_open_reservation_alone(store: Harness) -> None:
    """What its writer commits afterwards is a new object."""
    ref = new_ref()
    opened = await store.open(ref)
    await store.delete(ref)
    store.mapping.slice(opened.slot)[:] = content(ref)
    assert await store.commit(opened) == [True]
    assert await store.read(ref) == content(ref)


async def test_answers_come_in_the_order_asked(store: Harness) -> None:
    """Present and absent objects in one call are answered each in its place."""
    here = [new_ref(size) for size in (5000, 70_000, 5000)]
    away = [new_ref(5000), new_ref(70_000)]
    await store.put(*here)
    refs = [here[0], away[0], here[1], away[1], here[2]]
    assert await store.probe(*refs) == [True, False, True, False, True]
    held = await store.acquire(*refs)
    assert [answer is not None for answer in held] == [True, False, True, False, True]
    for ref, answer in zip(refs, held, strict=True):
        assert answer is None or store.bytes_at(answer.slot) == content(ref)


async def test_calls_about_nothing_are_answered_with_nothing(store: Harness) -> None:
    """Empty calls neither fail nor wait."""
    assert await store.probe() == []
    assert await store.acquire() == []
    assert await store.reserve() == []
    assert await store.commit() == []
    await store.abort()
    await store.release()
    await store.delete()


@pytest.mark.parametrize(
    "ref",
    [
        ObjectRef(b"a" * 31, 4096, DOMAIN),
        ObjectRef(b"a" * 33, 4096, DOMAIN),
        ObjectRef(b"", 4096, DOMAIN),
        ObjectRef(b"a" * 32, 0, DOMAIN),
        ObjectRef(b"a" * 32, -1, DOMAIN),
        ObjectRef(b"a" * 32, (1 << 40) + 1, DOMAIN),
        ObjectRef(b"a" * 32, 4096, b""),
        ObjectRef(b"a" * 32, 4096, b"d" * 33),
    ],
)
async def test_malformed_refs_are_a_callers_bug(store: Harness, ref: ObjectRef) -> None:
    """Every call that takes refs raises ValueError for one that is not well formed, and does nothing."""
    good = new_ref()
    calls = [store.backend.probe, store.backend.acquire, store.backend.reserve, store.backend.delete]
    for call in calls:
        with pytest.raises(ValueError):
            await call([good, ref], SOON_S)
    assert isinstance(await store.open(good), Reservation)


async def test_writers_and_readers_at_once_see_only_whole_objects(store: Harness) -> None:
    """Many tasks store, read and delete the same few addresses; a read finds nothing or one committed version, whole."""
    refs = [new_ref(40_000 + index) for index in range(6)]

    async def work(seed: int) -> int:
        found = 0
        for step in range(40):
            ref = refs[(seed * 7 + step * 3) % len(refs)]
            if step % 4 == 0:
                (answer,) = await store.reserve(ref)
                if isinstance(answer, Reservation):
                    store.mapping.slice(answer.slot)[:] = content(ref)
                    await asyncio.sleep(0)
                    assert await store.commit(answer) == [True]
            elif step % 13 == 0:
                await store.delete(ref)
            else:
                read = await store.read(ref)
                assert read in (None, content(ref))
                found += read is not None
        return found

    assert sum(await asyncio.gather(*(work(seed) for seed in range(8)))) > 0


async def test_status_is_flat_and_adds_up(store: Harness) -> None:
    """Status holds only numbers and texts, and counts what is open."""
    ref = new_ref()
    await store.put(ref)
    held = await store.hold(ref)
    await store.open(new_ref())
    status = await store.backend.status(SOON_S)
    assert all(isinstance(value, int | str) for value in status.values())
    assert status["pool_bytes"] == POOL_BYTES
    assert status["holds"] == 1
    assert status["reservations"] == 1
    await store.release(held)
    assert await store.counter("holds") == 0
