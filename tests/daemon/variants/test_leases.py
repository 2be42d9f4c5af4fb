"""Leases of artifacts, and attaching: what is read-only stays so, what is half there is not there, what is foreign is unknown."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgate.client import GatewayClient
from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.address import token_digests
from kvgate.contract.record import Record
from kvgate.protocol.messages import (
    Acquire,
    Bind,
    Bound,
    Commit,
    Extend,
    FinishLoad,
    Load,
    RegisterAdapter,
    Release,
    Reserve,
    Reserved,
    Revoke,
)
from kvgate.protocol.variant_messages import (
    LoadRectangle,
    ModelOpened,
    OpenModel,
    ReserveRectangle,
    SealVariant,
    VariantBound,
    VariantOpened,
)
from tests.client.sdk_engine import GatewayThread, SdkEngine, running_gateway
from tests.daemon import makers
from tests.daemon.variants.kit import (
    KEPT,
    SOURCE,
    WAIT_S,
    artifact,
    ask,
    bind_variant,
    found,
    holds,
    ids,
    manifest,
    open_variant,
    outcome,
    refusal,
)


def test_nothing_is_added_to_a_restored_variant(engine: SdkEngine, published: tuple[Artifact, VariantCapability]) -> None:
    """Its lease takes no further chunks, and neither worker nor client writes under it: decoding stores nothing there."""
    made, capability = published
    bound: VariantBound = ask(engine.scheduler, bind_variant(engine, capability, made.token_ids))
    t = makers.tokens("x")
    attempts: list[tuple[GatewayClient, Record]] = [
        (engine.scheduler, Extend(lease=bound.lease, first=2, tokens=t)),
        (engine.clients[0], Reserve(lease=bound.lease, chunks=(0,))),
        (engine.clients[1], Reserve(lease=bound.lease, chunks=(1,))),
        (engine.scheduler, ReserveRectangle(lease=bound.lease, rectangle=0, chunks=(0,))),
        (engine.scheduler, SealVariant(lease=bound.lease, ttl_s=1, deadline_ms=1000)),
    ]
    for one, message in attempts:
        assert refusal(lambda one=one, message=message: ask(one, message)).code == "denied"  # type: ignore[misc]
    ask(engine.scheduler, Release(lease=bound.lease))


def test_workers_load_a_restored_variant_as_they_load_anything(
    engine: SdkEngine, published: tuple[Artifact, VariantCapability]
) -> None:
    """Acquire by the scheduler, load by each rank, finish: the vLLM side needs nothing new for the bytes."""
    made, capability = published
    bound: VariantBound = ask(engine.scheduler, bind_variant(engine, capability, made.token_ids))
    assert ask(engine.scheduler, Acquire(lease=bound.lease, first=0, last=2, deadline_ms=5000)).end == 2
    for worker in engine.clients:
        plan = ask(worker, Load(lease=bound.lease, chunks=(0, 1)))
        assert len({slot.digest for slot in plan.slots}) == 2
        assert ask(worker, FinishLoad(ticket=plan.ticket, mismatched=())).valid
    ask(engine.scheduler, Release(lease=bound.lease))


def test_a_client_writes_under_no_ordinary_root(client: GatewayClient, engine: SdkEngine) -> None:
    """Ordinary KV comes from engines alone: a client's lease of it can be read and not written."""
    t = b"".join(token_digests(engine.opened.token_key, SOURCE, makers.CHUNK_TOKENS))
    bind = Bind(handle=engine.handle, adapter=None, salt=None, scope="prefix", scope_key=None, manifest=None, tokens=t)
    bound: Bound = ask(client, bind)
    for message in (
        ReserveRectangle(lease=bound.lease, rectangle=0, chunks=(0,)),
        Reserve(lease=bound.lease, chunks=(0,)),
        SealVariant(lease=bound.lease, ttl_s=1, deadline_ms=1000),
    ):
        assert refusal(lambda message=message: ask(client, message)).code == "denied"  # type: ignore[misc]
    ask(client, Release(lease=bound.lease))


def test_an_artifact_is_bound_by_its_capability_and_not_by_its_digest(
    client: GatewayClient, engine: SdkEngine, published: tuple[Artifact, VariantCapability]
) -> None:
    """The plain bind takes no manifest, nor scope global."""
    made, _ = published
    t = b"".join(token_digests(engine.opened.token_key, made.token_ids, makers.CHUNK_TOKENS))
    plain: dict[str, Any] = {"handle": engine.handle, "adapter": None, "salt": None, "tokens": t}
    digest = made.manifest.digest()
    scopes = [("prefix", None), ("query", made.manifest.query), ("request", makers.name("nonce"))]
    for scope, key in scopes:
        bind = Bind(**plain, scope=scope, scope_key=key, manifest=digest)
        assert refusal(lambda bind=bind: ask(client, bind)).field == "manifest"  # type: ignore[misc]
    assert refusal(lambda: ask(client, Bind(**plain, scope="global", scope_key=None, manifest=None))).field == "scope"


def test_a_half_written_artifact_gets_no_capability(client: GatewayClient, engine: SdkEngine, prefix: Prefix) -> None:
    """Sealing needs every rectangle of every chunk, stored; what was reserved and given up is nothing."""
    made = artifact(prefix, manifest(prefix, scope="request"))
    opened: VariantOpened = ask(client, open_variant(engine, made))
    seal = SealVariant(lease=opened.lease, ttl_s=60, deadline_ms=2000)
    assert refusal(lambda: ask(client, seal)).field == "tokens"
    reserved: Reserved = ask(client, ReserveRectangle(lease=opened.lease, rectangle=0, chunks=(0, 1)))
    assert [slot.status for slot in reserved.slots] == ["slot", "slot"]
    assert refusal(lambda: ask(client, seal)).field == "tokens"
    ask(client, Commit(written=(), aborted=tuple(slot.reservation for slot in reserved.slots)))
    assert refusal(lambda: ask(client, seal)).field == "tokens"
    ask(client, Release(lease=opened.lease))


def test_what_is_not_the_connections_own_is_refused(
    client: GatewayClient, engine: SdkEngine, prefix: Prefix, gateway: GatewayThread
) -> None:
    """Leases of another connection, rectangles that are none, a worker at a publisher's lease, an unknown handle."""
    made = artifact(prefix, manifest(prefix, scope="request"))
    opened: VariantOpened = ask(client, open_variant(engine, made))
    lease, foreign = opened.lease, engine.scheduler
    cases: list[tuple[GatewayClient, Record, str]] = [
        (foreign, ReserveRectangle(lease=lease, rectangle=0, chunks=(0,)), "lease"),
        (foreign, LoadRectangle(lease=lease, rectangle=0, chunks=(0,)), "lease"),
        (foreign, SealVariant(lease=lease, ttl_s=1, deadline_ms=1), "lease"),
        (engine.clients[0], Reserve(lease=lease, chunks=(0,)), "lease"),
        (engine.clients[0], Load(lease=lease, chunks=(0,)), "lease"),
        (client, ReserveRectangle(lease=lease, rectangle=2, chunks=(0,)), "rectangle"),
        (client, LoadRectangle(lease=lease, rectangle=2, chunks=(0,)), "rectangle"),
        (client, LoadRectangle(lease=lease, rectangle=0, chunks=(0,)), "chunks"),
        (client, ReserveRectangle(lease=lease, rectangle=0, chunks=(2,)), "chunks"),
        (client, Extend(lease=lease, first=2, tokens=makers.tokens("x")), "lease"),
        (client, open_variant(engine, made, handle=makers.name("handle")), "handle"),
        (client, open_variant(engine, made, adapter=makers.name("adapter")), "adapter"),
        (client, open_variant(engine, made, tokens=b""), "tokens"),
        (client, open_variant(engine, made, source=b""), "source_tokens"),
        (client, open_variant(engine, made, tail=makers.name("tail")), "source_tokens"),
        (client, Commit(written=(), aborted=(1,)), "reservation"),
    ]
    for one, message, field in cases:
        failure = refusal(lambda one=one, message=message: ask(one, message))  # type: ignore[misc]
        assert failure.field == field, f"{type(message).__name__}: {failure}"
    ask(client, Release(lease=lease))


def test_a_private_pool_is_private_from_clients_too() -> None:
    """Where only the gateway moves bytes, a client is told where none of them lie: nothing is fetched or published there."""
    with running_gateway(transfer="gateway") as running:
        engine = SdkEngine(running.socket)
        with Sdk(running.socket) as sdk:
            source = sdk.source(SOURCE)
            keys, values = engine.kv(ids())
            made = Artifact(keys, values, ids(), source.manifest(algorithm="any", version="1"), source)
            failure = refusal(lambda: sdk.publish(made))
            assert (failure.code, failure.field) == ("denied", "transfer")
            assert outcome(lambda: sdk.fetch(SOURCE)) == "gone"
        engine.close()


PUBLISHER = """
import sys, time
sys.path.insert(0, sys.argv[3])
from tests.daemon.variants.kit import *
from kvgate.client import sdk
from kvgate.client.moves import Mover
with sdk.Gateway(sys.argv[1], model=sys.argv[2]) as client:
    prefix = client.fetch(SOURCE)
    made = artifact(prefix, manifest(prefix, query=(99,)))
    def stall(*_arguments):
        print("reserved", flush=True)
        time.sleep(60)
    Mover._fill = stall
    client.publish(made)
"""


def test_a_publisher_that_is_killed_leaves_nothing_behind(
    gateway: GatewayThread, engine: SdkEngine, sdk: Sdk, prefix: Prefix
) -> None:
    """Between reserve and commit: its slots are free once its process is gone, nothing is visible, another one can publish."""
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", PUBLISHER, gateway.socket, engine.model.digest().hex(), root]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"reserved\n"
        assert gateway.status()["open_writes"] == 2
        assert found(sdk, manifest(prefix, query=(99,)), prefix) == "tokens"
        process.kill()
    made = artifact(prefix, manifest(prefix, query=(99,)))
    assert holds(sdk, sdk.publish(made), made)


@pytest.mark.parametrize(
    ("retained", "field"),
    [([KEPT] * 3, "manifest.retained.layers"), ([[KEPT] * 3] * 2, "manifest.retained.heads")],
    ids=["three layers", "three heads"],
)
def test_positions_must_fit_the_model(sdk: Sdk, prefix: Prefix, retained: Any, field: str) -> None:
    """Lists per layer are one a layer of this model, per head one a head."""
    assert refusal(lambda: sdk.publish(artifact(prefix, manifest(prefix, retained=retained)))).field == field


def test_a_registration_that_ended_publishes_and_binds_nothing(gateway: GatewayThread) -> None:
    """An artifact of weights that changed in place is refused; so is one whose engine is gone."""
    engine = SdkEngine(gateway.socket, "short-lived", weights="short-lived")
    engine.store(SOURCE)
    with Sdk(gateway.socket, model=engine.model.digest().hex()) as sdk:
        prefix = sdk.fetch(SOURCE)
        made = artifact(prefix, manifest(prefix))
        capability = sdk.publish(made)
        engine.clients[0].close()
        calls: list[Callable[[], Any]] = [
            lambda: sdk.publish(made),
            lambda: sdk.restore(capability),
            lambda: sdk.fetch(SOURCE),
        ]
        deadline = time.monotonic() + WAIT_S
        while outcome(calls[1]) == "hit" and time.monotonic() < deadline:
            time.sleep(0.01)
        for call in calls:
            assert refusal(call).code == "unsealed"
    engine.close()


def test_a_client_attaches_by_model(gateway: GatewayThread, client: GatewayClient, engine: SdkEngine) -> None:
    """One engine: no name needed; several of one contract count as one; of different contracts, digits of the digest decide."""
    mine = engine.model.digest().hex()
    twin = SdkEngine(gateway.socket, "twin")
    found: ModelOpened = ask(client, OpenModel(handle=None, model=None))
    assert found.handle in (engine.handle, twin.handle)
    assert (found.model, found.plan, found.representation) == (engine.model, engine.plan, engine.form)
    other = SdkEngine(gateway.socket, "other", weights="other")
    failure = refusal(lambda: ask(client, OpenModel(handle=None, model=None)))
    assert (failure.code, failure.field) == ("denied", "model")
    assert ask(client, OpenModel(handle=None, model=mine[:16])).model == engine.model
    assert ask(client, OpenModel(handle=other.handle, model=None)).model == other.model
    assert refusal(lambda: ask(client, OpenModel(handle=None, model="0" * 64))).code == "unsealed"
    assert refusal(lambda: ask(client, OpenModel(handle=makers.name("no handle"), model=None))).code == "unsealed"
    twin.close()
    other.close()


def test_a_client_sees_no_engine_of_another_domain(
    gateway: GatewayThread, client: GatewayClient, tenant: tuple[SdkEngine, Sdk, Prefix]
) -> None:
    """Neither by handle nor by digest: the answer is that of an engine that does not exist."""
    theirs, _, _ = tenant
    by_handle = refusal(lambda: ask(client, OpenModel(handle=theirs.handle, model=None)))
    unknown = refusal(lambda: ask(client, OpenModel(handle=makers.name("unknown"), model=None)))
    assert by_handle.encode() == unknown.encode()


@pytest.mark.parametrize("role", ["client", "admin"])
def test_a_client_says_nothing_about_the_engine(gateway: GatewayThread, engine: SdkEngine, role: str) -> None:
    """It is handed the engine's handle to read and publish: that revokes nothing, and makes no adapter known."""
    other = GatewayClient(gateway.socket, role)
    other.start()
    assert other.wait_connected(WAIT_S)
    handle = ask(other, OpenModel(handle=engine.handle, model=None)).handle
    for message in (Revoke(handle=handle), RegisterAdapter(handle=handle, adapter=makers.adapter("strange"))):
        failure = refusal(lambda message=message: ask(other, message))  # type: ignore[misc]
        assert (failure.code, failure.field) == ("denied", "role")
    other.close()
    assert makers.adapter("strange").digest() not in ask(engine.scheduler, OpenModel(handle=engine.handle, model=None)).adapters
