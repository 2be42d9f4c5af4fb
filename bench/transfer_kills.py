"""Cases of the transfer bench in which a process is killed: calls end, nothing is lost, and what is left over is given back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

from bench.transfer_setup import DEFAULT, GENERATION, KINDS, MOVE_S, SLACK_BYTES, Bench, gpu_used_mib, require
from kvgate.transfer import MoveRefused, TransferUnavailable


def begin_stores(bench: Bench) -> list[asyncio.Task[Any]]:
    """More stores than are done before something is killed."""
    mover, handle = bench.movers[DEFAULT], bench.handles[DEFAULT, "raw"]
    return [asyncio.create_task(mover.pack(handle, GENERATION, bench.moves, MOVE_S)) for _ in range(32)]


async def killed_process(bench: Bench) -> None:
    """kill -9 of the transfer process in the middle of a store: the call says so, memory comes back, the next one serves."""
    await bench.engine.ask("fill", 4)
    for kind in KINDS:
        if kind != DEFAULT:
            await bench.movers[kind].stop()
    await bench.engine.ask("end_worker")
    before = await bench.engine.ask("free_bytes")
    mover, handle = bench.movers[DEFAULT], bench.handles[DEFAULT, "raw"]
    calls = begin_stores(bench)
    await asyncio.sleep(0.01)
    os.kill(handle.pid, signal.SIGKILL)
    ended = outcomes(await asyncio.gather(*calls, return_exceptions=True))
    print(f"   stores under way: {ended}")
    require("TransferUnavailable" in ended, "no call was lost")
    require(not runs_still(handle.pid), "the process is still there after its calls have ended")
    again = await bench.attach(DEFAULT, "raw")
    require(again.pid != handle.pid, "the same process")
    await mover.pack(again, GENERATION, bench.moves, MOVE_S)
    await bench.engine.ask("clear")
    await mover.unpack(again, GENERATION, bench.moves, MOVE_S)
    require(await bench.engine.ask("intact"), "the pages are not what they were")
    try:
        await mover.pack(handle, GENERATION, bench.moves[:1], MOVE_S)
    except TransferUnavailable:
        pass
    else:
        raise AssertionError("a handle of the lost process is still good")
    after = await bench.engine.ask("free_bytes")
    print(f"   device memory free before {before >> 20} MiB, with the next process {after >> 20} MiB")
    require(before - after < SLACK_BYTES, "device memory is lost")


async def killed_engine(bench: Bench) -> None:
    """kill -9 of the engine in the middle of a store: the process outlives it, and gives its memory back on detach."""
    mover, handle = bench.movers[DEFAULT], bench.handles[DEFAULT, "raw"]
    calls = begin_stores(bench)
    await asyncio.sleep(0.01)
    held = gpu_used_mib()
    bench.engine.kill()
    ended = outcomes(await asyncio.gather(*calls, return_exceptions=True))
    print(f"   stores under way: {ended}")
    attached = gpu_used_mib()
    await mover.detach(handle)
    detached = gpu_used_mib()
    require(runs_still(handle.pid), "the transfer process did not outlive the engine")
    try:
        await mover.pack(handle, GENERATION, bench.moves[:1], MOVE_S)
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
    require(left <= bench.used_mib + 64, "GPU memory is lost")


def outcomes(ended: Sequence[object]) -> dict[str, int]:
    """How calls ended: how many were done, and how many with which exception."""
    names = [type(one).__name__ if isinstance(one, BaseException) else "done" for one in ended]
    return {name: names.count(name) for name in sorted(set(names))}


def runs_still(pid: int) -> bool:
    """Whether there is such a process."""
    return os.path.exists(f"/proc/{pid}")  # noqa: PTH110
