"""Variants and secrets, variants and nonsense: no marker comes out, and no input is a bug."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.client import GatewayClient, GatewayRefused
from kvgate.client.artifacts import Artifact, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.address import token_bytes
from kvgate.contract.record import Record
from kvgate.protocol.messages import Release
from kvgate.protocol.variant_messages import REPLIES, VariantBound, VariantOpened
from tests.client.sdk_engine import GatewayThread, SdkEngine, config
from tests.daemon.admin_client import get
from tests.daemon.variants.kit import (
    SOURCE,
    altered,
    artifact,
    bind_variant,
    folder_of,
    ids,
    manifest,
    open_variant,
    outcome,
    refusal,
)
from tests.protocol.test_variant_messages import MESSAGES

SALT = "salt-marker-Zq7"
TOKENS = tuple(0x51A7C0DE + 7919 * number for number in range(24))


def test_no_marker_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    """Tokens, salts, capabilities, keys and queries of fetching, publishing, binding and refusing: in no log, page, file or refusal."""
    folder = folder_of({})
    running = GatewayThread(config(folder)).start()
    engine = SdkEngine(running.socket)
    engine.store(TOKENS, salt=SALT)
    with Sdk(running.socket) as sdk:
        prefix = sdk.fetch(TOKENS, salt=SALT)
        made = artifact(prefix, manifest(prefix, query=TOKENS[:3], parameters={"p": "parameter-marker-Kx9"}))
        capability = sdk.publish(made)
        sdk.restore(capability, salt=SALT)
        refusals = [
            refusal(lambda: sdk.restore(capability)),
            refusal(lambda: sdk.restore(altered(capability, 100), salt=SALT)),
            refusal(lambda: sdk.restore(capability, TOKENS[:8], salt=SALT)),
            refusal(lambda: sdk.find(manifest(prefix, query=TOKENS[:2]), prefix.source, made.token_ids)),
            refusal(lambda: sdk.publish(artifact(prefix, manifest(prefix, scope="prefix", query=None)))),
        ]
    pages = [body(running, path) for path in ("/status", "/metrics", "/explain")]
    opened = engine.opened
    engine.close()
    running.stop()
    out, err = capfd.readouterr()
    assert "variant.sealed" in out
    secret = [opened.token_key, opened.salt_key, capability.data[:40], capability.data[-32:], made.manifest.query or b"-"]
    needles = [SALT, "parameter-marker", *(str(token) for token in TOKENS), *(f"{token:x}" for token in TOKENS)]
    raw = [*secret, SALT.encode(), *(token_bytes(TOKENS[at : at + 2]) for at in range(0, 24, 2))]
    for text in (out, err, repr(refusals), *pages):
        for needle in (*needles, *(one.hex() for one in raw)):
            assert needle not in text
    for path in (one for one in folder.rglob("*") if one.is_file() and one.name != "secret"):
        assert not [one for one in raw if one in path.read_bytes()]
    shutil.rmtree(folder)


def body(running: GatewayThread, path: str) -> str:
    """One admin page, asked for on the gateway's own loop."""
    return asyncio.run_coroutine_threadsafe(get(running.gateway, path), running._loop).result(20)[1]


@pytest.fixture
def raw(gateway: GatewayThread) -> Iterator[GatewayClient]:
    """A connection that may send anything."""
    made = GatewayClient(gateway.socket, "client")
    made.start()
    assert made.wait_connected(20)
    yield made
    made.close()


requests = st.one_of(*(MESSAGES[kind] for kind in REPLIES))
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def exchange(client: GatewayClient, message: Record) -> str:
    """The code of the answer; what it opened is given back."""
    try:
        reply = client.call(message, 20)
    except GatewayRefused as error:
        return error.code
    if isinstance(reply, VariantOpened | VariantBound):
        client.call(Release(lease=reply.lease), 20)
    return "ok"


@given(message=requests)
@FUZZ
def test_any_message_is_answered_and_never_by_a_bug(raw: GatewayClient, engine: SdkEngine, message: Record) -> None:
    """Random digests, manifests, capabilities and lists are refused in words."""
    assert exchange(raw, message) != "internal"


@given(data=st.data())
@FUZZ
def test_a_good_message_with_one_field_of_another_is_answered_and_never_by_a_bug(
    raw: GatewayClient, engine: SdkEngine, published: tuple[Artifact, VariantCapability], data: st.DataObject
) -> None:
    """So near to a right one that each check is reached; and what has been published is untouched by it."""
    made, capability = published
    good: Record = data.draw(st.sampled_from([open_variant(engine, made), bind_variant(engine, capability, made.token_ids)]))
    other: Any = data.draw(MESSAGES[type(good)])
    name = data.draw(st.sampled_from([name for name, _ in type(good)._specs]))
    values = {field: getattr(good, field) for field, _ in type(good)._specs} | {name: getattr(other, name)}
    assert exchange(raw, type(good)(**values)) != "internal"


def test_afterwards_all_is_well(sdk: Sdk, published: tuple[Artifact, VariantCapability]) -> None:
    """The gateway of the tests above still serves its variant, and nothing else in its place."""
    assert outcome(lambda: sdk.restore(published[1])) == "hit"
    assert outcome(lambda: sdk.fetch(ids())) == "gone"
    assert outcome(lambda: sdk.fetch(SOURCE)) == "hit"
