"""A start of the LMCache backend must remove what a killed one left, touch nobody else's, and refuse what it can't use by name."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvgate.storage.backend import ObjectRef, PoolInfo, StorageUnavailable
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from kvgate.storage.lmcache_settings import MODULE, TMP_PREFIX
from kvgate.storage.pool import SHM_DIR
from kvgate.storage.run_folder import RunFolder, RunRecord, process_started, storage_processes
from tests import mounts
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, freeze, new_ref

pytestmark = needs_lmcache

# A daemon reduced to its storage: starts the backend, stores one object, says what it has, and waits to be killed.
DAEMON = """
import asyncio, json, sys
from pathlib import Path
from tests.storage.harness import Harness, ObjectRef, POOL_BYTES
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig

async def main():
    backend = LMCacheBackend(LMCacheConfig(state_dir=Path(sys.argv[1]), pool_bytes=POOL_BYTES))
    await backend.start()
    store = Harness(backend)
    await store.put(ObjectRef(b"a" * 32, 70_000, b"d" * 32))
    await store.settle()
    await store.open(ObjectRef(b"b" * 32, 70_000, b"d" * 32))
    print(json.dumps({"pool": backend.pool.name, "pid": backend.process_pid}), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
STORED = ObjectRef(b"a" * 32, 70_000, b"d" * 32)


def start_daemon(state_dir: Path, root: Path) -> tuple[subprocess.Popen[bytes], str, int]:
    """A daemon process: itself, its pool's name, its storage process."""
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(state_dir)], stdout=subprocess.PIPE, cwd=root, env=dict(os.environ)
    )
    assert daemon.stdout is not None
    said = next(json.loads(line) for line in daemon.stdout if line.startswith(b"{"))  # its log comes before
    return daemon, said["pool"], said["pid"]


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(SOON_S):
        while process_started(pid):  # noqa: ASYNC110  # not our child: nothing to wait on
            await asyncio.sleep(0.01)


def config(state_dir: Path, **changes: object) -> LMCacheConfig:
    """A small configuration."""
    values: dict[str, object] = {"state_dir": state_dir, "pool_bytes": POOL_BYTES, **changes}
    return LMCacheConfig(**values)  # type: ignore[arg-type]  # test values by name


async def refusal(wanted: LMCacheConfig) -> str:
    """The reason why a backend does not start."""
    backend = LMCacheBackend(wanted)
    with pytest.raises(StorageUnavailable) as caught:
        await backend.start()
    assert backend.pool is None
    return str(caught.value)


async def test_the_storage_process_ends_with_its_daemon(tmp_path: Path, repo_root: Path) -> None:
    """A kill -9 of the daemon alone: its storage process ends by itself and takes its pool along."""
    daemon, pool, pid = start_daemon(tmp_path, repo_root)
    assert (SHM_DIR / pool).exists()
    daemon.kill()
    daemon.communicate()
    await gone(pid)
    assert not (SHM_DIR / pool).exists()
    assert not list((tmp_path / "storage").glob("*.sock"))
    assert [path.name for path in (tmp_path / "l2").iterdir() if path.is_dir()] == []


async def test_a_start_after_a_kill_of_everything_removes_what_was_left(tmp_path: Path, repo_root: Path) -> None:
    """Pool, temporary files and sockets of the dead start are gone, its settled objects are found."""
    daemon, pool, pid = start_daemon(tmp_path, repo_root)
    freeze(pid)
    daemon.kill()
    daemon.communicate()
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    # Python's resource tracker may have been quick; put back what a kill of it too leaves.
    (SHM_DIR / pool).touch(mode=0o600)
    (tmp_path / "storage" / "0123456789ab.sock").touch()
    left = tmp_path / "l2" / (TMP_PREFIX + pool.removeprefix("lmcache_l1_pool_kvgate_")) / "half.data"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half an object")
    backend = LMCacheBackend(config(tmp_path))
    await backend.start()
    try:
        assert not (SHM_DIR / pool).exists()
        assert not left.parent.exists()
        assert not list((tmp_path / "storage").glob("*.sock"))
        store = Harness(backend)
        assert await store.read(STORED) == content(STORED)
        assert await store.probe(ObjectRef(b"b" * 32, 70_000, b"d" * 32)) == [False]
    finally:
        await backend.stop(0)


async def test_a_start_ends_a_storage_process_that_outlived_its_daemon(tmp_path: Path, repo_root: Path) -> None:
    """One that hangs (stopped here) and so did not end with its daemon is killed by the next start."""
    daemon, pool, pid = start_daemon(tmp_path, repo_root)
    freeze(pid)
    daemon.kill()
    daemon.communicate()
    assert process_started(pid)
    backend = LMCacheBackend(config(tmp_path))
    await backend.start()
    try:
        await gone(pid)
        assert not (SHM_DIR / pool).exists()
        assert await Harness(backend).read(STORED) == content(STORED)
    finally:
        await backend.stop(0)


async def test_a_second_daemon_on_the_same_state_is_refused(tmp_path: Path) -> None:
    """The first goes on undisturbed, with its pool and its process."""
    first = LMCacheBackend(config(tmp_path))
    await first.start()
    try:
        assert "in use" in await refusal(config(tmp_path))
        store = Harness(first)
        ref = new_ref()
        await store.put(ref)
        assert await store.read(ref) == content(ref)
    finally:
        await first.stop(0)


@pytest.mark.slow
async def test_daemons_on_different_states_leave_each_other_alone(tmp_path: Path) -> None:
    """A second start, and its end, removes nothing of the first; both share the host's shared memory."""
    first, second = LMCacheBackend(config(tmp_path / "a")), LMCacheBackend(config(tmp_path / "b"))
    await first.start()
    try:
        pool = first.pool
        assert pool is not None
        await second.start()
        await second.stop(0)
        assert (SHM_DIR / pool.name).exists()
        store = Harness(first)
        ref = new_ref()
        await store.put(ref)
        assert await store.read(ref) == content(ref)
    finally:
        await first.stop(0)


def test_reaping_kills_only_what_is_verifiably_ours(tmp_path: Path) -> None:
    """A pid of the record that is another program, another start, or was given out anew is left alone."""
    folder = RunFolder(tmp_path)
    folder.open()
    start_id = "ab" * 16
    idle = "import time; time.sleep(3600)"
    stranger = subprocess.Popen([sys.executable, "-c", idle, "--start-id", start_id])
    other_start = subprocess.Popen([sys.executable, "-c", idle, "-m", MODULE, "--start-id", "cd" * 16])
    ours = subprocess.Popen([sys.executable, "-c", idle, "-m", MODULE, "--start-id", start_id])
    try:
        for process in (stranger, other_start):
            folder.reap(RunRecord(start_id, process.pid, process_started(process.pid), 1, ()))
        folder.reap(RunRecord(start_id, ours.pid, process_started(ours.pid) + 1, 1, ()))
        assert [process.poll() for process in (stranger, other_start, ours)] == [None] * 3
        assert storage_processes(start_id) == [ours.pid]
        folder.reap(RunRecord(start_id, 0, 0, 1, ()))
        assert ours.wait(SOON_S) == -signal.SIGTERM
        assert [process.poll() for process in (stranger, other_start)] == [None] * 2
    finally:
        for process in (stranger, other_start, ours):
            process.kill()
            process.wait()
        folder.close()


def test_reaping_touches_no_pool_but_the_recorded_one(tmp_path: Path) -> None:
    """Neighbours in shared memory stay: another start's, LMCache's own, somebody else's."""
    folder = RunFolder(tmp_path)
    folder.open()
    start_id = os.urandom(16).hex()
    names = [f"lmcache_l1_pool_kvgate_{start_id}", f"lmcache_l1_pool_kvgate_{start_id}x", f"lmcache_l1_pool_{start_id}"]
    paths = [SHM_DIR / name for name in names]
    for path in paths:
        path.touch(mode=0o600)
    try:
        folder.reap(RunRecord(start_id, 0, 0, 1, (str(tmp_path / "no such folder"),)))
        assert [path.exists() for path in paths] == [False, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        folder.close()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"start_id": "../../etc", "pid": 1, "started": 1, "generation": 1, "l2_folders": []}'],
)
def test_an_unreadable_record_is_ignored(tmp_path: Path, text: str) -> None:
    """A torn or foreign record removes nothing and does not keep the daemon from starting."""
    folder = RunFolder(tmp_path)
    folder.open()
    (folder.path / "run.json").write_text(text)
    assert folder.read() is None
    folder.close()


def test_a_record_reads_back_as_written(tmp_path: Path) -> None:
    """What the next start learns is what this one wrote."""
    folder = RunFolder(tmp_path)
    folder.open()
    record = RunRecord("ab" * 16, 17, 4711, 3, ("/data/a", "/data/b"))
    folder.write(record)
    assert folder.read() == record
    folder.close()


async def test_pool_socket_folder_and_process_are_private(tmp_path: Path) -> None:
    """The pool is 0600, the folder 0700, no socket can be reached by name, and no credential is on a command line."""
    adapters = ({"type": "fs", "base_path": str(tmp_path / "l2-with-a-secret-name")},)
    backend = LMCacheBackend(config(tmp_path / "state", l2_adapters=adapters))
    await backend.start()
    try:
        pool, pid = backend.pool, backend.process_pid
        assert isinstance(pool, PoolInfo)
        assert stat.S_IMODE((SHM_DIR / pool.name).stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "state" / "storage").stat().st_mode) == 0o700
        assert not list((tmp_path / "state" / "storage").glob("*.sock"))
        assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()  # noqa: ASYNC240  # a line of /proc
        assert listening_inodes() & open_sockets(pid) == set()
    finally:
        await backend.stop(0)


def listening_inodes() -> set[str]:
    """Inodes of all TCP sockets in state LISTEN."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(fields[9])
    return found


def open_sockets(pid: int | None) -> set[str]:
    """Inodes of a process's sockets."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


async def test_start_and_stop_can_be_repeated(tmp_path: Path) -> None:
    """Start and stop are idempotent, stop without start does nothing, and after stop calls are refused."""
    backend = LMCacheBackend(config(tmp_path))
    await backend.stop(0)
    await backend.start()
    pool = backend.pool
    await backend.start()
    assert backend.pool == pool
    assert pool is not None
    await backend.stop(1)
    await backend.stop(1)
    assert not (SHM_DIR / pool.name).exists()
    with pytest.raises(StorageUnavailable, match="stopped"):
        await backend.probe([new_ref()], SOON_S)
    await backend.start()
    again = backend.pool
    assert again is not None
    assert again.generation > pool.generation
    await backend.stop(0)


@pytest.mark.slow
async def test_stop_drains_what_is_on_its_way_to_l2(tmp_path: Path) -> None:
    """Objects committed right before a stop with time to drain are there after the next start."""
    refs = [new_ref(1 << 20) for _ in range(12)]
    for turn in range(2):
        backend = LMCacheBackend(config(tmp_path))
        await backend.start()
        store = Harness(backend)
        if turn == 0:
            await store.put(*refs)
        else:
            assert await store.probe(*refs) == [True] * len(refs)
        await backend.stop(SOON_S if turn == 0 else 0)


async def test_another_lmcache_release_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvgate uses unpublished names of one release: any other is refused at start, with both versions and the remedy."""
    info = tmp_path / "site" / "lmcache-0.5.7.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.7\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    reason = await refusal(config(tmp_path / "state"))
    assert "0.5.7" in reason
    assert "0.5.6" in reason
    assert "install" in reason


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ({"type": "no_such_adapter"}, "fs, fs_native,"),
        ({"type": "redis"}, 'Redis and Valkey are both "resp"'),
        ({"type": "fs"}, "base_path"),
        ({"type": "fs", "base_path": ""}, "base_path"),
        ({"base_path": "/tmp/x"}, "type"),
        ({"type": "fs", "base_path": "/proc/nowhere/l2"}, "L2 folder /proc/nowhere/l2: No such file"),
        ({"type": "fs", "base_path": "/tmp/kvgate-never-made", "serde": {"type": "fp8"}}, "serde"),
        ({"type": "fs", "base_path": "/tmp/kvgate-never-made", "affinity_tag": "x"}, "affinity_tag"),
    ],
)
async def test_an_unusable_l2_adapter_is_refused_with_its_reason(
    tmp_path: Path, adapter: dict[str, object], expected: str
) -> None:
    """A start with an adapter that cannot work, or would change bytes, says which and why, and leaves nothing."""
    reason = await refusal(config(tmp_path, l2_adapters=(adapter,)))
    assert expected in reason
    record = RunFolder(tmp_path).read()
    assert record is not None
    assert not list(SHM_DIR.glob(f"*{record.start_id}*"))
    assert not list((tmp_path / "storage").glob("*.sock"))


async def test_a_read_only_l2_folder_is_refused_with_its_path_and_the_remedy(tmp_path: Path) -> None:
    """The operator reads which folder it is, and what to do, before LMCache is started."""
    with mounts.small_disk(tmp_path / "l2", "1m") as folder:
        await asyncio.to_thread(subprocess.check_call, ["mount", "-o", "remount,ro", str(folder)])
        reason = await refusal(config(tmp_path / "state", l2_adapters=({"type": "fs", "base_path": str(folder)},)))
    assert str(folder) in reason
    assert "mount it writable" in reason


async def test_a_pool_larger_than_shared_memory_is_refused(tmp_path: Path) -> None:
    """A pool the host has no room for is refused at start with the numbers, not found out by a bus error."""
    too_much = shutil.disk_usage(SHM_DIR).total // 4096 * 4096 + (1 << 30)
    reason = await refusal(config(tmp_path, pool_bytes=too_much))
    assert str(too_much) in reason
    assert "smaller" in reason


async def test_a_python_without_kvgate_is_refused(tmp_path: Path) -> None:
    """An interpreter that cannot run the storage process makes start fail, not hang."""
    assert "ended with code" in await refusal(config(tmp_path, python="/bin/false"))
    assert "does not start" in await refusal(config(tmp_path, python=str(tmp_path / "none")))


async def test_a_state_dir_with_too_long_a_path_is_refused(tmp_path: Path) -> None:
    """Unix sockets have short names: the reason says so."""
    assert "too long" in await refusal(config(tmp_path / ("x" * 120)))


async def test_a_storage_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    """The record names processes to kill: nobody else may be able to write it."""
    (tmp_path / "storage").mkdir(mode=0o777)
    (tmp_path / "storage").chmod(0o777)
    assert "0700" in await refusal(config(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_bytes": 0},
        {"pool_bytes": 4097},
        {"evict_watermark": 0.0},
        {"evict_watermark": 1.1},
        {"evict_ratio": 0.0},
        {"max_calls": 0},
        {"fetches_in_flight": 0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Values out of range are refused where they are given."""
    with pytest.raises(ValueError):
        config(tmp_path, **changes)
