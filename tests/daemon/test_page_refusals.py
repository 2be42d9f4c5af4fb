"""Pages that workers lend: what the gateway refuses, in words that help, and without having done anything."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvgate.daemon.app import Gateway
from kvgate.daemon.pages import MAX_PACKED
from kvgate.protocol.messages import Done, LoadPlan, Registered, Reserve
from kvgate.protocol.page_messages import AttachPages, CommitPages, DetachPages, PagesAttached, PagesPacked, PagesStored
from kvgate.transfer.gate import Gate
from kvgate_kernels import PageGeometry
from kvgate_kernels.export import export_pages
from tests.daemon import makers
from tests.daemon.conftest import nothing_held, small_config
from tests.daemon.engine import Engine
from tests.daemon.lending import BLOCKS, GEOMETRY, Bench, LendingEngine, blocks_of, lending_gateway
from tests.daemon.wire import Denied, Wire, denied


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """A gateway whose mover the test holds."""
    async with lending_gateway(folder) as made:
        yield made


async def test_a_place_that_was_never_opened_lets_nothing_through(bench: Bench) -> None:
    """A load without its worker's leave is refused, and so is a second one through the same place."""
    engine = await bench.engine()
    await engine.save("a")
    lease = await engine.held_lease("a")
    async with denied("denied", "gate"):
        await engine.fetch(lease, 0, gate=17)
    message = engine.load_message(lease, 0)
    await engine.workers[0].ask(message)
    async with denied("denied", "gate"):
        await engine.fetch(lease, 0, gate=message.gate)


@pytest.mark.parametrize(
    "blocks", [b"", blocks_of(0), blocks_of(0, 1)[:-4], blocks_of(0, 1, 2)], ids=["none", "one chunk", "short", "long"]
)
async def test_block_lists_of_the_wrong_length_are_refused(bench: Bench, blocks: bytes) -> None:
    """Before anything is reserved or loaded."""
    engine = await bench.engine()
    await engine.save("x", "y")
    lease = await engine.held_lease("x", "y")
    for message in (engine.store_message(lease, 0, 1, blocks=blocks), engine.load_message(lease, 0, 1, blocks=blocks)):
        async with denied("malformed", "blocks"):
            await engine.workers[0].call(message, PagesPacked)
    assert await bench.reservations() == 0


async def test_blocks_outside_the_pages_are_refused(bench: Bench) -> None:
    """Nothing is moved, and the slots are free again."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    outside = struct.pack("<2I", 0, BLOCKS)
    async with denied("denied", "blocks"):
        await engine.workers[0].call(engine.store_message(lease, 0, blocks=outside), PagesPacked)
    assert await bench.reservations() == 0
    await engine.save("a")
    async with denied("denied", "blocks"):
        await engine.fetch(await engine.held_lease("a"), 0, blocks=outside)


async def test_a_chunk_named_twice_is_refused(bench: Bench) -> None:
    """By name, before anything is done."""
    engine = await bench.engine()
    lease = await engine.lease("a")
    for message in (engine.store_message(lease, 0, 0), engine.load_message(lease, 0, 0)):
        async with denied("malformed", "chunks"):
            await engine.workers[0].call(message, PagesPacked)


async def test_chunks_that_were_not_acquired_are_not_loaded(bench: Bench) -> None:
    """A lease alone opens nothing."""
    engine = await bench.engine()
    await engine.save("a")
    async with denied("denied", "chunks"):
        await engine.fetch(await engine.lease("a"), 0)


async def test_a_ticket_is_its_connections_and_for_once(bench: Bench) -> None:
    """Unknown, foreign and closed tickets are refused alike."""
    engine = await bench.engine()
    other = await bench.engine(engine=makers.engine_id("another start"))
    packed = await engine.pack(await engine.lease("a"), 0)
    for wire, ticket in ((engine.workers[0], 999), (other.workers[0], packed.ticket)):
        async with denied("denied", "ticket"):
            await wire.call(CommitPages(ticket=ticket, keep=True), PagesStored)
    assert await engine.keep(packed.ticket) == 1
    async with denied("denied", "ticket"):
        await engine.keep(packed.ticket)


async def test_stores_that_are_not_closed_are_bounded(folder: Path) -> None:
    """One more than the limit is refused, and closing one makes room."""
    made = Bench(folder, pool_bytes=4 << 20)
    await made.gateway.start()
    engine = await made.engine()
    texts = [f"chunk {number}" for number in range(MAX_PACKED + 1)]
    lease = await engine.lease(*texts)
    blocks = blocks_of(0)
    tickets = []
    for number in range(MAX_PACKED):
        message = engine.store_message(lease, number, blocks=blocks)
        tickets.append((await engine.workers[0].call(message, PagesPacked)).ticket)
    last = engine.store_message(lease, MAX_PACKED, blocks=blocks)
    async with denied("busy"):
        await engine.workers[0].call(last, PagesPacked)
    await engine.keep(tickets[0], keep=False)
    assert (await engine.workers[0].call(last, PagesPacked)).chunks == (MAX_PACKED,)
    await engine.close()
    await nothing_held(made.gateway)
    await made.gateway.stop()


async def test_pages_are_lent_again_in_place_of_the_old(bench: Bench) -> None:
    """The old mapping is given back, stores packed from it can still be closed."""
    engine = await bench.engine()
    packed = await engine.pack(await engine.lease("a"), 0)
    told = await engine.attach()
    assert told.worker == told.mover  # the test is both
    assert bench.mover.detached == [1]
    assert await engine.keep(packed.ticket) == 1
    await engine.workers[0].call(DetachPages(), Done)
    assert bench.mover.detached == [1, 2]
    async with denied("unavailable", "pages"):
        await engine.pack(await engine.lease("b"), 0)


async def test_pages_of_another_shape_than_registered_are_refused(bench: Bench) -> None:
    """They would be stored under the address of something else."""
    engine = await bench.engine()
    narrow = PageGeometry(GEOMETRY.layout, layers=1, kv_heads=2, head_dim=4, block_tokens=2, dtype="bfloat16")
    async with denied("disagree", "export"):
        await engine.attach(export=export_pages(narrow, engine.tensors[:1]))
    assert bench.mover.detached == []
    await engine.save("a")  # what was lent before still is


async def test_a_rectangle_registered_after_the_pages_is_noticed(bench: Bench) -> None:
    """The connection registers as a rank of half the heads: its old pages no longer fit, and nothing moves."""
    engine = await bench.engine()
    worker = engine.workers[0]
    report = dataclasses.replace(engine.report_of(0), engine=makers.engine_id("half"), plan=makers.plan(2))
    registered = await worker.call(report, Registered)
    other = await Wire.open(engine.path, "worker")
    await other.call(dataclasses.replace(report, tp_rank=1), Registered)
    engine.handle = registered.handle
    lease = await engine.lease("a")
    async with denied("disagree", "pages"):
        await engine.pack(lease, 0)
    assert await bench.reservations() == 0


async def test_only_registered_workers_lend(bench: Bench) -> None:
    """And only on a connection that speaks wire version 2."""
    engine = await bench.engine()
    message = AttachPages(export=engine.export, gate=Gate().descriptor)
    stranger = await Wire.open(engine.path, "worker", wire_highest=2)
    async with denied("denied"):
        await stranger.call(message, PagesAttached)
    old = await Wire.open(engine.path, "worker")
    async with denied("malformed", "type"):
        await old.call(message, PagesAttached)


async def test_a_private_pool_is_told_to_no_worker(folder: Path) -> None:
    """transfer = gateway: a worker that copies by itself is refused in words that help; lent pages are moved."""
    made = Bench(folder, transfer="gateway")
    await made.gateway.start()
    engine = await made.engine()
    await engine.save("a")
    lease = await engine.held_lease("a")
    with pytest.raises(Denied, match="don't see its pool"):
        await engine.load(lease, 0)
    with pytest.raises(Denied, match="don't see its pool"):
        await engine.reserve(lease, 0)
    assert (await engine.fetch(lease, 0)).valid
    await engine.close()
    await made.gateway.stop()


async def test_a_gateway_can_leave_all_copies_to_the_workers(folder: Path) -> None:
    """transfer = worker: pages are refused, and the remedy says what to set."""
    gateway = Gateway(small_config(folder, transfer="worker"))
    await gateway.start()
    with pytest.raises(Denied) as caught:
        await LendingEngine.lend(gateway.config.socket_path)
    assert (caught.value.failure.code, caught.value.failure.field) == ("denied", "transfer")
    assert '"worker"' in caught.value.failure.remedy
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    assert len(await engine.restore("a")) == 1
    await engine.close()
    await gateway.stop()


def test_messages_name_no_pool() -> None:
    """Nothing that a lending worker is sent has room for the pool's name or an offset in it."""
    for kind in (PagesAttached, PagesPacked, PagesStored):
        assert not {"pool", "pool_bytes", "offset", "slots"} & {name for name, _ in kind._specs}
    assert "pool" in {name for name, _ in LoadPlan._specs}
    assert "lease" in {name for name, _ in Reserve._specs}
