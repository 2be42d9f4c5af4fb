"""Attached to a running `lmcache server`: starts, refusals, restarts of either side, reservations that outlive their gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvgate.daemon.app import Gateway
from kvgate.storage.attach import AttachedBackend
from kvgate.storage.backend import PoolInfo, StorageBackend, StorageUnavailable
from kvgate.storage.lmcache import LMCacheConfig
from kvgate.storage.pool import pool_path
from kvgate.verify import runs
from kvgate.verify.results import Outcome, Progress, Report
from tests.children import child, die_with_parent
from tests.daemon.conftest import small_config
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, new_ref, overlap
from tests.storage.servers import Server, free_port, lmcache_server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_lmcache]


def l2_of(folder: Path) -> str:
    """A folder as the server's L2."""
    return json.dumps({"type": "fs", "base_path": str(folder / "l2")})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of this module, with as few threads as it can have."""
    folder = tmp_path_factory.mktemp("server")
    with lmcache_server(folder, POOL_BYTES, l2_of(folder), workers=1) as made:
        yield made


def backend_at(port: int, folder: Path) -> AttachedBackend:
    """A backend attached there, not started."""
    url = f"tcp://127.0.0.1:{port}"
    return AttachedBackend(LMCacheConfig(state_dir=folder, pool_bytes=POOL_BYTES, attach_url=url, restart_pause_s=0.05))


@contextlib.asynccontextmanager
async def attached(server: Server, folder: Path) -> AsyncIterator[Harness]:
    """A started backend and its harness."""
    backend = backend_at(server.port, folder)
    await backend.start()
    try:
        yield Harness(backend)
    finally:
        await backend.stop(5)


async def new_pool(backend: StorageBackend, old: PoolInfo | None) -> PoolInfo:
    """Wait for the pool of a later generation."""
    async with asyncio.timeout(4 * SOON_S):
        while backend.pool is None or (old is not None and backend.pool.generation == old.generation):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return backend.pool


async def test_a_start_without_a_server_says_how_to_start_one(tmp_path: Path) -> None:
    """Nobody listens: it fails soon, warned before what attaching means, with the server's whole command line."""
    port = free_port()
    with capture_logs() as logs, pytest.raises(StorageUnavailable) as caught:
        await backend_at(port, tmp_path).start()
    text = str(caught.value)
    assert "no LMCache server listens" in text
    for part in (f"lmcache server --host 127.0.0.1 --port {port}", "kvgate_lmcache.server_module", "--shm-name", "ttl-seconds"):
        assert part in text
    (warning,) = [log for log in logs if log["event"] == "storage.attached"]
    assert warning["log_level"] == "warning"
    assert "unpickles" in warning["meaning"]


async def test_a_server_without_our_module_is_refused_by_name(tmp_path: Path) -> None:
    """A plain server answers, and cannot keep our promises."""
    with (
        lmcache_server(tmp_path, POOL_BYTES, l2_of(tmp_path), module=False) as plain,
        pytest.raises(StorageUnavailable, match="without kvgate's module"),
    ):
        await backend_at(plain.port, tmp_path / "state").start()


async def test_a_server_whose_locks_expire_does_not_load_our_module(tmp_path: Path) -> None:
    """With LMCache's 600 s a slot still being written would go to somebody else: that server does not come up, and says why."""
    with (
        pytest.raises(AssertionError, match="--l1-write-ttl-seconds 1000000000"),
        lmcache_server(tmp_path, POOL_BYTES, l2_of(tmp_path), ttl_s=600),
    ):
        pass


async def test_the_pool_is_the_servers(server: Server, tmp_path: Path) -> None:
    """Its name and size are the server's, and a gateway that goes leaves it, and the objects in it, to the next."""
    ref = new_ref()
    async with attached(server, tmp_path) as store:
        first = store.backend.pool
        assert first is not None
        assert first.name.endswith(f"_{server.port}")
        assert first.pool_bytes == POOL_BYTES
        await store.put(ref)
    assert pool_path(first.name).exists()
    async with attached(server, tmp_path) as store:
        assert store.backend.pool is not None
        assert store.backend.pool.generation != first.generation
        assert (await store.hold(ref)).tier == "l1"
        assert await store.read(ref) == content(ref)


async def test_a_gateway_on_an_attached_server_keeps_what_it_stores_apart(server: Server) -> None:
    """Control plane, module and server together, through the protocol alone: what `kvgate verify` stores is found, removed from single
    tiers, loaded with the same bytes from the pool and from the server's L2, refused to others, and gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as name:
        folder, report = Path(name), Report()
        gateway = Gateway(small_config(folder), backend_at(server.port, folder / "state"))
        await gateway.start()
        try:
            where = runs.Target(gateway.config.socket_path, gateway.config.admin_path, (), ("same request", "access.salt"))
            await runs.whole(where, folder / "run.json", report, Progress())
        finally:
            await gateway.stop()
    assert report.backend == "attach"
    assert report.tiers == ["l1", "shared memory", "l2.0 fs"]
    assert {row.name: row.outcome for row in report.rows if row.outcome is not Outcome.PASS} == {}
    assert {"same request", "access.salt", "everything planted is removed"} <= {row.name for row in report.rows}


async def test_one_gateway_at_a_time(server: Server, tmp_path: Path) -> None:
    """A second one is refused while the first lives, and the first is not disturbed."""
    async with attached(server, tmp_path / "a") as store:
        ref = new_ref()
        await store.put(ref)
        with pytest.raises(StorageUnavailable, match="another gateway is attached"):
            await backend_at(server.port, tmp_path / "b").start()
        assert await store.read(ref) == content(ref)


async def test_a_killed_bridge_is_replaced(server: Server, tmp_path: Path) -> None:
    """Holds of the old session are given back, its ids mean nothing any more, committed objects are still there."""
    async with attached(server, tmp_path) as store:
        ref = new_ref()
        await store.put(ref)
        held = await store.hold(ref)
        old = store.backend.pool
        assert isinstance(store.backend, AttachedBackend)
        assert store.backend.process_pid is not None
        os.kill(store.backend.process_pid, signal.SIGKILL)
        await new_pool(store.backend, old)
        assert await store.counter("holds") == 0
        await store.release(held)
        assert await store.counter("unknown_releases") > 0
        assert await store.read(ref) == content(ref)


async def test_a_server_that_hangs_costs_deadlines(server: Server, tmp_path: Path) -> None:
    """Calls end in time while it is stopped; afterwards it goes on where it was, with nothing held."""
    async with attached(server, tmp_path) as store:
        ref = new_ref()
        await store.put(ref)
        server.freeze()
        try:
            assert await store.backend.probe([ref], 0.2) == [None]
            assert await store.backend.acquire([ref], 0.2) == [None]
            with pytest.raises(StorageUnavailable):
                await store.backend.reserve([new_ref()], 0.2)
        finally:
            server.thaw()
        await store.until("holds", 0)
        await store.until("reservations", 0)
        assert await store.read(ref) == content(ref)


async def test_a_restarted_server_is_a_new_generation(server: Server, tmp_path: Path) -> None:
    """Its end is noticed: calls fail, the pool is gone; when it is back there is a new pool, and what its L2 had is found."""
    async with attached(server, tmp_path) as store:
        ref = new_ref()
        await store.put(ref)
        await store.settle()
        opened = await store.open(new_ref())
        old = store.backend.pool
        server.kill()
        async with asyncio.timeout(SOON_S):
            while store.backend.pool is not None:  # noqa: ASYNC110  # the callback has tests of its own
                await asyncio.sleep(0.02)
        with pytest.raises(StorageUnavailable):
            await store.backend.probe([ref], 0.2)
        await asyncio.to_thread(server.restart)
        new = await new_pool(store.backend, old)
        assert old is not None
        assert new.generation > old.generation
        assert await store.commit(opened) == [False]
        assert await store.read(ref) == content(ref)
        assert (await store.backend.status(SOON_S))["backend"] == "attach"


async def test_a_slot_still_being_written_outlives_its_gateway(server: Server, tmp_path: Path) -> None:
    """While a process that had the pool mapped lives, the slot of its open reservation goes to nobody; when it is gone, it does."""
    program = (
        "import mmap,sys,time; f=open(sys.argv[1],'r+b'); m=mmap.mmap(f.fileno(),0); print('mapped',flush=True); time.sleep(99)"
    )
    async with contextlib.AsyncExitStack() as gateway:
        store = await gateway.enter_async_context(attached(server, tmp_path))
        opened = await store.open(new_ref(1 << 20))
        pool = store.backend.pool
        assert pool is not None
        with child((sys.executable, "-c", program, pool_path(pool.name)), log=tmp_path / "log"):
            async with asyncio.timeout(SOON_S):
                while "mapped" not in (tmp_path / "log").read_text():  # noqa: ASYNC110  # another process says so
                    await asyncio.sleep(0.02)
            await gateway.aclose()
            async with attached(server, tmp_path) as store:
                assert await store.counter("reservations") == 1
                others = [one for size in (1 << 20, 1 << 16) for one in await store.fill(size)]
                assert not any(overlap(opened.slot, other.slot) for other in others)
                await store.clean_up()
    async with attached(server, tmp_path) as store:
        assert await store.counter("reservations") == 0
        assert len(await store.fill(1 << 20)) == POOL_BYTES >> 20
        await store.clean_up()


async def test_serve_says_how_to_start_the_server(tmp_path: Path) -> None:
    """`kvgate serve` that cannot attach ends with code 1, the warning in its log and the server's command line on its last lines."""
    flags = ["--backend", "attach", "--attach-url", f"tcp://127.0.0.1:{free_port()}", "--state-dir", str(tmp_path / "state")]
    program = Path(sys.executable).with_name("kvgate")
    process = await asyncio.create_subprocess_exec(
        program,
        "serve",
        *flags,
        "--data-dir",
        str(tmp_path / "data"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )
    async with asyncio.timeout(4 * SOON_S):
        output, _ = await process.communicate()
    assert process.returncode == 1
    text = output.decode()
    assert "unpickles" in text
    assert text.rstrip().splitlines()[-1].strip().startswith("lmcache server --host 127.0.0.1")
