"""Synthetic engines: a scheduler and workers on real connections, payloads in the real pool, contracts of the run's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from kvgate.client.errors import GatewayRefused
from kvgate.client.pools import PoolMappings
from kvgate.client.wire import Wire
from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    AdapterRegistered,
    Bind,
    Bound,
    Commit,
    Committed,
    ConfirmAdapter,
    Done,
    Explain,
    Explained,
    FinishLoad,
    Load,
    LoadPlan,
    LoadVerdict,
    Opened,
    OpenEngine,
    RegisterAdapter,
    Registered,
    RegisterWorker,
    Release,
    Reserve,
    Reserved,
    WrittenPayload,
)
from kvgate.protocol.verify_messages import Forget, Forgotten, Inspect, Inspected, LeaveOnly, LeftOnly, VerifyEntered
from kvgate.storage.pool import PoolError
from kvgate.verify.link import CannotRun, Links, call
from kvgate.verify.sample import Value

ACQUIRE_MS: Final = 10_000
STORE_TRIES: Final = 20
STORE_PAUSE_S: Final = 0.25

Rank = tuple[int, int]


class Desk:
    """One verify domain: its scheduler connection, and what all its engines share."""

    def __init__(self, links: Links, run: bytes, scheduler: Wire, entered: VerifyEntered) -> None:
        self.links = links
        self.run = run
        self.scheduler = scheduler
        self.entered = entered
        self.pools = PoolMappings()

    @classmethod
    async def open(cls, links: Links, run: bytes) -> Desk:
        """Enter the domain of ``run``."""
        return cls(links, run, *await links.enter("scheduler", run))

    async def engine(self, name: bytes, request: Value, *, generation: int = 0, block_tokens: int = 0) -> Engine:
        """Register all ranks of a request's plan, as an engine start of that name. Raises ``GatewayRefused``, ``ContractError``."""
        values = {
            "engine": name,
            "generation": generation,
            "pp_rank": 0,
            "tp_rank": 0,
            "block_tokens": block_tokens or request["representation"]["chunk_tokens"],
            "model": {**request["model"], "adapter": None},
            "representation": request["representation"],
            "plan": request["plan"],
        }
        report = RegisterWorker.from_value(values)
        workers: dict[Rank, Wire] = {}
        try:
            handle = b""
            for place in report.plan.places:
                rank = (place.pp_rank, place.tp_rank)
                if rank not in workers:
                    workers[rank], _ = await self.links.enter("worker", self.run)
                    of_rank = RegisterWorker.from_value({**values, "pp_rank": rank[0], "tp_rank": rank[1]})
                    handle = (await call(workers[rank], of_rank, Registered)).handle
            opened = await call(self.scheduler, OpenEngine(handle=handle), Opened)
        except BaseException:
            self.links.drop(*workers.values())
            raise
        return Engine(self, report, handle, opened, workers)


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup: the lease, what the gateway believed at bind, and how many chunks it then held."""

    bound: Bound
    held: int
    addresses: tuple[bytes, ...]


class Engine:
    """One registered engine. ``workers``: the connection of each (pp, tp) rank."""

    def __init__(self, desk: Desk, report: RegisterWorker, handle: bytes, opened: Opened, workers: Mapping[Rank, Wire]) -> None:
        self.desk = desk
        self.report = report
        self.handle = handle
        self.opened = opened
        self.workers = workers
        self._adapters: dict[bytes, bytes] = {}

    def close(self) -> None:
        """Drop its workers' connections."""
        self.desk.links.drop(*self.workers.values())

    async def bind(self, request: Value, tokens: Sequence[bytes]) -> Bound:
        """Bind a request: adapter, access and variant of ``request``, these ``t``."""
        access = request["access"]
        message = Bind(
            handle=self.handle,
            adapter=await self.adapter(request["model"]["adapter"]),
            salt=access["salt"],
            scope=access["scope"],
            scope_key=access["scope_key"],
            manifest=request["variant"]["manifest"],
            tokens=b"".join(tokens),
        )
        return await call(self.desk.scheduler, message, Bound)

    async def find(self, request: Value, tokens: Sequence[bytes]) -> Found:
        """Look a request up as a scheduler does: bind, then acquire all of it."""
        bound = await self.bind(request, tokens)
        message = Acquire(lease=bound.lease, first=0, last=len(tokens), deadline_ms=ACQUIRE_MS)
        held = (await call(self.desk.scheduler, message, Acquired)).end
        return Found(bound, held, pieces(bound.addresses))

    async def explain(self, lease: bytes) -> tuple[str, ...]:
        """What the requester is told of its miss."""
        return (await call(self.desk.scheduler, Explain(lease=lease), Explained)).reasons

    async def release(self, lease: bytes) -> None:
        """Give everything back."""
        await call(self.desk.scheduler, Release(lease=lease), Done)

    async def shards(self, lease: bytes) -> tuple[bytes, ...]:
        """Addresses of the lease's objects."""
        return pieces((await call(self.desk.scheduler, Inspect(lease=lease), Inspected)).shards)

    async def settle(self, lease: bytes) -> None:
        """Wait until the gateway has asked L2 about the lease's chunks: what it finds can be explained again after a restart."""
        await call(self.desk.scheduler, Acquire(lease=lease, first=0, last=0, deadline_ms=ACQUIRE_MS), Acquired)

    async def leave_only(self, lease: bytes, tier: str) -> bytes:
        """Have the lease's objects in ``tier`` alone; one answer each. Tries again while it is not known: stores take their time."""
        answers = b""
        for _ in range(STORE_TRIES):
            answers = (await call(self.desk.scheduler, LeaveOnly(lease=lease, tier=tier), LeftOnly)).objects
            if 2 not in answers:
                break
            await asyncio.sleep(STORE_PAUSE_S)
        return answers

    async def forget(self, lease: bytes) -> None:
        """Remove the lease's objects everywhere."""
        await call(self.desk.scheduler, Forget(lease=lease), Forgotten)

    async def store(self, lease: bytes, rank: Rank, payloads: Mapping[int, Any], *, give_up: bool = False) -> str:
        """Write one rank's rectangle of each chunk; "" or what was wrong. ``payloads``: chunk → callable of the length in bytes.

        Raises ``CannotRun`` where the pool is full.
        """
        worker = self.workers[rank]
        reserved = await call(worker, Reserve(lease=lease, chunks=tuple(payloads)), Reserved)
        written, dropped, others = [], [], set()
        for slot in reserved.slots:
            if slot.status != "slot":
                others.add(slot.status)
                continue
            data = payloads[slot.chunk](slot.length)
            self.view(reserved, slot)[:] = data
            if give_up:
                dropped.append(slot.reservation)
            else:
                written.append(WrittenPayload(reservation=slot.reservation, digest=blake3(data).digest()))
        visible = (await call(worker, Commit(written=tuple(written), aborted=tuple(dropped)), Committed)).visible
        if "full" in others:
            raise CannotRun("the pool has no room for the few objects of a run; see `kvgate status`")
        if others:
            return "another object is stored under its name already"
        return "" if visible == len(written) else "what was committed did not become visible"

    async def load(self, lease: bytes, rank: Rank, chunks: Sequence[int]) -> dict[int, tuple[bytes, bytes]]:
        """Copy one rank's rectangle of held chunks out of shared memory: chunk → bytes, and the digest promised for them."""
        plan = await call(self.workers[rank], Load(lease=lease, chunks=tuple(chunks)), LoadPlan)
        found = {slot.chunk: (bytes(self.view(plan, slot)), slot.digest) for slot in plan.slots}
        verdict = await call(self.workers[rank], FinishLoad(ticket=plan.ticket, mismatched=()), LoadVerdict)
        return found if verdict.valid else {}

    async def may_load(self, lease: bytes, chunk: int) -> bool:
        """Whether a worker is let at a chunk that the lease does not hold."""
        worker = next(iter(self.workers.values()))
        try:
            plan = await call(worker, Load(lease=lease, chunks=(chunk,)), LoadPlan)
        except GatewayRefused:
            return False
        await call(worker, FinishLoad(ticket=plan.ticket, mismatched=()), LoadVerdict)
        return True

    def view(self, of: Reserved | LoadPlan, slot: Any) -> memoryview:
        """A payload in the pool. Raises ``CannotRun``."""
        try:
            return self.desk.pools.view(of.pool, of.pool_bytes, slot.offset, slot.length)
        except PoolError as error:
            raise CannotRun(
                f"the gateway's pool can't be mapped: {error}; run this as the gateway's user, on its host"
            ) from error

    async def adapter(self, value: Value | None) -> bytes | None:
        """Register an adapter and have every rank confirm it; its digest."""
        if value is None:
            return None
        files = ArtifactSet.from_value(value)
        name = files.encode()
        if name not in self._adapters:
            registered = await call(self.desk.scheduler, RegisterAdapter(handle=self.handle, adapter=files), AdapterRegistered)
            for worker in self.workers.values():
                await call(worker, ConfirmAdapter(adapter=files), Done)
            self._adapters[name] = registered.adapter
        return self._adapters[name]


def pieces(joined: bytes) -> tuple[bytes, ...]:
    """A byte string of digests, cut up."""
    return tuple(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))
