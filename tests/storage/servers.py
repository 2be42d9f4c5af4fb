"""Real servers for the storage tests, on free ports, gone with the test run: Redis, and an `lmcache server` with our module."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from kvgate.storage.attach_wire import LOCK_TTL_S
from kvgate.storage.backend import ObjectRef
from tests.children import die_with_parent

START_S = 120.0
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server on this machine")
needs_valkey = pytest.mark.skipif(
    importlib.util.find_spec("glide_sync") is None,
    reason="LMCache's valkey adapter needs valkey-glide-sync, not installed here",
)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """One server process that can be stopped, killed and started again on the same port."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self._command = command
        self._log = log
        self.port = port
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
                env=os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        ends_at = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return process
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > ends_at:
                    raise AssertionError(f"the server does not come up:\n{self._log.read_text()[-4000:]}") from None
                time.sleep(0.02)

    def freeze(self) -> None:
        """Let it hang."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again."""
        self.process = self._start()


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Server]:
    """A Redis without persistence."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = Server([*command, "--dir", str(folder), *options], port, folder / "redis.log")
    try:
        yield server
    finally:
        server.kill()


def redis_adapter(server: Server) -> dict[str, object]:
    """How LMCache is told of it."""
    return {"type": "resp", "host": "127.0.0.1", "port": server.port, "num_workers": 2}


def valkey_adapter(server: Server) -> dict[str, object]:
    """The same server through LMCache's other client: Valkey and Redis speak one protocol."""
    return {"type": "valkey", "startup_nodes": f"127.0.0.1:{server.port}", "num_workers": 2}


@contextmanager
def lmcache_server(
    folder: Path, pool_bytes: int, l2: str, *, ttl_s: int = LOCK_TTL_S, module: bool = True, workers: int = 4
) -> Iterator[Server]:
    """An `lmcache server` on loopback, with kvgate's module unless told otherwise; its pool goes with it."""
    port = free_port()
    pool = f"lmcache_l1_pool_test_{os.getpid()}_{port}"
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(free_port())]
    words += ["--disable-observability", "--l1-size-gb", str(pool_bytes / (1 << 30)), "--no-l1-use-lazy", "--shm-name", pool]
    words += ["--eviction-policy", "LRU", "--l2-prefetch-policy", "retain", "--max-cpu-workers", str(workers)]
    words += ["--l1-write-ttl-seconds", str(ttl_s), "--l1-read-ttl-seconds", str(ttl_s), "--l2-adapter", l2]
    if module:
        words += ["--server-module", '{"module_path":"kvgate_lmcache.server_module"}']
    program = str(Path(sys.executable).with_name("lmcache"))
    server = Server([program, *words], port, folder / "lmcache.log")
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()
        (Path("/dev/shm") / pool).unlink(missing_ok=True)


def name_in(client: Redis, ref: ObjectRef) -> bytes:
    """Under what name a Redis has the object."""
    (name,) = client.scan_iter(match=f"*{ref.address.hex()}*", count=10_000)
    assert isinstance(name, bytes)
    return name
