"""Pages that workers lend: what is stored from them and restored into them is exact, and nothing is given back too soon or too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvgate.contract.record import Record
from kvgate.contract.representation import ComponentFormat
from kvgate.protocol.messages import Done, Revoke
from kvgate.protocol.page_messages import PagesPacked
from kvgate.transfer import SlotsInDoubt, TransferBusy
from tests.daemon import makers
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import nothing_held
from tests.daemon.engine import Engine
from tests.daemon.lending import Bench, LendingEngine, lending_gateway
from tests.daemon.wire import denied

TEXTS = ("a", "b", "c")


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """A gateway whose mover the test holds."""
    async with lending_gateway(folder) as made:
        yield made


async def test_what_is_stored_from_pages_is_restored_into_pages(bench: Bench) -> None:
    """Bit for bit, into cleared pages, and nothing stays held."""
    engine = await bench.engine()
    engine.set_pages(1)
    before = engine.pages()
    await engine.save(*TEXTS)
    engine.set_pages(0)
    lease = await engine.held_lease(*TEXTS)
    loaded = await engine.fetch(lease, 0, 1, 2)
    assert (loaded.valid, loaded.failed) == (True, ())
    assert engine.holds(before, 0, 1, 2)
    await engine.release(lease)
    await nothing_held(bench.gateway)


async def test_lent_and_copied_chunks_are_the_same(bench: Bench) -> None:
    """A worker that copies by itself restores what one that lends has stored: one address, one payload."""
    engine = await bench.engine()
    engine.set_pages(2)
    await engine.save("a")
    other = await Engine.start(bench.gateway.config.socket_path, engine=makers.engine_id("another start"))
    (payload,) = await other.restore("a")
    lease = await engine.held_lease("a")
    engine.set_pages(0)
    await engine.fetch(lease, 0)
    assert len(payload) == 256
    again = await engine.lease("again")
    packed = await engine.pack(again, 0)
    await engine.keep(packed.ticket)
    assert await other.restore("again") == [payload]


async def test_skipped_tokens_are_not_touched(bench: Bench) -> None:
    """Blocks in front that vLLM holds already stay as they are, only in the first chunk of the message."""
    engine = await bench.engine()
    engine.set_pages(3)
    before = engine.pages()
    await engine.save(*TEXTS)
    engine.set_pages(4)
    other = engine.pages()
    lease = await engine.held_lease(*TEXTS)
    await engine.fetch(lease, 0, 1, skip_tokens=2)
    assert all((now[0] == then[0]).all() for now, then in zip(engine.tensors, other, strict=True))
    assert all((now[1:4] == then[1:4]).all() for now, then in zip(engine.tensors, before, strict=True))


async def test_nothing_is_visible_before_the_worker_says_so(bench: Bench) -> None:
    """A packed store is a miss; kept it is a hit."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    packed = await engine.pack(lease, 0)
    assert packed.chunks == (0,)
    assert await engine.hit("a") == 0
    assert await engine.keep(packed.ticket) == 1
    assert await engine.hit("a") == 1


async def test_a_store_that_was_given_up_leaves_nothing(bench: Bench) -> None:
    """Its pages were reused during the copy: what was copied never becomes visible."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    packed = await engine.pack(lease, 0)
    assert await engine.keep(packed.ticket, keep=False) == 0
    assert await bench.reservations() == 0
    assert await engine.hit("a") == 0


async def test_what_is_resident_is_not_packed_again(bench: Bench) -> None:
    """Only the missing chunk is copied; without any there is no ticket to close."""
    engine = await bench.engine()
    await engine.save("a")
    lease = await engine.lease("a", "b")
    packed = await engine.pack(lease, 0, 1)
    assert packed.chunks == (1,)
    await engine.keep(packed.ticket)
    assert await engine.pack(lease, 0, 1) == PagesPacked(ticket=0, chunks=())


async def test_a_lost_connection_drops_its_stores_and_its_pages(bench: Bench) -> None:
    """What was packed and not closed is free again at once, and the pages are unmapped."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    await engine.pack(lease, 0)
    await engine.close()
    await nothing_held(bench.gateway)
    assert bench.mover.detached == [1]


async def test_slots_outlive_the_connection_while_they_are_written(bench: Bench) -> None:
    """A worker that goes in the middle of a copy: its slots are nobody's before the copy is through, its pages stay mapped."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    bench.mover.hold = {"pack"}
    engine.workers[0].post(engine.store_message(lease, 0))
    await bench.until_held()
    await engine.workers[0].close()
    await asyncio.sleep(0.05)
    assert await bench.reservations() == 1
    assert bench.mover.detached == []
    bench.mover.go()
    await engine.close()
    await nothing_held(bench.gateway)
    assert bench.mover.detached == [1]


async def test_a_lost_process_drops_the_store_under_way(bench: Bench) -> None:
    """Its slots are free, the worker is told to lend its pages again, and then everything works as before."""
    engine = await bench.engine()
    engine.set_pages(5)
    before = engine.pages()
    lease = await engine.lease("a")
    bench.mover.hold = {"pack"}
    store = engine.workers[0].post(engine.store_message(lease, 0))
    await bench.until_held()
    bench.mover.lose()
    bench.mover.go()
    failure = await store
    assert (failure.code, failure.field) == ("unavailable", "pages")  # type: ignore[attr-defined]
    assert await bench.reservations() == 0
    for message in (engine.store_message(lease, 0), engine.load_message(lease, 0)):
        async with denied("unavailable", "pages"):
            await engine.workers[0].call(message, PagesPacked)
    await engine.attach()
    await engine.save("a")
    engine.set_pages(0)
    await engine.fetch(await engine.held_lease("a"), 0)
    assert engine.holds(before, 0)


async def test_slots_in_doubt_stay_taken_until_the_process_is_gone(bench: Bench) -> None:
    """A killed process that has not ended may still write: its slots go to nobody before."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bench.mover.doubt = SlotsInDoubt(gone)
    async with denied("unavailable"):
        await engine.pack(lease, 0)
    await engine.close()
    await asyncio.sleep(0.05)
    assert await bench.reservations() == 1
    gone.set_result(None)
    await nothing_held(bench.gateway)


async def load_in_flight(bench: Bench) -> tuple[LendingEngine, bytes, asyncio.Future[Record]]:
    """An engine, the lease of its one stored chunk, and a load of that which the mover holds."""
    engine = await bench.engine()
    await engine.save("a")
    lease = await engine.held_lease("a")
    bench.mover.hold = {"unpack"}
    load = engine.workers[0].post(engine.load_message(lease, 0))
    await bench.until_held()
    return engine, lease, load


async def test_a_process_lost_in_a_load_is_a_load_error(bench: Bench) -> None:
    """The worker is told; the holds are given back; the object is not suspected."""
    engine, lease, load = await load_in_flight(bench)
    bench.mover.lose()
    failure = await load
    assert (failure.code, failure.field) == ("unavailable", "pages")  # type: ignore[attr-defined]
    await engine.release(lease)
    await nothing_held(bench.gateway)
    assert await engine.hit("a") == 1


async def test_a_busy_process_is_no_lost_one(bench: Bench) -> None:
    """Too many calls: the worker skips this one and keeps its pages lent."""
    engine = await bench.engine()
    bench.mover.doubt = TransferBusy("too many")
    async with denied("busy"):
        await engine.pack(await engine.lease("a"), 0)
    bench.mover.doubt = None
    await engine.save("a")
    assert await bench.reservations() == 0


async def test_damaged_payloads_are_told_and_quarantined(bench: Bench) -> None:
    """One flipped bit in the pool: that chunk has failed and is gone, the others are right."""
    engine = await bench.engine()
    engine.set_pages(6)
    before = engine.pages()
    await engine.save(*TEXTS)
    helper = await Engine.start(bench.gateway.config.socket_path, engine=makers.engine_id("another start"))
    spoiled = await helper.lease(*TEXTS)
    await helper.acquire(spoiled, 0, 3)
    plan = await helper.load(spoiled, 1)
    helper.view(plan, plan.slots[0])[7] ^= 1
    await helper.finish(plan.ticket)
    await helper.close()
    engine.set_pages(0)
    lease = await engine.held_lease(*TEXTS)
    loaded = await engine.fetch(lease, 0, 1, 2)
    assert (loaded.valid, loaded.failed) == (True, (1,))
    assert engine.holds(before, 0, 2)
    await engine.release(lease)
    assert await engine.hit(*TEXTS) == 1


async def test_a_load_that_was_given_up_writes_nothing(bench: Bench) -> None:
    """The worker closes the gate while the load waits for the process: the pages stay as the engine left them."""
    engine = await bench.engine()
    engine.set_pages(7)
    await engine.save("a")
    lease = await engine.held_lease("a")
    bench.mover.hold = {"unpack"}
    message = engine.load_message(lease, 0)
    load = engine.workers[0].post(message)
    await bench.until_held()
    assert engine.gate.close_place(message.gate, 1.0)
    engine.set_pages(8)
    computed = engine.pages()
    bench.mover.go()
    failure = await load
    assert failure.code == "denied"  # type: ignore[attr-defined]
    assert engine.holds(computed, 0)
    assert await engine.hit("a") == 1, "nothing is wrong with the object"


async def test_weights_that_changed_during_a_copy_store_nothing(bench: Bench) -> None:
    """The registration is revoked between copy and commit: what was copied is dropped."""
    engine = await bench.engine()
    packed = await engine.pack(await engine.lease("a"), 0)
    await engine.workers[0].call(Revoke(handle=engine.handle), Done)
    assert await engine.keep(packed.ticket) == 0
    assert await bench.reservations() == 0


async def test_weights_that_changed_during_a_load_make_it_invalid(bench: Bench) -> None:
    """The bytes must not be used."""
    engine, _, load = await load_in_flight(bench)
    await engine.workers[0].call(Revoke(handle=engine.handle), Done)
    bench.mover.go()
    assert (await load).valid is False  # type: ignore[attr-defined]


async def test_a_pool_that_was_lost_takes_its_stores_along(folder: Path) -> None:
    """Storage restarts between copy and commit: nothing is visible, nothing fails, and the new pool serves."""
    backend = FaultyBackend()
    made = Bench(folder, backend)
    await made.gateway.start()
    engine = await made.engine()
    packed = await engine.pack(await engine.lease("a"), 0)
    await backend.die()
    await backend.revive()
    assert await engine.keep(packed.ticket) == 0
    await engine.save("a")
    assert await engine.hit("a") == 1
    await engine.close()
    await made.gateway.stop()


async def test_values_that_the_codec_cannot_hold_are_not_stored(folder: Path) -> None:
    """Under k16v8 a chunk with an infinite value is dropped, the others are stored."""
    made = Bench(folder, codec="k16v8")
    await made.gateway.start()
    form = makers.representation(codec="k16v8", v_format=ComponentFormat(dtype="int8", group=32, scale_dtype="bfloat16"))
    engine = await made.engine(representation=form)
    engine.set_pages(9)
    engine.tensors[1][2] = float("inf")
    lease = await engine.lease(*TEXTS)
    packed = await engine.pack(lease, 0, 1, 2)
    assert packed.chunks == (0, 2)
    assert await engine.keep(packed.ticket) == 2
    assert await made.reservations() == 0
    assert await engine.hit(*TEXTS) == 1
    await engine.close()
    await made.gateway.stop()
