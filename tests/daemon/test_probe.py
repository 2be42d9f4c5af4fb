"""Where nothing lies behind the pool the index knows all of it, and a miss is certain at the bind; where in doubt, storage is asked."""

from __future__ import annotations

import pytest

from kvgate.daemon import service
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, nothing_held
from tests.daemon.engine import Engine
from tests.daemon.wire import denied


@pytest.fixture
def patient_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind waits for its probe however long this machine takes for it."""
    monkeypatch.setattr(service, "BIND_PROBE_S", 30.0)


def without_l2() -> FaultyBackend:
    """A backend with nothing behind its pool."""
    backend = FaultyBackend()
    backend.l2 = False
    return backend


async def test_a_miss_is_certain_at_the_bind(start: Start) -> None:
    """Without L2 what was never stored is not probed for, before and after other things were stored."""
    backend = without_l2()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    for stored, texts in ((0, ("a",)), (1, ("a", "b"))):
        bound = await engine.bind(*texts)
        assert (bound.present, bound.probing) == (stored, False)
        assert await engine.acquire(bound.lease, 0, len(texts)) == stored
        await engine.release(bound.lease)
        await engine.store("a")
    assert "probe" not in backend.calls
    await engine.close()
    await nothing_held(gateway)


async def test_evicted_object_is_a_miss_without_a_probe(start: Start) -> None:
    """What the pool lost is found out by one acquire; after that its miss is certain again."""
    backend = without_l2()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    await backend.lose_newest()
    assert await engine.hit("a") == 0
    bound = await engine.bind("a")
    assert (bound.present, bound.probing) == (0, False)
    await engine.close()


async def test_l2_is_probed(start: Start, patient_bind: None) -> None:
    """With L2 what is not listed may be there all the same. The bind's answer has what the probe found: a miss needs no acquire."""
    backend = FaultyBackend()
    gateway = await start(backend, max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    bound = await engine.bind("a")
    assert (bound.present, bound.probing, backend.calls.count("probe")) == (0, False, 1)
    await engine.store("a", "b")
    bound = await engine.bind("a", "b", "c")
    assert (bound.present, bound.probing) == (2, False)
    assert await engine.acquire(bound.lease, 0, 3) == 2
    await engine.close()


async def test_probe_that_lasts_goes_on_after_the_bind(start: Start) -> None:
    """A bind waits for its probe a moment only; what that finds later is found by the acquire."""
    backend = FaultyBackend()
    gateway = await start(backend, max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    backend.stalled = {"probe"}
    bound = await engine.bind("a", "b")
    assert (bound.present, bound.probing) == (0, True)
    backend.resume()
    assert await engine.acquire(bound.lease, 0, 2) == 2
    await engine.close()


async def test_index_that_forgot_is_not_trusted(start: Start) -> None:
    """Without L2, once the bounded index forgot a chunk, storage is asked and finds it."""
    gateway = await start(without_l2(), max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    assert await engine.hit("a", "b") == 2
    await engine.close()


@pytest.mark.parametrize("fault", ["stalled", "broken"])
async def test_late_or_failed_acquire_is_no_proof_of_absence(start: Start, fault: str) -> None:
    """Without L2, a chunk that storage did not give in time is found once storage answers again."""
    backend = without_l2()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    setattr(backend, fault, {"acquire"})
    assert await engine.acquire(lease, 0, 1, deadline_ms=50) == 0
    backend.broken = set()
    backend.resume()
    assert await engine.hit("a") == 1
    await engine.close()


async def test_commit_without_an_answer_leaves_doubt(start: Start) -> None:
    """Whether a commit that failed was carried out is unknown: storage is asked from then on, until its pool is another one."""
    backend = without_l2()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    backend.broken = {"commit"}
    async with denied("unavailable"):
        await engine.store("a")
    backend.broken = set()
    await engine.bind("b")
    assert backend.calls.count("probe") == 1
    await backend.die()
    await backend.revive()
    await engine.bind("b")
    assert backend.calls.count("probe") == 1
    await engine.close()
