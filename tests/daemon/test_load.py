"""The read path: a load gives right bytes or a miss, whatever was done to the stored object."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from collections.abc import Callable

import pytest
from blake3 import blake3

from kvgate.daemon.app import Gateway
from kvgate.daemon.secret import load_or_create
from kvgate.protocol.messages import FinishLoad, Load, LoadPlan, LoadVerdict, WrittenPayload
from kvgate.storage.envelope import ENVELOPE_BYTES, Envelope, read, seal
from tests.daemon import makers
from tests.daemon.admin_client import counter
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, nothing_held
from tests.daemon.engine import Engine, payload
from tests.daemon.wire import Denied, denied


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


async def test_load_needs_an_acquire(gateway: Gateway) -> None:
    """Present is a hint: a chunk that was not acquired can't be loaded, nor can a partly acquired batch."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    async with denied("denied", "chunks"):
        await engine.load(lease, 0)
    assert await engine.acquire(lease, 0, 1) == 1
    async with denied("denied", "chunks"):
        await engine.load(lease, 0, 1)
    assert (await gateway.status())["open_loads"] == 0
    await engine.close()


async def test_ticket_closes_once_and_only_for_its_worker(gateway: Gateway) -> None:
    """A made-up ticket, a closed one, and another connection's ticket all get the verdict invalid, and close nothing."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    assert not await engine.finish(load.ticket + 1000)
    assert not await engine.finish(load.ticket, rank=1)
    assert not await engine.finish(load.ticket, 0, rank=1)
    assert (await engine.scheduler.call(FinishLoad(ticket=load.ticket, mismatched=()), LoadVerdict)).valid is False
    assert (await gateway.status())["open_loads"] == 1
    assert await engine.hit("a") == 1
    assert await engine.finish(load.ticket)
    assert not await engine.finish(load.ticket)
    await engine.close()
    await nothing_held(gateway)


async def test_mismatch_of_a_chunk_that_was_not_loaded_is_refused(gateway: Gateway) -> None:
    """It is refused by name, quarantines nothing, and the load can still be closed: no hold leaks."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    lease = await engine.lease("a", "b")
    assert await engine.acquire(lease, 0, 2) == 2
    load = await engine.load(lease, 0)
    for mismatched in ((1,), (0, 1), (2**40,)):
        async with denied("malformed", "mismatched"):
            await engine.finish(load.ticket, *mismatched)
    assert await engine.hit("a", "b") == 2
    await engine.release(lease)
    assert await engine.finish(load.ticket)
    await nothing_held(gateway)
    await engine.close()


async def test_refused_mismatch_does_not_keep_a_lost_workers_holds(gateway: Gateway) -> None:
    """The same, where the worker never closes the load but goes away."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    with pytest.raises(Denied):
        await engine.finish(load.ticket, 5)
    await engine.release(lease)
    await engine.workers[0].close()
    await nothing_held(gateway)
    await engine.scheduler.close()


async def test_same_chunk_twice_in_one_load(gateway: Gateway) -> None:
    """Asking twice for one chunk gives the same slot twice and closes with one ticket."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0, 0)
    assert load.slots[0] == load.slots[1]
    assert await engine.finish(load.ticket, 0, 0) is True
    await engine.close()
    await nothing_held(gateway)


async def test_each_rank_gets_its_own_rectangle(gateway: Gateway) -> None:
    """The gateway takes the rectangle from the registration: ranks of one lease get different slots and digests."""
    engine = await Engine.start(gateway.config.socket_path, tp=2)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    loads = [await engine.load(lease, 0, rank=rank) for rank in range(2)]
    assert loads[0].slots[0].offset != loads[1].slots[0].offset
    assert loads[0].slots[0].digest != loads[1].slots[0].digest
    await engine.close()


async def test_committed_digest_is_what_a_load_names(gateway: Gateway) -> None:
    """The digest a writer gave is the one a reader must find; a writer that lied about it gets a mismatch, not wrong bytes."""
    engine = await Engine.start(gateway.config.socket_path)
    lease = await engine.lease("a")
    (written,) = engine.fill(await engine.reserve(lease, 0), ("a",))
    lie = WrittenPayload(reservation=written.reservation, digest=makers.name("lie"))
    assert await engine.commit((lie,)) == 1
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    assert load.slots[0].digest == makers.name("lie")
    assert load.slots[0].digest != written.digest
    await engine.close()


async def test_storage_death_during_a_load_voids_it(start: Start) -> None:
    """The pool goes while a worker copies: the verdict is invalid, holds and presence are void, a new acquire is a miss."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    old = await engine.load(lease, 0)
    await backend.die()
    assert not await engine.finish(old.ticket)
    assert await engine.acquire(lease, 0, 1) == 0
    with pytest.raises(Denied):
        await engine.load(lease, 0)
    await backend.revive()
    assert (await engine.bind("a")).present == 0
    assert await engine.hit("a") == 0
    async with denied("denied", "chunks"):
        await engine.load(lease, 0)
    await engine.store("a")
    new = await engine.load(lease, 0) if await engine.acquire(lease, 0, 1) else None
    assert new is not None
    assert new.pool != old.pool
    assert await engine.finish(new.ticket)
    await engine.close()
    await nothing_held(gateway)


async def test_load_over_a_storage_restart_is_invalid(start: Start) -> None:
    """Died and back again within one copy: still invalid, though there is a pool again."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    load = await engine.load(lease, 0)
    await backend.die()
    await backend.revive()
    assert not await engine.finish(load.ticket)
    await engine.close()
    await nothing_held(gateway)


@pytest.mark.parametrize("when", ["stalled", "late"])
async def test_pool_that_changed_during_acquire_is_a_miss(start: Start, when: str) -> None:
    """Holds that were taken in a pool that is gone when they arrive are not taken for a hit."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    setattr(backend, when, {"acquire"})
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 1))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    await backend.die()
    await backend.revive()
    # The same object at the same place of the new pool: its envelope is good, but the hold that arrives does not keep it there.
    await engine.store("a")
    backend.resume()
    assert await acquiring == 0
    assert (await gateway.status())["held_chunks"] == 0
    await engine.close()
    await nothing_held(gateway)


async def test_stalled_storage_answers_by_the_deadline(start: Start) -> None:
    """A storage read that hangs is a miss at the deadline that the request gave, and leaves no hold behind (kind 23)."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    backend.stalled = {"acquire"}
    assert await engine.acquire(lease, 0, 1, deadline_ms=50) == 0
    backend.resume()
    await engine.release(lease)
    await nothing_held(gateway)
    assert await engine.hit("a") == 1
    await engine.close()


async def test_stalled_probe_does_not_stall_a_bind(start: Start) -> None:
    """Bind answers at once; an acquire waits for the probe no longer than its own deadline, or the probe's."""
    backend = FaultyBackend()
    gateway = await start(backend, probe_s=0.1)
    engine = await Engine.start(gateway.config.socket_path)
    backend.stalled = {"probe"}
    bound = await engine.bind("a")
    assert (bound.present, bound.probing) == (0, True)
    assert await engine.acquire(bound.lease, 0, 1, deadline_ms=10) == 0
    assert await engine.acquire(bound.lease, 0, 1, deadline_ms=5000) == 0
    await engine.release(bound.lease)
    await engine.close()
    await nothing_held(gateway)


async def test_probe_finds_what_the_index_forgot(start: Start) -> None:
    """A chunk that is stored but unknown to the bounded index is found by the probe and held."""
    gateway = await start(max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b", "c")
    bound = await engine.bind("a", "b", "c")
    assert bound.present == 0
    assert await engine.acquire(bound.lease, 0, 3) == 3
    await engine.close()


@pytest.mark.parametrize("call", ["probe", "acquire"])
async def test_broken_storage_read_is_a_miss(start: Start, call: str) -> None:
    """Storage that fails a read makes a miss, never a failed request, and works again when storage does."""
    backend = FaultyBackend()
    gateway = await start(backend, max_known_chunks=1)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a", "b")
    backend.broken = {call}
    assert await engine.hit("a", "b") == 0
    backend.broken = set()
    assert await engine.hit("a", "b") == 2
    await engine.close()
    await nothing_held(gateway)


async def test_failed_release_does_not_keep_leases(start: Start) -> None:
    """Where storage can't take holds back, the release is answered, and a lost connection still frees all its leases."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    leases = [await engine.lease("a") for _ in range(3)]
    for lease in leases:
        assert await engine.acquire(lease, 0, 1) == 1
    backend.broken = {"release"}
    await engine.release(leases[0])
    await engine.close()

    async def none() -> bool:
        status = await gateway.status()
        return not status["leases"] and not status["held_chunks"] and not status["registrations"]

    await eventually("no lease is left", none)


async def test_connection_lost_during_a_stalled_acquire(start: Start) -> None:
    """The registration is unsealed at once, not when storage answers; and nothing is held when it does."""
    backend = FaultyBackend()
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease, other = await engine.lease("a"), await engine.lease("a")
    assert await engine.acquire(other, 0, 1) == 1
    backend.stalled = {"acquire"}
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 1, deadline_ms=600_000))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    await engine.close()
    with pytest.raises(ConnectionError):
        await acquiring

    async def noticed() -> bool:
        status = await gateway.status()
        return status["leases"] == 1 and not status["registrations"] and status["storage"]["holds"] == 0

    await eventually("all but the waiting lease is given back", noticed)
    backend.resume()
    await nothing_held(gateway)


async def test_released_lease_stops_a_long_acquire(start: Start) -> None:
    """A request that is aborted while it acquires many chunks holds none of them afterwards."""
    backend = FaultyBackend(4 << 20)
    gateway = await start(backend)
    engine = await Engine.start(gateway.config.socket_path)
    texts = [f"{number}" for number in range(130)]
    await engine.store(*texts)
    lease = await engine.lease(*texts)
    backend.stalled = {"acquire"}
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 130))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    releasing = asyncio.create_task(engine.release(lease))
    await asyncio.sleep(0.05)
    calls = backend.calls.count("acquire")
    backend.resume()
    assert await acquiring == 0
    await releasing
    assert backend.calls.count("acquire") == calls
    await nothing_held(gateway)
    await engine.close()


async def test_stop_does_not_wait_for_stalled_storage(start: Start) -> None:
    """A stop is bounded by drain_s, also while a request waits for storage for ten minutes."""
    backend = FaultyBackend()
    gateway = await start(backend, drain_s=0.2)
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    backend.stalled = {"acquire"}
    acquiring = asyncio.create_task(engine.acquire(lease, 0, 1, deadline_ms=600_000))

    async def waits() -> bool:
        return backend.waiting > 0

    await eventually("acquire waits", waits)
    async with asyncio.timeout(10):
        await gateway.stop()
    with pytest.raises(ConnectionError):
        await acquiring
    assert backend.waiting == 0
    await engine.close()


async def test_scheduler_cannot_load(gateway: Gateway) -> None:
    """A connection that registered no worker gets no slot."""
    engine = await Engine.start(gateway.config.socket_path)
    await engine.store("a")
    lease = await engine.lease("a")
    assert await engine.acquire(lease, 0, 1) == 1
    async with denied("denied"):
        await engine.scheduler.call(Load(lease=lease, chunks=(0,)), LoadPlan)
    await engine.close()
