"""``gateway.bytes_per_chunk``: the daemon's memory for each chunk that it knows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.cases import Budget, Case, Env
from bench.gateway import BATCH_CHUNKS, EngineSessions, Geometry, ask, daemon, engine
from bench.measure import Samples
from kvgate.protocol.messages import Bound

CHUNKS: Final = 1_000_000
QUICK_CHUNKS: Final = 20_000
LEASE_CHUNKS: Final = 8 * BATCH_CHUNKS
POOL_BYTES: Final = 64 << 20
_GEOMETRY: Final = Geometry(layers=1, kv_heads=1, head_dim=1)


def footprint(env: Env) -> Samples:
    """Private memory that grew while the daemon learnt of a million chunks, over their number.

    The chunks are really stored: the pool is small, so that old objects are evicted while the index still knows them.
    """
    wanted = QUICK_CHUNKS if env.quick else CHUNKS
    step = env.stepper(wanted // LEASE_CHUNKS)
    # The memory backend always: LMCache's own process is not the daemon's memory, and its eviction is not instant.
    with daemon(env.folder, "memory", POOL_BYTES, max_known_chunks=2 * CHUNKS) as running:
        env.versions["storage"] = running.backend
        with engine(running, _GEOMETRY) as sessions:
            for _ in learn(sessions, 2):
                pass
            before = private_bytes(running.pid)
            known = 0
            for learnt in learn(sessions, wanted // LEASE_CHUNKS):
                known += learnt
                step()
            grown = private_bytes(running.pid) - before
    return Samples(ours=[grown / known], smaller_is_better=True, note=f"{known:,} chunks")


def learn(sessions: EngineSessions, leases: int) -> Iterator[int]:
    """Store chunks nobody knows yet, a lease full at a time; gives how many."""
    for _ in range(leases):
        digests = [secrets.token_bytes(32) for _ in range(LEASE_CHUNKS)]
        bound = ask(sessions.scheduler, sessions.bind_of(digests), Bound)
        sessions.fill(bound, LEASE_CHUNKS)
        sessions.release(bound)
        yield LEASE_CHUNKS


def private_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: pool and program text left out."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


CASES: Final = (
    Case(
        name="gateway.bytes_per_chunk",
        family="footprint",
        what="daemon memory per known chunk, one million chunks",
        unit="bytes",
        run=footprint,
        budgets=(Budget("value", "<=", 256.0),),
    ),
)
