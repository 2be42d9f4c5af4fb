"""Pack and unpack against an element-by-element oracle, over every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate_kernels import ChunkMove, Packer, PageGeometry, PageLayout
from tests.kernels.arena import CANARY, CANARY_BYTES, Arena, Case, cases, oracle_payload, oracle_unpack

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def guarded_payload(payload_bytes: int, lead: int = 0) -> tuple[npt.NDArray[np.uint8], memoryview]:
    """A payload view with canaries on both sides, ``lead`` bytes off alignment, and the whole buffer."""
    buffer = np.full(2 * CANARY_BYTES + payload_bytes + lead, CANARY, dtype=np.uint8)
    begin = CANARY_BYTES + lead
    return buffer, buffer.data[begin : begin + payload_bytes]


def canaries_whole(buffer: npt.NDArray[np.uint8], payload_bytes: int, lead: int = 0) -> bool:
    """True if nothing but the payload was written."""
    begin = CANARY_BYTES + lead
    return bool((buffer[:begin] == CANARY).all() and (buffer[begin + payload_bytes :] == CANARY).all())


def tables(case: Case, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Two disjoint block tables in random order."""
    blocks = case.payload.blocks(case.pages.block_tokens)
    ids = rng.permutation(case.num_blocks).tolist()
    return ids[:blocks], ids[blocks : 2 * blocks]


@FEW
@given(case=cases(), lead=st.sampled_from([0, 1, 8]), digest=st.booleans())
def test_pack_gives_the_canonical_payload(backend: str, case: Case, lead: int, digest: bool) -> None:
    """A packed payload is the oracle's, byte for byte, wherever it lies; its digest is of these bytes; no byte around it changes."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    before = arena.buffer.copy()
    packer = Packer(case.pages, case.payload, arena.tensors, backend=backend)
    pairs = tables(case, rng)
    outs = [guarded_payload(case.payload.payload_bytes, lead) for _ in pairs]
    digests = packer.pack([ChunkMove(view, table) for (_, view), table in zip(outs, pairs, strict=True)], digest=digest)
    assert digests == ([blake3(view).digest() for _, view in outs] if digest else [])
    for (buffer, view), table in zip(outs, pairs, strict=True):
        assert bytes(view) == oracle_payload(arena, case.payload, table)
        assert canaries_whole(buffer, case.payload.payload_bytes, lead)
    assert np.array_equal(arena.buffer, before)
    packer.close()


@FEW
@given(case=cases(), lead=st.sampled_from([0, 1, 8]), digest=st.booleans(), data=st.data())
def test_unpack_writes_only_the_named_tokens(backend: str, case: Case, lead: int, digest: bool, data: st.DataObject) -> None:
    """Unpack sets exactly the tokens after the skipped ones in the named blocks; all other page memory keeps its bytes."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    expected = Arena.filled(case.pages, case.num_blocks, np.random.default_rng(case.seed))
    expected.buffer[:] = arena.buffer
    blocks = case.payload.blocks(case.pages.block_tokens)
    skips = [data.draw(st.integers(0, blocks - 1)) * case.pages.block_tokens for _ in range(2)]
    moves = []
    for table, skip in zip(tables(case, rng), skips, strict=True):
        content = rng.integers(0, 256, case.payload.payload_bytes, dtype=np.uint8).tobytes()
        oracle_unpack(expected, case.payload, table, skip, content)
        _, view = guarded_payload(case.payload.payload_bytes, lead)
        view[:] = content
        # Skipped entries may hold anything, also ids that do not exist.
        shown = [10**6] * (skip // case.pages.block_tokens) + table[skip // case.pages.block_tokens :]
        moves.append(ChunkMove(view.toreadonly(), shown, skip))
    packer = Packer(case.pages, case.payload, arena.tensors, backend=backend)
    packer.unpack(moves, digest=digest)
    assert np.array_equal(arena.buffer, expected.buffer)
    packer.close()


@FEW
@given(case=cases(most_tokens=300))
def test_unpack_undoes_pack(backend: str, case: Case) -> None:
    """What was packed from some blocks and unpacked to others packs to the same payload and digest again."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    source, target = tables(case, rng)
    packer = Packer(case.pages, case.payload, arena.tensors, backend=backend)
    first, second = bytearray(case.payload.payload_bytes), bytearray(case.payload.payload_bytes)
    digests = packer.pack([ChunkMove(memoryview(first), source)], digest=True)
    assert packer.unpack([ChunkMove(memoryview(first), target)], digest=True) == digests
    assert packer.pack([ChunkMove(memoryview(second), target)], digest=True) == digests
    assert first == second
    packer.close()


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Case, PageGeometry]:
    """A case, and pages of another layout and block size that hold the same heads and types."""
    first = draw(cases(most_tokens=96, dims=(64, 96, 128)))
    if first.pages.layout is PageLayout.MLA_LATENT:
        layout = PageLayout.MLA_LATENT
    else:
        others = [layout for layout in PageLayout if layout is not PageLayout.MLA_LATENT]
        if first.pages.dtype != "bfloat16":
            others.remove(PageLayout.CPU_AMX)
        layout = draw(st.sampled_from(others))
    sizes = [32, 64] if layout is PageLayout.CPU_AMX else [1, 3, 16, 32]
    return first, replace(first.pages, layout=layout, block_tokens=draw(st.sampled_from(sizes)))


@FEW
@given(pair=layout_pairs())
def test_any_layout_reads_what_another_wrote(backend: str, pair: tuple[Case, PageGeometry]) -> None:
    """The payload of one layout, unpacked into pages of another, packs to the same bytes there."""
    first, pages = pair
    rng = np.random.default_rng(first.seed)
    blocks = first.payload.blocks(pages.block_tokens)
    source = Arena.filled(first.pages, first.num_blocks, rng)
    target = Arena.filled(pages, blocks, rng)
    reader = Packer(first.pages, first.payload, source.tensors, backend=backend)
    writer = Packer(pages, first.payload, target.tensors, backend=backend)
    there, back = bytearray(first.payload.payload_bytes), bytearray(first.payload.payload_bytes)
    reader.pack([ChunkMove(memoryview(there), tables(first, rng)[0])])
    writer.unpack([ChunkMove(memoryview(there), list(range(blocks)))])
    writer.pack([ChunkMove(memoryview(back), list(range(blocks)))])
    assert there == back
    reader.close()
    writer.close()
