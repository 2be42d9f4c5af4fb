"""A fake engine: a scheduler and its workers on real connections, payloads in the real pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvgate.client.pools import PoolMappings
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    Bind,
    Bound,
    Commit,
    Committed,
    Done,
    Extend,
    Extended,
    FinishLoad,
    Load,
    LoadPlan,
    LoadVerdict,
    Opened,
    OpenEngine,
    Registered,
    RegisterWorker,
    Release,
    Reserve,
    Reserved,
    WrittenPayload,
)
from tests.daemon import makers
from tests.daemon.wire import Wire

DEADLINE_MS = 5000


def payload(text: str, length: int) -> bytes:
    """Recognisable bytes of a given length."""
    return bytes(blake3(text.encode()).digest(length))


class Engine:
    """``workers[tp_rank]`` and one scheduler. Chunks are named by text; a chunk's payload depends on its text and rank."""

    def __init__(self, path: Path, report: RegisterWorker, credential: bytes | None) -> None:
        self.path = path
        self.report = report
        self.credential = credential
        self.workers: list[Wire] = []
        self.handle = b""
        self._pools = PoolMappings()

    @classmethod
    async def start(cls, path: Path, *, tp: int = 1, credential: bytes | None = None, **changes: Any) -> Engine:
        """Register all ranks and open the engine."""
        engine = cls(path, makers.report(plan=makers.plan(tp), **changes), credential)
        for rank in range(tp):
            await engine.join(rank)
        await engine.open()
        return engine

    def report_of(self, rank: int, **changes: Any) -> RegisterWorker:
        """What one rank reports."""
        values = {name: getattr(self.report, name) for name, _ in RegisterWorker._specs}
        return RegisterWorker(**(values | {"tp_rank": rank} | changes))

    async def join(self, rank: int, **changes: Any) -> Registered:
        """Connect and register one rank (again)."""
        worker = await Wire.open(self.path, "worker", self.credential)
        self.workers[rank : rank + 1] = [worker]
        registered = await worker.call(self.report_of(rank, **changes), Registered)
        self.handle = registered.handle
        return registered

    async def open(self) -> Opened:
        """Connect the scheduler (again) and open the engine."""
        self.scheduler = await Wire.open(self.path, "scheduler", self.credential)
        return await self.scheduler.call(OpenEngine(handle=self.handle), Opened)

    async def close(self) -> None:
        """Drop all connections."""
        for wire in (*self.workers, self.scheduler):
            await wire.close()

    def bind_message(self, *texts: str, **changes: Any) -> Bind:
        """A bind of these chunks."""
        values: dict[str, Any] = {
            "handle": self.handle,
            "adapter": None,
            "salt": None,
            "scope": "prefix",
            "scope_key": None,
            "manifest": None,
            "tokens": makers.tokens(*texts),
        }
        return Bind(**(values | changes))

    async def bind(self, *texts: str, **changes: Any) -> Bound:
        """Bind a request of these chunks."""
        return await self.scheduler.call(self.bind_message(*texts, **changes), Bound)

    async def lease(self, *texts: str, **changes: Any) -> bytes:
        """Bind, and return only the lease."""
        return (await self.bind(*texts, **changes)).lease

    async def acquire(self, lease: bytes, first: int, last: int, deadline_ms: int = DEADLINE_MS) -> int:
        """Where the held chunks end."""
        message = Acquire(lease=lease, first=first, last=last, deadline_ms=deadline_ms)
        return (await self.scheduler.call(message, Acquired)).end

    async def extend(self, lease: bytes, first: int, *texts: str) -> int:
        """How many chunks the lease knows now."""
        return (await self.scheduler.call(Extend(lease=lease, first=first, tokens=makers.tokens(*texts)), Extended)).chunks

    async def release(self, lease: bytes) -> None:
        """Release a lease."""
        await self.scheduler.call(Release(lease=lease), Done)

    async def reserve(self, lease: bytes, *chunks: int, rank: int = 0) -> Reserved:
        """Slots for one rank's shards."""
        return await self.workers[rank].call(Reserve(lease=lease, chunks=chunks), Reserved)

    def fill(self, reserved: Reserved, texts: Sequence[str], rank: int = 0) -> tuple[WrittenPayload, ...]:
        """Write the payload of each slot; ``texts`` are the lease's chunks."""
        written = []
        for slot in reserved.slots:
            if slot.status == "slot":
                data = payload(f"{texts[slot.chunk]} rank {rank}", slot.length)
                self.view(reserved, slot)[:] = data
                written.append(WrittenPayload(reservation=slot.reservation, digest=blake3(data).digest()))
        return tuple(written)

    def view(self, of: Reserved | LoadPlan, slot: Any) -> memoryview:
        """A payload in the pool. Workers map whole slots; the test kit maps the payload through its envelope's page."""
        whole = self._pools.view(of.pool, of.pool_bytes, slot.offset - 4096, slot.length + 4096)
        return whole[4096:]

    def header(self, of: Reserved | LoadPlan, slot: Any) -> memoryview:
        """The envelope in front of a payload."""
        return self._pools.view(of.pool, of.pool_bytes, slot.offset - 4096, 4096)

    async def commit(self, written: Sequence[WrittenPayload], aborted: Sequence[int] = (), rank: int = 0) -> int:
        """How many became visible."""
        message = Commit(written=tuple(written), aborted=tuple(aborted))
        return (await self.workers[rank].call(message, Committed)).visible

    async def store(self, *texts: str, ranks: Sequence[int] | None = None, **changes: Any) -> None:
        """Bind, store all chunks on all ranks, release."""
        lease = await self.lease(*texts, **changes)
        for rank in range(len(self.workers)) if ranks is None else ranks:
            reserved = await self.reserve(lease, *range(len(texts)), rank=rank)
            written = self.fill(reserved, texts, rank)
            assert await self.commit(written, rank=rank) == len(written)
        await self.release(lease)

    async def hit(self, *texts: str, **changes: Any) -> int:
        """How many chunks a fresh request of these chunks acquires; releases at once."""
        lease = await self.lease(*texts, **changes)
        end = await self.acquire(lease, 0, len(texts))
        await self.release(lease)
        return end

    async def load(self, lease: bytes, *chunks: int, rank: int = 0) -> LoadPlan:
        """Open a load."""
        return await self.workers[rank].call(Load(lease=lease, chunks=chunks), LoadPlan)

    async def finish(self, ticket: int, *mismatched: int, rank: int = 0) -> bool:
        """Close a load; the verdict."""
        return (await self.workers[rank].call(FinishLoad(ticket=ticket, mismatched=mismatched), LoadVerdict)).valid

    async def restore(self, *texts: str, rank: int = 0, **changes: Any) -> list[bytes]:
        """Acquire, load, verify and finish all chunks that hit; their payloads."""
        lease = await self.lease(*texts, **changes)
        end = await self.acquire(lease, 0, len(texts))
        found = []
        if end:
            plan = await self.load(lease, *range(end), rank=rank)
            for slot in plan.slots:
                data = bytes(self.view(plan, slot))
                assert blake3(data).digest() == slot.digest
                found.append(data)
            assert await self.finish(plan.ticket, rank=rank)
        await self.release(lease)
        return found
