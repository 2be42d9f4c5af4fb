"""A miss may tell of variants only to whoever asked for one, and only of its own domain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvgate.client.artifacts import Artifact, Prefix
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.address import token_digests
from kvgate.protocol.messages import (
    Acquire,
    Bind,
    Explain,
    Explained,
    Release,
)
from tests.client.sdk_engine import GatewayThread, SdkEngine
from tests.daemon import makers
from tests.daemon.admin_client import get
from tests.daemon.variants.kit import (
    artifact,
    ask,
    manifest,
    open_variant,
    recency,
)


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
