"""One run of the transfer bench: an engine process with pages, a pool, and transfer processes of each kind that is compared."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.kernels_common import Report
from bench.transfer_engine import BLOCK_TOKENS, CALL_S, CHUNK_TOKENS, EngineProcess, Shape
from kvgate.storage.backend import PoolInfo
from kvgate.storage.pool import ALIGN_BYTES, create_pool, unlink_pool
from kvgate.transfer import MoveSpec, PageExport, PageHandle, PayloadShape, WorkerProcess
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

    async def case(self, work: Callable[[Bench], Awaitable[None]]) -> None:
        """Run one case; a failure is told and does not end the others."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(CALL_S):
                await work(self)
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
