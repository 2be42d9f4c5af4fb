"""Our side: a real ``kvgate serve`` process, and sessions with it as an engine's workers and scheduler have them."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

from bench.cases import Skipped
from kvgate.client import Call, GatewayClient
from kvgate.contract.address import token_digests
from kvgate.contract.artifacts import Artifact, ArtifactSet
from kvgate.contract.model import Architecture, Engine, KvQuantization, ModelContract, Numerics, Parameter, Rope
from kvgate.contract.plan import PartitionPlan, even_plan
from kvgate.contract.record import Record
from kvgate.contract.representation import ComponentFormat, KvGroup, Representation
from kvgate.protocol.messages import (
    Bind,
    Bound,
    Commit,
    Committed,
    Opened,
    OpenEngine,
    Registered,
    RegisterWorker,
    Release,
    Reserve,
    Reserved,
    Welcome,
    WrittenPayload,
)

CHUNK_TOKENS: Final = 256
CALL_S: Final = 30.0
START_S: Final = 60.0
BATCH_CHUNKS: Final = 512
ANY_DIGEST: Final = b"\x01" * 32
"""Stands for a payload digest where none is computed."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one model's KV cache: bfloat16, K and V alike."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes of one whole chunk, all workers together."""
        return self.layers * 2 * self.kv_heads * CHUNK_TOKENS * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running gateway."""

    process: subprocess.Popen[bytes]
    endpoint: str
    backend: str

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid


def storage_of(backend: str) -> str:
    """What ``auto`` means here. Raises ``Skipped`` where ``lmcache`` is asked for and missing."""
    here = all(importlib.util.find_spec(name) is not None for name in ("lmcache", "kvgate.storage.lmcache"))
    if backend == "lmcache" and not here:
        raise Skipped("the lmcache backend is not installed")
    return ("lmcache" if here else "memory") if backend == "auto" else backend


@contextmanager
def daemon(
    folder: Path, backend: str, pool_bytes: int, *, max_known_chunks: int = 1_000_000, more: Mapping[str, str] | None = None
) -> Iterator[Daemon]:
    """``kvgate serve`` with its state in ``folder`` and no L2, as the peer is run too; stopped at the end. ``more``: other flags."""
    storage = storage_of(backend)
    home = folder / f"gateway-{secrets.token_hex(4)}"
    home.mkdir()
    flags = {
        "--backend": storage,
        "--state-dir": str(home / "state"),
        "--data-dir": str(home / "data"),
        "--pool-bytes": str(pool_bytes),
        "--max-known-chunks": str(max_known_chunks),
        "--l2": "[]",
        "--log-level": "warning",
        **(more or {}),
    }
    log = home / "log"
    command = [sys.executable, "-c", "import sys; from kvgate.cli import main; sys.exit(main())", "serve"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(word for pair in flags.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")},
        )
    try:
        wait_for(lambda: b"kvgate is ready" in log.read_bytes(), process, log, START_S)
        yield Daemon(process, str(home / "state" / "gateway.sock"), storage)
    finally:
        stop(process, signal.SIGTERM)


def wait_for(ready: object, process: subprocess.Popen[bytes], log: Path, wait_s: float) -> None:
    """Poll ``ready`` until it is true; raises with the log's end where the process ends or the time passes."""
    assert callable(ready), "a function without arguments"
    until = time.monotonic() + wait_s
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a server did not come up (exit status {process.poll()}):\n{tail}")
        time.sleep(0.05)


def stop(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """End a process of ours: by ``first``, after 20 s by SIGKILL."""
    if process.poll() is None:
        process.send_signal(first)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def ask(client: GatewayClient, message: Record, reply: type[R]) -> R:
    """One request; the reply is of the type that belongs to it."""
    answer = client.call(message, CALL_S)
    assert isinstance(answer, reply), f"the gateway answered {type(answer).__name__}"
    return answer


@dataclass(slots=True)
class EngineSessions:
    """One engine's sessions: its workers in the order of their ranks, and its scheduler."""

    workers: list[GatewayClient]
    scheduler: GatewayClient
    opened: Opened
    handle: bytes
    plan: PartitionPlan

    def bind_message(self, tokens: Sequence[int]) -> Bind:
        """From a prompt to the bind request: token digests of its full chunks, in one message."""
        digests = token_digests(self.opened.token_key, tokens, CHUNK_TOKENS)
        return self.bind_of(digests)

    def bind_of(self, digests: Sequence[bytes]) -> Bind:
        """The bind request of ready-made token digests."""
        return Bind(
            handle=self.handle,
            adapter=None,
            salt=None,
            scope="prefix",
            scope_key=None,
            manifest=None,
            tokens=b"".join(digests),
        )

    def bind(self, tokens: Sequence[int]) -> Bound:
        """Token digests and one round trip."""
        return ask(self.scheduler, self.bind_message(tokens), Bound)

    def release(self, bound: Bound) -> None:
        """Give the lease back."""
        self.scheduler.call(Release(lease=bound.lease), CALL_S)

    def fill(self, bound: Bound, chunks: int) -> None:
        """Commit every worker's shard of the first ``chunks`` without writing payloads: they are present then, their bytes whatever."""
        for worker in self.workers:
            for first in range(0, chunks, BATCH_CHUNKS):
                wanted = tuple(range(first, min(first + BATCH_CHUNKS, chunks)))
                reserved = ask(worker, Reserve(lease=bound.lease, chunks=wanted), Reserved)
                written = tuple(
                    WrittenPayload(reservation=slot.reservation, digest=ANY_DIGEST)
                    for slot in reserved.slots
                    if slot.status == "slot"
                )
                if ask(worker, Commit(written=written, aborted=()), Committed).visible != len(wanted):
                    raise RuntimeError("the pool is too small for this case")


@contextmanager
def engine(
    running: Daemon, geometry: Geometry, *, workers: int = 1, block_tokens: int = 16, credential: bytes | None = None
) -> Iterator[EngineSessions]:
    """Register ``workers`` tensor-parallel ranks and open the engine as its scheduler, in the domain of ``credential``."""
    plan = even_plan(
        layers=geometry.layers, kv_heads=geometry.kv_heads, pipeline=((0, geometry.layers),), tensor_parallel=workers
    )
    model, representation = model_contract(workers), representation_of(geometry)
    run = secrets.token_bytes(16)
    with ExitStack() as stack:
        clients, handle = [], b""
        for rank in range(workers):
            report = RegisterWorker(
                engine=run,
                generation=0,
                pp_rank=0,
                tp_rank=rank,
                block_tokens=block_tokens,
                model=model,
                representation=representation,
                plan=plan,
            )
            replies: list[Registered] = []

            async def register(
                call: Call, _welcome: Welcome, report: Record = report, replies: list[Registered] = replies
            ) -> None:
                replies.append(cast(Registered, await call(report, CALL_S)))

            client = GatewayClient(running.endpoint, "worker", credential, on_connect=register)
            clients.append(stack.enter_context(connected(client)))
            handle = replies[-1].handle
        scheduler = stack.enter_context(connected(GatewayClient(running.endpoint, "scheduler", credential)))
        opened = ask(scheduler, OpenEngine(handle=handle), Opened)
        yield EngineSessions(clients, scheduler, opened, handle, plan)


@contextmanager
def connected(client: GatewayClient) -> Iterator[GatewayClient]:
    """The client, connected and set up."""
    client.start()
    try:
        if not client.wait_connected(START_S):
            raise RuntimeError("the client did not connect")
        yield client
    finally:
        client.close()


def representation_of(geometry: Geometry) -> Representation:
    """Raw bfloat16."""
    plain = ComponentFormat(dtype="bfloat16", group=None, scale_dtype=None)
    return Representation(
        layout="canonical",
        layout_version=1,
        chunk_tokens=CHUNK_TOKENS,
        codec="raw",
        k_format=plain,
        v_format=plain,
        groups=(
            KvGroup(
                layers=geometry.layers,
                kv_heads=geometry.kv_heads,
                head_dim_k=geometry.head_dim,
                head_dim_v=geometry.head_dim,
                window=None,
            ),
        ),
    )


def model_contract(workers: int) -> ModelContract:
    """A complete contract of a model that nobody has: figures need its shape, not its weights."""
    return ModelContract(
        base=ArtifactSet(artifacts=(Artifact(role="weights", size_bytes=1 << 30, digest=b"\x02" * 32),)),
        architecture=Architecture(settings=(Parameter(name="model_type", value="bench"),)),
        adapter=None,
        rope=Rope(kind="default", theta="10000.0", rotary_dim=64, style="neox", max_positions=131_072, parameters=()),
        weight_quantization="none",
        kv_quantization=KvQuantization(cache_dtype="bfloat16", scales=None),
        multimodal=None,
        numerics=Numerics(
            attention_backend="bench",
            isa="vec",
            compute_dtype="bfloat16",
            execution="eager",
            lora_max_rank=None,
            tensor_parallel=workers,
            pipeline_parallel=1,
            other=(),
            engine=Engine(name="bench", version="1", build="1", torch="1"),
        ),
    )
