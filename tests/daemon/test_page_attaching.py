"""Which pages a gateway takes, from whom, and which gate it has then: never another one than the worker closes."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from kvgate.protocol.messages import Done, Registered
from kvgate.protocol.page_messages import AttachPages, DetachPages, PagesAttached, PagesPacked
from kvgate.transfer.gate import Gate
from kvgate_kernels import PageGeometry, PageLayout
from kvgate_kernels.export import export_pages
from tests.daemon import makers
from tests.daemon.lending import BLOCK_TOKENS, BLOCKS, Bench, blocks_of, lending_gateway
from tests.daemon.wire import WAIT_S, Wire, denied

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    """A gateway whose mover the test holds."""
    async with lending_gateway(folder) as made:
        yield made


def export_of(layers: int, heads: int, head_dim: int, dtype: str = "bfloat16") -> tuple[AttachPages, list[torch.Tensor]]:
    """Pages that are just what they say, and what keeps them."""
    geometry = PageGeometry(PageLayout.CPU_VEC, layers, heads, head_dim, BLOCK_TOKENS, dtype)
    tensors = [torch.zeros(BLOCKS, heads, BLOCK_TOKENS, 2 * head_dim, dtype=TORCH[dtype]) for _ in range(layers)]
    return AttachPages(export=export_pages(geometry, tensors), gate=Gate().descriptor), tensors


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "dtype"),
    [
        (1, 4, 4, "bfloat16"),
        (4, 1, 4, "bfloat16"),
        (2, 1, 8, "bfloat16"),
        (1, 2, 8, "bfloat16"),
        (2, 2, 4, "float16"),
        (2, 1, 4, "float32"),
    ],
    ids=["more heads", "more layers", "longer heads", "fewer layers", "another type", "a wider type"],
)
async def test_pages_of_the_right_length_and_another_shape_are_refused(
    bench: Bench, layers: int, heads: int, head_dim: int, dtype: str
) -> None:
    """They hold as many bytes as the registered rectangle, and other ones: nothing is mapped, and what was lent before still is."""
    engine = await bench.engine()
    message, _tensors = export_of(layers, heads, head_dim, dtype)
    async with denied("disagree", "export"):
        await engine.workers[0].call(message, PagesAttached)
    assert bench.mover.detached == []
    await engine.save("a")


async def test_pages_are_those_of_the_rectangle_that_they_were_attached_for(bench: Bench) -> None:
    """The connection registers as the other rank, whose rectangle has the same length: its old pages would be stored as that one's."""
    engine = await bench.engine()
    worker = engine.workers[0]
    report = dataclasses.replace(engine.report_of(0), engine=makers.engine_id("half"), plan=makers.plan(2))
    other = await Wire.open(engine.path, "worker", wire_highest=2)
    engine.handle = (await worker.call(report, Registered)).handle
    await other.call(dataclasses.replace(report, tp_rank=1), Registered)
    message, _tensors = export_of(2, 1, 4)
    await worker.call(message, PagesAttached)
    lease = await engine.lease("a")
    await engine.workers[0].call(engine.store_message(lease, 0), PagesPacked)
    await other.close()
    await worker.call(dataclasses.replace(report, tp_rank=1), Registered)
    again = await Wire.open(engine.path, "worker", wire_highest=2)
    engine.handle = (await again.call(report, Registered)).handle
    lease = await engine.lease("b")
    async with denied("disagree", "pages"):
        await worker.call(engine.store_message(lease, 0), PagesPacked)
    await worker.call(message, PagesAttached)
    await worker.call(engine.store_message(lease, 0), PagesPacked)


async def test_an_attachment_that_comes_late_takes_no_later_ones_place(bench: Bench) -> None:
    """The worker gave the first up and asked again: loads pass the gate that it has now, and not the one that it has closed."""
    engine = await bench.engine()
    await engine.save("a")
    lease = await engine.held_lease("a")
    bench.mover.hold = {"attach"}
    first = engine.workers[0].post(AttachPages(export=engine.export, gate=Gate().descriptor))
    await bench.until_held()
    bench.mover.hold = set()
    engine.gate = Gate()
    second = engine.workers[0].post(AttachPages(export=engine.export, gate=engine.gate.descriptor))
    await asyncio.sleep(0.05)
    bench.mover.go()
    await first
    assert type(await second) is PagesAttached
    assert (await engine.fetch(lease, 0)).valid


async def test_only_the_last_of_many_attachments_is_made(bench: Bench) -> None:
    """What was asked for in between is refused with what to do, and costs nothing."""
    engine = await bench.engine()
    bench.mover.hold = {"attach"}
    replies = [engine.workers[0].post(AttachPages(export=engine.export, gate=Gate().descriptor))]
    await bench.until_held()
    replies += [engine.workers[0].post(AttachPages(export=engine.export, gate=Gate().descriptor)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert bench.mover.held == 1
    bench.mover.go()
    kinds = [getattr(reply, "code", "attached") for reply in await asyncio.gather(*replies)]
    assert kinds == ["attached", "busy", "busy", "attached"]
    assert bench.mover.detached == [1, 2]
    await engine.workers[0].call(DetachPages(), Done)
    assert bench.mover.detached == [1, 2, 3]


async def test_a_detach_comes_after_what_was_asked_for_before_it(bench: Bench) -> None:
    """Pages that are being attached when their worker takes them back are not left mapped."""
    engine = await bench.engine()
    bench.mover.hold = {"attach"}
    attached = engine.workers[0].post(AttachPages(export=engine.export, gate=Gate().descriptor))
    await bench.until_held()
    detached = engine.workers[0].post(DetachPages())
    await asyncio.sleep(0.05)
    bench.mover.go()
    await attached
    assert type(await detached) is Done
    assert bench.mover.detached == [1, 2]
    async with denied("unavailable", "pages"):
        await engine.workers[0].call(engine.store_message(await engine.lease("a"), 0, blocks=blocks_of(0)), PagesPacked)


async def test_a_worker_in_another_pid_namespace_is_refused(bench: Bench) -> None:
    """Its process ids are others, even where its own happens to be the one that is seen from here."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or await (await asyncio.create_subprocess_exec(*apart, "true")).wait():
        pytest.skip("no PID namespace can be made here")

    async def told(*before: str) -> str:
        command = [*before, sys.executable, "-m", "tests.daemon.foreign_worker", str(bench.gateway.config.socket_path)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await asyncio.wait_for(process.communicate(), 3 * WAIT_S)
        return output.decode().splitlines()[-1]

    assert await told() == "attached"
    assert await told(*apart) == "denied: the worker is in another PID namespace"
