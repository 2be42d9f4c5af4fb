"""Slots must be aligned, apart, inside the pool, and whole again when they are given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.storage.pool import ALIGN_BYTES
from kvgate.storage.slots import SlotAllocator, aligned

POOL_BYTES = 32 * ALIGN_BYTES


@given(st.lists(st.one_of(st.integers(1, 6 * ALIGN_BYTES), st.just(None)), max_size=80), st.randoms())
def test_slots_never_overlap_and_all_memory_comes_back(steps: list[int | None], random: object) -> None:
    """Allocated slots are aligned, inside the pool and apart; when all are free the pool is one run again."""
    slots = SlotAllocator(POOL_BYTES)
    taken: dict[int, int] = {}
    for step in steps:
        if step is None:
            if taken:
                offset = random.choice(sorted(taken))  # type: ignore[attr-defined]  # Hypothesis's Random
                slots.free(offset)
                del taken[offset]
            continue
        got = slots.allocate(step)
        if got is None:
            assert not slots.fits_without(step, set())
            assert slots.fits_without(step, set(taken))
            continue
        assert got % ALIGN_BYTES == 0
        assert got + step <= POOL_BYTES
        assert all(got + aligned(step) <= other or other + size <= got for other, size in taken.items())
        taken[got] = aligned(step)
    assert slots.used_bytes == sum(taken.values())
    for offset in taken:
        slots.free(offset)
    assert slots.allocate(POOL_BYTES) == 0


def test_freeing_what_is_not_taken_is_refused() -> None:
    """A double free is a bug of the caller and is not absorbed."""
    slots = SlotAllocator(POOL_BYTES)
    offset = slots.allocate(1)
    assert offset is not None
    slots.free(offset)
    with pytest.raises(KeyError):
        slots.free(offset)


def test_room_is_judged_by_runs_not_by_sum() -> None:
    """Two free slots with a held one between them do not make one of double size."""
    slots = SlotAllocator(3 * ALIGN_BYTES)
    first, second, third = (slots.allocate(1) for _ in range(3))
    assert (first, second, third) == (0, ALIGN_BYTES, 2 * ALIGN_BYTES)
    assert not slots.fits_without(2 * ALIGN_BYTES, {0, 2 * ALIGN_BYTES})
    assert slots.fits_without(2 * ALIGN_BYTES, {0, ALIGN_BYTES})
