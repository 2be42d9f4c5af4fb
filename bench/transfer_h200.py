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
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from bench import records
from bench.kernels_common import Report, finish
from bench.transfer_engine import Shape
from bench.transfer_kills import killed_engine, killed_process
from bench.transfer_rates import both_ways, interference, one_chunk, rates, ways_of_copying
from bench.transfer_setup import DEFAULT, GENERATION, MOVE_S, Bench, gpu_used_mib, require
from kvgate.storage.backend import Slot
from kvgate.storage.pool import PoolMapping


async def right_bytes(bench: Bench) -> None:
    """Payloads are what torch makes of the pages; digests are theirs; unpacking gives the pages back; every kind alike."""
    for kind in bench.movers:
        handle = bench.handles[kind, "raw"]
        await bench.engine.ask("fill", 1)
        # In another order than the slots', so that copies of one payload and of several rows both happen.
        order = sorted(range(len(bench.moves)), key=lambda index: (index % 8 == 3, index % 5 == 0, index))
        done = await bench.movers[kind].pack(handle, GENERATION, [bench.moves[index] for index in order], MOVE_S)
        packed = [one for _, one in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]
        some = range(0, len(bench.moves), max(1, len(bench.moves) // 6))
        offsets = [bench.moves[index].offset for index in some]
        same = await bench.engine.ask(
            "slots_equal", bench.pool.name, bench.pool.pool_bytes, offsets, [bench.tables[index] for index in some]
        )
        require(same, f"{kind}: a payload is not what the pages hold")
        with PoolMapping.open(bench.pool) as mapping:
            for index in some:
                payload = mapping.slice(Slot(bench.moves[index].offset, bench.payload_bytes))
                require(blake3(payload).digest() == packed[index].digest, f"{kind}: a digest is wrong")
                del payload
        await bench.engine.ask("clear")
        digests = await bench.movers[kind].unpack(handle, GENERATION, bench.moves, MOVE_S)
        require(digests == [one.digest for one in packed], f"{kind}: a load has other digests than the store")
        require(await bench.engine.ask("intact"), f"{kind}: the pages are not what they were")


async def behind_the_engine(bench: Bench) -> None:
    """A store asked for while the engine still computes holds what the engine writes last, not what was there before."""
    handle = bench.handles[DEFAULT, "raw"]
    await bench.engine.ask("fill", 2)
    ready = await bench.engine.ask("late_fill", 3, 200 if bench.shape.device == "cuda" else 1)
    await bench.movers[DEFAULT].pack(handle, GENERATION, bench.moves, MOVE_S, ready=ready)
    await bench.engine.ask("clear")
    await bench.movers[DEFAULT].unpack(handle, GENERATION, bench.moves, MOVE_S)
    require(await bench.engine.ask("intact"), "the store did not wait for the engine")


async def run(shape: Shape, runs: int, report: Report, only: Sequence[str]) -> int:
    """All cases; how many failed."""
    bench = Bench(shape, runs, report)
    try:
        begin = time.perf_counter()
        await bench.start()
        print(f"-- start: {time.perf_counter() - begin:.1f} s", flush=True)
        report.machine = {**report.machine, **await bench.engine.ask("describe")}
        for work in (
            right_bytes,
            behind_the_engine,
            rates,
            ways_of_copying,
            both_ways,
            one_chunk,
            interference,
            killed_process,
            killed_engine,
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
