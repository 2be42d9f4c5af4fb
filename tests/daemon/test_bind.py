"""Bind and extend name exactly the chunks asked for: in order, of one's own access, and of nothing that is not to be had."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import (
    MAX_CHUNKS,
    Bind,
    Failure,
)
from tests.daemon import makers
from tests.daemon.engine import Engine
from tests.daemon.wire import denied


async def test_bind_of_nothing_is_a_miss(gateway: Gateway) -> None:
    """A prompt below one chunk has no address and no hit, and can be extended later."""
    engine = await Engine.start(gateway.config.socket_path)
    bound = await engine.bind()
    assert (bound.present, bound.probing, bound.addresses) == (0, False, b"")
    assert await engine.acquire(bound.lease, 0, 0) == 0
    assert await engine.extend(bound.lease, 0, "a") == 1
    await engine.close()


async def test_missing_first_chunk_is_a_miss(gateway: Gateway) -> None:
    """Later chunks without the first are worth nothing."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    assert await engine.commit(engine.fill(await engine.reserve(lease, 1), ("a", "b"))) == 1
    assert (await engine.bind("a", "b")).present == 0
    assert await engine.hit("a", "b") == 0
    await engine.close()


async def test_other_continuation_shares_the_prefix_only(gateway: Gateway) -> None:
    """Equal chunks after different ones have different addresses: the chain carries what came before."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b", "c")
    assert await engine.hit("a", "x", "c") == 1
    assert await engine.hit("b", "a", "c") == 0
    assert await engine.hit("a", "b", "c", "d") == 3
    await engine.close()


async def test_extend_continues_the_chain(gateway: Gateway) -> None:
    """Chunks added one by one have the addresses that a bind of all of them gives, and can be stored and found."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    assert await engine.extend(lease, 1, "b") == 2
    assert await engine.extend(lease, 2, "c", "d") == 4
    written = engine.fill(await engine.reserve(lease, 0, 1, 2, 3), ("a", "b", "c", "d"))
    assert await engine.commit(written) == 4
    assert await engine.hit("a", "b", "c", "d", "e") == 4
    await engine.close()


async def test_repeated_extend_is_harmless(gateway: Gateway) -> None:
    """An extend that overlaps what is known with equal tokens changes nothing it should not."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a", "b")
    assert await engine.extend(lease, 0, "a") == 2
    assert await engine.extend(lease, 1, "b", "c") == 3
    assert await engine.extend(lease, 1, "b", "c") == 3
    assert await engine.extend(lease, 3) == 3
    await engine.close()


@pytest.mark.parametrize(
    ("first", "texts", "field"),
    [(3, ("d",), "first"), (3, (), "first"), (0, ("x",), "tokens"), (1, ("x", "c"), "tokens"), (1, ("a",), "tokens")],
)
async def test_extend_with_a_gap_or_other_tokens_is_refused(
    gateway: Gateway, first: int, texts: tuple[str, ...], field: str
) -> None:
    """A lease never knows chunks without all before them, and what was bound can't be rewritten."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    async with denied("malformed", field):
        await engine.extend(lease, first, *texts)
    assert await engine.acquire(lease, 0, 2) == 2
    async with denied("denied", "last"):
        await engine.acquire(lease, 0, 3)
    await engine.close()


async def test_extend_beyond_the_limit_is_refused(gateway: Gateway) -> None:
    """A request has a bounded number of chunks, also when it grows."""
    engine = await Engine.start(gateway.config.socket_path)
    many = b"".join(index.to_bytes(32, "big") for index in range(1, MAX_CHUNKS + 1))
    lease = (await engine.bind(tokens=many)).lease
    async with denied("malformed", "tokens"):
        await engine.extend(lease, MAX_CHUNKS, "one more")
    await engine.release(lease)
    await engine.close()


async def test_salts_separate(gateway: Gateway) -> None:
    """What one salt stored is a miss for another salt and for none (kind 4)."""
    engine = await Engine.start(gateway.config.socket_path)
    first, second = makers.name("t1"), makers.name("t2")
    await engine.store("a", salt=first)
    assert [await engine.hit("a", salt=salt) for salt in (first, second, None)] == [1, 0, 0]
    await engine.store("b")
    assert [await engine.hit("b", salt=salt) for salt in (first, second, None)] == [0, 0, 1]
    await engine.close()


async def test_another_tenants_entry_looks_absent(gateway: Gateway) -> None:
    """The replies about what another salt stored and about what nobody stored are alike but for random lease and address (kind 6)."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", salt=makers.name("theirs"))
    seen = []
    for text in ("a", "absent"):
        bound = await engine.bind(text, salt=makers.name("ours"))
        seen.append((bound.present, bound.probing, len(bound.addresses), await engine.acquire(bound.lease, 0, 1)))
    assert seen[0] == seen[1]
    await engine.close()


async def test_request_scope_is_not_shared(gateway: Gateway) -> None:
    """Scope request with a nonce of its own is found under that nonce only; each scope is a world of its own."""
    engine = await Engine.start(gateway.config.socket_path)
    mine: dict[str, Any] = {"scope": "request", "scope_key": makers.name("mine")}
    other = mine | {"scope_key": makers.name("other")}
    query: dict[str, Any] = {"scope": "query", "scope_key": makers.name("mine")}
    await engine.store("a", **mine)
    assert [await engine.hit("a", **asked) for asked in (mine, other, query, {})] == [1, 0, 0, 0]
    await engine.close()


BAD_BINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "global scope": ({"scope": "global"}, "denied", "scope"),
    "request scope without a nonce": ({"scope": "request"}, "malformed", "scope_key"),
    "query scope without its digest": ({"scope": "query"}, "malformed", "scope_key"),
    "prefix scope with a key": ({"scope_key": makers.name("k")}, "malformed", "scope_key"),
    "transformed variant": ({"manifest": makers.name("m")}, "denied", "manifest"),
}


@pytest.mark.parametrize("case", list(BAD_BINDS))
async def test_bind_for_what_is_not_to_be_had_is_refused(gateway: Gateway, case: str) -> None:
    """Scopes and variants that no policy allows are refused by name, and open no lease."""
    changes, code, field = BAD_BINDS[case]
    engine = await Engine.start(gateway.config.socket_path)
    async with denied(code, field):
        await engine.bind("a", **changes)
    assert (await gateway.status())["leases"] == 0
    await engine.close()


async def test_bind_wants_every_field(gateway: Gateway) -> None:
    """A missing field is refused by name: there are no defaults on the wire."""
    engine = await Engine.start(gateway.config.socket_path)
    for name, _ in Bind._specs:
        body = engine.bind_message("a").to_value()
        del body[name]
        reply = await engine.scheduler.ask_raw("Bind", body)
        assert isinstance(reply, Failure)
        assert (reply.code, reply.field) == ("malformed", name)
    await engine.close()
