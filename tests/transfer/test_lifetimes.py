"""How long transfer processes live: none that nobody knows of, none for nobody, and none that can't reach the pool without a word."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from kvgate.storage.backend import PoolInfo
from kvgate.storage.pool import ALIGN_BYTES
from kvgate.transfer import TransferUnavailable
from kvgate.transfer.child import Child
from kvgate.transfer.limits import Limits
from kvgate.transfer.supervisor import TransferProcesses, end_left_behind
from tests.transfer.conftest import Served
from tests.transfer.harness import ME, RAW, SOON_S, Pages, Pool, export_on, make_mover, moves, pid_of, runs
from tests.transfer.harness import until as wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NO_GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must come true, while the loop runs."""
    await asyncio.to_thread(wait_until, holds)


async def test_a_device_whose_process_is_dying_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device comes while one is about to start its process again: the new process is known, and ends with the mover."""
    owner, dead = secrets.token_hex(16), asyncio.Event()
    bury = Child.bury

    async def slowly(child: Child) -> bool:
        await dead.wait()
        return await bury(child)

    mover = TransferProcesses(owner, limits=Limits(restart_pause_s=0.01))
    pages = Pages()
    handle = await mover.attach(pages.export, RAW, ME, SOON_S)
    monkeypatch.setattr(Child, "bury", slowly)
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: not pid_of(mover))
    with pytest.raises(TransferUnavailable):
        await mover.attach(export_on(NO_GPU, pages.export), RAW, ME, 0.0)
    dead.set()
    assert set(mover.status()) == {"cpu", NO_GPU}
    await until(lambda: pid_of(mover) not in (0, handle.pid))
    await mover.stop()
    assert await asyncio.to_thread(end_left_behind, owner) == 0


async def test_a_process_that_was_started_again_for_nobody_ends_when_idle() -> None:
    """Its engines died with the one before and none comes back: it does not stay for ever."""
    mover = make_mover(limits=Limits(restart_pause_s=0.01, idle_s=0.2))
    pages = Pages()
    handle = await mover.attach(pages.export, RAW, ME, SOON_S)
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: pid_of(mover) not in (0, handle.pid))
    again = pid_of(mover)
    await until(lambda: not runs(again))
    assert mover.status()["cpu"]["restarts"] == 1
    await mover.stop()


async def test_pages_that_come_while_an_idle_process_ends_get_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not turned away, and not attached in a process that has been told to end."""
    told, ask = asyncio.Event(), Child.ask

    async def ask_and_tell(child: Child, op: int, body: object, deadline_s: float) -> object:
        if op == 8:  # STOP
            told.set()
        return await ask(child, op, body, deadline_s)  # type: ignore[arg-type]

    mover = make_mover(limits=Limits(idle_s=0.05))
    pages = Pages()
    old = await mover.attach(pages.export, RAW, ME, SOON_S)
    monkeypatch.setattr(Child, "ask", ask_and_tell)
    await mover.detach(old)
    await asyncio.wait_for(told.wait(), SOON_S)
    new = await mover.attach(pages.export, RAW, ME, SOON_S)
    assert new.pid != old.pid
    assert not runs(old.pid)
    await mover.stop()


async def test_a_pool_that_cannot_be_mapped_is_told_once(served: Served, pool: Pool) -> None:
    """In the log, with the reason and what to do, and in the status until another one is mapped; moves fail meanwhile."""
    status = served.mover.status
    with capture_logs() as logs:
        served.mover.use_pool(PoolInfo("kvgate_test_none", ALIGN_BYTES, ALIGN_BYTES, 6))
        for _ in range(3):
            with pytest.raises(TransferUnavailable):
                await served.mover.pack(served.handle, 6, moves(1), SOON_S)
    told = [entry for entry in logs if entry["event"] == "transfer.pool_not_mapped"]
    assert len(told) == 1
    assert "No such file" in told[0]["reason"]
    assert "pool_bytes" in told[0]["remedy"]
    assert "kvgate_test_none" not in str(told)
    assert status()["cpu"]["pool"] == "failed"
    assert "No such file" in str(status()["cpu"]["problem"])
    served.mover.use_pool(pool.info)
    await served.mover.pack(served.handle, 7, moves(1), SOON_S)
    assert status()["cpu"]["pool"] == "mapped"
    assert "problem" not in status()["cpu"]


async def test_a_pool_that_was_replaced_meanwhile_is_no_fault(served: Served, pool: Pool) -> None:
    """What is no longer wanted need not be mapped: nothing is logged, and the one that is wanted serves."""
    with capture_logs() as logs:
        served.mover.use_pool(PoolInfo("kvgate_test_none", ALIGN_BYTES, ALIGN_BYTES, 6))
        served.mover.use_pool(pool.info)
        await served.mover.pack(served.handle, 7, moves(1), SOON_S)
    assert not [entry for entry in logs if entry["event"] == "transfer.pool_not_mapped"]
    assert "problem" not in served.mover.status()["cpu"]


async def test_a_process_that_does_not_start_is_a_problem_in_the_status() -> None:
    """The operator sees why engines miss, without searching the log."""
    mover = make_mover(python="/bin/false")
    with pytest.raises(TransferUnavailable):
        await mover.attach(Pages().export, RAW, ME, SOON_S)
    assert "does not start" in str(mover.status()["cpu"]["problem"])
    await mover.stop()
