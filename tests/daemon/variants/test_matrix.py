"""The matrix of design.md, row by row: who may meet what, and what the gateway does not believe."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgate.client import GatewayClient
from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.capability import CAPABILITY_BYTES
from kvgate.contract.table import MANIFEST
from tests.client.sdk_engine import GatewayThread, SdkEngine
from tests.daemon import makers
from tests.daemon.explaining import ALONE
from tests.daemon.variants.kit import (
    OTHERS,
    SOURCE,
    WAIT_S,
    altered,
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
