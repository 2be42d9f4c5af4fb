"""A long acquire asks storage for its chunks in parts, the next while the last is looked at: it ends where one by one would have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvgate.daemon import reads
from kvgate.storage.backend import Held, ObjectRef, StorageUnavailable
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, nothing_held
from tests.daemon.engine import Engine

TEXTS = ("a", "b", "c", "d", "e")


@pytest.fixture(autouse=True)
def parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one chunk."""
    monkeypatch.setattr(reads, "BATCH_CHUNKS", 1)


class Breaking(FaultyBackend):
    """Storage that fails at one of its acquires."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    async def acquire(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        """See ``StorageBackend``."""
        if self.calls.count("acquire") == self._at:
            self.calls.append("acquire")
            raise StorageUnavailable("broken by the test")
        return await super().acquire(refs, deadline_s)


@pytest.mark.parametrize("at", range(len(TEXTS)))
async def test_what_came_before_storage_failed_is_a_hit(start: Start, at: int) -> None:
    """Chunks that were held and checked count, whichever later call failed; nothing after them stays held."""
    gateway = await start(Breaking(at))
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store(*TEXTS)
    lease = await engine.lease(*TEXTS)
    assert await engine.acquire(lease, 0, len(TEXTS)) == at
    assert await engine.acquire(lease, 0, len(TEXTS)) == len(TEXTS)
    await engine.release(lease)
    await engine.close()
    await nothing_held(gateway)


@pytest.mark.parametrize("at", range(len(TEXTS)))
async def test_nothing_behind_a_gap_is_held(start: Start, at: int) -> None:
    """Where a chunk is gone the acquire ends there, and what was asked for beyond it is given back."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store(*TEXTS)
    await backend.inner.delete([backend.stored[at]], 1.0)
    lease = await engine.lease(*TEXTS)
    assert await engine.acquire(lease, 0, len(TEXTS)) == at
    assert await engine.acquire(lease, 0, len(TEXTS)) == at
    await engine.release(lease)
    await engine.close()
    await nothing_held(gateway)


@pytest.mark.parametrize("at", [0, 2])
async def test_a_quarantined_chunk_ends_the_next_acquire(start: Start, at: int) -> None:
    """What a worker found to be other bytes is handed out no more under its lease, and ends an acquire at once."""
    gateway = await start(FaultyBackend())
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store(*TEXTS)
    lease = await engine.lease(*TEXTS)
    assert await engine.acquire(lease, 0, len(TEXTS)) == len(TEXTS)
    load = await engine.load(lease, at)
    await engine.finish(load.ticket, at)
    await engine.store(*TEXTS)
    assert await engine.hit(*TEXTS) == len(TEXTS)
    assert await engine.acquire(lease, 0, len(TEXTS)) == at
    await engine.close()
    await nothing_held(gateway)
