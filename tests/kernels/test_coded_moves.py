"""Packing and unpacking with the k16v8 codecs against the canonical payload and the plain-torch codec."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate_kernels import ChunkMove, Codec, NonFiniteValues, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.codecs import decode_values, encode_values
from tests.kernels.arena import Arena, Case, cases, oracle_payload, oracle_unpack

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TWO_COMPONENTS = tuple(layout for layout in PageLayout if layout is not PageLayout.MLA_LATENT)
CODED_CASES = st.sampled_from([Codec.K16V8, Codec.K16V8_E4M3]).flatmap(
    lambda codec: cases(layouts=TWO_COMPONENTS, codec=codec, most_tokens=96)
)


def coded(raw: bytes, payload: PayloadGeometry) -> bytes:
    """The coded payload of a raw one, part by part as the format is written down."""
    dtype = getattr(torch, payload.dtype)
    bits = torch.frombuffer(bytearray(raw), dtype=dtype)
    layers = bits.view(payload.layers, 2, payload.rows, payload.head_dim)
    parts = []
    for layer in layers:
        codes, scales, _ = encode_values(layer[1], payload.codec)
        parts += [layer[0].view(torch.uint8), codes, scales.view(torch.uint8)]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


def decoded(data: bytes, payload: PayloadGeometry) -> bytes:
    """The raw payload that a coded one stands for."""
    dtype = getattr(torch, payload.dtype)
    out = []
    for layer in torch.frombuffer(bytearray(data), dtype=torch.uint8).view(payload.layers, -1):
        key, codes, scales = layer.split_with_sizes(
            [
                payload.component_bytes,
                payload.rows * payload.head_dim,
                payload.rows * payload.groups * 2,
            ]
        )
        shaped = scales.clone().view(torch.bfloat16).view(payload.rows, payload.groups)
        values = decode_values(codes.clone().view(payload.rows, payload.head_dim), shaped, dtype, payload.codec)
        out += [key, values.view(torch.uint8)]
    return b"".join(part.contiguous().numpy().tobytes() for part in out)


@FEW
@given(case=CODED_CASES, digest=st.booleans())
def test_packing_codes_the_canonical_payload(backend: str, case: Case, digest: bool) -> None:
    """A coded payload is the coding of the raw canonical payload, so that page layouts do not enter it; its digest is of its bytes."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    blocks = case.payload.blocks(case.pages.block_tokens)
    table = rng.permutation(case.num_blocks).tolist()[:blocks]
    raw = PayloadGeometry.of(case.pages, case.payload.chunk_tokens)
    packer = Packer(case.pages, case.payload, arena.tensors, backend=backend)
    out = bytearray(case.payload.payload_bytes)
    digests = packer.pack([ChunkMove(memoryview(out), table)], digest=digest)
    assert digests == ([blake3(out).digest()] if digest else [])
    assert bytes(out) == coded(oracle_payload(arena, raw, table), case.payload)
    packer.close()


@FEW
@given(case=CODED_CASES, data=st.data())
def test_unpacking_writes_what_the_codes_stand_for(backend: str, case: Case, data: st.DataObject) -> None:
    """Keys come back bit for bit and values as code times scale; nothing outside the named tokens changes."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    expected = Arena.filled(case.pages, case.num_blocks, np.random.default_rng(case.seed))
    expected.buffer[:] = arena.buffer
    blocks = case.payload.blocks(case.pages.block_tokens)
    table = rng.permutation(case.num_blocks).tolist()[:blocks]
    skip = data.draw(st.integers(0, blocks - 1)) * case.pages.block_tokens
    content = rng.integers(0, 256, case.payload.payload_bytes, dtype=np.uint8)
    # Any code is legal; scales are those of finite groups, and a NaN now and then.
    for layer in range(case.payload.layers):
        end = (layer + 1) * case.payload.layer_bytes
        count = case.payload.rows * case.payload.groups
        scales = torch.from_numpy(np.exp(rng.uniform(-30, 30, count)).astype(np.float32)).to(torch.bfloat16)
        scales[rng.random(count) < 0.02] = torch.nan
        content[end - 2 * count : end] = scales.view(torch.uint8).numpy()
    raw = PayloadGeometry.of(case.pages, case.payload.chunk_tokens)
    oracle_unpack(expected, raw, table, skip, decoded(content.tobytes(), case.payload))
    packer = Packer(case.pages, case.payload, arena.tensors, backend=backend)
    packer.unpack([ChunkMove(memoryview(content.tobytes()), table, skip)])
    assert np.array_equal(arena.buffer, expected.buffer)
    packer.close()


@pytest.mark.parametrize("codec", [Codec.K16V8, Codec.K16V8_E4M3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [PageLayout.CPU_VEC, PageLayout.GPU_NHD_SPLIT])
def test_all_bit_patterns_are_coded_as_in_the_reference(backend: str, codec: Codec, dtype: str, layout: PageLayout) -> None:
    """Every 16-bit pattern as V, NaN, infinities and denormals among them: same bytes, same report, same decoding."""
    pages = PageGeometry(layout, 1, 2, 128, 32, dtype)
    payload = PayloadGeometry.of(pages, 256, codec)
    patterns = np.arange(65536, dtype=np.uint16)
    content = np.concatenate([patterns, np.random.default_rng(1).permutation(patterns)] * 2)
    arenas = [Arena.filled(pages, 16, np.random.default_rng(0)) for _ in range(2)]
    payloads = []
    for arena, name in zip(arenas, ("torch-reference", backend), strict=True):
        arena.layers[0][:] = content[: arena.layers[0].size]
        packer = Packer(pages, payload, arena.tensors, backend=name)
        outs = [bytearray(payload.payload_bytes) for _ in range(2)]
        moves = [ChunkMove(memoryview(out), range(8 * i, 8 * i + 8)) for i, out in enumerate(outs)]
        with pytest.raises(NonFiniteValues) as caught:
            packer.pack(moves)
        assert caught.value.indices == (0, 1)
        packer.unpack(moves)
        payloads.append(outs)
        packer.close()
    assert payloads[0] == payloads[1]
    assert np.array_equal(arenas[0].buffer, arenas[1].buffer)
