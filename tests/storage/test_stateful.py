"""Any sequence of calls, compared with a dictionary: what may be visible, which bytes, and whose slot is whose."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvgate.storage.backend import Held, ObjectRef, Refusal, Reservation
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from kvgate.storage.memory import MemoryBackend
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import DOMAIN, POOL_BYTES, Harness, content, disjoint, new_ref

T = TypeVar("T")

SIZES = [1, 4096, 50_000, 700_000]
WHICH = st.integers(0, 7)
SIZE = st.sampled_from(SIZES)


class StorageMachine(RuleBasedStateMachine):
    """Rules over eight addresses in four lengths. ``store`` and ``loop`` come from the test."""

    store: ClassVar[Harness]
    loop: ClassVar[asyncio.AbstractEventLoop]
    # Whether an object nobody holds may have been evicted, so that absence is no error.
    evicts: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        salt = os.urandom(24)  # not `random`: Hypothesis seeds it, and every sequence would meet the last one's objects
        self.addresses = [salt + index.to_bytes(8, "little") for index in range(8)]
        self.versions: dict[ObjectRef, int] = {}
        # Every version an address and length ever had since its last delete: L2 keeps the first it got.
        self.ever: dict[ObjectRef, set[int]] = {}
        self.writing: dict[Reservation, tuple[ObjectRef, int]] = {}
        self.held: dict[Held, bytes] = {}
        self.next_version = 0

    def run_(self, call: Coroutine[Any, Any, T]) -> T:
        """Let one call happen."""
        return self.loop.run_until_complete(call)

    def ref(self, which: int, size: int) -> ObjectRef:
        """One of the refs."""
        return ObjectRef(self.addresses[which], size, DOMAIN)

    @rule(which=WHICH, size=SIZE)
    def reserve(self, which: int, size: int) -> None:
        """A reservation is granted exactly if nobody writes the address, L1 lacks the object, and there is room."""
        ref = self.ref(which, size)
        (answer,) = self.run_(self.store.reserve(ref))
        busy = any(other.address == ref.address for other, _ in self.writing.values())
        if busy:
            assert answer is Refusal.BUSY
        elif isinstance(answer, Reservation):
            assert answer.slot.object_bytes == size
            if not self.evicts:
                assert ref not in self.versions
            self.next_version += 1
            self.store.mapping.slice(answer.slot)[:] = content(ref, self.next_version)
            self.writing[answer] = (ref, self.next_version)
        elif answer is Refusal.RESIDENT:
            assert ref in self.versions
        elif answer is Refusal.FULL:
            assert self.evicts
        else:
            # Deleted while held: not visible, and not writable before its last hold is gone.
            assert any(slot.slot.object_bytes == size for slot in self.held)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """An open reservation commits; a second time it does not."""
        reservation = data.draw(st.sampled_from(sorted(self.writing, key=lambda one: one.reservation)))
        ref, version = self.writing.pop(reservation)
        assert self.store.bytes_at(reservation.slot) == content(ref, version)
        assert self.run_(self.store.commit(reservation, reservation)) == [True, False]
        self.versions[ref] = version
        self.ever.setdefault(ref, set()).add(version)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """An aborted reservation leaves nothing."""
        reservation = data.draw(st.sampled_from(sorted(self.writing, key=lambda one: one.reservation)))
        del self.writing[reservation]
        self.run_(self.store.abort(reservation))
        assert self.run_(self.store.commit(reservation)) == [False]

    @rule(which=WHICH, size=SIZE)
    def acquire(self, which: int, size: int) -> None:
        """What is held has the bytes of a commit; what was never committed, or deleted since, is not held."""
        ref = self.ref(which, size)
        (held,) = self.run_(self.store.acquire(ref))
        if held is None:
            assert self.evicts or ref not in self.versions
            return
        found = self.store.bytes_at(held.slot)
        assert found in {content(ref, version) for version in self.ever.get(ref, set())}
        self.held[held] = found

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A hold given back twice is given back once."""
        held = data.draw(st.sampled_from(sorted(self.held, key=lambda one: one.hold)))
        del self.held[held]
        self.run_(self.store.release(held, held))

    @rule(which=WHICH, size=SIZE)
    def probe(self, which: int, size: int) -> None:
        """Probe sees what acquire would."""
        ref = self.ref(which, size)
        (found,) = self.run_(self.store.probe(ref))
        assert found is not None
        assert not found or ref in self.versions
        assert found or self.evicts or ref not in self.versions

    @rule(which=WHICH, size=SIZE)
    def delete(self, which: int, size: int) -> None:
        """A deleted object is absent at once, held or not."""
        ref = self.ref(which, size)
        self.run_(self.store.delete(ref))
        self.versions.pop(ref, None)
        self.ever.pop(ref, None)
        assert self.run_(self.store.probe(ref)) == [False]
        assert self.run_(self.store.acquire(ref)) == [None]

    @precondition(lambda self: self.evicts)
    @rule()
    def pressure(self) -> None:
        """Strangers fill the pool with their bytes and go."""
        opened = self.run_(self.store.fill(1 << 20))
        for reservation in opened:
            self.store.mapping.slice(reservation.slot)[:] = b"\xff" * reservation.slot.object_bytes
        self.run_(self.store.abort(*opened))

    @invariant()
    def slots_are_their_owners_alone(self) -> None:
        """Open and held slots share no byte, and hold what was written or read there."""
        places = {one.slot for one in self.held} | {one.slot for one in self.writing}
        assert disjoint(sorted(places, key=lambda slot: slot.offset))
        assert not {one.slot for one in self.held} & {one.slot for one in self.writing}
        for reservation, (ref, version) in self.writing.items():
            assert self.store.bytes_at(reservation.slot) == content(ref, version)
        for held, found in self.held.items():
            assert self.store.bytes_at(held.slot) == found

    def teardown(self) -> None:
        """Leave the backend to the next sequence."""
        self.run_(self.store.clean_up())


def run_machine(store: Harness, loop: asyncio.AbstractEventLoop, *, evicts: bool, examples: int, steps: int) -> None:
    """Run the machine on a backend."""

    class Machine(StorageMachine):
        """The machine on this backend."""

    Machine.store = store
    Machine.loop = loop
    Machine.evicts = evicts
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs only while a call does."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_memory_with_room_is_exactly_a_dictionary(loop: asyncio.AbstractEventLoop) -> None:
    """With room for everything the memory backend behaves as the model does, presence included."""
    backend = MemoryBackend(4 * POOL_BYTES)
    loop.run_until_complete(backend.start())
    try:
        run_machine(Harness(backend), loop, evicts=False, examples=60, steps=50)
    finally:
        loop.run_until_complete(backend.stop(0))


def test_memory_under_pressure_forgets_but_never_errs(loop: asyncio.AbstractEventLoop) -> None:
    """With a small pool objects may be evicted; what is found is right, and slots are never shared."""
    backend = MemoryBackend(4 << 20)
    loop.run_until_complete(backend.start())
    try:
        run_machine(Harness(backend), loop, evicts=True, examples=60, steps=50)
    finally:
        loop.run_until_complete(backend.stop(0))


@needs_lmcache
def test_lmcache_under_pressure_forgets_but_never_errs(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """The same for LMCache, where evicted objects come back from L2."""
    backend = LMCacheBackend(LMCacheConfig(state_dir=tmp_path, pool_bytes=POOL_BYTES))
    loop.run_until_complete(backend.start())
    try:
        run_machine(Harness(backend), loop, evicts=True, examples=25, steps=40)
        ref = new_ref()
        store = Harness(backend)
        loop.run_until_complete(store.put(ref))
        assert loop.run_until_complete(store.read(ref)) == content(ref)
    finally:
        loop.run_until_complete(backend.stop(0))
