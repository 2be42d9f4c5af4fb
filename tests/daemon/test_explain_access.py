"""Who asked is told of its own lookup and of nothing else; the operator's page shows words and opaque digests."""

from __future__ import annotations

import json

from kvgate.contract.table import COMPONENTS
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Explain
from tests.daemon import makers
from tests.daemon.admin_client import get
from tests.daemon.conftest import Start
from tests.daemon.explaining import (
    TEXTS,
    explain,
    miss,
    other_engine,
    seen,
    stored,
)
from tests.daemon.wire import denied


async def test_explained_after_the_release(gateway: Gateway) -> None:
    """A scheduler may ask after it gave the lease back; a lookup that was never made is not explained then."""
    engine = await stored(gateway)
    lease = await engine.lease("x")
    await engine.acquire(lease, 0, 1)
    await engine.release(lease)
    assert (await explain(engine, lease)).reasons == ("absent",)
    unasked = await engine.lease("y")
    await engine.release(unasked)
    async with denied("denied", "lease"):
        await explain(engine, unasked)


async def test_explained_without_a_lookup(gateway: Gateway) -> None:
    """A bound request that nobody looked up is explained from what is believed to be there."""
    engine = await stored(gateway)
    told = await explain(engine, await engine.lease(*TEXTS, "new"))
    assert (told.chunk, told.reasons) == (3, ("absent",))


async def test_only_the_connection_of_the_lease_is_told(gateway: Gateway) -> None:
    """Another connection, of the same engine too, and a made-up lease are refused, before and after the release."""
    engine = await stored(gateway)
    other = await other_engine(gateway, "other")
    bound = await engine.bind("x")
    await engine.acquire(bound.lease, 0, 1)
    for _ in range(2):
        async with denied("denied", "lease"):
            await explain(other, bound.lease)
        await engine.release(bound.lease)
    async with denied("denied", "lease"):
        await explain(engine, bytes(16) + bound.lease[16:])


async def test_reference_opens_nothing(gateway: Gateway) -> None:
    """The reference is no part of the lease, is fresh for each request, and no lease can be made of it."""
    engine = await stored(gateway)
    first, second = await engine.bind("x"), await engine.bind("x")
    assert first.reference != second.reference
    for bound in (first, second):
        raw = bytes.fromhex(bound.reference)
        assert raw not in bound.lease
        async with denied("denied", "lease"):
            await engine.scheduler.call(Explain(lease=raw.ljust(32, b"\1")), Explain)


async def test_page_shows_opaque_digests_only(gateway: Gateway) -> None:
    """The operator's page holds words, counts and 16-digit digests; it never shows salt or token digests, leases or links."""
    engine = await stored(gateway)
    salt = makers.name("secret salt")
    bound = await engine.bind(*TEXTS, salt=salt)
    await engine.acquire(bound.lease, 0, 3)
    page = await seen(gateway, bound.reference)
    assert page["asked"].keys() == page["nearest"].keys() == set(COMPONENTS)
    for side in ("asked", "nearest"):
        assert all(text == "none" or (len(text) == 16 and bytes.fromhex(text)) for text in page[side].values())
    differing = [name for name in COMPONENTS if page["asked"][name] != page["nearest"][name]]
    assert differing == page["reasons"] == ["scope"]
    text = json.dumps(page)
    for secret in (salt, bound.lease, *(makers.name(one) for one in TEXTS)):
        assert secret.hex()[:16] not in text


async def test_latest_misses_are_listed_newest_first_and_bounded(start: Start) -> None:
    """The page lists as many as asked for; the oldest miss goes when there are more than are kept."""
    gateway = await start(explain_misses=3)
    engine = await other_engine(gateway)
    references = [(await miss(engine, f"new {number}"))[0] for number in range(5)]
    for asked, wanted in (("?last=2", references[:2:-1]), ("?last=99999", references[:1:-1]), ("", references[:1:-1])):
        status, page = await get(gateway, f"/explain{asked}")
        assert status == 200
        assert [one["reference"] for one in json.loads(page)] == wanted
    assert (await get(gateway, f"/explain/{references[0]}"))[0] == 404
    for wrong in ("?last=-1", "?last=x", "?last=100000", "?last="):
        assert (await get(gateway, f"/explain{wrong}"))[0] == 400
    for wrong in ("ABCDEF0123456789", "0", "..", "0123456789abcdef0"):
        assert (await get(gateway, f"/explain/{wrong}"))[0] == 404
