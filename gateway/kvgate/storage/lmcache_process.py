"""One run of the storage process: started, connected to, and buried with everything it left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Mapping
from typing import Any

import structlog

from .backend import PoolInfo, StorageUnavailable
from .lmcache_client import StorageConnection
from .lmcache_settings import MAX_LINE_BYTES, MODULE, ProcessSettings, Ready, SettingsError
from .lmcache_wire import WIRE
from .pool import SHM_DIR
from .run_folder import RunFolder, RunRecord, process_started

_MAX_SOCKET_PATH_BYTES = 107
_CONNECT_S = 10.0
_EXIT_S = 5.0

_log = structlog.get_logger(__name__)


class StorageProcess:
    """A storage process that serves. Made by ``launch``; ``connection.lost`` is set when it is gone."""

    def __init__(
        self,
        folder: RunFolder,
        record: RunRecord,
        process: asyncio.subprocess.Process,
        connection: StorageConnection,
        pool: PoolInfo,
    ) -> None:
        self._folder = folder
        self._record = record
        self._process = process
        self.connection = connection
        self.pool = pool

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @classmethod
    async def launch(
        cls,
        folder: RunFolder,
        *,
        python: str,
        generation: int,
        pool_bytes: int,
        l2_adapters: tuple[Mapping[str, Any], ...],
        evict_watermark: float,
        evict_ratio: float,
        fetches_in_flight: int,
        orphan_drain_s: float,
        max_calls: int,
        start_timeout_s: float,
        attach_url: str = "",
    ) -> StorageProcess:
        """Start a process and wait until it serves. Raises ``StorageUnavailable`` with the cause, nothing left behind."""
        start_id = secrets.token_hex(16)
        settings = ProcessSettings(
            start_id=start_id,
            parent_pid=os.getpid(),
            socket_path=str(folder.socket_path(start_id)),
            pool_bytes=pool_bytes,
            l2_adapters=l2_adapters,
            evict_watermark=evict_watermark,
            evict_ratio=evict_ratio,
            fetches_in_flight=fetches_in_flight,
            orphan_drain_s=orphan_drain_s,
            attach_url=attach_url,
        )
        _check_before_start(settings)
        l2_folders = tuple(str(spec["base_path"]) for spec in l2_adapters if isinstance(spec.get("base_path"), str))
        record = RunRecord(start_id, 0, 0, generation, l2_folders)
        await asyncio.to_thread(folder.write, record)
        process = None
        try:
            async with asyncio.timeout(start_timeout_s):
                process = await _spawn(python, settings)
                record = RunRecord(start_id, process.pid, process_started(process.pid), generation, l2_folders)
                await asyncio.to_thread(folder.write, record)
                ready = await _ready(process, settings)
                connection = await _connect(settings, max_calls)
                # The process does the same; whoever is first, no name is left when the backend is up.
                folder.socket_path(start_id).unlink(missing_ok=True)
        except BaseException as error:  # a cancelled start must not leave a process either
            await _end(process)
            await asyncio.to_thread(folder.reap, record)
            if isinstance(error, TimeoutError):
                raise StorageUnavailable(f"the storage process was not ready after {start_timeout_s:g} s") from error
            if isinstance(error, OSError):
                raise StorageUnavailable(f"the storage process does not start: {error.strerror}") from error
            raise
        pool = PoolInfo(ready.pool_name or settings.pool_name, ready.pool_bytes, ready.align_bytes, generation)
        return cls(folder, record, process, connection, pool)

    async def bury(self, exit_s: float = 0.0) -> int:
        """Give the process ``exit_s`` to end by itself, kill it, and remove what it left. Its exit code."""
        if exit_s:
            with contextlib.suppress(TimeoutError):  # then it is killed below
                await asyncio.wait_for(self._process.wait(), exit_s)
        self.connection.close()
        await _end(self._process)
        await asyncio.to_thread(self._folder.reap, self._record)
        return self._process.returncode or 0


def _check_before_start(settings: ProcessSettings) -> None:
    """What would otherwise fail in the process as a signal or in words that help nobody."""
    if len(os.fsencode(settings.socket_path)) > _MAX_SOCKET_PATH_BYTES:
        raise StorageUnavailable(
            f"the state_dir's path is too long for a socket in it ({_MAX_SOCKET_PATH_BYTES} bytes at most): choose a shorter one"
        )
    free_bytes = shutil.disk_usage(SHM_DIR).free
    if not settings.attach_url and settings.pool_bytes > free_bytes:
        raise StorageUnavailable(
            f"{SHM_DIR} has {free_bytes} bytes free, the pool needs {settings.pool_bytes}: "
            f"make the pool smaller, or {SHM_DIR} larger"
        )


async def _spawn(python: str, settings: ProcessSettings) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        MODULE,
        "--start-id",
        settings.start_id,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        cwd="/",
    )
    assert process.stdin is not None
    process.stdin.write(settings.to_line())
    process.stdin.close()
    return process


async def _ready(process: asyncio.subprocess.Process, settings: ProcessSettings) -> Ready:
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise StorageUnavailable(f"the storage process ended with code {code} before it was ready; see its log")
        ready = Ready.from_line(line)
    except (SettingsError, TypeError, ValueError) as error:
        raise StorageUnavailable(f"the storage process gave no ready line: {error}") from error
    if ready.error:
        raise StorageUnavailable(ready.error)
    if ready.wire != WIRE or (ready.pool_bytes != settings.pool_bytes and not settings.attach_url):
        raise StorageUnavailable("the storage process is of another kvgate than this daemon: reinstall both together")
    return ready


async def _connect(settings: ProcessSettings, max_calls: int) -> StorageConnection:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_S):
        _, connection = await loop.create_unix_connection(lambda: StorageConnection(max_calls), settings.socket_path)
    return connection


async def _end(process: asyncio.subprocess.Process | None) -> None:
    """Kill the process unless it has ended, and wait for it."""
    if process is None:
        return
    try:
        # Not process.kill(): that polls, and can take the exit status from under asyncio's own wait.
        pidfd = os.pidfd_open(process.pid) if process.returncode is None else -1
    except ProcessLookupError:
        pidfd = -1
    if pidfd >= 0:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended meanwhile
        finally:
            os.close(pidfd)
    try:
        async with asyncio.timeout(_EXIT_S):
            await process.wait()
            if process.stdout is not None:
                await process.stdout.read()  # to its end, so that asyncio closes the pipe
    except TimeoutError:
        _log.error("storage_process_does_not_end", pid=process.pid)
