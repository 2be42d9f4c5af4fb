"""``oracle.variant.*`` and ``oracle.capability.*``: the same question for transformed artifacts.

variant: a client works out the very manifest under which another tenant has published the same transform of a prompt, and looks for
it. capability: it presents a capability that another tenant really holds, or one that was made up.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from bench.cases import Case, Env
from bench.gateway import ANY_DIGEST, CALL_S, CHUNK_TOKENS, EngineSessions, ask, connected
from bench.lookup import prompt
from bench.measure import Samples
from bench.oracle import (
    CHUNKS,
    DEADLINE_MS,
    FRAME_ID,
    SEED,
    BareSocket,
    Latencies,
    Probe,
    cases_of,
    measure,
    numbers_of,
    reply,
    require_given,
    samples_of,
    tenants,
    timed_exchange,
)
from kvgate.client import GatewayClient
from kvgate.contract.address import token_digests
from kvgate.contract.capability import CAPABILITY_BYTES
from kvgate.contract.manifest import TransformManifest, position_map, retained
from kvgate.protocol.framing import frame_bytes, parse_frame
from kvgate.protocol.messages import Commit, Committed, Failure, Release, Reserved, WrittenPayload
from kvgate.protocol.variant_messages import (
    BindVariant,
    DescribeSource,
    OpenVariant,
    ReserveRectangle,
    SealVariant,
    SourceDescribed,
    VariantBound,
    VariantOpened,
    VariantSealed,
)

KEPT: Final = CHUNKS // 2
"""Chunks of an artifact: the last half of its prompt."""
TTL_S: Final = 3600


def open_message(client: GatewayClient, sessions: EngineSessions, number: int) -> OpenVariant:
    """What a tenant sends to publish, or to look for, the recency half of prompt ``number``."""
    digests = token_digests(sessions.opened.token_key, prompt(CHUNKS * CHUNK_TOKENS, number), CHUNK_TOKENS)
    source = b"".join(digests)
    describe = DescribeSource(
        handle=sessions.handle,
        adapter=None,
        salt=None,
        scope="prefix",
        tokens=source,
        source_tokens=CHUNKS * CHUNK_TOKENS,
        tail=None,
    )
    described = ask(client, describe, SourceDescribed)
    positions = [[list(range((CHUNKS - KEPT) * CHUNK_TOKENS, CHUNKS * CHUNK_TOKENS))]]
    manifest = TransformManifest(
        algorithm="recency",
        algorithm_version="1",
        parameters=(),
        source_prefix=described.source_prefix,
        source_tokens=CHUNKS * CHUNK_TOKENS,
        retained=retained(positions, "model"),
        position_map=position_map(positions, [[list(range(KEPT * CHUNK_TOKENS))]]),
        query=None,
        payload_format=described.payload_format,
        model=described.model,
        scope="prefix",
    )
    return OpenVariant(
        handle=sessions.handle,
        adapter=None,
        salt=None,
        manifest=manifest,
        source=source,
        tail=None,
        tokens=b"".join(digests[CHUNKS - KEPT :]),
    )


def publish(client: GatewayClient, sessions: EngineSessions, number: int) -> tuple[bytes, bytes]:
    """Store the artifact of prompt ``number`` without writing payloads; its capability and its addresses."""
    opened = ask(client, open_message(client, sessions, number), VariantOpened)
    reserve = ReserveRectangle(lease=opened.lease, rectangle=0, chunks=tuple(range(KEPT)))
    slots = ask(client, reserve, Reserved).slots
    written = tuple(WrittenPayload(reservation=slot.reservation, digest=ANY_DIGEST) for slot in slots)
    if ask(client, Commit(written=written, aborted=()), Committed).visible != KEPT:
        raise RuntimeError("the pool is too small for this case")
    sealed = ask(client, SealVariant(lease=opened.lease, ttl_s=TTL_S, deadline_ms=DEADLINE_MS), VariantSealed)
    client.call(Release(lease=opened.lease), CALL_S)
    return sealed.capability, opened.addresses


@contextmanager
def probed(env: Env, *, capability: bool) -> Iterator[Latencies]:
    """The latencies of looking for artifacts, or of presenting capabilities, on the memory backend."""
    order = random.Random(SEED)
    of_kind = numbers_of(order, env)
    with (
        tenants(env, storage="memory", salted=False) as both,
        connected(GatewayClient(both.endpoint, "client", both.others_credential)) as others,
        connected(GatewayClient(both.endpoint, "client", both.probers_credential)) as mine,
    ):
        foreign = [publish(others, both.other, number) for number in of_kind["foreign"]]
        own = [publish(mine, both.prober, number) for number in of_kind["own"]]
        if capability:
            made_up = [one[:2] + secrets.token_bytes(CAPABILITY_BYTES - 2) for one, _ in foreign]
            held = {"foreign": [one for one, _ in foreign], "absent": made_up, "own": [one for one, _ in own]}
            probes = [
                Probe(kind, frame_bytes(FRAME_ID, bind_variant(both.prober, number, one)), kind == "own")
                for kind, numbers in of_kind.items()
                for number, one in zip(numbers, held[kind], strict=True)
            ]
        else:
            messages = {kind: [open_message(mine, both.prober, one) for one in numbers] for kind, numbers in of_kind.items()}
            probes = [
                Probe(kind, frame_bytes(FRAME_ID, one), kind == "own") for kind, found in messages.items() for one in found
            ]
            _apart(mine, messages["foreign"], [addresses for _, addresses in foreign])
        wire = BareSocket(both.endpoint, both.probers_credential, "scheduler" if capability else "client")
        try:
            yield measure(wire, probes, present_once if capability else find_once, order, env)
        finally:
            wire.close()


def bind_variant(sessions: EngineSessions, number: int, capability: bytes) -> BindVariant:
    """A request that presents a capability for the artifact of prompt ``number``."""
    digests = token_digests(sessions.opened.token_key, prompt(CHUNKS * CHUNK_TOKENS, number), CHUNK_TOKENS)
    tokens = b"".join(digests[CHUNKS - KEPT :])
    return BindVariant(handle=sessions.handle, adapter=None, salt=None, capability=capability, tokens=tokens)


def find_once(wire: BareSocket, probe: Probe) -> dict[str, float]:
    """Open the artifact, ask for its capability, release."""
    open_s, payload = timed_exchange(wire, probe.frame)
    lease = reply(payload, VariantOpened).lease
    seal = SealVariant(lease=lease, ttl_s=TTL_S, deadline_ms=DEADLINE_MS)
    seal_s, payload = timed_exchange(wire, frame_bytes(FRAME_ID, seal))
    release_s, _ = timed_exchange(wire, frame_bytes(FRAME_ID, Release(lease=lease)))
    require_given(probe, not isinstance(parse_frame(payload).message(), Failure))
    return {"open": open_s, "seal": open_s + seal_s, "release": release_s}


def present_once(wire: BareSocket, probe: Probe) -> dict[str, float]:
    """Present a capability; release what it gave."""
    bind_s, payload = timed_exchange(wire, probe.frame)
    answer = parse_frame(payload).message()
    if isinstance(answer, VariantBound):
        wire.exchange(frame_bytes(FRAME_ID, Release(lease=answer.lease)))
    require_given(probe, isinstance(answer, VariantBound))
    return {"bind": bind_s}


def _apart(client: GatewayClient, messages: list[OpenVariant], theirs: list[bytes]) -> None:
    """The same transform of the same prompt has other addresses in the prober's domain."""
    for message, stored in zip(messages, theirs, strict=True):
        opened = ask(client, message, VariantOpened)
        client.call(Release(lease=opened.lease), CALL_S)
        both = {addresses[at : at + 32] for addresses in (opened.addresses, stored) for at in range(0, KEPT * 32, 32)}
        if len(both) != 2 * KEPT:
            raise RuntimeError("two tenants have an artifact's address in common")


def oracle(env: Env, *, capability: bool, step: str, error: bool) -> Samples:
    """The AUC of one step's latency, or its standard error."""
    found = env.shared(f"variants {capability}", partial(probed, capability=capability))
    return samples_of(found, step, error=error)


def _cases() -> Iterator[Case]:
    artifacts = "artifacts another domain published against absent ones"
    found = {
        "open": f"open an artifact: {artifacts}",
        "seal": f"open it and ask for its capability: {artifacts}",
        "release": f"the release after them: {artifacts}",
    }
    yield from cases_of("oracle.variant", found, partial(oracle, capability=False))
    presented = {"bind": "present a capability: another domain's against made-up ones"}
    yield from cases_of("oracle.capability", presented, partial(oracle, capability=True))


CASES: Final = tuple(_cases())
