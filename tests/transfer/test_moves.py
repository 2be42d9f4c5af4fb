"""Moves between a worker's pages and the pool: the right bytes, and nothing but them."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import pytest
import torch
from blake3 import blake3

from kvgate.transfer import MoveRefused, MoveSpec, PayloadShape, TransferUnavailable
from kvgate.transfer.gate import Gate
from kvgate_kernels import Codec
from tests.transfer.conftest import Served
from tests.transfer.harness import (
    BLOCKS,
    CHUNK_BLOCKS,
    ME,
    POOL_BYTES,
    RAW,
    SOON_S,
    Pages,
    blocks_of,
    long_store,
    move,
    moves,
    offset_of,
    pid_of,
    shared_maps,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_pack_gives_canonical_payloads_and_their_digests(served: Served) -> None:
    """Payloads in the pool are what the reference makes of the pages, and the digests are theirs."""
    served.pages.fill(1)
    packed = await served.mover.pack(served.handle, 7, moves(3), SOON_S)
    for index, one in enumerate(packed):
        payload = served.pages.payload(blocks_of(index))
        assert served.pool.payload(index) == payload
        assert one.digest == blake3(payload).digest()
        assert not one.bad


async def test_unpack_restores_pages(served: Served) -> None:
    """What was packed and is unpacked into cleared pages is there again, under the same digests."""
    served.pages.fill(2)
    before = served.pages.copy()
    packed = await served.mover.pack(served.handle, 7, moves(4), SOON_S)
    served.pages.clear()
    digests = await served.mover.unpack(served.handle, 7, moves(4), SOON_S)
    assert digests == [one.digest for one in packed]
    assert all(torch.equal(one, other) for one, other in zip(before, served.pages.tensors, strict=True))


async def test_unpack_leaves_skipped_tokens_alone(served: Served) -> None:
    """Blocks in front that are held already are not written, not even looked at."""
    served.pages.fill(3)
    await served.mover.pack(served.handle, 7, moves(1), SOON_S)
    before = served.pages.copy()
    served.pages.clear()
    blocks = blocks_of(0)
    blocks[0] = BLOCKS + 1  # no block at all
    await served.mover.unpack(served.handle, 7, [move(0, blocks, skip_tokens=32)], SOON_S)
    for old, new in zip(before, served.pages.tensors, strict=True):
        assert not new[blocks_of(0)[:2]].any()
        assert torch.equal(old[blocks_of(0)[2:]], new[blocks_of(0)[2:]])


async def test_digests_only_where_asked_for(served: Served) -> None:
    """Without a digest the answer has none, and the bytes are the same."""
    served.pages.fill(4)
    packed = await served.mover.pack(served.handle, 7, moves(2), SOON_S, digest=False)
    assert [one.digest for one in packed] == [b"", b""]
    assert served.pool.payload(1) == served.pages.payload(blocks_of(1))
    assert await served.mover.unpack(served.handle, 7, moves(2), SOON_S, digest=False) == []


async def test_coded_payloads_name_what_may_not_be_committed(served: Served) -> None:
    """A chunk with a NaN among its values is flagged under k16v8, and its neighbours are good."""
    pages = Pages()
    handle = await served.mover.attach(pages.export, PayloadShape(chunk_tokens=256, codec="k16v8"), ME, SOON_S)
    block = blocks_of(1)[3]
    # The last part of a head's block is V in this layout.
    pages.tensors[0][block].view(4, -1)[1, -5] = float("nan")
    packed = await served.mover.pack(handle, 7, moves(3), SOON_S)
    assert [one.bad for one in packed] == [False, True, False]
    assert served.pool.payload(2, handle.payload_bytes) == pages.payload(blocks_of(2), Codec.K16V8)
    await served.mover.detach(handle)


async def test_load_does_not_wait_for_stores(served: Served) -> None:
    """A load is done while a long store that was asked for before it is still under way."""
    await served.mover.pack(served.handle, 7, moves(1), SOON_S)
    store = asyncio.create_task(served.mover.pack(served.handle, 7, long_store(), SOON_S))
    await asyncio.sleep(0.05)
    await served.mover.unpack(served.handle, 7, moves(1), SOON_S)
    assert not store.done()
    await store


async def test_store_that_waits_too_long_is_taken_back(served: Served) -> None:
    """A store whose deadline passes behind another one moves nothing, and the process is not killed for it."""
    pid = pid_of(served.mover)
    mark = os.urandom(64)
    first = asyncio.create_task(served.mover.pack(served.handle, 7, long_store(), SOON_S))
    await asyncio.sleep(0.05)
    served.pool.write(0, mark)
    with pytest.raises(TransferUnavailable):
        await served.mover.pack(served.handle, 7, moves(1), 0.01)
    await first
    assert served.pool.payload(0)[:64] == mark
    assert pid_of(served.mover) == pid


async def test_cancelled_move_runs_to_its_end(served: Served) -> None:
    """The cancellation of a caller comes through only when nothing touches its slots any more."""
    store = asyncio.create_task(served.mover.pack(served.handle, 7, long_store(), SOON_S))
    await asyncio.sleep(0.05)
    store.cancel()
    await asyncio.sleep(0)
    store.cancel()
    with pytest.raises(asyncio.CancelledError):
        await store
    assert served.mover.status()["cpu"]["calls_in_flight"] == 0


BAD_MOVES = {
    "behind the pool": [move(10_000, blocks_of(0))],
    "over the pool's end": [MoveSpec(POOL_BYTES - 4096, move(0, blocks_of(0)).blocks)],
    "at an odd offset": [MoveSpec(offset_of(1) + 8, move(0, blocks_of(0)).blocks)],
    "far away": [MoveSpec(2**64 - 4096, move(0, blocks_of(0)).blocks)],
    "at no offset of 64 bits": [MoveSpec(2**64, move(0, blocks_of(0)).blocks)],
    "at a negative offset": [MoveSpec(-4096, move(0, blocks_of(0)).blocks)],
    "of a block too high": [move(0, [*blocks_of(0)[:-1], BLOCKS])],
    "of the highest block id": [move(0, [*blocks_of(0)[:-1], 2**32 - 1])],
    "of too few blocks": [move(0, blocks_of(0)[:-1])],
    "of too many blocks": [move(0, [*blocks_of(0), 0])],
    "of half a block id": [MoveSpec(offset_of(0), b"\0" * (4 * CHUNK_BLOCKS - 1))],
    "of unequal lengths that add up": [
        MoveSpec(offset_of(0), b"\0" * (4 * CHUNK_BLOCKS - 4)),
        MoveSpec(offset_of(1), b"\0" * (4 * CHUNK_BLOCKS + 4)),
    ],
    "of no blocks": [MoveSpec(offset_of(0), b"")],
    "of more moves than a call may have": [move(0, blocks_of(0))] * 4097,
    "none": [],
}


@pytest.mark.parametrize("bad", BAD_MOVES)
@pytest.mark.parametrize("way", ["pack", "unpack"])
async def test_bad_moves_are_refused_before_a_byte_moves(served: Served, way: str, bad: str) -> None:
    """A call with one move that names memory outside pages or pool does nothing, and the process goes on."""
    pid = pid_of(served.mover)
    before, pages = served.pool.everything(), served.pages.copy()
    calls = BAD_MOVES[bad]
    for given in (calls, [move(1, blocks_of(1)), *calls]) if calls else (calls,):
        with pytest.raises(MoveRefused):
            await getattr(served.mover, way)(served.handle, 7, given, SOON_S)
    assert served.pool.everything() == before
    assert all(torch.equal(one, other) for one, other in zip(pages, served.pages.tensors, strict=True))
    assert pid_of(served.mover) == pid


@pytest.mark.parametrize("skip", [1, 15, 17, 256, 4096, 2**63, -16])
async def test_odd_skips_are_refused(served: Served, skip: int) -> None:
    """Tokens that are skipped are whole blocks, and not all of a chunk."""
    with pytest.raises(MoveRefused):
        await served.mover.unpack(served.handle, 7, [move(0, blocks_of(0), skip)], SOON_S)


async def test_pack_skips_nothing(served: Served) -> None:
    """A store writes whole payloads only."""
    with pytest.raises(MoveRefused):
        await served.mover.pack(served.handle, 7, [move(0, blocks_of(0), 16)], SOON_S)


async def test_two_loads_into_one_block_are_refused(served: Served) -> None:
    """Which of two payloads a block holds must not depend on their order."""
    with pytest.raises(MoveRefused):
        await served.mover.unpack(served.handle, 7, [move(0, blocks_of(0)), move(1, blocks_of(0))], SOON_S)


@pytest.mark.parametrize("ready", [b"", b"x" * 63, b"x" * 64, b"x" * 65])
async def test_events_of_nothing_are_refused(served: Served, ready: bytes) -> None:
    """CPU pages have no events, and no other bytes are one."""
    with pytest.raises(MoveRefused):
        await served.mover.pack(served.handle, 7, moves(1), SOON_S, ready=ready)


@pytest.mark.parametrize("generation", [0, 6, 8, -1])
async def test_slots_of_another_pool_are_refused(served: Served, generation: int) -> None:
    """A slot of a pool that is not the live one names nothing."""
    with pytest.raises(MoveRefused):
        await served.mover.pack(served.handle, generation, moves(1), SOON_S)


@pytest.mark.parametrize(
    "change", [{"number": 99}, {"number": 0}, {"incarnation": 99}, {"device": "GPU-x"}, {"payload_bytes": 1}, {"pid": 1}]
)
async def test_handles_that_were_not_given_are_refused(served: Served, change: dict[str, object]) -> None:
    """Only the very handle that attach gave is good."""
    with pytest.raises(TransferUnavailable):
        await served.mover.pack(dataclasses.replace(served.handle, **change), 7, moves(1), SOON_S)  # type: ignore[arg-type]


async def test_detached_pages_are_gone_from_the_process(served: Served) -> None:
    """After detach their handle is void and the process maps them no more; detaching again is nothing."""
    mapped = shared_maps(pid_of(served.mover))
    pages = Pages()
    handle = await served.mover.attach(pages.export, RAW, ME, SOON_S)
    assert shared_maps(pid_of(served.mover)) > mapped
    await served.mover.detach(handle)
    assert shared_maps(pid_of(served.mover)) == mapped
    with pytest.raises(TransferUnavailable):
        await served.mover.pack(handle, 7, moves(1), SOON_S)
    await served.mover.detach(handle)


async def test_detach_waits_for_moves_under_way(served: Served) -> None:
    """A move that has begun is finished before its pages go; one asked for later finds none."""
    pages = Pages()
    handle = await served.mover.attach(pages.export, RAW, ME, SOON_S)
    store = asyncio.create_task(served.mover.pack(handle, 7, long_store(), SOON_S))
    await asyncio.sleep(0.05)
    await served.mover.detach(handle)
    assert len(await asyncio.wait_for(store, SOON_S)) == len(long_store())


async def test_layers_in_one_storage_and_odd_block_strides(served: Served) -> None:
    """Layers that lie in one allocation, block by block, are packed like any others."""
    pages = Pages()
    whole = torch.randn(BLOCKS, 8, 4, 16, 128).to(torch.bfloat16)
    pages.tensors = [whole[:, layer] for layer in range(8)]
    from kvgate_kernels.export import export_pages
    from tests.transfer.harness import GEOMETRY

    export = export_pages(GEOMETRY, pages.tensors)
    assert len(export.storages) == 1
    handle = await served.mover.attach(export, RAW, ME, SOON_S)
    await served.mover.pack(handle, 7, moves(2), SOON_S)
    assert served.pool.payload(1) == pages.payload(blocks_of(1))
    await served.mover.detach(handle)


async def test_gate_stops_a_load_that_was_given_up(served: Served) -> None:
    """A load whose place its worker has closed writes nothing; one with an open place does, once."""
    pages, gate = Pages(), Gate()
    handle = await served.mover.attach(pages.export, RAW, ME, SOON_S, gate=gate.descriptor)
    await served.mover.pack(handle, 7, moves(1), SOON_S)
    pages.clear()
    place = gate.open_place()
    assert gate.close_place(place, 0.0)
    with pytest.raises(MoveRefused):
        await served.mover.unpack(handle, 7, moves(1), SOON_S, gate=place)
    assert not any(tensor.any() for tensor in pages.tensors)
    gate.give_back(place)
    place = gate.open_place()
    await served.mover.unpack(handle, 7, moves(1), SOON_S, gate=place)
    assert pages.tensors[0].any()
    with pytest.raises(MoveRefused):
        await served.mover.unpack(handle, 7, moves(1), SOON_S, gate=place)
    await served.mover.detach(handle)
    gate.close()


@pytest.mark.parametrize("place", [None, 0, -1, 4096, 2**40])
async def test_load_without_its_place_is_refused(served: Served, place: int | None) -> None:
    """Where a worker has a gate, no load goes around it."""
    pages, gate = Pages(), Gate()
    handle = await served.mover.attach(pages.export, RAW, ME, SOON_S, gate=gate.descriptor)
    pages.clear()
    with pytest.raises(MoveRefused):
        await served.mover.unpack(handle, 7, moves(1), SOON_S, gate=place)
    assert not any(tensor.any() for tensor in pages.tensors)
    await served.mover.detach(handle)
    gate.close()


async def test_status_counts_moves(served: Served) -> None:
    """Calls and bytes of both ways are counted."""
    before = served.mover.status()["cpu"]
    await served.mover.pack(served.handle, 7, moves(2), SOON_S)
    await served.mover.unpack(served.handle, 7, moves(1), SOON_S)
    after = served.mover.status()["cpu"]
    assert after["state"] == "serving"
    assert int(after["packs"]) - int(before["packs"]) == 1
    assert int(after["unpacked_bytes"]) - int(before["unpacked_bytes"]) == served.handle.payload_bytes
