"""Times gateway-driven transfers on a GPU: a real engine process with pages of an 8B model, the real transfer process, a pool.

    PYTHONPATH=$PWD/gateway:$PWD/bindings:$PWD python3 -m bench.transfer_h200 --out FOLDER --commit HASH

Bytes are payload bytes counted once, k16v8 in the raw bytes that they stand for. The limit is one cudaMemcpyAsync of the payload bytes
between device memory and cudaMallocHost memory, in turns with ours. Every case runs even if another fails; a failure is printed
and makes the exit code 1. ``--device cpu`` runs the same on small pages without a GPU, to try the program itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from bench import records
from bench.kernels_common import Beside, Report, finish
from bench.transfer_engine import BLOCK_TOKENS, CALL_S, CHUNK_TOKENS, EngineProcess, Shape
from kvgate.storage.backend import PoolInfo, Slot
from kvgate.storage.pool import ALIGN_BYTES, PoolMapping, create_pool, unlink_pool
from kvgate.transfer import (
    MoveRefused,
    MoveSpec,
    PageExport,
    PageHandle,
    PayloadShape,
    TransferUnavailable,
    WorkerProcess,
)
from kvgate.transfer.supervisor import TransferProcesses

MOVE_S = 20.0
GENERATION = 1
SLACK_BYTES = 256 << 20
"""Device memory that may differ between two looks without anything being leaked."""
DEFAULT = "default"
CHUNK_BYTES = 32 << 20
KINDS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "group1": {"stage_bytes": 2 * CHUNK_BYTES},
    "group16": {"stage_bytes": 32 * CHUNK_BYTES},
}
"""Kinds of process that are compared: by payloads a launch moves, by their stages' size."""


class Bench:
    """One run: the engine, the pool, and a supervisor with a transfer process of each kind that is compared."""

    def __init__(self, shape: Shape, runs: int, report: Report) -> None:
        self.shape = shape
        self.runs = runs
        self.report = report
        self.failures = 0
        self.movers: dict[str, TransferProcesses] = {}
        self.handles: dict[tuple[str, str], PageHandle] = {}
        raw = shape.layers * 2 * shape.kv_heads * CHUNK_TOKENS * shape.head_dim * 2
        self.payload_bytes = raw
        slot = -(-raw // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES  # an envelope in front
        self.pool = PoolInfo(f"kvgate_bench_{os.getpid()}", slot * shape.chunks, ALIGN_BYTES, GENERATION)
        per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
        # Blocks in a scattered order: as after hours of serving, and the same in every run.
        order = [index * 7919 % shape.blocks for index in range(shape.blocks)]
        self.tables = [order[at : at + per_chunk] for at in range(0, shape.blocks, per_chunk)]
        self.moves = [
            MoveSpec(index * slot + ALIGN_BYTES, struct.pack(f"<{per_chunk}I", *table))
            for index, table in enumerate(self.tables)
        ]
        self.used_mib = gpu_used_mib()
        self.engine: EngineProcess

    async def start(self) -> None:
        """Pool, engine and transfer processes, all at once."""
        descriptor = create_pool(self.pool.name, self.pool.pool_bytes)
        os.close(descriptor)
        self.engine = await asyncio.to_thread(EngineProcess, self.shape)
        self.export = PageExport.decode(await self.engine.ask("export"))
        for kind, options in KINDS.items():
            mover = self.movers[kind] = TransferProcesses(f"bench{kind}{os.getpid()}", **options)
            await mover.start()
            mover.use_pool(self.pool)
        await asyncio.gather(*(self.attach(kind, "raw") for kind in KINDS))
        await self.attach(DEFAULT, "k16v8")
        offsets = [move.offset for move in self.moves]
        await self.engine.ask("begin_worker", self.pool.name, self.pool.pool_bytes, offsets, self.tables)
        print({handle.backend: handle.reason for handle in self.handles.values()}, flush=True)

    async def attach(self, kind: str, codec: str) -> PageHandle:
        """Attach the engine's pages in the process of that kind."""
        worker = WorkerProcess(self.engine.pid, os.getuid())
        shape = PayloadShape(chunk_tokens=CHUNK_TOKENS, codec=codec)
        handle = await self.movers[kind].attach(self.export, shape, worker, CALL_S)
        self.handles[kind, codec] = handle
        return handle

    async def stop(self) -> None:
        """End everything that still runs, and remove the pool."""
        for mover in self.movers.values():
            await mover.stop()
        if hasattr(self, "engine"):
            self.engine.kill()
        unlink_pool(self.pool.name)

    async def case(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run one case; a failure is told and does not end the others."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(CALL_S):
                await work()
        except Exception:  # noqa: BLE001
            self.failures += 1
            print(f"FAILED {work.__name__}\n{traceback.format_exc()}", flush=True)
        print(f"-- {work.__name__}: {time.perf_counter() - begin:.1f} s", flush=True)

    async def move(
        self, way: str, kind: str, codec: str, moves: Sequence[MoveSpec], digest: bool, paced: bool | None = None
    ) -> float:
        """Seconds of one pack or unpack, from asking to the answer. paced: stores are and loads are not unless it is said."""
        mover, handle = self.movers[kind], self.handles[kind, codec]
        begin = time.perf_counter()
        if way == "store":
            await mover.pack(handle, GENERATION, moves, MOVE_S, digest=digest, paced=paced is not False)
        else:
            await mover.unpack(handle, GENERATION, moves, MOVE_S, digest=digest, paced=paced is True)
        return time.perf_counter() - begin

    # The cases.

    async def right_bytes(self) -> None:
        """Payloads are what torch makes of the pages; digests are theirs; unpacking gives the pages back; every kind alike."""
        for kind in self.movers:
            handle = self.handles[kind, "raw"]
            await self.engine.ask("fill", 1)
            # In another order than the slots', so that copies of one payload and of several rows both happen.
            order = sorted(range(len(self.moves)), key=lambda index: (index % 8 == 3, index % 5 == 0, index))
            done = await self.movers[kind].pack(handle, GENERATION, [self.moves[index] for index in order], MOVE_S)
            packed = [one for _, one in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]
            some = range(0, len(self.moves), max(1, len(self.moves) // 6))
            offsets = [self.moves[index].offset for index in some]
            same = await self.engine.ask(
                "slots_equal", self.pool.name, self.pool.pool_bytes, offsets, [self.tables[index] for index in some]
            )
            require(same, f"{kind}: a payload is not what the pages hold")
            with PoolMapping.open(self.pool) as mapping:
                for index in some:
                    payload = mapping.slice(Slot(self.moves[index].offset, self.payload_bytes))
                    require(blake3(payload).digest() == packed[index].digest, f"{kind}: a digest is wrong")
                    del payload
            await self.engine.ask("clear")
            digests = await self.movers[kind].unpack(handle, GENERATION, self.moves, MOVE_S)
            require(digests == [one.digest for one in packed], f"{kind}: a load has other digests than the store")
            require(await self.engine.ask("intact"), f"{kind}: the pages are not what they were")

    async def behind_the_engine(self) -> None:
        """A store asked for while the engine still computes holds what the engine writes last, not what was there before."""
        handle = self.handles[DEFAULT, "raw"]
        await self.engine.ask("fill", 2)
        ready = await self.engine.ask("late_fill", 3, 200 if self.shape.device == "cuda" else 1)
        await self.movers[DEFAULT].pack(handle, GENERATION, self.moves, MOVE_S, ready=ready)
        await self.engine.ask("clear")
        await self.movers[DEFAULT].unpack(handle, GENERATION, self.moves, MOVE_S)
        require(await self.engine.ask("intact"), "the store did not wait for the engine")

    async def rates(self) -> None:
        """The budgets: raw and k16v8, both ways, with and without digests."""
        raw_taken: dict[str, list[float]] = {}
        total = len(self.moves) * self.payload_bytes
        for codec in ("raw", "k16v8"):
            for way in ("store", "load"):
                for digest in (False, True):
                    taken, limit = await self.in_turns(way, DEFAULT, codec, digest)
                    name = f"transfer.{way}.{codec}{'.digest' if digest else ''}.h200"
                    beside = Beside("pinned cudaMemcpyAsync", total, limit)
                    if codec == "raw" and not digest:
                        raw_taken[way] = taken
                    peer = Beside("raw transfer", total, raw_taken[way]) if codec != "raw" and not digest else None
                    self.report.rate(name, total, taken, limit=beside, peer=peer)

    async def ways_of_copying(self) -> None:
        """The other kinds on a GPU that is not busy; and the same kernels in the engine's own process."""
        total = len(self.moves) * self.payload_bytes
        for way in ("store", "load"):
            for kind in KINDS:
                if kind != DEFAULT:
                    taken, limit = await self.in_turns(way, kind, "raw", True)
                    beside = Beside("pinned cudaMemcpyAsync", total, limit)
                    self.report.rate(f"transfer.{way}.raw.digest.{kind}.h200", total, taken, limit=beside)
            limit, taken = [], []
            for run in range(self.runs + 1):
                limit.append(await self.engine.ask("copy", way == "store", total))
                taken.append(await self.engine.ask("worker_move", way, True))
                if not run:
                    limit, taken = [], []
            self.report.rate(f"transfer.{way}.raw.digest.worker.h200", total, taken, limit=Beside("copy", total, limit))

    async def in_turns(self, way: str, kind: str, codec: str, digest: bool) -> tuple[list[float], list[float]]:
        """Seconds of ours and of the plain copy, run by run, in turns; the first of each does not count."""
        taken, limit = [], []
        nbytes = len(self.moves) * self.payload_bytes
        for run in range(self.runs + 1):
            plain = await self.engine.ask("copy", way == "store", nbytes)
            ours = await self.move(way, kind, codec, self.moves, digest)
            if run:
                limit.append(plain)
                taken.append(ours)
        return taken, limit

    async def both_ways(self) -> None:
        """Stores and loads at once: neither waits for the other."""
        half = len(self.moves) // 2
        total = half * self.payload_bytes
        alone, beside = [], []
        for _ in range(self.runs):
            alone.append(await self.move("load", DEFAULT, "raw", self.moves[:half], True))
            both = await asyncio.gather(
                self.move("load", DEFAULT, "raw", self.moves[:half], True),
                self.move("store", DEFAULT, "raw", self.moves[half:], True),
            )
            beside.append(both[0])
        self.report.rate("transfer.load.raw.beside-store.h200", total, beside, peer=Beside("load alone", total, alone))

    async def one_chunk(self) -> None:
        """What one chunk takes, asked and answered."""
        for way in ("store", "load"):
            taken = [1e3 * await self.move(way, DEFAULT, "raw", self.moves[:1], True) for _ in range(5 * self.runs)]
            self.report.number(f"transfer.{way}.one-chunk.h200", "ms", taken)

    async def interference(self) -> None:
        """How much products in the engine slow down while chunks move all the time; and what rate those reach meanwhile."""
        for way in ("store", "load"):
            for paced in (True, False):
                await self.interfered(DEFAULT, way, True, paced)
        await self.interfered("worker", "store", True, False)

    async def interfered(self, kind: str, way: str, digest: bool, paced: bool) -> None:
        """One kind of process, or the engine itself as ``worker``: products without pause, and moves in every second phase."""
        batch = 10 if self.shape.device == "cuda" else 1
        phases = [0.3, 0.3] * 3
        if kind == "worker":
            batches, at_work, moved = await self.engine.ask("matmul_beside_worker", batch, way, digest, phases)
        else:
            stream = asyncio.create_task(self.engine.ask("matmul_stream", batch, sum(phases) + 0.2))
            at_work, moved = await self.in_phases(way, kind, digest, paced, phases)
            batches = await stream
        beside = [took for ended, took in batches if any(a + 0.03 + took < ended < b for a, b in at_work)]
        alone = [took for ended, took in batches if all(not a < ended < b + 0.03 + took for a, b in at_work)]
        require(len(beside) > 3 and len(alone) > 3, f"too few products: {len(beside)} beside, {len(alone)} alone")
        # Means of what ran beside moves: the cost may fall on few of the batches.
        one = statistics.median(alone)
        thirds = [beside[at::3] for at in range(3)]
        slowdowns = [max(0.0, (statistics.mean(third) / one - 1) * 100) for third in thirds if third]
        suffix = f"{'.paced' if paced else ''}{'.digest' if digest else ''}{'' if kind == DEFAULT else f'.{kind}'}.h200"
        self.report.number(f"transfer.interference.{way}{suffix}", "%", slowdowns, limit=3.0)
        seconds = sum(b - a for a, b in at_work)
        self.report.rate(f"transfer.beside-matmul.{way}{suffix}", self.payload_bytes, [seconds / max(1, moved)])

    async def in_phases(
        self, way: str, kind: str, digest: bool, paced: bool, phases: Sequence[float]
    ) -> tuple[list[tuple[float, float]], int]:
        """Move in every second phase; when that was, and how many chunks were moved."""
        piece = self.moves[: 16 if paced else len(self.moves) // 2]
        at_work: list[tuple[float, float]] = []
        moved = 0
        for number, seconds in enumerate(phases):
            until = time.monotonic() + seconds
            if number % 2 == 0:
                await asyncio.sleep(seconds)
                continue
            begin = time.monotonic()
            while time.monotonic() < until:
                await self.move(way, kind, "raw", piece, digest, paced)
                moved += len(piece)
            at_work.append((begin, time.monotonic()))
        return at_work, moved

    def begin_stores(self) -> list[asyncio.Task[Any]]:
        """More stores than are done before something is killed."""
        mover, handle = self.movers[DEFAULT], self.handles[DEFAULT, "raw"]
        return [asyncio.create_task(mover.pack(handle, GENERATION, self.moves, MOVE_S)) for _ in range(32)]

    async def killed_process(self) -> None:
        """kill -9 of the transfer process in the middle of a store: the call says so, memory comes back, the next one serves."""
        await self.engine.ask("fill", 4)
        for kind in KINDS:
            if kind != DEFAULT:
                await self.movers[kind].stop()
        await self.engine.ask("end_worker")
        before = await self.engine.ask("free_bytes")
        mover, handle = self.movers[DEFAULT], self.handles[DEFAULT, "raw"]
        calls = self.begin_stores()
        await asyncio.sleep(0.01)
        os.kill(handle.pid, signal.SIGKILL)
        ended = outcomes(await asyncio.gather(*calls, return_exceptions=True))
        print(f"   stores under way: {ended}")
        require("TransferUnavailable" in ended, "no call was lost")
        require(not runs_still(handle.pid), "the process is still there after its calls have ended")
        again = await self.attach(DEFAULT, "raw")
        require(again.pid != handle.pid, "the same process")
        await mover.pack(again, GENERATION, self.moves, MOVE_S)
        await self.engine.ask("clear")
        await mover.unpack(again, GENERATION, self.moves, MOVE_S)
        require(await self.engine.ask("intact"), "the pages are not what they were")
        try:
            await mover.pack(handle, GENERATION, self.moves[:1], MOVE_S)
        except TransferUnavailable:
            pass
        else:
            raise AssertionError("a handle of the lost process is still good")
        after = await self.engine.ask("free_bytes")
        print(f"   device memory free before {before >> 20} MiB, with the next process {after >> 20} MiB")
        require(before - after < SLACK_BYTES, "device memory is lost")

    async def killed_engine(self) -> None:
        """kill -9 of the engine in the middle of a store: the process outlives it, and gives its memory back on detach."""
        mover, handle = self.movers[DEFAULT], self.handles[DEFAULT, "raw"]
        calls = self.begin_stores()
        await asyncio.sleep(0.01)
        held = gpu_used_mib()
        self.engine.kill()
        ended = outcomes(await asyncio.gather(*calls, return_exceptions=True))
        print(f"   stores under way: {ended}")
        attached = gpu_used_mib()
        await mover.detach(handle)
        detached = gpu_used_mib()
        require(runs_still(handle.pid), "the transfer process did not outlive the engine")
        try:
            await mover.pack(handle, GENERATION, self.moves[:1], MOVE_S)
        except (TransferUnavailable, MoveRefused):
            pass
        else:
            raise AssertionError("detached pages are still moved")
        await mover.stop()
        left = gpu_used_mib()
        print(
            f"   GPU memory in use: {held} MiB with the engine, {attached} when it was dead and its pages attached, "
            f"{detached} when they were detached, {left} when the transfer process had ended"
        )
        require(not runs_still(handle.pid), "the transfer process is still there")
        require(left <= self.used_mib + 64, "GPU memory is lost")


def outcomes(ended: Sequence[object]) -> dict[str, int]:
    """How calls ended: how many were done, and how many with which exception."""
    names = [type(one).__name__ if isinstance(one, BaseException) else "done" for one in ended]
    return {name: names.count(name) for name in sorted(set(names))}


def runs_still(pid: int) -> bool:
    """Whether there is such a process."""
    return os.path.exists(f"/proc/{pid}")  # noqa: PTH110


def require(holds: object, text: str) -> None:
    """``AssertionError`` unless it holds: a bench has no -O."""
    if not holds:
        raise AssertionError(text)


def gpu_used_mib() -> int:
    """Device memory in use as nvidia-smi says; 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(done.stdout.split()[0])


async def run(shape: Shape, runs: int, report: Report, only: Sequence[str]) -> int:
    """All cases; how many failed."""
    bench = Bench(shape, runs, report)
    try:
        begin = time.perf_counter()
        await bench.start()
        print(f"-- start: {time.perf_counter() - begin:.1f} s", flush=True)
        report.machine = {**report.machine, **await bench.engine.ask("describe")}
        for work in (
            bench.right_bytes,
            bench.behind_the_engine,
            bench.rates,
            bench.ways_of_copying,
            bench.both_ways,
            bench.one_chunk,
            bench.interference,
            bench.killed_process,
            bench.killed_engine,
        ):
            if not only or work.__name__ in only:
                await bench.case(work)
    finally:
        await bench.stop()
    left = [name for name in os.listdir("/dev/shm") if name.startswith(bench.pool.name)]  # noqa: PTH208
    print(f"left in /dev/shm: {left or 'nothing'}; GPU memory in use {bench.used_mib} MiB before, {gpu_used_mib()} MiB after")
    return bench.failures + bool(left)


def main() -> int:
    """Writes the records to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    options = parser.parse_args()
    if options.device == "cuda":
        shape = Shape("cuda", layers=32, kv_heads=8, head_dim=128, chunks=128, matmul=8192)
    else:
        shape = Shape("cpu", layers=4, kv_heads=2, head_dim=64, chunks=16, matmul=512)
    report = Report("python -m bench.transfer_h200", records.machine(), records.versions(), options.commit or records.commit())
    try:
        failures = asyncio.run(run(shape, options.runs, report, options.only))
    finally:
        if report.records:
            finish(report, options.out, "transferh200")
    print("all cases passed" if not failures else f"{failures} FAILED")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
