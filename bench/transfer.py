"""``store.*`` and ``load.*``: payload bytes through the whole path, against LMCache's engine-driven client and plain copies."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

from bench import peer
from bench.cases import Budget, Case, Env, Skipped
from bench.gateway import ANY_DIGEST, CHUNK_TOKENS, Daemon, EngineSessions, Geometry, ask, daemon, engine
from bench.limits import CopyLimit
from bench.lookup import prompt
from bench.measure import Samples, Timed, gigabytes_per_second, interleave
from kvgate.client.pools import PoolMappings
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    Bound,
    Commit,
    Committed,
    FinishLoad,
    Load,
    LoadPlan,
    LoadVerdict,
    Reserve,
    Reserved,
    WrittenPayload,
)

CHUNKS: Final = 8
LARGE: Final = Geometry(layers=8, kv_heads=8, head_dim=128)
"""8 MiB a chunk: 64 MiB a call."""
SMALL: Final = Geometry(layers=8, kv_heads=2, head_dim=64)
"""1 MiB a chunk, as the test model has it."""
REAL: Final = Geometry(layers=32, kv_heads=8, head_dim=128)
"""32 MiB a chunk, as Llama-3-8B has it: 256 MiB a call."""
BLOCK_TOKENS: Final = 128
"""What vLLM's CPU platform takes by default."""
POOL_BYTES: Final = 1 << 30
PEER_POOL_BYTES: Final = 5 << 29
LIMIT_BYTES: Final = 512 << 20
FULL_S: Final = 1.5
"""LMCache looks once a second whether it has to evict."""
FULL_TRIES: Final = 10


@contextmanager
def running_gateway(env: Env) -> Iterator[Daemon]:
    """The gateway of this family."""
    with daemon(env.folder, env.backend, POOL_BYTES) as running:
        env.versions["storage"] = running.backend
        yield running


@contextmanager
def running_peer(env: Env) -> Iterator[peer.Server]:
    """The peer of this family. Its pool is larger: it evicts in the background, and a full one refuses."""
    with peer.server(env.folder, PEER_POOL_BYTES) as running:
        yield running


class OurWorker:
    """A worker with pages in vLLM's CPU vector layout, half of them in use, in no order."""

    def __init__(self, sessions: EngineSessions, geometry: Geometry) -> None:
        import torch

        from kvgate_kernels import ChunkMove, Packer, PageGeometry, PageLayout, PayloadGeometry

        self._move = ChunkMove
        self.sessions = sessions
        self.worker = sessions.workers[0]
        per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
        blocks = 2 * CHUNKS * per_chunk
        pages = PageGeometry(
            PageLayout.CPU_VEC, geometry.layers, geometry.kv_heads, geometry.head_dim, BLOCK_TOKENS, "bfloat16"
        )
        shape = (blocks, geometry.kv_heads, BLOCK_TOKENS, 2 * geometry.head_dim)
        tensors = [torch.randn(shape).to(torch.bfloat16) for _ in range(geometry.layers)]
        self.packer = Packer(pages, PayloadGeometry.of(pages, CHUNK_TOKENS), tensors)
        order = random.Random(1).sample(range(blocks), blocks)
        self._tables = [order[n * per_chunk : (n + 1) * per_chunk] for n in range(2 * CHUNKS)]
        self._pools = PoolMappings()

    def store(self, bound: Bound, *, digest: bool) -> None:
        """reserve → pack → commit."""
        reserved = ask(self.worker, Reserve(lease=bound.lease, chunks=tuple(range(CHUNKS))), Reserved)
        moves = [
            self._move(self._pools.view(reserved.pool, reserved.pool_bytes, slot.offset, slot.length), table)
            for slot, table in zip(reserved.slots, self._tables[:CHUNKS], strict=True)
        ]
        digests = self.packer.pack(moves, digest=digest) or [ANY_DIGEST] * CHUNKS
        written = tuple(
            WrittenPayload(reservation=slot.reservation, digest=one) for slot, one in zip(reserved.slots, digests, strict=True)
        )
        if ask(self.worker, Commit(written=written, aborted=()), Committed).visible != CHUNKS:
            raise RuntimeError("not every chunk was stored")

    def load(self, bound: Bound, *, digest: bool) -> None:
        """acquire → load → unpack → finish."""
        acquire = Acquire(lease=bound.lease, first=0, last=CHUNKS, deadline_ms=10_000)
        if ask(self.sessions.scheduler, acquire, Acquired).end != CHUNKS:
            raise RuntimeError("not every chunk was acquired")
        plan = ask(self.worker, Load(lease=bound.lease, chunks=tuple(range(CHUNKS))), LoadPlan)
        moves = [
            self._move(self._pools.view(plan.pool, plan.pool_bytes, slot.offset, slot.length), table)
            for slot, table in zip(plan.slots, self._tables[CHUNKS:], strict=True)
        ]
        digests = self.packer.unpack(moves, digest=digest)
        if digest and digests != [slot.digest for slot in plan.slots]:
            raise RuntimeError("a payload did not have its digest")
        if not ask(self.worker, FinishLoad(ticket=plan.ticket, mismatched=()), LoadVerdict).valid:
            raise RuntimeError("the holds were lost")

    def touch_pool(self, bound: Bound) -> None:
        """Map every page of the pool into this process now, so that no timed copy pays for it."""
        reserved = ask(self.worker, Reserve(lease=bound.lease, chunks=(0,)), Reserved)
        view = self._pools.view(reserved.pool, reserved.pool_bytes, 0, reserved.pool_bytes)
        for at in range(0, len(view), 4096):
            view[at]
        view.release()
        opened = tuple(slot.reservation for slot in reserved.slots if slot.status == "slot")
        self.worker.call(Commit(written=(), aborted=opened), 10.0)

    def close(self) -> None:
        """Unmap."""
        self.packer.close()
        self._pools.close()


@dataclass(slots=True)
class Both:
    """Our worker and, where it is installed, the peer's client, for one geometry."""

    ours: OurWorker
    theirs: peer.Client | None
    chunks: list[Any]  # the peer's payloads: contiguous, in its stored order already
    note: str
    prompts: count[int]


def both(geometry: Geometry) -> Any:
    """The fixture of one geometry."""

    @contextmanager
    def make(env: Env) -> Iterator[Both]:
        import torch

        with engine(env.shared("gateway", running_gateway), geometry, block_tokens=BLOCK_TOKENS) as sessions:
            ours = OurWorker(sessions, geometry)
            chosen = ours.packer.describe()
            env.versions["kernels"] = f"{chosen.name}, {chosen.threads} threads"
            bound = sessions.bind(prompt(CHUNKS * CHUNK_TOKENS, 0))
            ours.touch_pool(bound)
            sessions.release(bound)
            shape = (2, geometry.layers, CHUNK_TOKENS, geometry.kv_heads * geometry.head_dim)
            if geometry is REAL:
                # The peer's pool would be full after a few calls, and wait for its eviction most of the time.
                yield Both(ours, None, [], "no peer at this size", count(1))
                ours.close()
                return
            chunks = [torch.randn(shape).to(torch.bfloat16) for _ in range(CHUNKS)]
            try:
                server = env.shared("peer", running_peer)
            except Skipped as why:
                yield Both(ours, None, chunks, str(why), count(1))
            else:
                with peer.client(server, geometry) as theirs:
                    theirs.touch_pool()
                    yield Both(ours, theirs, chunks, "", count(1))
            ours.close()

    return make


def our_store(pair: Both, *, digest: bool) -> Timed:
    """New chunks every time; binding their request does not count: the scheduler did that before."""

    def one() -> float:
        bound = pair.ours.sessions.bind(prompt(CHUNKS * CHUNK_TOKENS, next(pair.prompts)))
        begin = time.perf_counter()
        pair.ours.store(bound, digest=digest)
        seconds = time.perf_counter() - begin
        pair.ours.sessions.release(bound)
        return seconds

    return one


def our_load(pair: Both, *, digest: bool) -> Timed:
    """Loads what was stored just before; only the load counts."""

    def one() -> float:
        bound = pair.ours.sessions.bind(prompt(CHUNKS * CHUNK_TOKENS, next(pair.prompts)))
        pair.ours.store(bound, digest=digest)
        begin = time.perf_counter()
        pair.ours.load(bound, digest=digest)
        seconds = time.perf_counter() - begin
        pair.ours.sessions.release(bound)
        return seconds

    return one


def peer_stored(pair: Both, theirs: peer.Client) -> tuple[tuple[int, ...], float]:
    """Store new chunks; the tokens, and the seconds that prepare → copy → commit took. Waits where the pool is full."""
    for _ in range(FULL_TRIES):
        tokens = tuple(prompt(CHUNKS * CHUNK_TOKENS, number := next(pair.prompts)))
        begin = time.perf_counter()
        try:
            theirs.store(tokens, f"store-{number}", pair.chunks)
        except peer.PoolFull:
            time.sleep(FULL_S)
            continue
        finally:
            seconds = time.perf_counter() - begin
            theirs.end(f"store-{number}")
        return tokens, seconds
    raise RuntimeError("LMCache's pool stayed full")


def peer_store(pair: Both, theirs: peer.Client) -> Timed:
    """prepare → copy → commit of new chunks."""
    return lambda: peer_stored(pair, theirs)[1]


def peer_load(pair: Both, theirs: peer.Client) -> Timed:
    """lookup → wait → prepare → copy → commit of what was stored just before."""
    import torch

    targets = [torch.zeros_like(chunk) for chunk in pair.chunks]
    requests = count()

    def one() -> float:
        tokens, _ = peer_stored(pair, theirs)
        request = f"load-{theirs.instance}-{next(requests)}"
        begin = time.perf_counter()
        if theirs.lookup(tokens, request) != CHUNKS:
            raise RuntimeError("LMCache did not find what it stored")
        theirs.retrieve(tokens, request, targets)
        seconds = time.perf_counter() - begin
        theirs.end(request)
        return seconds

    return one


@contextmanager
def paged_peer(env: Env) -> Iterator[tuple[peer.Paged, list[list[int]]]]:
    """LMCache's worker with pages of the large geometry, and two tables of blocks in no order."""
    pair = env.shared(f"both-{LARGE}", both(LARGE))
    if pair.theirs is None:
        raise Skipped(pair.note)
    half = CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
    order = random.Random(1).sample(range(1, 2 * half + 1), 2 * half)  # block 0 is vLLM's null block
    made = pair.theirs.paged(LARGE, 2 * half + 1, BLOCK_TOKENS)
    try:
        yield made, [order[:half], order[half:]]
    finally:
        made.close()


def peer_pages(env: Env, pair: Both, *, store: bool) -> Timed:
    """What LMCache's own worker does from pages and back."""
    theirs, (source, target) = env.shared("paged", paged_peer)
    owner = pair.theirs
    assert owner is not None, "paged_peer has looked"

    def one() -> float:
        for _ in range(FULL_TRIES):
            tokens, request = tuple(prompt(CHUNKS * CHUNK_TOKENS, number := next(pair.prompts))), f"paged-{number}"
            try:
                begin = time.perf_counter()
                theirs.store(tokens, request, source)
                stored = time.perf_counter()
                owner.end(request)
                if store:
                    theirs.require(tokens, f"{request}-check", CHUNKS)
                    return stored - begin
                begin = time.perf_counter()
                theirs.load(tokens, f"{request}-load", target)
                loaded = time.perf_counter()
                owner.end(f"{request}-load")
            except peer.PoolFull:
                time.sleep(FULL_S)
            else:
                return loaded - begin
        raise RuntimeError("LMCache's pool stayed full")

    return one


def transfer(env: Env, geometry: Geometry, *, store: bool, digest: bool, paged: bool = False) -> Samples:
    """One direction, one size; ``paged``: the peer moves from and to pages, as we do."""
    pair = env.shared(f"both-{geometry}", both(geometry))
    sides = {"ours": (our_store if store else our_load)(pair, digest=digest)}
    if paged:
        sides["peer"] = peer_pages(env, pair, store=store)
    elif pair.theirs is not None:
        sides["peer"] = (peer_store if store else peer_load)(pair, pair.theirs)
    repeats = {LARGE: 3, REAL: 1}.get(geometry, 10)
    plan = env.plan(runs=15, repeats=repeats, warmup=1)
    with CopyLimit(CHUNKS, geometry.chunk_bytes, LIMIT_BYTES, out=store, hashed=digest) as limit:
        sides["limit"] = limit.best()
        taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    speed = partial(gigabytes_per_second, CHUNKS * geometry.chunk_bytes)
    moves = "its own worker from and to pages" if paged else "contiguous copy"
    return Samples(
        ours=speed(taken["ours"]),
        smaller_is_better=False,
        peer=peer.name(f"engine-driven, shared memory, {moves}, no digest") if "peer" in taken else "",
        peers=speed(taken.get("peer", ())),
        limits=speed(taken["limit"]),
        note=pair.note,
    )


def _cases(geometry: Geometry, suffix: str, size: str, *, budget: bool) -> Iterator[Case]:
    for digest, kind in ((False, "raw"), (True, "verified")):
        for store, direction in ((True, "store"), (False, "load")):
            path = "reserve → pack → commit" if store else "acquire → load → unpack → finish"
            bounds = [Budget("limit_ratio", ">=", 0.85)] + ([] if digest or geometry is REAL else [Budget("ratio", ">", 1.0)])
            yield Case(
                name=f"{direction}.{kind}{suffix}",
                family="transfer",
                what=f"{path}, 8 chunks of {size}, {'with' if digest else 'without'} payload digest",
                unit="GB/s",
                run=partial(transfer, geometry=geometry, store=store, digest=digest),
                budgets=tuple(bounds) if budget else (),
                limit="BLAKE3 while copying, best of two ways on all cores" if digest else "memcpy, best of one and all cores",
            )


def _paged_cases() -> Iterator[Case]:
    for store, direction in ((True, "store"), (False, "load")):
        yield Case(
            name=f"{direction}.raw.pages",
            family="transfer",
            what="the same, against LMCache's own worker that gathers and scatters pages too",
            unit="GB/s",
            run=partial(transfer, geometry=LARGE, store=store, digest=False, paged=True),
            limit="memcpy, best of one and all cores",
        )


CASES: Final = (
    *_cases(LARGE, "", "8 MiB", budget=True),
    *_paged_cases(),
    *_cases(SMALL, ".1mib", "1 MiB", budget=False),
    *_cases(REAL, ".32mib", "32 MiB", budget=True),
)
