"""Whatever was done to a stored object: a miss, and the object is gone."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import pytest
from blake3 import blake3

from kvgate.daemon.app import Gateway
from kvgate.daemon.secret import load_or_create
from kvgate.storage.envelope import ENVELOPE_BYTES, Envelope, read, seal
from tests.daemon import makers
from tests.daemon.admin_client import counter
from tests.daemon.conftest import eventually, nothing_held
from tests.daemon.engine import Engine, payload
from tests.daemon.wire import denied


def key_of(gateway: Gateway) -> bytes:
    """The deployment's envelope key."""
    return load_or_create(gateway.config.secret_path).envelope


async def alter(engine: Engine, text: str, change: Callable[[bytes], bytes]) -> None:
    """Change the envelope of the stored chunk ``text`` in the pool, behind the gateway's back."""
    lease = await engine.lease(text)
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    header = engine.header(load, load.slots[0])
    header[:] = change(bytes(header))
    await engine.finish(load.ticket)
    await engine.release(lease)


async def objects(gateway: Gateway) -> int:
    """Objects in storage."""
    return int((await gateway.status())["storage"]["objects"])


async def assert_quarantined(gateway: Gateway, engine: Engine, text: str, reason: str) -> None:
    """The chunk is a miss, gone from storage, counted under ``reason``; a new store of it is served."""
    assert await engine.hit(text) == 0

    async def gone() -> bool:
        return await objects(gateway) == 0

    await eventually("the object is deleted", gone)
    assert await counter(gateway, "quarantined_shards_total", reason=reason) == 1
    assert (await engine.bind(text)).present == 0
    assert await engine.hit(text) == 0
    await engine.store(text)
    assert len(await engine.restore(text)) == 1
    await engine.close()
    await nothing_held(gateway)


# Offset of a byte of each part of the envelope, and the reason a miss is given for it.
FLIPS = {
    "magic, first": (0, "magic"),
    "magic, last": (7, "magic"),
    "schema, low": (8, "schema"),
    "schema, high": (9, "schema"),
    "flags, low": (10, "format"),
    "flags, high": (11, "format"),
    "component bytes, low": (12, "mac"),
    "component bytes, high": (15, "format"),
    "address, first": (16, "mac"),
    "address, last": (47, "mac"),
    "payload bytes, low": (48, "mac"),
    "payload bytes, high": (55, "mac"),
    "payload digest, first": (56, "mac"),
    "payload digest, last": (87, "mac"),
    "mac, first": (88, "mac"),
    "mac, last": (119, "mac"),
    "components, first": (120, "mac"),
    "components, in a digest": (200, "mac"),
    "padding, last": (ENVELOPE_BYTES - 1, "padding"),
}


@pytest.mark.parametrize("part", list(FLIPS))
async def test_flipped_envelope_bit_is_a_quarantined_miss(gateway: Gateway, part: str) -> None:
    """One changed bit anywhere in the envelope: a miss, removed, never served (kind 23)."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    offset, reason = FLIPS[part]

    def flip(header: bytes) -> bytes:
        return header[:offset] + bytes([header[offset] ^ 1]) + header[offset + 1 :]

    await alter(engine, "a", flip)
    await assert_quarantined(gateway, engine, "a", f"envelope_{reason}")


@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
async def test_overwritten_envelope_is_a_quarantined_miss(gateway: Gateway, filler: bytes) -> None:
    """An envelope of zeros (a lost page) or of anything else is a miss."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    await alter(engine, "a", lambda _: filler * ENVELOPE_BYTES)
    await assert_quarantined(gateway, engine, "a", "envelope_magic")


def resealed(gateway: Gateway, **changes: object) -> Callable[[bytes], bytes]:
    """An envelope with a good MAC that says something else."""
    key = key_of(gateway)

    def change(header: bytes) -> bytes:
        return seal(key, dataclasses.replace(read((key,), header), **changes))  # type: ignore[arg-type]

    return change


async def test_good_envelope_of_another_address_is_a_miss(gateway: Gateway) -> None:
    """An object that storage gives back under the wrong address is not served, though its envelope is genuine."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    await alter(engine, "a", resealed(gateway, address=makers.name("another")))
    await assert_quarantined(gateway, engine, "a", "envelope_address")


@pytest.mark.parametrize("by", [-1, 1, 1 << 40])
async def test_good_envelope_of_another_size_is_a_miss(gateway: Gateway, by: int) -> None:
    """An envelope for a payload of another length, by one byte or by much, is a miss (kind 22)."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    await alter(
        engine, "a", resealed(gateway, payload_bytes=makers.representation().payload_bytes(makers.plan().rectangles[0]) + by)
    )
    await assert_quarantined(gateway, engine, "a", "envelope_size")


@pytest.mark.parametrize("schema", [2, 9, 2**16 - 1])
async def test_unknown_schema_is_a_miss(gateway: Gateway, schema: int) -> None:
    """A stored object of a schema this build can't read is a miss, though its MAC is good."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    await alter(engine, "a", resealed(gateway, schema=schema))
    await assert_quarantined(gateway, engine, "a", "envelope_schema")


async def test_another_deployments_envelope_is_a_miss(gateway: Gateway) -> None:
    """Who can write to a shared L2 but lacks the secret can't forge an object that is served."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    ours = key_of(gateway)
    await alter(engine, "a", lambda header: seal(makers.name("their key"), read((ours,), header)))
    await assert_quarantined(gateway, engine, "a", "envelope_mac")


async def test_envelope_without_a_digest_is_a_miss(gateway: Gateway) -> None:
    """A payload digest of zeros vouches for nothing, even under a good MAC."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    key = key_of(gateway)

    def forge(header: bytes) -> bytes:
        fixed, body = bytearray(header[:88]), header[120 : 120 + struct.unpack_from("<I", header, 12)[0]]
        fixed[56:88] = bytes(32)
        mac = blake3(bytes(fixed) + body, key=key).digest()
        return (bytes(fixed) + mac + body).ljust(ENVELOPE_BYTES, b"\0")

    await alter(engine, "a", forge)
    await assert_quarantined(gateway, engine, "a", "envelope_digest")


async def test_envelope_tells_what_the_object_is(gateway: Gateway) -> None:
    """The gateway's envelope names the shard's address, size, payload digest and component digests."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    seen: list[Envelope] = []
    key = key_of(gateway)

    def look(header: bytes) -> bytes:
        seen.append(read((key,), header))
        return header

    await alter(engine, "a", look)
    (envelope,) = seen
    length = makers.representation().payload_bytes(makers.plan().rectangles[0])
    assert envelope.payload_bytes == length
    assert envelope.payload_digest == blake3(payload("a rank 0", length)).digest()
    assert envelope.components.rope == makers.model().rope.digest()
    assert envelope.components.plan == makers.plan().digest()
    assert envelope.components.adapter is None
    await engine.close()


@pytest.mark.parametrize("bad_shard", [0, 1])
async def test_one_bad_shard_makes_the_chunk_a_miss(gateway: Gateway, bad_shard: int) -> None:
    """With two rectangles one bad envelope is a miss of the chunk and of all behind it; nothing of it stays held."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a", "b", "c")
    lease = await engine.lease("a", "b", "c")
    assert await engine.acquire(lease, 0, 3) == 3
    load = await engine.load(lease, 1, rank=bad_shard)
    engine.header(load, load.slots[0])[100] ^= 1
    await engine.finish(load.ticket, rank=bad_shard)
    await engine.release(lease)
    again = await engine.lease("a", "b", "c")
    assert await engine.acquire(again, 0, 3) == 1
    assert (await gateway.status())["storage"]["holds"] == 2
    assert await engine.acquire(again, 0, 3) == 1
    await engine.close()
    await nothing_held(gateway)


async def test_mismatched_payload_is_quarantined(gateway: Gateway) -> None:
    """A worker finds other bytes than the digest says: the object is removed, and no other request gets it (kinds 22, 23)."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    engine.view(load, load.slots[0])[17] ^= 1
    assert blake3(engine.view(load, load.slots[0])).digest() != load.slots[0].digest
    await engine.finish(load.ticket, 0)
    await engine.release(lease)
    await assert_quarantined(gateway, engine, "a", "payload_digest")


async def test_quarantined_chunk_is_not_handed_out_again_under_its_lease(gateway: Gateway) -> None:
    """After a mismatch the same lease neither loads nor acquires the chunk again, and what lies before it stays good."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b", "c")
    lease = await engine.lease("a", "b", "c")
    assert await engine.acquire(lease, 0, 3) == 3
    load = await engine.load(lease, 0, 1, 2)
    await engine.finish(load.ticket, 1)
    async with denied("denied", "chunks"):
        await engine.load(lease, 1)
    assert await engine.acquire(lease, 0, 3) == 1
    assert await engine.finish((await engine.load(lease, 0)).ticket)
    await engine.close()
    await nothing_held(gateway)


async def test_mismatch_is_not_counted_as_good(gateway: Gateway) -> None:
    """A hit is counted after verification: a mismatched load is bad, a verified one good (kind 22)."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    await engine.acquire(lease, 0, 2)
    assert await counter(gateway, "loaded_chunks_total", verdict="good") == 0
    await engine.finish((await engine.load(lease, 0)).ticket)
    assert await counter(gateway, "loaded_chunks_total", verdict="good") == 1
    await engine.finish((await engine.load(lease, 1)).ticket, 1)
    assert await counter(gateway, "loaded_chunks_total", verdict="good") == 1
    assert await counter(gateway, "loaded_chunks_total", verdict="bad") == 1
    await engine.close()
