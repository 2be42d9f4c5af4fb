"""Processes that die, hang, or are left behind: slots are safe when a call has ended, and nothing is leaked."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from kvgate.storage.backend import PoolInfo
from kvgate.transfer import (
    MoveRefused,
    PagesRefused,
    SlotsInDoubt,
    TransferBusy,
    TransferUnavailable,
    WorkerProcess,
)
from kvgate.transfer.child import Child
from kvgate.transfer.limits import Limits
from kvgate.transfer.supervisor import TransferProcesses, end_left_behind
from tests.transfer.conftest import Served
from tests.transfer.harness import (
    ME,
    RAW,
    SOON_S,
    Pages,
    Pool,
    blocks_of,
    daemon,
    export_on,
    long_store,
    make_mover,
    moves,
    pid_of,
    runs,
    shared_maps,
    until,
    worker,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(served: Served) -> AsyncIterator[Served]:
    """The module's process, attached anew where a test before has ended it."""
    served.mover.use_pool(served.pool.info)
    served.handle = await served.mover.attach(served.pages.export, RAW, ME, SOON_S)
    yield served
    await served.mover.detach(served.handle)


async def test_killed_process_loses_its_calls_and_comes_back(mortal: Served) -> None:
    """After a kill -9 every call under way fails once the process is gone; handles are void; the next process serves."""
    lost: list[tuple[str, int]] = []
    mortal.mover.on_lost(lambda device, incarnation: lost.append((device, incarnation)))
    mortal.pages.fill(1)
    calls = [asyncio.create_task(mortal.mover.pack(mortal.handle, 7, long_store(), SOON_S)) for _ in range(3)]
    await asyncio.sleep(0.05)
    os.kill(mortal.handle.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(TransferUnavailable):
            await call
    assert not runs(mortal.handle.pid)
    assert lost == [("cpu", mortal.handle.incarnation)]
    with pytest.raises(TransferUnavailable):
        await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
    old, mortal.handle = mortal.handle, await mortal.mover.attach(mortal.pages.export, RAW, ME, SOON_S)
    assert mortal.handle.incarnation != old.incarnation
    await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
    assert mortal.pool.payload(0) == mortal.pages.payload(blocks_of(0))
    with pytest.raises(TransferUnavailable):
        await mortal.mover.pack(old, 7, moves(1), SOON_S)
    assert int(mortal.mover.status()["cpu"]["restarts"]) >= 1


async def test_process_that_hangs_is_killed(mortal: Served) -> None:
    """A move without an answer by its deadline ends the process, and fails only when that is gone."""
    os.kill(mortal.handle.pid, signal.SIGSTOP)
    with pytest.raises(TransferUnavailable) as failed:
        await mortal.mover.pack(mortal.handle, 7, moves(1), 0.1)
    assert not isinstance(failed.value, SlotsInDoubt)
    assert not runs(mortal.handle.pid)


async def test_detach_of_a_lost_process_is_nothing(mortal: Served) -> None:
    """Detaching what went with its process neither fails nor waits."""
    os.kill(mortal.handle.pid, signal.SIGKILL)
    await mortal.mover.detach(mortal.handle)
    until(lambda: not runs(mortal.handle.pid))


async def test_pages_outlive_their_worker(mortal: Served) -> None:
    """A worker that is killed leaves its pages to the process until they are detached; then they are gone."""
    with worker() as (process, export):
        mapped = shared_maps(mortal.handle.pid)
        handle = await mortal.mover.attach(export, RAW, WorkerProcess(process.pid, os.getuid()), SOON_S)
        store = asyncio.create_task(mortal.mover.pack(handle, 7, long_store(), SOON_S))
        await asyncio.sleep(0.02)
        process.kill()
        process.wait()
        assert len(await store) == len(long_store())
        await mortal.mover.pack(handle, 7, moves(2), SOON_S)
        mortal.pages.fill(0)  # what the worker's pages held
        assert mortal.pool.payload(1) == mortal.pages.payload(blocks_of(1))
        await mortal.mover.detach(handle)
        assert shared_maps(mortal.handle.pid) == mapped
        with pytest.raises(PagesRefused):
            await mortal.mover.attach(export, RAW, WorkerProcess(process.pid, os.getuid()), SOON_S)


async def test_memory_that_shrinks_costs_the_process_and_no_more(mortal: Served) -> None:
    """A worker that takes its memory away under a move ends the process; the next one serves the others."""
    pages = Pages()
    handle = await mortal.mover.attach(pages.export, RAW, ME, SOON_S)
    os.truncate(int(pages.export.storages[0].handle), 4096)
    with pytest.raises(TransferUnavailable):
        await mortal.mover.pack(handle, 7, moves(1), SOON_S)
    mortal.handle = await mortal.mover.attach(mortal.pages.export, RAW, ME, SOON_S)
    await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)


async def test_new_pool_takes_over(mortal: Served) -> None:
    """A move under way ends in the pool it began in; the old pool's slots are void then, and its memory goes with it."""
    other = Pool(8)
    try:
        mortal.pages.fill(5)
        store = asyncio.create_task(mortal.mover.pack(mortal.handle, 7, long_store(), SOON_S))
        await asyncio.sleep(0.05)
        mortal.mover.use_pool(None)
        with pytest.raises(MoveRefused):
            await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
        mortal.mover.use_pool(other.info)
        await mortal.mover.pack(mortal.handle, 8, moves(1), SOON_S)
        await store
        assert other.payload(0) == mortal.pages.payload(blocks_of(0))
        assert mortal.pool.payload(7) == mortal.pages.payload(blocks_of(3))
        with pytest.raises(MoveRefused):
            await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
        assert f"/dev/shm/{mortal.pool.info.name}" not in shared_maps(mortal.handle.pid)
    finally:
        mortal.mover.use_pool(mortal.pool.info)
        other.close()


@pytest.mark.parametrize("name", ["kvgate_test_that_is_not_there", "../etc/passwd"])
async def test_pool_that_is_not_there_moves_nothing(mortal: Served, name: str) -> None:
    """Where the pool cannot be mapped moves are not to be had, the process lives, and the next pool is good again."""
    mortal.mover.use_pool(PoolInfo(name, 4096, 4096, 9))
    with pytest.raises(TransferUnavailable):
        await mortal.mover.pack(mortal.handle, 9, moves(1), SOON_S)
    mortal.mover.use_pool(mortal.pool.info)
    await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)


async def test_late_attach_is_undone(mortal: Served) -> None:
    """Pages whose worker has given up waiting, or was cut off, do not stay mapped."""
    mapped, pages = shared_maps(mortal.handle.pid), Pages()
    os.kill(mortal.handle.pid, signal.SIGSTOP)
    with pytest.raises(TransferUnavailable):
        await mortal.mover.attach(pages.export, RAW, ME, 0.05)
    cut_off = asyncio.create_task(mortal.mover.attach(pages.export, RAW, ME, SOON_S))
    await asyncio.sleep(0.05)
    cut_off.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut_off
    os.kill(mortal.handle.pid, signal.SIGCONT)
    await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
    for _ in range(1000):
        if mortal.mover.status()["cpu"]["calls_in_flight"] == 0 and shared_maps(mortal.handle.pid) == mapped:
            break
        await asyncio.sleep(0.01)
    assert shared_maps(mortal.handle.pid) == mapped


@pytest.mark.slow
async def test_too_many_calls_are_turned_away(pool: Pool) -> None:
    """Beyond its bound a device takes no further call, and says that nothing was begun; slots in doubt are told apart."""
    mover = make_mover(limits=Limits(max_calls=2), exit_s=0.0)
    mover.use_pool(pool.info)
    pages = Pages()
    handle = await mover.attach(pages.export, RAW, ME, SOON_S)
    calls = [asyncio.create_task(mover.pack(handle, 7, long_store(), SOON_S)) for _ in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(TransferBusy):
        await mover.pack(handle, 7, moves(1), SOON_S)
    # With no time to die, a process that was killed is not known to be gone.
    os.kill(handle.pid, signal.SIGSTOP)
    os.kill(handle.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(TransferUnavailable) as failed:
            await call
        if isinstance(failed.value, SlotsInDoubt):
            await asyncio.wait_for(failed.value.gone, SOON_S)
        assert not runs(handle.pid)
    await mover.stop()


async def test_one_worker_leaves_room_for_others(mortal: Served) -> None:
    """Beyond its own bound a worker is turned away, and another one's move is taken."""
    other = await mortal.mover.attach(mortal.pages.export, RAW, ME, SOON_S)
    os.kill(mortal.handle.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)) for _ in range(16)]
    await asyncio.sleep(0)
    with pytest.raises(TransferBusy):
        await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
    theirs = asyncio.create_task(mortal.mover.pack(other, 7, moves(1), SOON_S))
    await asyncio.sleep(0.05)
    os.kill(mortal.handle.pid, signal.SIGCONT)
    await asyncio.gather(theirs, *calls)
    await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)
    await mortal.mover.detach(other)


@pytest.mark.slow
async def test_doubt_goes_before_a_cancellation(pool: Pool) -> None:
    """A caller that is cancelled still hears that its slots are in doubt: it must not free them."""
    mover = make_mover(exit_s=0.0)
    mover.use_pool(pool.info)
    pages = Pages()
    handle = await mover.attach(pages.export, RAW, ME, SOON_S)
    call = asyncio.create_task(mover.pack(handle, 7, long_store(), SOON_S))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.sleep(0)
    os.kill(handle.pid, signal.SIGKILL)
    with pytest.raises((SlotsInDoubt, asyncio.CancelledError)) as ended:
        await call
    # Where it was gone at once there was no doubt.
    assert isinstance(ended.value, SlotsInDoubt) or not runs(handle.pid)
    await mover.stop()


@pytest.mark.slow
async def test_idle_process_ends_and_a_new_one_starts(pool: Pool) -> None:
    """Without pages a process ends; the next attach starts another, and no old handle is good in it."""
    mover = make_mover(limits=Limits(idle_s=0.05))
    mover.use_pool(pool.info)
    pages = Pages()
    old = await mover.attach(pages.export, RAW, ME, SOON_S)
    await mover.detach(old)
    for _ in range(2000):
        if not runs(old.pid):
            break
        await asyncio.sleep(0.01)
    assert not runs(old.pid)
    new = await mover.attach(pages.export, RAW, ME, SOON_S)
    assert new != old
    with pytest.raises(TransferUnavailable):
        await mover.pack(old, 7, moves(1), SOON_S)
    assert mover.status()["cpu"]["restarts"] == 0
    await mover.stop()
    assert not runs(new.pid)
    await mover.stop()
    with pytest.raises(TransferUnavailable):
        await mover.attach(pages.export, RAW, ME, SOON_S)


async def test_a_process_that_dies_slowly_is_replaced_once(mortal: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attach starts the next process while the last is dying. It stays the only one, and keeps the pages that it was lent."""
    launch, bury, dead = Child.launch, Child.bury, asyncio.Event()
    launched: list[str] = []

    async def counted(device: str, *settings: Any) -> Child:
        launched.append(device)
        return await launch(device, *settings)

    async def slowly(child: Child) -> bool:
        await dead.wait()
        return await bury(child)

    monkeypatch.setattr(Child, "launch", counted)
    monkeypatch.setattr(Child, "bury", slowly)
    restarts = int(mortal.mover.status()["cpu"]["restarts"])
    os.kill(mortal.handle.pid, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: not pid_of(mortal.mover))
    mortal.handle = await mortal.mover.attach(mortal.pages.export, RAW, ME, SOON_S)
    dead.set()
    await asyncio.to_thread(until, lambda: mortal.mover.status()["cpu"]["restarts"] != restarts)
    await asyncio.sleep(0.2)  # longer than the pause before a start
    assert launched == ["cpu"]
    await mortal.mover.pack(mortal.handle, 7, moves(1), SOON_S)


async def test_gpu_that_is_not_there(served: Served) -> None:
    """Pages on a GPU that this machine lacks are not attached, with the cause; the process that tried is gone."""
    mover = make_mover()
    export = export_on("GPU-01234567-89ab-cdef-0123-456789abcdef", served.pages.export)
    if torch.cuda.is_available():
        pytest.skip("there may be such a GPU")
    with pytest.raises(TransferUnavailable, match="GPU"):
        await mover.attach(export, RAW, ME, SOON_S)
    assert mover.status()[export.device]["state"] == "stopped"
    await mover.stop()


async def test_python_that_does_not_start(served: Served) -> None:
    """An interpreter that is not there, or that ends at once, is a cause and no crash."""
    for python in ("/nonexistent/python", "/bin/false"):
        mover = make_mover(python=python)
        with pytest.raises(TransferUnavailable):
            await mover.attach(served.pages.export, RAW, ME, SOON_S)
        await mover.stop()


async def test_killed_daemon_leaves_no_process() -> None:
    """The process ends with the daemon, also when that is killed, and also when the process is stopped just then."""
    with daemon() as (process, pid):
        os.kill(pid, signal.SIGSTOP)
        process.kill()
    until(lambda: not runs(pid))


@pytest.mark.slow
async def test_start_ends_what_was_left_behind(mortal: Served) -> None:
    """A daemon that starts ends processes of its own state folder, and of no other."""
    owner = secrets.token_hex(16)
    mover = TransferProcesses(owner)
    pages = Pages()
    handle = await mover.attach(pages.export, RAW, ME, SOON_S)
    assert await asyncio.to_thread(end_left_behind, secrets.token_hex(16)) == 0
    assert runs(handle.pid)
    assert await asyncio.to_thread(end_left_behind, owner) == 1
    assert not runs(handle.pid)
    assert runs(mortal.handle.pid)
    await mover.stop()


async def test_files_of_killed_processes_are_removed(mortal: Served) -> None:
    """CUDA's files in shared memory go with the process and with the worker that are killed; those of others stay."""
    with worker() as (process, export):
        handle = await mortal.mover.attach(export, RAW, WorkerProcess(process.pid, os.getuid()), SOON_S)
        pids = [process.pid, handle.pid, os.getpid()]
        files = [Path("/dev/shm", f"cuda.shm.{os.getuid()}.{pid:x}.1") for pid in pids]
        for file in files:
            file.touch()
        await mortal.mover.detach(handle)
        process.kill()
        process.wait()
    os.kill(mortal.handle.pid, signal.SIGKILL)
    with pytest.raises(TransferUnavailable):
        await mortal.mover.pack(mortal.handle, 7, long_store(), SOON_S)
    mortal.handle = await mortal.mover.attach(mortal.pages.export, RAW, ME, SOON_S)
    for _ in range(1000):
        if not files[0].exists() and not files[1].exists():
            break
        await asyncio.sleep(0.01)
    assert [file.exists() for file in files] == [False, False, True]
    files[2].unlink()


async def test_process_ends_where_its_parent_has_ended() -> None:
    """A process that finds another parent than the one that started it does not serve."""
    arguments = ["--owner", "x", "--device", "cpu", "--socket", "0", "--parent", "1"]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "kvgate.transfer.process", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=SOON_S,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == done.stderr == b""
