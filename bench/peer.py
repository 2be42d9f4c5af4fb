"""The peer: a real LMCache MP server, and LMCache's own client classes. Nothing here is imported where LMCache is missing."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.cases import Skipped
from bench.gateway import CHUNK_TOKENS, Geometry, stop, wait_for

NAME: Final = "LMCache MP"
CALL_S: Final = 60.0
START_S: Final = 120.0
_ENVIRONMENT: Final = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}


def name(what: str) -> str:
    """The peer's name in a record."""
    return f"LMCache {version('lmcache')} MP {what}"


class PoolFull(Exception):
    """LMCache refused slots: it evicts once a second, in the background, and does not wait for room."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: where its clients connect."""

    url: str


@contextmanager
def server(folder: Path, pool_bytes: int) -> Iterator[Server]:
    """``lmcache server`` on loopback with a pool in shared memory and no L2. Raises ``Skipped`` without LMCache."""
    if importlib.util.find_spec("lmcache") is None:
        raise Skipped("LMCache is not installed in this environment")
    port, http_port, prometheus_port = free_ports(3)
    log = folder / f"lmcache-{port}.log"
    command = [
        *(sys.executable, "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "server"),
        *("--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)),
        *("--prometheus-port", str(prometheus_port), "--chunk-size", str(CHUNK_TOKENS)),
        *("--supported-transfer-mode", "auto", "--eviction-policy", "LRU"),
        *("--l1-size-gb", f"{pool_bytes / (1 << 30):g}", "--no-l1-use-lazy"),
        *("--shm-name", f"lmcache_l1_pool_bench_{secrets.token_hex(4)}"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _ENVIRONMENT
        )
    try:
        wait_for(lambda: _listens(port), process, log, START_S)
        yield Server(f"tcp://127.0.0.1:{port}")
    finally:
        stop(process, signal.SIGINT)


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Client:
    """One worker's and its scheduler's side of the MP protocol: one model, one worker, engine-driven transfer."""

    def __init__(self, url: str, geometry: Geometry) -> None:
        os.environ.update(_ENVIRONMENT)
        logging.disable(logging.WARNING)
        import torch
        import zmq
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata, create_engine_driven_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._key_type = IPCCacheServerKey
        self._model = f"bench/{geometry.layers}x{geometry.kv_heads}x{geometry.head_dim}"
        self._wire: Any = RequestClientFactory.create(url, context=zmq.Context())
        self.instance = secrets.randbits(31)
        hidden = geometry.kv_heads * geometry.head_dim
        payload = RegisterEngineDrivenContextPayload(
            self.instance, self._model, 1, 16, geometry.layers, hidden, "bfloat16", False, CHUNK_TOKENS
        )
        pool = self._wire.register_kv_cache_engine_driven_context(payload).result(timeout=CALL_S)
        layout = MemoryLayoutDesc([torch.Size([2, geometry.layers, CHUNK_TOKENS, hidden])], [torch.bfloat16])
        self.context: Any = create_engine_driven_context(
            EngineDrivenContextMetadata(layout, 16, False), self._wire, CALL_S, pool.shm_name, pool.pool_size
        )
        if type(self.context).__name__ != "EngineDrivenContextShm":
            raise RuntimeError("LMCache's client did not get its shared memory")

    def key(self, tokens: tuple[int, ...], request: str, worker: int | None, model: str = "") -> Any:
        """LMCache's key of a request; ``worker`` None is the scheduler."""
        return self._key_type(model or self._model, 1, worker, tokens, 0, len(tokens), request, "", None, 1)

    def lookup(self, tokens: tuple[int, ...], request: str, model: str = "") -> int:
        """lookup + wait: how many chunks are there, read-locked now."""
        self._wire.lookup(self.key(tokens, request, None, model), 1).result(timeout=CALL_S)
        return int(self._wire.wait_prefetch_status(request, 10.0).result(timeout=CALL_S) or 0)

    def unlock(self, tokens: tuple[int, ...], request: str, model: str = "") -> None:
        """Free the locks that a lookup took."""
        self._wire.free_lookup_locks(self.key(tokens, request, None, model), 1).result(timeout=CALL_S)

    def end(self, request: str) -> None:
        """End the request's session."""
        self._wire.end_session(request).result(timeout=CALL_S)

    def store(self, tokens: tuple[int, ...], request: str, chunks: Sequence[Any]) -> None:
        """prepare → copy into the slots → commit. ``chunks`` are contiguous and already in the stored order. Raises ``PoolFull``."""
        key = self.key(tokens, request, 0)
        slots, indices = self.context.prepare_store(key, self.instance)
        for slot, index in zip(slots, indices, strict=True):
            slot.copy_(chunks[index])
        # Also where only some got a slot: they would stay locked otherwise.
        committed = not indices or self.context.commit_store(key, self.instance, [])
        if not committed:
            raise RuntimeError("LMCache did not commit")
        if len(indices) != len(chunks):
            raise PoolFull

    def retrieve(self, tokens: tuple[int, ...], request: str, targets: Sequence[Any]) -> None:
        """prepare → copy out of the slots → commit, after a lookup."""
        key = self.key(tokens, request, 0)
        views = self.context.prepare_retrieve(key, self.instance)
        if views is None or len(views) != len(targets):
            raise RuntimeError("LMCache did not retrieve every chunk")
        for target, view in zip(targets, views, strict=True):
            target.copy_(view)
        if not self.context.commit_retrieve(key, self.instance):
            raise RuntimeError("LMCache lost its read locks")

    def paged(self, geometry: Geometry, blocks: int, block_tokens: int) -> Paged:
        """LMCache's own worker with pages of its own, as its vLLM connector has it."""
        return Paged(self, self._wire, f"{self._model}/paged", geometry, blocks, block_tokens)

    def touch_pool(self) -> None:
        """Map every page of the pool into this process now, so that no timed copy pays for it."""
        touch(self.context)

    def close(self) -> None:
        """Unregister and disconnect."""
        self._wire.unregister_kv_cache_engine_driven_context(self.instance).result(timeout=CALL_S)
        self.context.close()
        self._wire.close()


def touch(context: Any) -> None:
    """Map every page of the pool that an engine-driven context has mapped."""
    buffer = context._shm_buffer
    for at in range(0, len(buffer), 4096):
        buffer[at]


class Paged:
    """LMCache's transfer context over pages ``[2, block, token, head, dim]``: its own gather and scatter are part of it."""

    def __init__(self, owner: Client, wire: Any, model: str, geometry: Geometry, blocks: int, block_tokens: int) -> None:
        import torch
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context

        self._owner = owner
        self.model = model
        self._blocks_in_chunk = CHUNK_TOKENS // block_tokens
        shape = (2, blocks, block_tokens, geometry.kv_heads, geometry.head_dim)
        self._pages = {f"layer.{n}": torch.randn(shape).to(torch.bfloat16) for n in range(geometry.layers)}
        self._context: Any = create_transfer_context(
            self._pages, instance_id=owner.instance + 1, req_client=wire, mode="engine_driven"
        )
        self._context.register(self._pages, model, 1, self._blocks_in_chunk, CALL_S, layout_hints={"kv_layout": "NHD"})
        touch(self._context.engine_driven_context)

    def store(self, tokens: tuple[int, ...], request: str, table: list[int]) -> None:
        """prepare → gather into the slots → commit. Raises ``PoolFull``."""
        key = self._owner.key(tokens, request, 0, self.model)
        done = self._context.submit_store(request, key, self._pages, [table], None, self._blocks_in_chunk)
        if not done.result(timeout=CALL_S):
            raise PoolFull

    def require(self, tokens: tuple[int, ...], request: str, chunks: int) -> None:
        """Raises ``PoolFull`` unless all ``chunks`` are there: a store into a full pool is reported as done too."""
        found = self._owner.lookup(tokens, request, self.model)
        self._owner.unlock(tokens, request, self.model)
        self._owner.end(request)
        if found != chunks:
            raise PoolFull

    def load(self, tokens: tuple[int, ...], request: str, table: list[int]) -> None:
        """lookup → wait → prepare → scatter → commit."""
        if self._owner.lookup(tokens, request, self.model) * self._blocks_in_chunk != len(table):
            raise PoolFull
        key = self._owner.key(tokens, request, 0, self.model)
        done = self._context.submit_retrieve(request, key, self._pages, [table], None, self._blocks_in_chunk)
        if not done.result(timeout=CALL_S):
            raise RuntimeError("LMCache did not retrieve every chunk")

    def close(self) -> None:
        """Unregister and unmap."""
        self._context.unregister().result(timeout=CALL_S)
        self._context.close()


@contextmanager
def client(running: Server, geometry: Geometry) -> Iterator[Client]:
    """A registered client."""
    made = Client(running.url, geometry)
    try:
        yield made
    finally:
        made.close()
