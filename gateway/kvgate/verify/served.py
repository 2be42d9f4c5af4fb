"""An artifact for a vLLM server to decode from: published in its domain, as the SDK does, with nothing but zeros in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvgate.client.errors import GatewayRefused
from kvgate.client.pools import PoolMappings
from kvgate.client.wire import Wire
from kvgate.contract.keys import salt_digest
from kvgate.contract.manifest import TransformManifest, position_map, query_digest, retained
from kvgate.protocol.messages import Commit, Committed, Done, Release, Reserved, WrittenPayload
from kvgate.protocol.variant_messages import (
    DescribeSource,
    ModelOpened,
    OpenModel,
    OpenVariant,
    ReserveRectangle,
    SealVariant,
    SourceDescribed,
    VariantOpened,
    VariantSealed,
)
from kvgate.storage.pool import PoolError
from kvgate.verify.artifacts import ALGORITHM, TTL_S
from kvgate.verify.engine import ACQUIRE_MS
from kvgate.verify.link import CannotRun, Links, call
from kvgate.verify.plants import Chunk

MAX_ARTIFACT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """A published artifact: its capability, and the token ids that a prompt must begin with."""

    capability: bytes
    tokens: tuple[int, ...]


async def publish(links: Links, source: list[int], salt: str) -> Served:
    """Every other token of ``source`` (two whole chunks), of the one engine registered in the gateway's default domain.

    Raises ``CannotRun``: several engines or none, an artifact that is too large, a pool without room.
    """
    wire = await links.greet("client")
    try:
        opened = await call(wire, OpenModel(handle=None, model=None), ModelOpened)
        found = await _open(wire, opened, source, salt)
        try:
            await _write(wire, opened, found.lease)
            message = SealVariant(lease=found.lease, ttl_s=TTL_S, deadline_ms=ACQUIRE_MS)
            sealed = await call(wire, message, VariantSealed)
        finally:
            await call(wire, Release(lease=found.lease), Done)
    except GatewayRefused as error:
        raise CannotRun(f"no artifact could be published for the vLLM server: {error}") from error
    finally:
        links.drop(wire)
    return Served(sealed.capability, tuple(source[1::2]))


async def _open(wire: Wire, opened: ModelOpened, source: list[int], salt: str) -> VariantOpened:
    step, key = opened.representation.chunk_tokens, opened.token_key
    salted = salt_digest(opened.salt_key, salt)
    digests = b"".join(Chunk(tuple(source[at : at + step])).digest(key) for at in range(0, len(source), step))
    described = await call(
        wire,
        DescribeSource(
            handle=opened.handle,
            adapter=None,
            salt=salted,
            scope="prefix",
            tokens=digests,
            source_tokens=len(source),
            tail=None,
        ),
        SourceDescribed,
    )
    positions = [[list(range(1, len(source), 2))]]
    manifest = TransformManifest(
        algorithm=ALGORITHM,
        algorithm_version="1",
        parameters=(),
        source_prefix=described.source_prefix,
        source_tokens=len(source),
        retained=retained(positions, "model"),
        position_map=position_map(positions, [[list(range(len(source) // 2))]]),
        query=query_digest(key, source[:1]),
        payload_format=described.payload_format,
        model=described.model,
        scope="request",
    )
    tokens = Chunk(tuple(source[1::2])).digest(key)
    message = OpenVariant(
        handle=opened.handle, adapter=None, salt=salted, manifest=manifest, source=digests, tail=None, tokens=tokens
    )
    return await call(wire, message, VariantOpened)


async def _write(wire: Wire, opened: ModelOpened, lease: bytes) -> None:
    rectangles = opened.plan.rectangles
    if sum(opened.representation.payload_bytes(one) for one in rectangles) > MAX_ARTIFACT_BYTES:
        raise CannotRun(f"an artifact of one chunk would take more than {MAX_ARTIFACT_BYTES} bytes")
    pools = PoolMappings()
    for number in range(len(rectangles)):
        reserved = await call(wire, ReserveRectangle(lease=lease, rectangle=number, chunks=(0,)), Reserved)
        (slot,) = reserved.slots
        if slot.status != "slot":
            raise CannotRun(f"an artifact could not be stored: {slot.status}; see `kvgate status`")
        data = bytes(slot.length)
        try:
            pools.view(reserved.pool, reserved.pool_bytes, slot.offset, slot.length)[:] = data
        except PoolError as error:
            raise CannotRun(f"the gateway's pool can't be mapped: {error}") from error
        written = WrittenPayload(reservation=slot.reservation, digest=blake3(data).digest())
        await call(wire, Commit(written=(written,), aborted=()), Committed)
    pools.close()
