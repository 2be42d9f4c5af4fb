"""A gateway in a thread, and an engine on it that stores known KV: what the SDK needs to be tried against."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvgate.client import GatewayClient, PoolMappings
from kvgate.client.payloads import encode
from kvgate.config import Config
from kvgate.contract.address import token_digests
from kvgate.contract.keys import salt_digest
from kvgate.contract.plan import PartitionPlan
from kvgate.contract.representation import ComponentFormat, Representation
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import (
    AdapterRegistered,
    Bind,
    Bound,
    Commit,
    Committed,
    ConfirmAdapter,
    Opened,
    OpenEngine,
    RegisterAdapter,
    Registered,
    Release,
    Reserve,
    Reserved,
    WrittenPayload,
)
from tests.daemon import makers
from tests.daemon.conftest import small_config

WAIT_S = 20.0
Floats = NDArray[np.float32]


class GatewayThread:
    """One gateway on its own loop; ``stop`` ends it and waits."""

    def __init__(self, config: Config) -> None:
        self.gateway = Gateway(config)
        self.socket = str(config.socket_path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> Self:
        """Bring it up."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.gateway.start(), self._loop).result(WAIT_S)
        return self

    def status(self) -> dict[str, Any]:
        """As the admin page has it."""
        return asyncio.run_coroutine_threadsafe(self.gateway.status(), self._loop).result(WAIT_S)

    def stop(self) -> None:
        """End it."""
        asyncio.run_coroutine_threadsafe(self.gateway.stop(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@contextmanager
def running_gateway(folder: Path | None = None, **settings: Any) -> Iterator[GatewayThread]:
    """A gateway with the small settings of these tests and ``settings``, in ``folder`` or one of its own; both are gone afterwards."""
    folder = folder or Path(tempfile.mkdtemp(prefix="kvg-"))
    running = GatewayThread(config(folder, **settings)).start()
    try:
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder)


class SdkEngine:
    """One worker a rank of ``plan`` and a scheduler, in one credential's domain."""

    def __init__(
        self,
        socket: str,
        name: str = "engine",
        *,
        credential: bytes | None = None,
        plan: PartitionPlan | None = None,
        representation: Representation | None = None,
        **model: Any,
    ) -> None:
        self.plan = plan or makers.plan(tp=2)
        self.form = representation or makers.representation()
        self.model = makers.model(**model)
        self._pools = PoolMappings()
        self.clients = [GatewayClient(socket, "worker", credential) for _ in self.plan.places]
        self.scheduler = GatewayClient(socket, "scheduler", credential)
        for client in (*self.clients, self.scheduler):
            client.start()
            assert client.wait_connected(WAIT_S)
        for client, place in zip(self.clients, self.plan.places, strict=True):
            report = makers.report(
                engine=makers.engine_id(name),
                pp_rank=place.pp_rank,
                tp_rank=place.tp_rank,
                model=self.model,
                representation=self.form,
                plan=self.plan,
            )
            self.handle = cast(Registered, client.call(report, WAIT_S)).handle
        self.opened = cast(Opened, self.scheduler.call(OpenEngine(handle=self.handle), WAIT_S))

    def add_adapter(self, text: str) -> bytes:
        """Register an adapter, and confirm it on every rank."""
        adapter = makers.adapter(text)
        found = self.scheduler.call(RegisterAdapter(handle=self.handle, adapter=adapter), WAIT_S)
        for client in self.clients:
            client.call(ConfirmAdapter(adapter=adapter), WAIT_S)
        return cast(AdapterRegistered, found).adapter

    def kv(self, tokens: Sequence[int], seed: int = 0) -> tuple[Floats, Floats]:
        """Keys and values of ``tokens``, exact in the cache's type: random, the same for the same arguments."""
        group = self.form.groups[0]
        random = np.random.default_rng([seed, *tokens])
        made = []
        for dim in (group.head_dim_k, group.head_dim_v):
            drawn = random.standard_normal((group.layers, group.kv_heads, len(tokens), dim), dtype=np.float32)
            made.append((drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
        return made[0], made[1]

    def bind(self, tokens: Sequence[int], *, adapter: bytes | None = None, salt: str | None = None) -> Bound:
        """Bind an ordinary prompt's whole chunks."""
        digests = token_digests(self.opened.token_key, tokens, self.form.chunk_tokens)
        message = Bind(
            handle=self.handle,
            adapter=adapter,
            salt=salt_digest(self.opened.salt_key, salt),
            scope="prefix",
            scope_key=None,
            manifest=None,
            tokens=b"".join(digests),
        )
        return cast(Bound, self.scheduler.call(message, WAIT_S))

    def store(self, tokens: Sequence[int], *, adapter: bytes | None = None, salt: str | None = None) -> tuple[Floats, Floats]:
        """Compute and store a prompt's whole chunks, as vLLM's workers do; its KV."""
        step = self.form.chunk_tokens
        keys, values = self.kv(tokens)
        lease = self.bind(tokens, adapter=adapter, salt=salt).lease
        for client, place in zip(self.clients, self.plan.places, strict=True):
            rectangle = self.plan.rectangles[place.rectangle]
            reserve = Reserve(lease=lease, chunks=tuple(range(len(tokens) // step)))
            reserved = cast(Reserved, client.call(reserve, WAIT_S))
            written = []
            for slot in reserved.slots:
                if slot.status == "resident":
                    continue
                part = (
                    slice(rectangle.layer_start, rectangle.layer_end),
                    slice(rectangle.head_start, rectangle.head_end),
                    slice(slot.chunk * step, (slot.chunk + 1) * step),
                )
                payload = encode(self.form, rectangle, keys[part], values[part])
                self._pools.view(reserved.pool, reserved.pool_bytes, slot.offset, slot.length)[:] = payload
                written.append(WrittenPayload(reservation=slot.reservation, digest=blake3(payload).digest()))
            done = cast(Committed, client.call(Commit(written=tuple(written), aborted=()), WAIT_S))
            assert done.visible == len(written)
        self.scheduler.call(Release(lease=lease), WAIT_S)
        return keys, values

    def close(self) -> None:
        """The engine is gone."""
        for client in (*self.clients, self.scheduler):
            client.close()


def k16v8() -> Representation:
    """Keys in 16 bits, values in 8, of the test model."""
    return dataclasses.replace(
        makers.representation(),
        codec="k16v8",
        v_format=ComponentFormat(dtype="int8", group=32, scale_dtype="bfloat16"),
    )


def config(folder: Path, **settings: Any) -> Config:
    """The daemon tests' small settings in ``folder``, with room for a model's KV."""
    return small_config(folder, **({"pool_bytes": 8 << 20} | settings))


def refuse(call: Callable[[], Any]) -> Any:
    """The gateway's refusal of a call."""
    from kvgate.client import GatewayRefused

    try:
        call()
    except GatewayRefused as error:
        return error.failure
    raise AssertionError("it was not refused")
