"""What a move may name: everything else is refused before the first byte is written."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from kvgate_kernels import ChunkMove, MoveError, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.moves import check_moves
from kvgate_kernels.pages import check_pages

PAGES = PageGeometry(PageLayout.CPU_VEC, 1, 1, 16, 32, "float32")
PAYLOAD = PayloadGeometry.of(PAGES, 64)


@pytest.fixture(name="packer")
def make_packer(backend: str) -> Iterator[Packer]:
    """A packer over six blocks."""
    packer = Packer(PAGES, PAYLOAD, [torch.zeros(6, 1, 32, 32)], backend=backend)
    yield packer
    packer.close()


def view(size: int = PAYLOAD.payload_bytes, fill: int = 7) -> memoryview:
    """A writable payload of one byte value."""
    return memoryview(bytearray([fill]) * size)


@pytest.mark.parametrize(
    ("table", "message"),
    [([0], "2 blocks"), ([0, 1, 2], "2 blocks"), ([0, 6], "outside"), ([-1, 0], "outside"), ([], "2 blocks")],
)
@pytest.mark.parametrize("operation", ["pack", "unpack"])
def test_block_tables_are_checked(packer: Packer, operation: str, table: list[int], message: str) -> None:
    """A table of wrong length, or with an id that is no block, moves nothing."""
    good, bad = view(), view()
    with pytest.raises(MoveError, match=f"move 1: .*{message}"):
        getattr(packer, operation)([ChunkMove(good, [0, 1]), ChunkMove(bad, table)])
    assert bytes(good) == bytes(bad) == bytes(view())


@pytest.mark.parametrize("size", [0, PAYLOAD.payload_bytes - 1, PAYLOAD.payload_bytes + 1])
@pytest.mark.parametrize("operation", ["pack", "unpack"])
def test_payloads_have_exactly_their_size(packer: Packer, operation: str, size: int) -> None:
    """One byte more or less is refused."""
    with pytest.raises(MoveError, match=f"must be {PAYLOAD.payload_bytes} bytes"):
        getattr(packer, operation)([ChunkMove(view(size), [0, 1])])


def test_pack_refuses_a_read_only_payload(packer: Packer) -> None:
    """A view that may not be written is not written."""
    with pytest.raises(MoveError, match="read-only"):
        packer.pack([ChunkMove(view().toreadonly(), [0, 1])])


def test_strided_payloads_are_refused(packer: Packer) -> None:
    """A payload is one run of bytes."""
    with pytest.raises(MoveError, match="contiguous"):
        packer.unpack([ChunkMove(view(2 * PAYLOAD.payload_bytes)[::2], [0, 1])])
    with pytest.raises(MoveError, match="uint8"):
        packer.unpack([ChunkMove(torch.zeros(PAYLOAD.payload_bytes // 4), [0, 1])])


@pytest.mark.parametrize("skip", [-32, 1, 31, 64, 96])
def test_skips_are_whole_blocks_inside_the_chunk(packer: Packer, skip: int) -> None:
    """A skip inside a block, below zero or of the whole chunk is refused."""
    with pytest.raises(MoveError, match="skip_tokens"):
        packer.unpack([ChunkMove(view(), [0, 1], skip)])


def test_pack_skips_nothing(packer: Packer) -> None:
    """A payload is always written whole."""
    with pytest.raises(MoveError, match="pack skips no tokens"):
        packer.pack([ChunkMove(view(), [0, 1], 32)])


@pytest.mark.parametrize("tables", [([0, 0],), ([0, 1], [2, 1])])
def test_unpack_refuses_to_write_a_block_twice(packer: Packer, tables: tuple[list[int], ...]) -> None:
    """The result would depend on which write came last."""
    with pytest.raises(MoveError, match="twice"):
        packer.unpack([ChunkMove(view(), table) for table in tables])


def test_pack_may_read_a_block_twice(packer: Packer) -> None:
    """Requests with a common prefix share blocks."""
    outs = [view(), view()]
    assert len(packer.pack([ChunkMove(out, [3, 3]) for out in outs], digest=True)) == 2
    assert outs[0] == outs[1]


def test_an_empty_batch_is_no_work(packer: Packer) -> None:
    """No moves, no digests, no error."""
    assert packer.pack([], digest=True) == []
    assert packer.unpack([]) == []


def test_ids_of_skipped_blocks_reach_no_backend() -> None:
    """They are not looked at, so they may be any number: no backend has to hold, or believe, one that is no block."""
    pages = check_pages(PAGES, [torch.zeros(6, 1, 32, 32)])
    (checked,) = check_moves([ChunkMove(view(), [2**32 - 1, 3], skip_tokens=32)], pages, PAYLOAD, unpack=True)
    assert checked.block_table == (0, 3)


def test_a_call_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one chunk fails no other is still being written: the caller gives the blocks to others."""
    packer = Packer(PAGES, PAYLOAD, [torch.zeros(6, 1, 32, 32)], backend="torch-reference", threads=2)
    ended = []

    def unpack(_pages: object, _payload: object, table: tuple[int, ...], _skip: int, _source: object) -> None:
        if table[0] == 0:
            raise RuntimeError("the first")
        time.sleep(0.2)
        ended.append(table)

    monkeypatch.setattr("kvgate_kernels.backend.unpack_chunk", unpack)
    with pytest.raises(RuntimeError, match="the first"):
        packer.unpack([ChunkMove(view(), [0, 1]), ChunkMove(view(), [2, 3])])
    assert ended == [(2, 3)]
    packer.close()
