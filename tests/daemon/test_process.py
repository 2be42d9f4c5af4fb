"""A real `kvgate serve`: start, stop, second start, kill -9, and what each leaves behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.daemon.conftest import eventually
from tests.daemon.engine import Engine
from tests.daemon.serve import alive, children, locked, pools, serve

BACKENDS = ["memory", "lmcache"]


def left(folder: Path) -> list[str]:
    """Sockets, the gateway's lock file, and held locks in the state directory. (The storage's run record stays: it counts pools.)"""
    state = folder / "state"
    sockets = [path.name for path in state.rglob("*.sock")]
    return sockets + [path.name for path in state.glob("lock")] + locked(state)


@pytest.mark.parametrize(
    ("backend", "number"), [("memory", signal.SIGINT), ("memory", signal.SIGTERM), ("lmcache", signal.SIGINT)]
)
async def test_stop_leaves_nothing(folder: Path, backend: str, number: int) -> None:
    """Ctrl-C or SIGTERM with a connected, busy engine: exit code 0, no socket, lock, process or shared memory left."""
    async with serve(folder, backend) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        await engine.store("a")
        lease = await engine.lease("a", "b")
        assert await engine.acquire(lease, 0, 1) == 1
        await engine.load(lease, 0)
        await engine.reserve(lease, 1)
        below, mapped = children(gateway.process.pid), pools(gateway.process.pid)
        assert bool(below) == (backend == "lmcache")
        assert len(mapped) == 1
        assert await gateway.end(number) == 0
        assert b"Traceback" not in gateway.output
        await engine.close()
    assert left(folder) == []
    assert not [pid for pid in below if alive(pid)]
    assert not [path for path in mapped if path.exists()]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_kill_9_then_restart(folder: Path, backend: str) -> None:
    """After a kill -9 with open holds and writes the next start works, reaps what was left, and shows nothing half-written."""
    async with serve(folder, backend) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket)
        await engine.store("a")
        lease = await engine.lease("a", "b")
        assert await engine.acquire(lease, 0, 1) == 1
        await engine.load(lease, 0)
        mapped = pools(gateway.process.pid)
        engine.fill(await engine.reserve(lease, 1), ("a", "b"))
        below = children(gateway.process.pid)
        await gateway.end(signal.SIGKILL)
        await engine.close()

    async def gone() -> bool:
        return not [pid for pid in below if alive(pid)]

    await eventually("the killed gateway's processes have ended", gone)
    async with serve(folder, backend) as gateway:
        await gateway.ready()
        assert not [path for path in mapped if path.exists()]
        mapped = pools(gateway.process.pid)
        engine = await Engine.start(gateway.socket)
        assert await engine.hit("a", "b") <= 1
        await engine.store("a", "b")
        assert len(await engine.restore("a", "b")) == 2
        await engine.close()
        assert await gateway.end() == 0
    assert left(folder) == []
    assert not [path for path in mapped if path.exists()]


async def test_second_start_is_refused_by_name(folder: Path) -> None:
    """A second gateway on the same state directory exits with 1 and names the process; the first one goes on."""
    async with serve(folder) as first:
        await first.ready()
        async with serve(folder) as second:
            assert await second.ended() == 1
            assert f"another gateway (process {first.process.pid})".encode() in second.output
            assert b"Traceback" not in second.output
        engine = await Engine.start(first.socket)
        await engine.close()
        assert await first.end() == 0


async def test_open_state_dir_is_refused_by_name(folder: Path) -> None:
    """A state directory that others can enter: exit code 1 and the command that mends it."""
    (folder / "state").mkdir()
    (folder / "state").chmod(0o755)
    async with serve(folder) as gateway:
        assert await gateway.ended() == 1
        assert b"chmod 700" in gateway.output
        assert b"Traceback" not in gateway.output


async def test_interrupt_during_start_ends_it(folder: Path) -> None:
    """Ctrl-C before the gateway is ready ends it, with nothing left behind."""
    mapped: set[Path] = set()
    async with serve(folder, "lmcache") as gateway:

        async def begun() -> bool:
            below = children(gateway.process.pid) if alive(gateway.process.pid) else []
            return bool(below)

        await eventually("the storage process has been started", begun)
        below = children(gateway.process.pid)
        mapped |= pools(gateway.process.pid)
        await gateway.end(signal.SIGINT)
        assert b"Traceback" not in gateway.output
    assert left(folder) == []
    assert not [pid for pid in below if alive(pid)]
    assert not [path for path in mapped if path.exists()]
