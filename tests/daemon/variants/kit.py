"""Artifacts for tests of variants: a source, a transform of it that keeps some tokens, and every way of asking for the result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.client import GatewayClient
from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.errors import GatewayRefused, NotStored
from kvgate.client.sdk import TTL_S
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.address import token_digests
from kvgate.contract.manifest import TransformManifest
from kvgate.contract.record import Record
from kvgate.protocol.messages import Failure
from kvgate.protocol.variant_messages import BindVariant, OpenVariant
from tests.client.sdk_engine import SdkEngine
from tests.daemon import makers

WAIT_S = 20.0
TENANT = b"tenant"
SOURCE = tuple(range(1000, 1024))
"""Six chunks of four tokens."""
KEPT = (0, 1, 2, 3, 9, 10, 17, 23)
"""Two chunks' worth of positions."""
LISTED = "recency@1"
"""What the gateways of these tests take as determined by the prefix."""


def ids(kept: Sequence[int] = KEPT, source: Sequence[int] = SOURCE) -> tuple[int, ...]:
    """Logical ids of an artifact."""
    return tuple(source[at] for at in kept)


def manifest(prefix: Prefix, **changes: Any) -> TransformManifest:
    """SnapKV of ``prefix`` at ratio 1/3 for one query, with changes."""
    values: dict[str, Any] = {
        "algorithm": "snapkv",
        "version": "1",
        "parameters": {"ratio": "1/3"},
        "retained": KEPT,
        "query": (7, 8, 9),
        "scope": "query",
    }
    return prefix.source.manifest(**(values | changes))


def recency(prefix: Prefix, **changes: Any) -> TransformManifest:
    """A transform that looks at nothing but the prefix."""
    return manifest(prefix, **({"algorithm": "recency", "query": None, "scope": "prefix"} | changes))


def artifact(prefix: Prefix, made: TransformManifest, kept: Sequence[int] = KEPT) -> Artifact:
    """The kept tokens' KV under ``made``, marked so that it is no ordinary KV of them."""
    take = list(kept)
    keys, values = -prefix.keys[:, :, take], -prefix.values[:, :, take]
    return Artifact(keys, values, ids(kept, prefix.token_ids), made, prefix.source)


def holds(sdk: Sdk, capability: VariantCapability, wanted: Artifact, **how: Any) -> bool:
    """Whether the capability gives exactly this artifact."""
    keys, values = sdk.restore(capability, wanted.token_ids, **how)
    return np.array_equal(keys, wanted.keys) and np.array_equal(values, wanted.values)


def found(sdk: Sdk, made: TransformManifest, prefix: Prefix, token_ids: Sequence[int] | None = None) -> str:
    """What a lookup of an exact manifest comes to: "hit", or the field that the refusal names."""
    # The SDK refuses to look for scope request by itself; what the gateway says to it is asked here.
    return outcome(lambda: sdk._find(made, prefix.source, tuple(token_ids or ids(source=prefix.token_ids)), TTL_S))


def outcome(call: Callable[[], Any]) -> str:
    """ "hit", "gone" where less than all is stored, or the field that the refusal names."""
    try:
        call()
    except GatewayRefused as error:
        return error.failure.field
    except NotStored:
        return "gone"
    return "hit"


def refusal(call: Callable[[], Any]) -> Failure:
    """The gateway's refusal of a call."""
    try:
        call()
    except GatewayRefused as error:
        return error.failure
    raise AssertionError("it was not refused")


def altered(capability: VariantCapability, at: int) -> VariantCapability:
    """One bit of it changed."""
    data = bytearray(capability.data)
    data[at] ^= 1
    return dataclasses.replace(capability, data=bytes(data))


def folder_of(settings: dict[str, Any]) -> Path:
    """A short private folder with the credentials of one tenant."""
    made = Path(tempfile.mkdtemp(prefix="kvg-"))
    file = made / "credentials.json"
    file.write_text(json.dumps({hashlib.sha256(TENANT).hexdigest(): "tenant"}))
    settings["credentials_file"] = str(file)
    return made


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
