"""Variants at the gateway: the matrix of who may meet what, scope by policy, capabilities, leases, and what a miss tells."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgate.client import GatewayClient, GatewayRefused
from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.address import token_digests
from kvgate.contract.capability import CAPABILITY_BYTES
from kvgate.contract.record import Record
from kvgate.contract.table import MANIFEST
from kvgate.protocol.messages import (
    Acquire,
    Bind,
    Bound,
    Commit,
    Explain,
    Explained,
    Extend,
    Failure,
    FinishLoad,
    Load,
    Release,
    Reserve,
    Reserved,
)
from kvgate.protocol.variant_messages import (
    BindVariant,
    DescribeSource,
    LoadRectangle,
    ModelOpened,
    OpenModel,
    OpenVariant,
    ReserveRectangle,
    SealVariant,
    VariantBound,
    VariantOpened,
)
from tests.client.sdk_engine import GatewayThread, SdkEngine, config
from tests.daemon import makers
from tests.daemon.admin_client import get
from tests.daemon.explaining import ALONE
from tests.daemon.variant_kit import (
    KEPT,
    LISTED,
    SOURCE,
    altered,
    artifact,
    found,
    holds,
    ids,
    manifest,
    outcome,
    recency,
    refusal,
)

WAIT_S = 20.0
TENANT = b"tenant"


def folder_of(settings: dict[str, Any]) -> Path:
    """A short private folder with the credentials of one tenant."""
    made = Path(tempfile.mkdtemp(prefix="kvg-"))
    file = made / "credentials.json"
    file.write_text(json.dumps({hashlib.sha256(TENANT).hexdigest(): "tenant"}))
    settings["credentials_file"] = str(file)
    return made


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayThread]:
    """One gateway for the module: the listed transform may be shared, but not between domains."""
    settings: dict[str, Any] = {"determined_transforms": f"other@9, {LISTED}"}
    folder = folder_of(settings)
    running = GatewayThread(config(folder, **settings)).start()
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(gateway: GatewayThread) -> Iterator[SdkEngine]:
    """The engine whose KV is transformed; two ranks."""
    made = SdkEngine(gateway.socket)
    made.store(SOURCE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def sdk(gateway: GatewayThread, engine: SdkEngine) -> Iterator[Sdk]:
    """A client beside it."""
    with Sdk(gateway.socket, model=engine.model.digest().hex()) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(sdk: Sdk) -> Prefix:
    """The KV of the source."""
    return sdk.fetch(SOURCE)


@pytest.fixture(scope="module")
def published(sdk: Sdk, prefix: Prefix) -> tuple[Artifact, VariantCapability]:
    """SnapKV of the source for query A, shared with whoever asks the same."""
    made = artifact(prefix, manifest(prefix))
    return made, sdk.publish(made)


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[GatewayClient]:
    """A raw connection in the client's role."""
    made = GatewayClient(gateway.socket, "client")
    made.start()
    assert made.wait_connected(WAIT_S)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_held(gateway: GatewayThread) -> Iterator[None]:
    """Whatever a test does, no lease, load or write is left of it."""
    yield
    deadline = time.monotonic() + WAIT_S
    counts: list[Any] = []
    while time.monotonic() < deadline:
        status = gateway.status()
        counts = [status[name] for name in ("leases", "open_loads", "open_writes")]
        counts += [status["storage"]["holds"], status["storage"]["reservations"]]
        if not any(counts):
            return
        time.sleep(0.01)
    pytest.fail(f"still held: {counts}")


def ask(client: GatewayClient, message: Record) -> Any:
    """The reply to a raw message."""
    return client.call(message, WAIT_S)


def bind_variant(engine: SdkEngine, capability: VariantCapability, tokens: tuple[int, ...], **changes: Any) -> BindVariant:
    """What a scheduler sends for a prompt of ``tokens``."""
    values: dict[str, Any] = {
        "handle": engine.handle,
        "adapter": None,
        "salt": None,
        "capability": capability.data,
        "tokens": b"".join(token_digests(engine.opened.token_key, tokens, makers.CHUNK_TOKENS)),
    }
    return BindVariant(**(values | changes))


def open_variant(engine: SdkEngine, made: Artifact, **changes: Any) -> OpenVariant:
    """What a client sends to publish."""
    key = engine.opened.token_key
    values: dict[str, Any] = {
        "handle": engine.handle,
        "adapter": None,
        "salt": None,
        "manifest": made.manifest,
        "source": b"".join(token_digests(key, made.source.token_ids, makers.CHUNK_TOKENS)),
        "tail": None,
        "tokens": b"".join(token_digests(key, made.token_ids, makers.CHUNK_TOKENS)),
    }
    return OpenVariant(**(values | changes))


# The matrix of design.md, row by row.


def test_ordinary_kv_hits_and_stays_what_it_was_after_its_variant_is_published(
    sdk: Sdk, prefix: Prefix, published: tuple[Artifact, VariantCapability], engine: SdkEngine
) -> None:
    """The original full prompt is served its own bytes, whatever has been made of it."""
    keys, values = engine.kv(SOURCE)
    again = sdk.fetch(SOURCE)
    assert np.array_equal(again.keys, keys)
    assert np.array_equal(again.values, values)
    assert holds(sdk, published[1], published[0])


def test_an_ordinary_lookup_of_the_retained_tokens_misses(sdk: Sdk, published: tuple[Artifact, VariantCapability]) -> None:
    """The literal retained tokens are a prompt like any other: nothing of the artifact is served for it, not one chunk."""
    assert outcome(lambda: sdk.fetch(published[0].token_ids)) == "gone"


def test_ordinary_kv_of_the_retained_tokens_is_not_served_for_the_variant(
    sdk: Sdk, published: tuple[Artifact, VariantCapability], engine: SdkEngine, prefix: Prefix
) -> None:
    """The reverse: storing that prompt as ordinary KV changes nothing for the variant, and gives no variant."""
    made, capability = published
    other = (5, *made.token_ids[1:])
    keys, _ = engine.store(other)
    assert found(sdk, made.manifest, prefix, other) == "tokens"
    assert np.array_equal(sdk.fetch(other).keys, keys)
    assert holds(sdk, capability, made)


def test_the_same_query_with_the_same_manifest_hits(
    sdk: Sdk, prefix: Prefix, published: tuple[Artifact, VariantCapability]
) -> None:
    """Query A again: found by its manifest alone, and restored bit for bit."""
    again = sdk.find(manifest(prefix), prefix.source, ids())
    assert holds(sdk, again, published[0])


OTHERS: dict[str, dict[str, Any]] = {
    "query B": {"query": (7, 8, 10)},
    "query A cut short": {"query": (7, 8)},
    "no query, held by nobody else": {"query": None, "scope": "request"},
    "ratio 1/4": {"parameters": {"ratio": "1/4"}},
    "one more parameter": {"parameters": {"ratio": "1/3", "window": "32"}},
    "no parameter": {"parameters": {}},
    "algorithm version 2": {"version": "2"},
    "another algorithm": {"algorithm": "snapkv2"},
    "other positions kept": {"retained": (0, 1, 2, 3, 9, 10, 17, 22)},
    "moved elsewhere": {"new_positions": (0, 1, 2, 3, 5, 6, 7, 8)},
    "kept per layer": {"retained": [KEPT, KEPT]},
    "kept per head": {"retained": [[KEPT, KEPT], [KEPT, KEPT]]},
    "nothing kept": {"retained": None},
    "scope request": {"scope": "request"},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_any_other_manifest_misses(
    sdk: Sdk, prefix: Prefix, published: tuple[Artifact, VariantCapability], change: dict[str, Any]
) -> None:
    """One field alone, and the artifact of the same tokens is not found; published, it does not disturb the first."""
    other = manifest(prefix, **change)
    assert found(sdk, other, prefix) == "tokens"
    second = artifact(prefix, other)
    second = dataclasses.replace(second, keys=second.keys * 2)
    assert holds(sdk, sdk.publish(second), second)
    assert holds(sdk, sdk.find(manifest(prefix), prefix.source, ids()), published[0])


WORKED_OUT = ("source_prefix", "source_tokens", "payload_format", "model")
"""Fields of a manifest that the gateway works out by itself."""


@pytest.mark.parametrize("field", WORKED_OUT)
def test_what_the_gateway_can_work_out_is_not_believed(
    client: GatewayClient, engine: SdkEngine, published: tuple[Artifact, VariantCapability], field: str
) -> None:
    """A manifest that names another source, model or stored form than the request's is refused by that field's name."""
    made = published[0]
    other: Any = makers.name("something else") if field != "source_tokens" else 25
    wrong = dataclasses.replace(made.manifest, **{field: other})
    failure = refusal(lambda: ask(client, open_variant(engine, made, manifest=wrong)))
    assert failure.code == "malformed"
    assert failure.field == ("source_tokens" if field == "source_tokens" else f"manifest.{field}")


def test_every_field_of_a_manifest_is_in_one_of_the_two_tests_above() -> None:
    """None is left out: what is not worked out is varied."""
    varied = {"algorithm", "algorithm_version", "parameters", "retained", "position_map", "query", "scope"}
    assert {row.path.split(".")[1].removesuffix("[]") for row in MANIFEST} == varied | set(WORKED_OUT)


def test_another_source_with_the_same_retained_ids_misses(
    sdk: Sdk, prefix: Prefix, published: tuple[Artifact, VariantCapability], engine: SdkEngine
) -> None:
    """Source B differs in one token that is not kept: its artifact of equal ids, positions and query is another."""
    source = tuple(token if at != 12 else 5 for at, token in enumerate(SOURCE))
    engine.store(source)
    second = sdk.fetch(source)
    assert ids(source=source) == ids()
    other = manifest(second)
    assert found(sdk, other, second) == "tokens"
    assert refusal(lambda: sdk.find(manifest(prefix), second.source, ids())).field == "manifest.source_prefix"
    assert refusal(lambda: sdk.find(other, prefix.source, ids())).field == "manifest.source_prefix"


def test_other_logical_ids_miss_under_the_same_manifest(
    sdk: Sdk, prefix: Prefix, published: tuple[Artifact, VariantCapability]
) -> None:
    """One id in any chunk, or one chunk less: the ids are in the chain below the variant."""
    right = ids()
    for at in range(len(right)):
        assert found(sdk, manifest(prefix), prefix, (*right[:at], 3, *right[at + 1 :])) == "tokens"
    assert found(sdk, manifest(prefix), prefix, (*right, 1, 2, 3, 4)) == "tokens"


@pytest.fixture
def stranger(request: pytest.FixtureRequest, gateway: GatewayThread) -> Iterator[SdkEngine]:
    """An engine that differs from the first in one thing, with ordinary KV of the source of its own."""
    change = dict(request.param)
    change["plan"] = makers.plan(change.pop("tp", 2))
    model = change.pop("model", makers.model())
    parts = {
        name: getattr(model, name) for name in ("base", "architecture", "rope", "numerics", "kv_quantization", "multimodal")
    }
    made = SdkEngine(gateway.socket, "stranger", **change, **parts)
    made.store(SOURCE)
    yield made
    made.close()


STRANGERS = {**ALONE, "plan": {"tp": 1}}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS, indirect=True)
def test_another_model_or_stored_form_neither_finds_nor_opens_it(
    gateway: GatewayThread, stranger: SdkEngine, published: tuple[Artifact, VariantCapability]
) -> None:
    """Base, RoPE, numerics, engine build, geometry, dtype or plan: its capability is refused, its manifest is another one."""
    made, capability = published
    failure = refusal(lambda: ask(stranger.scheduler, bind_variant(stranger, capability, made.token_ids)))
    assert (failure.code, failure.field) == ("denied", "capability.root")
    client = GatewayClient(gateway.socket, "client")
    client.start()
    assert client.wait_connected(WAIT_S)
    field = refusal(lambda: ask(client, open_variant(stranger, made))).field
    assert field in ("manifest.model", "manifest.payload_format", "manifest.source_prefix")
    client.close()


def test_another_adapter_neither_finds_nor_opens_it(
    sdk: Sdk, engine: SdkEngine, published: tuple[Artifact, VariantCapability]
) -> None:
    """No adapter is not any adapter; under the adapter there is an artifact of its own."""
    made, capability = published
    adapter = engine.add_adapter("kjv")
    engine.store(SOURCE, adapter=adapter)
    assert outcome(lambda: sdk.restore(capability, adapter=adapter)) == "capability.root"
    under = sdk.fetch(SOURCE, adapter=adapter)
    assert found(sdk, manifest(under), under) == "tokens"
    assert refusal(lambda: sdk.find(made.manifest, under.source, ids())).field == "manifest.model"
    second = artifact(under, manifest(under))
    own = sdk.publish(second)
    assert holds(sdk, own, second, adapter=adapter)
    assert outcome(lambda: sdk.restore(own)) == "capability.root"


def test_another_salt_neither_finds_nor_opens_it(
    sdk: Sdk, engine: SdkEngine, published: tuple[Artifact, VariantCapability]
) -> None:
    """A salt separates users inside a domain, artifacts included."""
    _, capability = published
    engine.store(SOURCE, salt="s")
    salted = sdk.fetch(SOURCE, salt="s")
    assert outcome(lambda: sdk.restore(capability, salt="s")) == "capability.root"
    assert found(sdk, manifest(salted), salted) == "tokens"
    second = artifact(salted, manifest(salted))
    own = sdk.publish(second)
    assert holds(sdk, own, second, salt="s")
    assert outcome(lambda: sdk.restore(own)) == "capability.root"
    assert outcome(lambda: sdk.restore(own, salt="t")) == "capability.root"


@pytest.fixture(scope="module")
def tenant(gateway: GatewayThread) -> Iterator[tuple[SdkEngine, Sdk, Prefix]]:
    """The same engine, prompt and client in another isolation domain."""
    made = SdkEngine(gateway.socket, credential=TENANT)
    made.store(SOURCE)
    with Sdk(gateway.socket, credential=TENANT) as client:
        yield made, client, client.fetch(SOURCE)
    made.close()


def test_another_domain_neither_finds_nor_opens_it(
    tenant: tuple[SdkEngine, Sdk, Prefix], published: tuple[Artifact, VariantCapability]
) -> None:
    """The same model, tokens, transform and query in another domain: miss; and the first domain's handle opens nothing there."""
    _, client, theirs = tenant
    made, capability = published
    assert found(client, manifest(theirs), theirs) == "tokens"
    assert outcome(lambda: client.restore(capability)) == "capability"
    assert manifest(theirs) != made.manifest


def test_a_foreign_capability_and_one_that_never_was_are_answered_alike(
    tenant: tuple[SdkEngine, Sdk, Prefix], published: tuple[Artifact, VariantCapability]
) -> None:
    """Byte for byte: nothing tells the holder of a stolen capability, or of a guess, that another domain has it."""
    engine, client, theirs = tenant
    _, capability = published
    guess = VariantCapability(b"\x01\x02" + bytes(CAPABILITY_BYTES - 2), capability.token_ids)
    replies = {
        refusal(lambda one=one: ask(engine.scheduler, bind_variant(engine, one, ids()))).encode()  # type: ignore[misc]
        for one in (capability, guess, altered(capability, 50), altered(capability, 173))
    }
    assert len(replies) == 1
    absent = refusal(lambda: client.find(manifest(theirs, query=(1,)), theirs.source, ids()))
    foreign = refusal(lambda: client.find(manifest(theirs), theirs.source, ids()))
    assert absent.encode() == foreign.encode()


# Scope by policy.


def test_scope_request_is_its_holders_alone(sdk: Sdk, prefix: Prefix) -> None:
    """Two results of one manifest are two artifacts: each capability gives its own, and neither is found without it."""
    made = manifest(prefix, scope="request")
    first, second = artifact(prefix, made), artifact(prefix, made)
    second = dataclasses.replace(second, values=second.values * 2)
    one, other = sdk.publish(first), sdk.publish(second)
    assert one.data != other.data
    assert holds(sdk, one, first)
    assert holds(sdk, other, second)
    assert found(sdk, made, prefix) == "tokens"


def test_a_legacy_result_is_its_holders_alone(sdk: Sdk, prefix: Prefix) -> None:
    """A bare tuple has no manifest, so it is shared with nobody, and restored all the same."""
    made = artifact(prefix, manifest(prefix))
    capability = sdk.publish((made.keys, made.values, made.token_ids))
    assert capability.scope == "request"
    assert holds(sdk, capability, made)
    legacy = sdk.source(made.token_ids).legacy_manifest()
    assert outcome(lambda: sdk.find(legacy, sdk.source(made.token_ids), made.token_ids)) == "tokens"


def test_scope_prefix_is_for_listed_transforms(sdk: Sdk, prefix: Prefix) -> None:
    """The listed transform is shared like its prefix, and found by everybody who may share that."""
    made = artifact(prefix, recency(prefix))
    assert holds(sdk, sdk.publish(made), made)
    assert holds(sdk, sdk.find(recency(prefix), prefix.source, ids()), made)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2"},
        {"version": "1.0"},
        {"version": "10"},
        {"algorithm": "recency2"},
        {"algorithm": "ecency"},
        {"algorithm": "snapkv"},
        {"algorithm": "other", "version": "1"},
    ],
    ids=str,
)
def test_scope_prefix_is_refused_to_every_other_transform(sdk: Sdk, prefix: Prefix, change: dict[str, str]) -> None:
    """Name and version must be listed exactly: a version that nobody vouched for is another transform."""
    made = artifact(prefix, recency(prefix, **change))
    failure = refusal(lambda: sdk.publish(made))
    assert (failure.code, failure.field) == ("denied", "manifest.scope")


def test_scope_global_is_refused_where_the_operator_has_not_allowed_it(
    client: GatewayClient, engine: SdkEngine, prefix: Prefix
) -> None:
    """Even a listed transform is not shared between domains by default, and no shared key is handed out."""
    opened: ModelOpened = ask(client, OpenModel(handle=engine.handle, model=None))
    assert opened.shared_token_key is None
    made = artifact(prefix, recency(prefix))
    wide = dataclasses.replace(made.manifest, scope="global")
    failure = refusal(lambda: ask(client, open_variant(engine, made, manifest=wide)))
    assert (failure.code, failure.field) == ("denied", "scope")
    message = DescribeSource(
        handle=engine.handle, adapter=None, salt=None, scope="global", tokens=b"", source_tokens=1, tail=makers.name("t")
    )
    assert refusal(lambda: ask(client, message)).field == "scope"


def test_scope_global_is_shared_between_domains_where_it_is_allowed() -> None:
    """With the setting, two domains of one deployment find one artifact of a listed transform; prefix scope stays apart."""
    settings: dict[str, Any] = {"determined_transforms": LISTED, "cross_domain": True}
    folder = folder_of(settings)
    running = GatewayThread(config(folder, **settings)).start()
    try:
        engines = [SdkEngine(running.socket, credential=one) for one in (None, TENANT)]
        for one in engines:
            one.store(SOURCE)
        with Sdk(running.socket) as mine, Sdk(running.socket, credential=TENANT) as theirs:
            here, there = mine.fetch(SOURCE), theirs.fetch(SOURCE)
            made = artifact(here, recency(here, scope="global"))
            capability = mine.publish(made)
            assert recency(there, scope="global") == made.manifest
            assert holds(mine, capability, made)
            own = theirs.find(recency(there, scope="global"), there.source, ids())
            assert holds(theirs, own, made)
            assert outcome(lambda: theirs.restore(capability)) == "capability"
            mine.publish(artifact(here, recency(here)))
            assert found(theirs, recency(there), there) == "tokens"
            assert found(theirs, recency(there, scope="global", version="1", parameters={"ratio": "1"}), there) == "tokens"
            assert outcome(lambda: mine.fetch(ids())) == "gone"
        for one in engines:
            one.close()
    finally:
        running.stop()
        shutil.rmtree(folder)


# Capabilities.


@pytest.mark.parametrize("at", [0, 1, 2, 6, 13, 14, 46, 78, 110, 141, 142, 173])
def test_an_altered_capability_is_refused(sdk: Sdk, published: tuple[Artifact, VariantCapability], at: int) -> None:
    """One bit in any of its fields: nobody makes or widens one without the deployment's secret."""
    broken = altered(published[1], at)
    message = refusal(lambda: sdk_bind(sdk, broken, published[0].token_ids))
    assert (message.code, message.field) == ("denied", "capability")


def sdk_bind(sdk: Sdk, capability: VariantCapability, tokens: tuple[int, ...]) -> Any:
    """Present a capability whose content may make no sense."""
    opened = sdk.opened()
    values = {"handle": opened.handle, "adapter": None, "salt": None, "capability": capability.data}
    digests = b"".join(token_digests(opened.token_key, tokens, makers.CHUNK_TOKENS))
    return sdk._client.call(BindVariant(**values, tokens=digests), WAIT_S)  # type: ignore[arg-type]


def test_the_prompt_must_begin_with_the_artifacts_tokens(
    engine: SdkEngine, published: tuple[Artifact, VariantCapability]
) -> None:
    """Too short, or one other token: refused. What follows it is the request's own business."""
    made, capability = published
    for wrong in ((), made.token_ids[:4], (*made.token_ids[:7], 1)):
        failure = refusal(lambda wrong=wrong: ask(engine.scheduler, bind_variant(engine, capability, wrong)))  # type: ignore[misc]
        assert (failure.code, failure.field) == ("denied", "capability.end")
    longer = (*made.token_ids, *range(40))
    bound: VariantBound = ask(engine.scheduler, bind_variant(engine, capability, longer))
    assert len(bound.addresses) == 2 * 32
    assert bound.present == 2
    assert bound.variant == made.manifest.digest() == capability.variant
    ask(engine.scheduler, Release(lease=bound.lease))


def test_an_expired_capability_is_refused_by_that_name(sdk: Sdk, prefix: Prefix) -> None:
    """Its artifact is there still, and a new one can be had."""
    made = artifact(prefix, manifest(prefix))
    capability = sdk.publish(made, ttl_s=1)
    while not capability.expired:
        time.sleep(0.05)
    assert outcome(lambda: sdk.restore(capability)) == "capability.expires_s"
    assert holds(sdk, sdk.find(made.manifest, prefix.source, ids()), made)


def test_the_operator_limits_how_long_a_capability_lives() -> None:
    """What is asked for beyond the setting is cut down to it."""
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    running = GatewayThread(config(folder, capability_ttl_s=60)).start()
    engine = SdkEngine(running.socket)
    engine.store(SOURCE)
    with Sdk(running.socket) as sdk:
        prefix = sdk.fetch(SOURCE)
        capability = sdk.publish(artifact(prefix, manifest(prefix)), ttl_s=10**6)
        assert 0 < capability.expires_s - time.time() <= 60
    engine.close()
    running.stop()
    shutil.rmtree(folder)


def test_a_capability_outlives_its_gateway_and_is_good_at_every_other_of_the_deployment() -> None:
    """After a restart, and beside it, it is believed without any memory; what is gone with the pool is gone, and says so.

    A gateway of another deployment believes nothing.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    secret = str(folder / "secret")
    places = [folder / name for name in ("one", "two", "other")]
    for place in places:
        place.mkdir(mode=0o700)
    first = GatewayThread(config(places[0], secret_file=secret)).start()
    engine = SdkEngine(first.socket)
    engine.store(SOURCE)
    with Sdk(first.socket) as sdk:
        prefix = sdk.fetch(SOURCE)
        made = artifact(prefix, manifest(prefix))
        kept = [sdk.publish(made), sdk.publish(dataclasses.replace(made, manifest=manifest(prefix, scope="request")))]
    engine.close()
    first.stop()
    for place, settings, wanted in (
        (places[0], {"secret_file": secret}, "gone"),
        (places[1], {"secret_file": secret}, "gone"),
        (places[2], {}, "capability"),
    ):
        running = GatewayThread(config(place, **settings)).start()
        engine = SdkEngine(running.socket)
        with Sdk(running.socket) as sdk:
            for capability in kept:
                assert outcome(lambda: sdk.restore(VariantCapability.from_hex(capability.hex, ids()))) == wanted  # noqa: B023
            if wanted == "gone":
                engine.store(SOURCE)
                again = sdk.fetch(SOURCE)
                assert again.source.prefix == prefix.source.prefix
                assert found(sdk, manifest(again), again) == "tokens"
        engine.close()
        running.stop()
    shutil.rmtree(folder)


# Leases.


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
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    running = GatewayThread(config(folder, transfer="gateway")).start()
    engine = SdkEngine(running.socket)
    with Sdk(running.socket) as sdk:
        source = sdk.source(SOURCE)
        keys, values = engine.kv(ids())
        made = Artifact(keys, values, ids(), source.manifest(algorithm="any", version="1"), source)
        failure = refusal(lambda: sdk.publish(made))
        assert (failure.code, failure.field) == ("denied", "transfer")
        assert outcome(lambda: sdk.fetch(SOURCE)) == "gone"
    engine.close()
    running.stop()
    shutil.rmtree(folder)


PUBLISHER = """
import sys, time
sys.path.insert(0, sys.argv[3])
from tests.daemon.variant_kit import *
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
    root = str(Path(__file__).resolve().parents[2])
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


# Attaching.


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


# What a miss tells.


def explained(engine: SdkEngine, gateway: GatewayThread, bound: Any, chunks: int) -> tuple[list[str], list[str]]:
    """Acquire, ask why it missed, release: the requester's answer and the operator's."""
    client = engine.scheduler
    end = ask(client, Acquire(lease=bound.lease, first=0, last=chunks, deadline_ms=5000)).end
    assert end < chunks
    told: Explained = ask(client, Explain(lease=bound.lease))
    ask(client, Release(lease=bound.lease))
    status, page = asyncio.run(get(gateway.gateway, f"/explain/{bound.reference}"))
    assert status == 200
    return list(told.reasons), json.loads(page)[0]["reasons"]


def test_a_miss_of_a_variant_names_it_and_an_ordinary_miss_tells_nothing_of_it(
    gateway: GatewayThread, engine: SdkEngine, sdk: Sdk, prefix: Prefix
) -> None:
    """Another manifest of one access is told "variant"; of another query only the operator sees "variant" and "scope".

    An ordinary lookup of the retained tokens is told what it would be told if nothing were stored; the operator sees why.
    """
    kept = (0, 1, 2, 3, 20, 21, 22, 23)
    wide = artifact(prefix, recency(prefix, retained=kept), kept)
    narrow_kept = (4, 5, 6, 7, 20, 21, 22, 23)
    narrow = artifact(prefix, manifest(prefix, retained=narrow_kept), narrow_kept)
    sdk.publish(wide)
    sdk.publish(narrow)

    def open_as(made: Artifact, changed: Any) -> Any:
        return ask(engine.scheduler, open_variant(engine, made, manifest=changed))

    other = recency(prefix, retained=kept, parameters={"ratio": "1"})
    assert explained(engine, gateway, open_as(wide, other), 2) == (["variant"], ["variant"])
    query_b = manifest(prefix, retained=narrow_kept, query=(1, 1))
    assert explained(engine, gateway, open_as(narrow, query_b), 2) == (["absent"], ["variant", "scope"])
    same_query = manifest(prefix, retained=narrow_kept, version="2")
    assert explained(engine, gateway, open_as(narrow, same_query), 2) == (["variant"], ["variant"])
    for made, seen in ((wide, ["variant"]), (narrow, ["variant", "scope"])):
        t = b"".join(token_digests(engine.opened.token_key, made.token_ids, makers.CHUNK_TOKENS))
        bind = Bind(handle=engine.handle, adapter=None, salt=None, scope="prefix", scope_key=None, manifest=None, tokens=t)
        assert explained(engine, gateway, ask(engine.scheduler, bind), 2) == (["absent"], seen)


# Every tier, and after a restart of everything.


@pytest.mark.slow
def test_the_matrix_holds_in_l2_and_after_a_restart() -> None:
    """Published, everything stopped, started again: old capabilities open their artifacts from L2, and the rest still misses."""
    settings: dict[str, Any] = {
        "backend": "lmcache",
        "determined_transforms": LISTED,
        "probe_s": 60.0,
        "storage_s": 60.0,
        "pool_bytes": 16 << 20,
        "drain_s": 30.0,
    }
    folder = folder_of(settings)
    running = GatewayThread(config(folder, **settings)).start()
    engine = SdkEngine(running.socket)
    engine.store(SOURCE)
    with Sdk(running.socket, deadline_s=120) as sdk:
        prefix = sdk.fetch(SOURCE)
        made = {
            "query": artifact(prefix, manifest(prefix)),
            "prefix": artifact(prefix, recency(prefix)),
            "request": artifact(prefix, manifest(prefix, scope="request")),
        }
        kept = {name: sdk.publish(one) for name, one in made.items()}
        check_matrix(sdk, engine, made, kept)
    engine.close()
    running.stop()
    running = GatewayThread(config(folder, **settings)).start()
    engine = SdkEngine(running.socket)
    with Sdk(running.socket, deadline_s=120) as sdk:
        check_matrix(sdk, engine, made, kept)
    tenant = SdkEngine(running.socket, credential=TENANT)
    with Sdk(running.socket, credential=TENANT, deadline_s=120) as theirs:
        for capability in kept.values():
            assert outcome(lambda: theirs.restore(capability)) == "capability"  # noqa: B023
        assert outcome(lambda: theirs.fetch(SOURCE)) == "gone"
    tenant.close()
    engine.close()
    running.stop()
    shutil.rmtree(folder)


def check_matrix(sdk: Sdk, engine: SdkEngine, made: dict[str, Artifact], kept: dict[str, VariantCapability]) -> None:
    """Hits where there must be hits, bit for bit, and misses everywhere else."""
    prefix = sdk.fetch(SOURCE)
    assert np.array_equal(prefix.keys, engine.kv(SOURCE)[0])
    for name, one in made.items():
        assert holds(sdk, kept[name], one)
        assert found(sdk, one.manifest, prefix) == ("tokens" if name == "request" else "hit")
    assert outcome(lambda: sdk.fetch(ids())) == "gone"
    for change in OTHERS.values():
        assert found(sdk, manifest(prefix, **change), prefix) == "tokens"
    assert outcome(lambda: sdk.restore(kept["query"], salt="s")) == "capability.root"
    assert outcome(lambda: sdk.restore(altered(kept["query"], 100))) == "capability"


def test_a_capability_is_no_part_of_any_refusal(sdk: Sdk, published: tuple[Artifact, VariantCapability]) -> None:
    """Error texts hold no digest, token or byte of what was sent."""
    made, capability = published
    with pytest.raises(GatewayRefused) as caught:
        sdk.restore(capability, (1, 2, 3, 4, 5, 6, 7, 8))
    failure: Failure = caught.value.failure
    text = f"{failure.problem} {failure.remedy} {caught.value}"
    for secret in (capability.hex, made.manifest.digest().hex()[:8], "1000"):
        assert secret not in text
