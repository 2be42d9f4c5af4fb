"""No oracle: what somebody else has stored changes no byte of any reply. (Times are measured by ``bench/oracle.py``, not here.)

Two things in the replies are random by nature, and nothing else may differ: the lease's 32 bytes, new at every bind, and the request's
public reference, 16 digits that anybody can compute from the lease. Where a writer is given room, so are the reservation's number and
the room's place in the pool: they tell how much is stored, by whomever, and not what. Artifacts of scope ``request`` have new addresses
each time they are opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.manifest import TransformManifest, position_map, retained
from kvgate.contract.record import Record
from kvgate.daemon import service
from kvgate.daemon.explain import reference
from kvgate.daemon.explain_index import ExplainIndex
from kvgate.daemon.links import Links
from kvgate.daemon.reasons import ACCESS_BYTES, SET_BYTES, Make, Question, judge
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import (
    Acquire,
    Bound,
    Commit,
    Committed,
    Explain,
    Extend,
    Failure,
    Load,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    Welcome,
)
from kvgate.protocol.variant_messages import (
    BindVariant,
    DescribeSource,
    LoadRectangle,
    OpenModel,
    OpenVariant,
    ReserveRectangle,
    SealVariant,
    SourceDescribed,
    VariantOpened,
    VariantSealed,
)
from tests.daemon import makers
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start
from tests.daemon.engine import DEADLINE_MS, Engine
from tests.daemon.wire import Wire, hello

OTHER, PROBER = b"the other tenant's", b"the prober's"
PROMPT = ("a", "b", "c")
SALTS = (makers.name("salt one"), makers.name("salt two"))


@pytest.fixture(autouse=True)
def patient_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a bind's probe ends within its wait is a matter of time, as this machine has it; here every one does."""
    monkeypatch.setattr(service, "BIND_PROBE_S", 30.0)


def credentials(folder: Path) -> str:
    """Two tenants in two domains."""
    file = folder / "credentials.json"
    file.write_text(json.dumps({hashlib.sha256(one).hexdigest(): name for one, name in ((OTHER, "one"), (PROBER, "two"))}))
    return str(file)


class Transcript:
    """One connection's replies as they came, the random parts made zero."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lease = b""
        self.replies: list[tuple[str, bytes]] = []

    @classmethod
    async def open(cls, path: Path, first: Record, second: Record) -> Transcript:
        """Connect, greet and introduce; those replies (the gateway's and the engine's own) are the same for all."""
        made = cls(await Wire.connect(path, listen=False))
        await made.ask(first)
        await made.ask(second)
        return made

    async def ask(self, message: Record, *, new_addresses: bool = False) -> Record:
        """Send, and note the reply's bytes. ``new_addresses``: those in it are random by nature."""
        await self._wire.raw(frame_bytes(len(self.replies) + 1, message))
        head = await self._wire.reader.readexactly(HEADER.size)
        payload = await self._wire.reader.readexactly(frame_length(head))
        reply = parse_frame(payload).message()
        self.replies.append((type(reply).__name__, head + self._masked(reply, payload, new_addresses)))
        return reply

    async def close(self) -> None:
        """Hang up."""
        await self._wire.close()

    @staticmethod
    def _masked(reply: Record, payload: bytes, new_addresses: bool) -> bytes:
        random: list[bytes] = []
        if isinstance(reply, Bound | VariantOpened):
            assert reply.reference == reference(reply.lease), "the reference says nothing that the lease does not"
            random = [reply.lease, reply.reference.encode()]
            random += [reply.addresses] if new_addresses else []
        elif isinstance(reply, Reserved):
            kept = [(slot.chunk, slot.status, slot.length) for slot in reply.slots]
            return repr((kept, reply.pool, reply.pool_bytes)).encode()
        for part in random:
            assert payload.count(part) == 1
            payload = payload.replace(part, bytes(len(part)))
        return payload


async def probe(engine: Engine, salt: bytes | None) -> list[tuple[str, bytes]]:
    """Everything a tenant can ask about a prompt, in all orders that make a difference: the replies."""
    worker = await Transcript.open(engine.path, hello("worker", engine.credential), engine.report_of(0))
    scheduler = await Transcript.open(engine.path, hello("scheduler", engine.credential), OpenEngine(handle=engine.handle))
    first = await bind(scheduler, engine, salt, *PROMPT)
    await scheduler.ask(Explain(lease=first))
    await scheduler.ask(Acquire(lease=first, first=0, last=3, deadline_ms=DEADLINE_MS))
    await scheduler.ask(Explain(lease=first))
    await scheduler.ask(Acquire(lease=first, first=1, last=2, deadline_ms=DEADLINE_MS))
    await scheduler.ask(Acquire(lease=first, first=0, last=9, deadline_ms=DEADLINE_MS))
    await worker.ask(Load(lease=first, chunks=(0,)))
    await scheduler.ask(Release(lease=first))
    await scheduler.ask(Explain(lease=first))
    await scheduler.ask(Acquire(lease=first, first=0, last=3, deadline_ms=DEADLINE_MS))
    short = await bind(scheduler, engine, salt, PROMPT[0])
    await scheduler.ask(Extend(lease=short, first=1, tokens=makers.tokens(*PROMPT[1:])))
    await scheduler.ask(Acquire(lease=short, first=0, last=3, deadline_ms=DEADLINE_MS))
    reserved = await worker.ask(Reserve(lease=short, chunks=(0, 1, 2)))
    assert isinstance(reserved, Reserved)
    await worker.ask(Commit(written=(), aborted=tuple(slot.reservation for slot in reserved.slots if slot.reservation)))
    await scheduler.ask(Release(lease=short))
    await worker.close()
    await scheduler.close()
    return scheduler.replies + worker.replies


async def bind(scheduler: Transcript, engine: Engine, salt: bytes | None, *texts: str) -> bytes:
    """The lease of a bind."""
    bound = await scheduler.ask(engine.bind_message(*texts, salt=salt))
    assert isinstance(bound, Bound)
    return bound.lease


def manifest(described: SourceDescribed, scope: str) -> TransformManifest:
    """The second half of the prompt, by recency."""
    kept = [[list(range(8, 12))]]
    return TransformManifest(
        algorithm="recency",
        algorithm_version="1",
        parameters=(),
        source_prefix=described.source_prefix,
        source_tokens=12,
        retained=retained(kept, "model"),
        position_map=position_map(kept, [[list(range(4))]]),
        query=None,
        payload_format=described.payload_format,
        model=described.model,
        scope=scope,
    )


def open_message(engine: Engine, described: SourceDescribed, salt: bytes | None, scope: str) -> OpenVariant:
    """Open that artifact."""
    return OpenVariant(
        handle=engine.handle,
        adapter=None,
        salt=salt,
        manifest=manifest(described, scope),
        source=makers.tokens(*PROMPT),
        tail=None,
        tokens=makers.tokens(PROMPT[2]),
    )


def describe_message(engine: Engine, salt: bytes | None, scope: str) -> DescribeSource:
    """Name the prompt as a source."""
    tokens = makers.tokens(*PROMPT)
    return DescribeSource(
        handle=engine.handle, adapter=None, salt=salt, scope=scope, tokens=tokens, source_tokens=12, tail=None
    )


async def publish(engine: Engine, salt: bytes | None) -> bytes:
    """Store the artifact so that everybody of that domain and salt may find it; its capability."""
    client = await Wire.connect(engine.path)
    await client.call(hello("client", engine.credential, wire_highest=2), Welcome)
    described = await client.call(describe_message(engine, salt, "prefix"), SourceDescribed)
    opened = await client.call(open_message(engine, described, salt, "prefix"), VariantOpened)
    reserved = await client.call(ReserveRectangle(lease=opened.lease, rectangle=0, chunks=(0,)), Reserved)
    await client.call(Commit(written=engine.fill(reserved, PROMPT[2:]), aborted=()), Committed)
    sealed = await client.call(SealVariant(lease=opened.lease, ttl_s=60, deadline_ms=DEADLINE_MS), VariantSealed)
    await client.close()
    return sealed.capability


async def look_for_artifact(engine: Engine, salt: bytes | None) -> list[tuple[str, bytes]]:
    """Everything a tenant can ask about an artifact that it has no capability of: the replies."""
    client = await Transcript.open(
        engine.path, hello("client", engine.credential, wire_highest=2), OpenModel(handle=engine.handle, model=None)
    )
    for scope in ("prefix", "request"):
        described = await client.ask(describe_message(engine, salt, scope))
        assert isinstance(described, SourceDescribed)
        message = open_message(engine, described, salt, scope)
        opened = await client.ask(message, new_addresses=scope == "request")
        assert isinstance(opened, VariantOpened)
        await client.ask(Acquire(lease=opened.lease, first=0, last=1, deadline_ms=DEADLINE_MS))
        await client.ask(LoadRectangle(lease=opened.lease, rectangle=0, chunks=(0,)))
        await client.ask(SealVariant(lease=opened.lease, ttl_s=60, deadline_ms=DEADLINE_MS))
        await client.ask(Explain(lease=opened.lease))
        reserved = await client.ask(ReserveRectangle(lease=opened.lease, rectangle=0, chunks=(0,)))
        assert isinstance(reserved, Reserved)
        await client.ask(Commit(written=(), aborted=tuple(slot.reservation for slot in reserved.slots)))
        await client.ask(Release(lease=opened.lease))
    # The retained tokens as an ordinary prompt.
    lease = await bind(client, engine, salt, PROMPT[2])
    await client.ask(Acquire(lease=lease, first=0, last=1, deadline_ms=DEADLINE_MS))
    await client.ask(Explain(lease=lease))
    await client.ask(Release(lease=lease))
    await client.close()
    return client.replies


def backend_of(kind: str) -> FaultyBackend | None:
    """The memory backend believing that an L2 lies behind it, so that misses are probed for; None: as configured."""
    return FaultyBackend() if kind == "probed" else None


@pytest.mark.parametrize("kind", ["memory", "probed", pytest.param("lmcache", marks=pytest.mark.slow)])
@pytest.mark.parametrize("apart", ["domain", "salt"])
async def test_what_another_tenant_stores_changes_no_byte(start: Start, folder: Path, kind: str, apart: str) -> None:
    """All replies about a prompt are the same bytes before and after somebody else stores it, by domain and by salt."""
    more = {"backend": "lmcache", "pool_bytes": 16 << 20} if kind == "lmcache" else {}
    gateway = await start(backend_of(kind), credentials_file=credentials(folder), **more)
    path = gateway.config.socket_path
    theirs, mine = (OTHER, PROBER) if apart == "domain" else (PROBER, PROBER)
    salts: Sequence[bytes | None] = (None, None) if apart == "domain" else SALTS
    other = await Engine.start(path, credential=theirs)
    prober = await Engine.start(path, credential=mine, engine=makers.engine_id("the prober's"))
    absent = await probe(prober, salts[1])
    await other.store(*PROMPT, salt=salts[0])
    assert await other.hit(*PROMPT, salt=salts[0]) == 3
    foreign = await probe(prober, salts[1])
    assert foreign == absent
    # The check can fail: the prober's own object does change the replies.
    prober = await Engine.start(path, credential=mine, engine=makers.engine_id("the prober's"))
    await prober.store(*PROMPT, salt=salts[1])
    assert await probe(prober, salts[1]) != absent


@pytest.mark.parametrize("kind", ["memory", "probed"])
@pytest.mark.parametrize("apart", ["domain", "salt"])
async def test_what_another_tenant_publishes_changes_no_byte(start: Start, folder: Path, kind: str, apart: str) -> None:
    """All replies about an artifact, and about its retained tokens, are the same before and after somebody else publishes it."""
    gateway = await start(backend_of(kind), credentials_file=credentials(folder), determined_transforms="recency@1")
    path = gateway.config.socket_path
    theirs = OTHER if apart == "domain" else PROBER
    salts: Sequence[bytes | None] = (None, None) if apart == "domain" else SALTS
    other = await Engine.start(path, credential=theirs)
    prober = await Engine.start(path, credential=PROBER, engine=makers.engine_id("the prober's"))
    absent = await look_for_artifact(prober, salts[1])
    await publish(other, salts[0])
    assert await look_for_artifact(prober, salts[1]) == absent
    # The check can fail: the prober's own artifact does change the replies.
    await publish(prober, salts[1])
    assert await look_for_artifact(prober, salts[1]) != absent


async def test_a_stolen_capability_is_as_good_as_a_made_up_one(start: Start, folder: Path) -> None:
    """A scheduler of another domain gets the same bytes for a capability that is good elsewhere and for one of nobody."""
    gateway = await start(credentials_file=credentials(folder), determined_transforms="recency@1")
    path = gateway.config.socket_path
    other = await Engine.start(path, credential=OTHER)
    prober = await Engine.start(path, credential=PROBER, engine=makers.engine_id("the prober's"))
    stolen = await publish(other, None)
    replies = []
    for capability in (stolen, stolen[:2] + bytes(len(stolen) - 2)):
        asked = await Transcript.open(path, hello("scheduler", PROBER, wire_highest=2), OpenEngine(handle=prober.handle))
        tokens = makers.tokens(PROMPT[2])
        message = BindVariant(handle=prober.handle, adapter=None, salt=None, capability=capability, tokens=tokens)
        assert isinstance(await asked.ask(message), Failure)
        replies.append(asked.replies)
        await asked.close()
    assert replies[0] == replies[1]


async def test_two_tenants_have_no_address_in_common(start: Start, folder: Path) -> None:
    """The same chunks have other addresses in another domain or under another salt: what is asked of storage is not there."""
    gateway = await start(credentials_file=credentials(folder))
    engines = [
        await Engine.start(gateway.config.socket_path, credential=one, engine=makers.engine_id(repr(one)))
        for one in (OTHER, PROBER)
    ]
    found = [(await engine.bind(*PROMPT, salt=salt)).addresses for engine in engines for salt in (None, *SALTS)]
    chunks = [addresses[at : at + 32] for addresses in found for at in range(0, len(addresses), 32)]
    assert len(chunks) == len(set(chunks)) == len(PROMPT) * 2 * 3


class Asked:
    """The real index, and a list of what it was asked."""

    def __init__(self, index: ExplainIndex) -> None:
        self._index = index
        self.calls: list[str] = []

    def holds(self, link: bytes, make: Make) -> bool:
        """See ``Known``."""
        self.calls.append(f"holds {link.hex()}")
        return self._index.holds(link, make)

    def run(self, links: Sequence[bytes], access: bytes | None) -> int:
        """See ``Known``."""
        self.calls.append(f"run {b''.join(links).hex()} {access!r}")
        return self._index.run(links, access)

    def makes(self, link: bytes, access: bytes | None) -> list[Make]:
        """See ``Known``."""
        self.calls.append(f"makes {access!r}")
        return self._index.makes(link, access)


def test_the_operators_verdict_asks_the_same_of_the_index_whatever_others_stored() -> None:
    """The questions behind a miss do not depend on whether another salt has stored the prompt; only the operator's answer does."""
    chain = Links(makers.name("domain"), makers.tokens(*PROMPT))
    mine, theirs = (Make(makers.name("parts") * (SET_BYTES // 32), makers.name(one)[:ACCESS_BYTES]) for one in "mt")
    found = []
    for stored in (False, True):
        index = ExplainIndex(None, 100)
        if stored:
            index.add(chain.copy().first(1), theirs)
        asked = Asked(index)
        verdict = judge(asked, Question(chain, 0, mine), None)
        found.append(asked.calls)
        assert verdict.reasons == (("scope",) if stored else ("absent",))
        assert judge(asked, Question(chain, 0, mine), mine.shelf).reasons == ("absent",)
        index.close()
    assert found[0] == found[1]


@given(st.lists(st.booleans(), min_size=SET_BYTES // 32, max_size=SET_BYTES // 32), st.booleans())
def test_the_distance_of_two_makes_is_how_many_components_differ(same: list[bool], access: bool) -> None:
    """The quick count agrees with the names."""
    parts = b"".join(makers.name("one" if one else "other") for one in same)
    mine = Make(makers.name("one") * len(same), makers.name("access")[:ACCESS_BYTES])
    other = Make(parts, makers.name("access" if access else "another")[:ACCESS_BYTES])
    assert mine.distance(other) == other.distance(mine) == len(mine.differing(other)) == same.count(False) + (not access)


async def test_a_foreign_handle_is_as_good_as_a_made_up_one(start: Start, folder: Path) -> None:
    """Presenting another tenant's handle and presenting no one's gives the same bytes."""
    gateway = await start(credentials_file=credentials(folder))
    path = gateway.config.socket_path
    other = await Engine.start(path, credential=OTHER)
    replies = []
    for handle in (other.handle, makers.name("nobody's handle")):
        asked = await Transcript.open(path, hello("scheduler", PROBER), OpenEngine(handle=handle))
        message: Any = other.bind_message(*PROMPT, handle=handle)
        await asked.ask(message)
        replies.append(asked.replies)
        await asked.close()
    assert replies[0] == replies[1]
