"""Explained misses through a real gateway: each component alone is named by its own name, and nobody learns of others' objects."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kvgate.contract.table import COMPONENTS
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import MISS_REASONS, QUARANTINES
from tests.daemon import makers
from tests.daemon.admin_client import counter, get
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, nothing_held
from tests.daemon.explaining import (
    ALONE,
    BASE_BY_OTHER_MEANS,
    TEXTS,
    adapter,
    explain,
    miss,
    numerics,
    other_engine,
    reasons,
    seen,
    stored,
    windowed,
    with_engine,
)

ABSENT = (["absent"], ["absent"])


@pytest.mark.parametrize("component", ALONE)
async def test_one_difference_is_named_by_its_own_name(gateway: Gateway, component: str) -> None:
    """An engine that differs from what is stored in one component alone misses because of that one, for client and operator."""
    await stored(gateway)
    asking = await other_engine(gateway, **ALONE[component])
    assert await reasons(gateway, asking, *TEXTS) == ([component], [component])


@pytest.mark.parametrize("means", BASE_BY_OTHER_MEANS)
async def test_what_else_the_base_covers_is_named_base(gateway: Gateway, means: str) -> None:
    """Architecture, quantisation, cache dtype and multimodal preprocessing count as base."""
    await stored(gateway)
    asking = await other_engine(gateway, **BASE_BY_OTHER_MEANS[means])
    assert await reasons(gateway, asking, *TEXTS) == (["base"], ["base"])


async def test_adapter_is_named_against_none_and_against_another(gateway: Gateway) -> None:
    """No adapter is not any adapter: each of none, A and B names the adapter beside what another one stored."""
    engine = await stored(gateway)
    first, second = await adapter(engine, "one"), await adapter(engine, "two")
    assert await reasons(gateway, engine, *TEXTS, adapter=first) == (["adapter"], ["adapter"])
    await engine.store("x", adapter=first)
    assert await reasons(gateway, engine, "x", adapter=second) == (["adapter"], ["adapter"])
    assert await reasons(gateway, engine, "x") == (["adapter"], ["adapter"])


@pytest.mark.parametrize(
    "access", [{"salt": makers.name("salt")}, {"scope": "request", "scope_key": makers.name("nonce")}], ids=["salt", "scope"]
)
async def test_scope_is_seen_by_the_operator_and_absent_to_the_client(gateway: Gateway, access: dict[str, Any]) -> None:
    """Another salt or sharing scope of the domain: the operator sees "scope", the client what it would if nothing was there."""
    engine = await stored(gateway)
    assert await reasons(gateway, engine, *TEXTS, **access) == (["absent"], ["scope"])


async def test_client_cannot_tell_another_salt_from_nothing(gateway: Gateway) -> None:
    """The same request gets equal bytes before anything is stored and after another salt stored it, with its very adapter too."""
    engine = await other_engine(gateway, "plain")
    tuned = await adapter(engine, "one")
    salt, other = makers.name("mine"), makers.name("theirs")
    before = (await miss(engine, *TEXTS, salt=salt, adapter=tuned))[1].encode()
    await engine.store(*TEXTS, salt=other, adapter=tuned)
    await engine.store(*TEXTS)
    assert (await miss(engine, *TEXTS, salt=salt, adapter=tuned))[1].encode() == before
    await engine.store(*TEXTS, salt=salt)
    assert (await miss(engine, *TEXTS, salt=salt, adapter=tuned))[1].reasons == ("adapter",)


async def test_what_other_salts_store_changes_no_reason_of_mine(gateway: Gateway) -> None:
    """Neither nearer nor longer objects of other salts change what a client is told, however many there are."""
    engine = await other_engine(gateway, "plain", model=with_engine(build="old"))
    salt = makers.name("mine")
    await engine.store(*TEXTS[:1], salt=salt)
    asking = await other_engine(gateway)
    told = (await miss(asking, *TEXTS, salt=salt))[1].encode()
    for number in range(80):
        await asking.store(*TEXTS, salt=makers.name(f"theirs {number}"))
    reference, answer = await miss(asking, *TEXTS, salt=salt)
    assert answer.encode() == told
    assert answer.reasons == ("engine",)
    assert (await seen(gateway, reference))["reasons"] == ["scope"]


async def test_other_domain_is_absent_to_everybody(start: Start, folder: Path) -> None:
    """What another isolation domain stored is not even shown to the operator: its chain has no link in common."""
    file = folder / "credentials"
    file.write_text(json.dumps({hashlib.sha256(b"tenant").hexdigest(): "tenant"}))
    gateway = await start(credentials_file=str(file))
    await stored(gateway)
    asking = await other_engine(gateway, credential=b"tenant")
    assert await reasons(gateway, asking, *TEXTS) == ABSENT
    reference, _ = await miss(asking, *TEXTS)
    assert (await seen(gateway, reference))["nearest"] is None


PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    ("base", "rope", {"model": makers.model("other weights", rope=ALONE["rope"]["model"].rope)}),
    ("base", "engine", {"model": makers.model("other weights", numerics=with_engine(build="cuda").numerics)}),
    ("rope", "payload layout", {**ALONE["rope"], "representation": windowed()}),
    ("numerics", "codec", {**ALONE["numerics"], **ALONE["codec"]}),
    ("numerics", "plan", {"tp": 2, "model": makers.model(numerics=numerics(tensor_parallel=2, isa="amx"))}),
    ("engine", "plan", {"tp": 2, "model": with_engine(split=2, torch="2")}),
]


@pytest.mark.parametrize(("first", "second", "changes"), PAIRS, ids=lambda part: part if isinstance(part, str) else "")
async def test_two_differences_are_both_named_in_fixed_order(
    gateway: Gateway, first: str, second: str, changes: dict[str, Any]
) -> None:
    """Two components that differ at once are both named, in the order of the contract's table."""
    await stored(gateway)
    asking = await other_engine(gateway, **changes)
    assert COMPONENTS.index(first) < COMPONENTS.index(second)
    assert await reasons(gateway, asking, *TEXTS) == ([first, second], [first, second])


async def test_nearest_object_is_the_one_compared_with(gateway: Gateway) -> None:
    """Of what is stored of the same tokens, the object with the fewest differences explains the miss, whenever it was stored."""
    makers_of = [{**PAIRS[0][2], "representation": windowed()}, ALONE["numerics"], PAIRS[0][2]]
    storing = [await other_engine(gateway, f"stores {number}", **changes) for number, changes in enumerate(makers_of)]
    asking = await other_engine(gateway)
    for order in itertools.permutations(range(3)):
        for number in order:
            await storing[number].store(f"in order {order}")
        assert await reasons(gateway, asking, f"in order {order}") == (["numerics"], ["numerics"])


async def test_longest_prefix_is_compared_with(gateway: Gateway) -> None:
    """An object that has more of the prompt explains it, before one that only shares its beginning."""
    codec, rope = await other_engine(gateway, "codec", **ALONE["codec"]), await other_engine(gateway, "rope", **ALONE["rope"])
    await codec.store(*TEXTS)
    await rope.store(*TEXTS[:2])
    asking = await other_engine(gateway)
    reference, _ = await miss(asking, *TEXTS, "new")
    page = await seen(gateway, reference)
    assert (page["reasons"], page["stored_chunks"], page["chunks"], page["missing"]) == (["codec"], 3, 4, 0)


async def test_rest_after_a_hit_is_explained(gateway: Gateway) -> None:
    """A request that hits its first chunk is explained from the first missing one on."""
    engine = await stored(gateway)
    asking = await other_engine(gateway, **ALONE["rope"])
    await asking.store("a")
    reference, told = await miss(asking, *TEXTS)
    assert (told.chunk, told.reasons) == (1, ("rope",))
    page = await seen(gateway, reference)
    assert (page["missing"], page["stored_chunks"]) == (1, 2)
    assert (await miss(engine, *TEXTS, "new"))[1].reasons == ("absent",)


async def test_nothing_stored_is_absent(gateway: Gateway) -> None:
    """Other tokens, also after a common beginning that hit, are absent."""
    engine = await stored(gateway)
    assert await reasons(gateway, engine, "other", "b") == ABSENT
    assert await reasons(gateway, engine, "a", "other") == ABSENT
    # The same chunk after another one is another chunk.
    assert await reasons(gateway, engine, "b") == ABSENT


async def test_hit_has_no_reason(gateway: Gateway) -> None:
    """Nothing is missing, nothing is explained, and no miss is kept or counted."""
    engine = await stored(gateway)
    bound = await engine.bind(*TEXTS)
    assert await engine.acquire(bound.lease, 0, 3) == 3
    told = await explain(engine, bound.lease)
    assert (told.reasons, told.chunk) == ((), 3)
    assert (await get(gateway, f"/explain/{bound.reference}"))[0] == 404


async def test_no_full_chunk_is_below_one_chunk(gateway: Gateway) -> None:
    """A request without a full chunk can miss for no other reason."""
    engine = await stored(gateway)
    assert await reasons(gateway, engine) == (["below one chunk"], ["below one chunk"])


async def test_what_is_gone_was_evicted(start: Start) -> None:
    """Exactly this was stored, and storage lost it: also where other objects of the same tokens are still there."""
    backend = FaultyBackend()
    gateway = await start(backend)
    await stored(gateway)
    asking = await other_engine(gateway, **ALONE["codec"])
    await asking.store(*TEXTS)
    await backend.lose_newest()
    reference, told = await miss(asking, *TEXTS)
    assert (told.chunk, told.reasons) == (2, ("evicted",))
    page = await seen(gateway, reference)
    assert page["reasons"] == ["evicted"]
    assert page["nearest"] == page["asked"]


async def test_half_a_chunk_is_not_stored(gateway: Gateway) -> None:
    """A chunk of which only one worker has stored its part is absent, not evicted; the other worker completes it."""
    engine = await other_engine(gateway, "two", **ALONE["plan"])
    await engine.store(*TEXTS, ranks=[0])
    assert await reasons(gateway, engine, *TEXTS) == ABSENT
    await engine.store(*TEXTS, ranks=[1])
    assert await engine.hit(*TEXTS) == 3
    assert (await reasons(gateway, await other_engine(gateway), *TEXTS))[0] == ["plan"]


@pytest.mark.parametrize("call", ["probe", "acquire"])
@pytest.mark.parametrize("how", ["broken", "stalled"])
async def test_storage_that_does_not_answer_is_unavailable(start: Start, call: str, how: str) -> None:
    """Where storage fails or is late nobody knows what is there: that is the reason, whatever the index holds."""
    backend = FaultyBackend()
    gateway = await start(backend, probe_s=0.1)
    engine = await stored(gateway)
    await engine.store("x")
    getattr(backend, how).add(call)
    texts = ("x",) if call == "acquire" else ("never stored",)
    bound = await engine.bind(*texts)
    assert await engine.acquire(bound.lease, 0, 1, deadline_ms=100) == 0
    assert (await explain(engine, bound.lease)).reasons == ("unavailable",)
    backend.broken.clear()
    backend.resume()
    await engine.release(bound.lease)
    if call == "acquire":
        await engine.hit("x")


async def test_altered_envelope_is_refused_by_name(gateway: Gateway) -> None:
    """An envelope that does not vouch for its object is the reason, also after the removal, until the chunk is stored again."""
    engine = await stored(gateway)
    lease = await engine.lease(*TEXTS)
    await engine.acquire(lease, 0, 3)
    plan = await engine.load(lease, 1)
    header = engine.header(plan, plan.slots[0])
    header[300] ^= 1
    await engine.finish(plan.ticket)
    await engine.release(lease)
    for _ in range(2):
        reference, told = await miss(engine, *TEXTS)
        assert (told.chunk, told.reasons) == (1, ("refused:envelope_mac",))
        assert (await seen(gateway, reference))["reasons"] == ["refused:envelope_mac"]
    await nothing_held(gateway)
    await engine.store(*TEXTS)
    assert await engine.hit(*TEXTS) == 3


async def test_altered_payload_is_refused_by_name(gateway: Gateway) -> None:
    """Bytes that a worker found to be others: the request that loaded them is told so, and the next one too."""
    engine = await stored(gateway)
    bound = await engine.bind(*TEXTS)
    assert await engine.acquire(bound.lease, 0, 3) == 3
    plan = await engine.load(bound.lease, 0, 1, 2)
    await engine.finish(plan.ticket, 2)
    told = await explain(engine, bound.lease)
    assert (told.chunk, told.reasons) == (2, ("refused:payload_digest",))
    await engine.release(bound.lease)
    assert (await miss(engine, *TEXTS))[1].reasons == ("refused:payload_digest",)


async def test_decoded_chunks_are_known(gateway: Gateway) -> None:
    """Chunks that came by extend are explained as those that were bound."""
    engine = await other_engine(gateway, "stores", **ALONE["engine"])
    lease = await engine.lease("a")
    assert await engine.extend(lease, 0, "a", "b", "c") == 3
    await engine.commit(engine.fill(await engine.reserve(lease, 0, 1, 2), TEXTS))
    asking = await other_engine(gateway)
    reference, told = await miss(asking, *TEXTS)
    assert told.reasons == ("engine",)
    assert (await seen(gateway, reference))["stored_chunks"] == 3


async def test_aborted_store_is_not_known(gateway: Gateway) -> None:
    """What never became visible explains nothing."""
    engine = await other_engine(gateway, "stores", **ALONE["engine"])
    lease = await engine.lease(*TEXTS)
    reserved = await engine.reserve(lease, 0, 1, 2)
    await engine.commit((), [slot.reservation for slot in reserved.slots])
    assert await reasons(gateway, await other_engine(gateway), *TEXTS) == ABSENT


async def test_misses_are_counted_once_under_each_reason(gateway: Gateway) -> None:
    """One miss, looked up and asked about again and again, counts once; with two reasons, once under each."""
    await stored(gateway)
    asking = await other_engine(gateway, **PAIRS[0][2])
    bound = await asking.bind(*TEXTS)
    for _ in range(3):
        await asking.acquire(bound.lease, 0, 3)
        await explain(asking, bound.lease)
    await seen(gateway, bound.reference)
    assert await counter(gateway, "misses_total", reason="base") == 1
    assert await counter(gateway, "misses_total", reason="rope") == 1
    assert await counter(gateway, "misses_total", reason="absent") == 0


async def test_explain_index_is_watched(gateway: Gateway) -> None:
    """The metrics page shows how many entries the index has."""
    await stored(gateway)

    async def known() -> bool:
        return await counter(gateway, "explain_entries") == len(TEXTS)

    await eventually("three entries", known)


def test_every_quarantine_word_is_a_reason() -> None:
    """Every word with which an object can be refused is one of the closed set, and so is every component."""
    source = Path(__file__).parents[2] / "gateway" / "kvgate" / "storage" / "envelope.py"
    words = {part.split('"')[1] for part in source.read_text().split("raise EnvelopeError(")[1:]} - {"components"}
    # "components" is raised by `read` only, which no lookup uses.
    assert {f"envelope_{word}" for word in words} | {"payload_digest"} == set(QUARANTINES)
    assert set(COMPONENTS) <= set(MISS_REASONS)
    assert len(set(MISS_REASONS)) == len(MISS_REASONS)
