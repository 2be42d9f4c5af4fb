"""Capabilities: made by nobody else, believed without memory, refused with a reason only where that tells nothing."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kvgate.client import GatewayRefused
from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.address import token_digests
from kvgate.protocol.messages import (
    Failure,
    Release,
)
from kvgate.protocol.variant_messages import (
    BindVariant,
    VariantBound,
)
from tests.client.sdk_engine import GatewayThread, SdkEngine, config, running_gateway
from tests.daemon import makers
from tests.daemon.variants.kit import (
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
    outcome,
    refusal,
)


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
    with running_gateway(capability_ttl_s=60) as running:
        engine = SdkEngine(running.socket)
        engine.store(SOURCE)
        with Sdk(running.socket) as sdk:
            prefix = sdk.fetch(SOURCE)
            capability = sdk.publish(artifact(prefix, manifest(prefix)), ttl_s=10**6)
            assert 0 < capability.expires_s - time.time() <= 60
        engine.close()


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


def test_a_capability_is_no_part_of_any_refusal(sdk: Sdk, published: tuple[Artifact, VariantCapability]) -> None:
    """Error texts hold no digest, token or byte of what was sent."""
    made, capability = published
    with pytest.raises(GatewayRefused) as caught:
        sdk.restore(capability, (1, 2, 3, 4, 5, 6, 7, 8))
    failure: Failure = caught.value.failure
    text = f"{failure.problem} {failure.remedy} {caught.value}"
    for secret in (capability.hex, made.manifest.digest().hex()[:8], "1000"):
        assert secret not in text
