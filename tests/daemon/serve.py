"""A real `kvgate serve` in a process of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.daemon import makers
from tests.daemon.wire import WAIT_S

START_S = 90.0
"""LMCache takes some seconds to import on a busy machine."""


class Serve:
    """One start. ``output`` is all it printed, on both streams, once it has ended."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.process = process
        self.socket = folder / "state" / "gateway.sock"
        self.admin = folder / "state" / "admin.sock"
        self.output = b""

    async def ready(self) -> None:
        """Wait for the banner."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            while b"Stop with Ctrl-C" not in self.output:
                line = await self.process.stdout.readline()
                if not line:
                    pytest.fail(f"kvgate serve ended: {self.output.decode()}")
                self.output += line

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end; the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for the end; the exit code."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            self.output += await self.process.stdout.read()
            return await self.process.wait()


def flags(folder: Path, backend: str, **settings: str) -> list[str]:
    """The flags of one start."""
    values = {
        "state_dir": str(folder / "state"),
        "data_dir": str(folder / "data"),
        "backend": backend,
        "pool_bytes": "64MiB",
        "chunk_tokens": str(makers.CHUNK_TOKENS),
        "log_level": "debug",
    } | settings
    return [part for name, value in values.items() for part in ("--" + name.replace("_", "-"), value)]


@asynccontextmanager
async def serve(folder: Path, backend: str = "memory", **settings: str) -> AsyncIterator[Serve]:
    """A started gateway, killed at the end if the test has not ended it."""
    program = Path(sys.executable).with_name("kvgate")
    process = await asyncio.create_subprocess_exec(
        str(program),
        "serve",
        *flags(folder, backend, **settings),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")},
    )
    started = Serve(folder, process)
    try:
        yield started
    finally:
        if process.returncode is None:
            # Gently first: a failed test must not leave a storage process and its pool on the machine.
            process.terminate()
            try:
                async with asyncio.timeout(WAIT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def children(pid: int) -> list[int]:
    """Processes below ``pid``."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found + [below for child in found for below in children(child)]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def pools(pid: int) -> set[Path]:
    """Pools that a gateway or its storage process has mapped: other gateways of the machine have theirs."""
    found = set()
    for process in (pid, *children(pid)):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            path = line.partition("/dev/shm/")[2]
            if "kvgate" in path:
                found.add(Path("/dev/shm") / path)
    return found


def locked(folder: Path) -> list[str]:
    """Lock files below ``folder`` that somebody holds."""
    held = []
    for path in folder.rglob("lock"):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(str(path))
    return held
