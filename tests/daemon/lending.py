"""A fake engine that lends its pages, and a mover inside the test's process whose moves can be held up, lost or left in doubt."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Registered
from kvgate.protocol.page_messages import (
    AttachPages,
    CommitPages,
    LoadPages,
    PagesAttached,
    PagesLoaded,
    PagesPacked,
    PagesStored,
    StorePages,
)
from kvgate.storage.backend import PoolInfo, StorageBackend
from kvgate.transfer import GateShut, MoveRefused, MoveSpec, PagesRefused, TransferUnavailable
from kvgate.transfer.gate import Gate
from kvgate.transfer.process.devices import CpuDevice
from kvgate.transfer.process.engine import Engine as MoverEngine
from kvgate.transfer.process.engine import Options, Refused, Shut
from kvgate.transfer.records import Packed, PageExport, PageHandle, PayloadShape, WorkerProcess
from kvgate.transfer.wire import MoveBody, unpack_digests, unpack_result
from kvgate_kernels import PageGeometry, PageLayout
from kvgate_kernels.export import export_pages
from tests.daemon import makers
from tests.daemon.conftest import eventually, small_config
from tests.daemon.engine import Engine
from tests.daemon.wire import WAIT_S, Wire

BLOCKS = 16
BLOCK_TOKENS = 2
CHUNK_BLOCKS = makers.CHUNK_TOKENS // BLOCK_TOKENS
GEOMETRY = PageGeometry(
    PageLayout.CPU_VEC,
    layers=makers.LAYERS,
    kv_heads=makers.KV_HEADS,
    head_dim=4,
    block_tokens=BLOCK_TOKENS,
    dtype="bfloat16",
)


class InsideMover:
    """``PageMover`` around the very engine of a transfer process, in this one. ``hold``: moves of that name wait for ``go``.

    ``lose``: what waits fails as it does when the process dies, and all handles are void. ``doubt``: the error that moves raise.
    """

    def __init__(self) -> None:
        self.engine = MoverEngine(CpuDevice(), Options(1, 0, 1.0))
        self.hold: set[str] = set()
        self.held = 0
        self.doubt: Exception | None = None
        self.detached: list[int] = []
        self._go = asyncio.Event()
        self._lost = asyncio.Event()
        self._incarnation = 1
        self._callbacks: list[Callable[[str, int], None]] = []

    def go(self) -> None:
        """Let the moves that wait go on."""
        self.hold = set()
        self._go.set()

    def lose(self) -> None:
        """The process dies."""
        self._lost.set()
        self._lost = asyncio.Event()
        for callback in self._callbacks:
            callback("cpu", self._incarnation)
        self._incarnation += 1

    async def start(self) -> None:
        """See ``PageMover``."""

    async def stop(self) -> None:
        """See ``PageMover``."""
        self.engine.close()

    def use_pool(self, pool: PoolInfo | None) -> None:
        """See ``PageMover``."""
        self.engine.use_pool(pool)

    def on_lost(self, callback: Callable[[str, int], None]) -> None:
        """See ``PageMover``."""
        self._callbacks.append(callback)

    async def attach(
        self, export: PageExport, payload: PayloadShape, worker: WorkerProcess, deadline_s: float, *, gate: int | None = None
    ) -> PageHandle:
        """See ``PageMover``."""
        del deadline_s
        await self._pass("attach")
        try:
            number, blocks, size, backend, reason = self.engine.attach(export.encode(), payload.encode(), worker, gate)
        except Refused as error:
            raise PagesRefused(str(error)) from error
        return PageHandle("cpu", self._incarnation, os.getpid(), number, blocks, size, backend, reason)  # type: ignore[arg-type]

    async def pack(
        self,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        *,
        ready: bytes | None = None,
        digest: bool = True,
        paced: bool = True,
    ) -> list[Packed]:
        """See ``PageMover``."""
        del deadline_s
        await self._pass("pack", handle)
        return unpack_result(self._move(self.engine.pack, handle, generation, moves, ready, digest, paced), len(moves), digest)

    async def unpack(
        self,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        *,
        ready: bytes | None = None,
        digest: bool = True,
        paced: bool = False,
        gate: int | None = None,
    ) -> list[bytes]:
        """See ``PageMover``."""
        del deadline_s
        await self._pass("unpack", handle)
        return unpack_digests(
            self._move(self.engine.unpack, handle, generation, moves, ready, digest, paced, gate), len(moves), digest
        )

    async def detach(self, handle: PageHandle) -> None:
        """See ``PageMover``."""
        self.detached.append(handle.number)
        self.engine.detach(handle.number)

    def status(self) -> Mapping[str, Mapping[str, int | str]]:
        """See ``PageMover``."""
        return {}

    def _move(
        self,
        run: Callable[[MoveBody, Callable[[], bool]], Any],
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        ready: bytes | None,
        digest: bool,
        paced: bool,
        gate: int | None = None,
    ) -> Any:
        if self.doubt is not None:
            raise self.doubt
        try:
            body = MoveBody.of(handle.number, generation, moves, ready, digest, paced, gate)
            if not self.engine.ready(body):
                raise TransferUnavailable("the engine is late")
            return run(body, lambda: False)
        except Shut as error:
            raise GateShut(str(error)) from error
        except Refused as error:
            raise MoveRefused(str(error)) from error

    async def _pass(self, what: str, handle: PageHandle | None = None) -> None:
        if handle is not None and handle.incarnation != self._incarnation:
            raise TransferUnavailable("lost")
        if what not in self.hold:
            return
        self.held += 1
        waits = [asyncio.ensure_future(event.wait()) for event in (self._go, self._lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                raise TransferUnavailable("lost")
        finally:
            self.held -= 1
            for wait in waits:
                wait.cancel()


class LendingEngine(Engine):
    """An engine of one worker with real pages. Chunk ``n`` of a request lies in blocks ``2 n`` and ``2 n + 1``."""

    tensors: list[torch.Tensor]
    gate: Gate

    @classmethod
    async def lend(cls, path: Path, **changes: Any) -> LendingEngine:
        """Register, lend the pages, open the engine."""
        engine = await cls.start(path, **changes)
        assert isinstance(engine, LendingEngine)
        return engine

    async def join(self, rank: int, **changes: Any) -> Registered:
        """Connect with wire version 2, register and attach (again), the pages as they are."""
        worker = await Wire.open(self.path, "worker", self.credential, wire_highest=2)
        self.workers[rank : rank + 1] = [worker]
        registered = await worker.call(self.report_of(rank, **changes), Registered)
        self.handle = registered.handle
        if not hasattr(self, "tensors"):
            self.tensors = [torch.zeros(BLOCKS, 2, BLOCK_TOKENS, 8, dtype=torch.bfloat16) for _ in range(makers.LAYERS)]
            self.export = export_pages(GEOMETRY, self.tensors)
            self.set_pages(0)
        await self.attach()
        return registered

    async def attach(self, **changes: Any) -> PagesAttached:
        """Lend the pages (again), with a new gate."""
        self.gate = Gate()
        values: dict[str, Any] = {"export": self.export, "gate": self.gate.descriptor}
        return await self.workers[0].call(AttachPages(**(values | changes)), PagesAttached)

    def set_pages(self, seed: int) -> None:
        """Other contents, in place; 0: zeros."""
        for tensor in self.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) if seed else torch.zeros(1))

    def pages(self) -> list[torch.Tensor]:
        """What they hold now."""
        return [tensor.clone() for tensor in self.tensors]

    def holds(self, pages: list[torch.Tensor], *chunks: int) -> bool:
        """Whether these chunks' blocks are now as they were in ``pages``."""
        blocks = [block for chunk in chunks for block in range(CHUNK_BLOCKS * chunk, CHUNK_BLOCKS * (chunk + 1))]
        return all(torch.equal(now[blocks], then[blocks]) for now, then in zip(self.tensors, pages, strict=True))

    def store_message(self, lease: bytes, *chunks: int, **changes: Any) -> StorePages:
        """A store of these chunks."""
        values: dict[str, Any] = {"lease": lease, "chunks": chunks, "blocks": blocks_of(*chunks), "ready": None}
        return StorePages(**(values | changes))

    async def pack(self, lease: bytes, *chunks: int) -> PagesPacked:
        """The first half of a store."""
        return await self.workers[0].call(self.store_message(lease, *chunks), PagesPacked)

    async def keep(self, ticket: int, *, keep: bool = True) -> int:
        """The second half: how many are visible."""
        return (await self.workers[0].call(CommitPages(ticket=ticket, keep=keep), PagesStored)).visible

    async def save(self, *texts: str) -> None:
        """Bind, store all chunks, release."""
        lease = await self.lease(*texts)
        packed = await self.pack(lease, *range(len(texts)))
        assert await self.keep(packed.ticket) == len(texts)
        await self.release(lease)

    async def held_lease(self, *texts: str) -> bytes:
        """Bind and acquire all of them."""
        lease = await self.lease(*texts)
        assert await self.acquire(lease, 0, len(texts)) == len(texts)
        return lease

    def load_message(self, lease: bytes, *chunks: int, **changes: Any) -> LoadPages:
        """A load of these chunks, through a place of the gate that is open."""
        values: dict[str, Any] = {
            "lease": lease,
            "chunks": chunks,
            "blocks": blocks_of(*chunks),
            "skip_tokens": 0,
            "ready": None,
            "paced": False,
        }
        if "gate" not in changes:
            changes["gate"] = self.gate.open_place()
        return LoadPages(**(values | changes))

    async def fetch(self, lease: bytes, *chunks: int, **changes: Any) -> PagesLoaded:
        """Load chunks into their blocks."""
        return await self.workers[0].call(self.load_message(lease, *chunks, **changes), PagesLoaded)


def blocks_of(*chunks: int) -> bytes:
    """The block ids of these chunks, as messages have them."""
    ids = [block for chunk in chunks for block in range(CHUNK_BLOCKS * chunk, CHUNK_BLOCKS * (chunk + 1))]
    return struct.pack(f"<{len(ids)}I", *ids)


class Bench:
    """A gateway whose mover the test holds."""

    def __init__(self, folder: Path, backend: StorageBackend | None = None, **settings: Any) -> None:
        self.mover = InsideMover()
        self.gateway = Gateway(small_config(folder, **settings), backend, self.mover)

    async def engine(self, **changes: Any) -> LendingEngine:
        """An engine that lends its pages."""
        return await LendingEngine.lend(self.gateway.config.socket_path, **changes)

    async def reservations(self) -> int:
        """Slots that are taken and not committed."""
        return int((await self.gateway.status())["storage"]["reservations"])

    async def until_held(self) -> None:
        """Wait until a move is held up."""

        async def held() -> bool:
            return self.mover.held > 0

        await eventually("a move is held up", held)


@asynccontextmanager
async def lending_gateway(folder: Path, **settings: Any) -> AsyncIterator[Bench]:
    """One that runs for the length of the block."""
    made = Bench(folder, **settings)
    await made.gateway.start()
    yield made
    async with asyncio.timeout(WAIT_S):
        await made.gateway.stop()
