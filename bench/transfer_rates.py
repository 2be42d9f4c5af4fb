"""Cases of the transfer bench that time moves: alone, in both directions at once, and beside products in the engine."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from bench.kernels_common import Beside
from bench.transfer_setup import DEFAULT, KINDS, Bench, require


async def rates(bench: Bench) -> None:
    """The budgets: raw and k16v8, both ways, with and without digests."""
    raw_taken: dict[str, list[float]] = {}
    total = len(bench.moves) * bench.payload_bytes
    for codec in ("raw", "k16v8"):
        for way in ("store", "load"):
            for digest in (False, True):
                taken, limit = await in_turns(bench, way, DEFAULT, codec, digest)
                name = f"transfer.{way}.{codec}{'.digest' if digest else ''}.h200"
                beside = Beside("pinned cudaMemcpyAsync", total, limit)
                if codec == "raw" and not digest:
                    raw_taken[way] = taken
                peer = Beside("raw transfer", total, raw_taken[way]) if codec != "raw" and not digest else None
                bench.report.rate(name, total, taken, limit=beside, peer=peer)


async def ways_of_copying(bench: Bench) -> None:
    """The other kinds on a GPU that is not busy; and the same kernels in the engine's own process."""
    total = len(bench.moves) * bench.payload_bytes
    for way in ("store", "load"):
        for kind in KINDS:
            if kind != DEFAULT:
                taken, limit = await in_turns(bench, way, kind, "raw", True)
                beside = Beside("pinned cudaMemcpyAsync", total, limit)
                bench.report.rate(f"transfer.{way}.raw.digest.{kind}.h200", total, taken, limit=beside)
        limit, taken = [], []
        for run in range(bench.runs + 1):
            limit.append(await bench.engine.ask("copy", way == "store", total))
            taken.append(await bench.engine.ask("worker_move", way, True))
            if not run:
                limit, taken = [], []
        bench.report.rate(f"transfer.{way}.raw.digest.worker.h200", total, taken, limit=Beside("copy", total, limit))


async def in_turns(bench: Bench, way: str, kind: str, codec: str, digest: bool) -> tuple[list[float], list[float]]:
    """Seconds of ours and of the plain copy, run by run, in turns; the first of each does not count."""
    taken, limit = [], []
    nbytes = len(bench.moves) * bench.payload_bytes
    for run in range(bench.runs + 1):
        plain = await bench.engine.ask("copy", way == "store", nbytes)
        ours = await bench.move(way, kind, codec, bench.moves, digest)
        if run:
            limit.append(plain)
            taken.append(ours)
    return taken, limit


async def both_ways(bench: Bench) -> None:
    """Stores and loads at once: neither waits for the other."""
    half = len(bench.moves) // 2
    total = half * bench.payload_bytes
    alone, beside = [], []
    for _ in range(bench.runs):
        alone.append(await bench.move("load", DEFAULT, "raw", bench.moves[:half], True))
        both = await asyncio.gather(
            bench.move("load", DEFAULT, "raw", bench.moves[:half], True),
            bench.move("store", DEFAULT, "raw", bench.moves[half:], True),
        )
        beside.append(both[0])
    bench.report.rate("transfer.load.raw.beside-store.h200", total, beside, peer=Beside("load alone", total, alone))


async def one_chunk(bench: Bench) -> None:
    """What one chunk takes, asked and answered."""
    for way in ("store", "load"):
        taken = [1e3 * await bench.move(way, DEFAULT, "raw", bench.moves[:1], True) for _ in range(5 * bench.runs)]
        bench.report.number(f"transfer.{way}.one-chunk.h200", "ms", taken)


async def interference(bench: Bench) -> None:
    """How much products in the engine slow down while chunks move all the time; and what rate those reach meanwhile."""
    for way in ("store", "load"):
        for paced in (True, False):
            await interfered(bench, DEFAULT, way, True, paced)
    await interfered(bench, "worker", "store", True, False)


async def interfered(bench: Bench, kind: str, way: str, digest: bool, paced: bool) -> None:
    """One kind of process, or the engine itself as ``worker``: products without pause, and moves in every second phase."""
    batch = 10 if bench.shape.device == "cuda" else 1
    phases = [0.3, 0.3] * 3
    if kind == "worker":
        batches, at_work, moved = await bench.engine.ask("matmul_beside_worker", batch, way, digest, phases)
    else:
        stream = asyncio.create_task(bench.engine.ask("matmul_stream", batch, sum(phases) + 0.2))
        at_work, moved = await in_phases(bench, way, kind, digest, paced, phases)
        batches = await stream
    beside = [took for ended, took in batches if any(a + 0.03 + took < ended < b for a, b in at_work)]
    alone = [took for ended, took in batches if all(not a < ended < b + 0.03 + took for a, b in at_work)]
    require(len(beside) > 3 and len(alone) > 3, f"too few products: {len(beside)} beside, {len(alone)} alone")
    # Means of what ran beside moves: the cost may fall on few of the batches.
    one = statistics.median(alone)
    thirds = [beside[at::3] for at in range(3)]
    slowdowns = [max(0.0, (statistics.mean(third) / one - 1) * 100) for third in thirds if third]
    suffix = f"{'.paced' if paced else ''}{'.digest' if digest else ''}{'' if kind == DEFAULT else f'.{kind}'}.h200"
    bench.report.number(f"transfer.interference.{way}{suffix}", "%", slowdowns, limit=3.0)
    seconds = sum(b - a for a, b in at_work)
    bench.report.rate(f"transfer.beside-matmul.{way}{suffix}", bench.payload_bytes, [seconds / max(1, moved)])


async def in_phases(
    bench: Bench, way: str, kind: str, digest: bool, paced: bool, phases: Sequence[float]
) -> tuple[list[tuple[float, float]], int]:
    """Move in every second phase; when that was, and how many chunks were moved."""
    piece = bench.moves[: 16 if paced else len(bench.moves) // 2]
    at_work: list[tuple[float, float]] = []
    moved = 0
    for number, seconds in enumerate(phases):
        until = time.monotonic() + seconds
        if number % 2 == 0:
            await asyncio.sleep(seconds)
            continue
        begin = time.monotonic()
        while time.monotonic() < until:
            await bench.move(way, kind, "raw", piece, digest, paced)
            moved += len(piece)
        at_work.append((begin, time.monotonic()))
    return at_work, moved
