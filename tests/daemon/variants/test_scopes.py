"""Scope by policy: what each must prove, and whom the operator lets share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvgate.client import GatewayClient
from kvgate.client.artifacts import Artifact, Prefix
from kvgate.client.errors import ArtifactError
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.manifest import retained
from kvgate.protocol.variant_messages import (
    DescribeSource,
    ModelOpened,
    OpenModel,
    OpenVariant,
    SourceDescribed,
)
from kvgate.protocol.verify_messages import EnterVerify
from tests.client.sdk_engine import GatewayThread, SdkEngine, running_gateway
from tests.daemon import makers
from tests.daemon.variants.kit import (
    LISTED,
    SOURCE,
    TENANT,
    WAIT_S,
    artifact,
    ask,
    folder_of,
    found,
    holds,
    ids,
    manifest,
    open_variant,
    outcome,
    recency,
    refusal,
)


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


@pytest.mark.parametrize("tokens", [4, 8])
def test_one_manifest_stands_for_one_result(sdk: Sdk, prefix: Prefix, tokens: int) -> None:
    """Who publishes other KV, or a result of another length, under what is stored already is told so: the two are never mixed."""
    made = manifest(prefix, retained=None, parameters={"trained": f"for {tokens}"})
    first = Artifact(prefix.keys[:, :, :8], prefix.values[:, :, :8], prefix.token_ids[:8], made, prefix.source)
    capability = sdk.publish(first)
    other = dataclasses.replace(
        first,
        keys=first.keys[:, :, :tokens],
        values=-first.values[:, :, :tokens],
        token_ids=first.token_ids[:tokens],
    )
    with pytest.raises(ArtifactError, match="another result"):
        sdk.publish(other)
    assert holds(sdk, capability, first)
    assert holds(sdk, sdk.publish(first), first)


def test_a_legacy_result_is_its_holders_alone(sdk: Sdk, prefix: Prefix) -> None:
    """A bare tuple has no manifest, so it is shared with nobody, and restored all the same."""
    made = artifact(prefix, manifest(prefix))
    capability = sdk.publish((made.keys, made.values, made.token_ids))
    assert capability.scope == "request"
    assert holds(sdk, capability, made)
    legacy = sdk.source(made.token_ids).legacy_manifest()
    assert outcome(lambda: sdk._find(legacy, sdk.source(made.token_ids), made.token_ids, 60)) == "tokens"


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
    with running_gateway(folder, **settings) as running:
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
        no_way_from_a_verify_domain(running, made)
        for one in engines:
            one.close()


def no_way_from_a_verify_domain(running: GatewayThread, made: Artifact) -> None:
    """Anybody may enter one, so it takes no part in what domains share: it gets no key to it, and neither finds nor publishes."""

    async def enter(call: Any, _welcome: Any) -> None:
        await call(EnterVerify(run=b"r" * 32), WAIT_S)

    worker, client = (GatewayClient(running.socket, role, on_connect=enter) for role in ("worker", "client"))
    for one in (worker, client):
        one.start()
        assert one.wait_connected(WAIT_S)
    ask(worker, makers.report(engine=makers.engine_id("verified"), plan=makers.plan(tp=1)))
    opened: ModelOpened = ask(client, OpenModel(handle=None, model=None))
    assert opened.shared_token_key is None
    source: dict[str, Any] = {
        "handle": opened.handle,
        "adapter": None,
        "salt": None,
        "tokens": b"t" * 32,
        "source_tokens": 4,
        "tail": None,
    }
    failure = refusal(lambda: ask(client, DescribeSource(**source, scope="global")))
    assert (failure.code, failure.field) == ("denied", "scope")
    mine: SourceDescribed = ask(client, DescribeSource(**source, scope="prefix"))
    named: dict[str, Any] = {
        "model": mine.model,
        "source_prefix": mine.source_prefix,
        "source_tokens": 4,
        "payload_format": mine.payload_format,
    }
    manifest = dataclasses.replace(made.manifest, **named, retained=retained([[[0, 1]]], "model"))
    message: dict[str, Any] = {
        "handle": opened.handle,
        "adapter": None,
        "salt": None,
        "source": b"t" * 32,
        "tail": None,
        "tokens": b"t" * 32,
    }
    failure = refusal(lambda: ask(client, OpenVariant(**message, manifest=manifest)))
    assert (failure.code, failure.field) == ("denied", "scope")
    for one in (worker, client):
        one.close()
