"""Pages with canaries around them, and an oracle that names the place of every element by the layout's closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvgate_kernels import Codec, GatherMove, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.rope import Rotation, inverse_frequencies

CANARY_BYTES = 256
CANARY = 0xA5
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
PACKED = (PageLayout.CPU_VEC, PageLayout.CPU_AMX, PageLayout.GPU_NHD_PACKED, PageLayout.GPU_HND_PACKED)


def block_elements(g: PageGeometry) -> int:
    """Elements of one block of one layer, all components and heads."""
    return g.components * g.kv_heads * g.block_tokens * g.head_dim


def element_offset(g: PageGeometry, num_blocks: int, block: int, c: int, h: int, t: int, d: int) -> int:
    """Where element d of token t, head h, component c of a block lies from its layer's start; blocks are dense."""
    heads, tokens, dim = g.kv_heads, g.block_tokens, g.head_dim
    packed = block * block_elements(g)
    half = packed + h * 2 * tokens * dim + c * tokens * dim
    split = (c * num_blocks + block) * heads * tokens * dim
    match g.layout:
        case PageLayout.CPU_VEC:
            return half + (d * tokens + t if c == 0 else t * dim + d)
        case PageLayout.CPU_AMX if c == 0:
            return half + (t // 16) * 16 * dim + (d // 2) * 32 + (t % 16) * 2 + d % 2
        case PageLayout.CPU_AMX:
            return half + (d // 16) * 16 * tokens + (t // 2) * 32 + (d % 16) * 2 + t % 2
        case PageLayout.GPU_NHD_PACKED:
            return packed + (t * heads + h) * 2 * dim + c * dim + d
        case PageLayout.GPU_HND_PACKED:
            return packed + (h * tokens + t) * 2 * dim + c * dim + d
        case PageLayout.GPU_NHD_SPLIT:
            return split + (t * heads + h) * dim + d
        case PageLayout.GPU_HND_SPLIT:
            return split + (h * tokens + t) * dim + d
        case PageLayout.MLA_LATENT:
            return packed + t * dim + d


def shape_and_stride(g: PageGeometry, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The logical shape an engine registers, and the strides of dense blocks, in elements."""
    heads, tokens, dim, block = g.kv_heads, g.block_tokens, g.head_dim, block_elements(g)
    match g.layout:
        case PageLayout.CPU_VEC | PageLayout.CPU_AMX | PageLayout.GPU_HND_PACKED:
            return (num_blocks, heads, tokens, 2 * dim), (block, tokens * 2 * dim, 2 * dim, 1)
        case PageLayout.GPU_NHD_PACKED:
            return (num_blocks, heads, tokens, 2 * dim), (block, 2 * dim, heads * 2 * dim, 1)
        case PageLayout.GPU_NHD_SPLIT:
            half = block // 2
            return (2, num_blocks, tokens, heads, dim), (num_blocks * half, half, heads * dim, dim, 1)
        case PageLayout.GPU_HND_SPLIT:
            half = block // 2
            return (2, num_blocks, tokens, heads, dim), (num_blocks * half, half, dim, tokens * dim, 1)
        case PageLayout.MLA_LATENT:
            return (num_blocks, tokens, dim), (block, dim, 1)


@dataclass
class Arena:
    """Every layer's pages in one buffer, canaries before, between and after them."""

    geometry: PageGeometry
    num_blocks: int
    buffer: npt.NDArray[Any]
    layers: list[npt.NDArray[Any]]
    tensors: list[torch.Tensor]

    @classmethod
    def filled(cls, g: PageGeometry, num_blocks: int, rng: np.random.Generator) -> Arena:
        """Pages of random bits (16-bit floats: finite ones, so that codecs apply)."""
        kind = BITS[g.element_bytes]
        elements = num_blocks * block_elements(g)
        layer_bytes = elements * g.element_bytes
        step = (layer_bytes + CANARY_BYTES + 63) // 64 * 64
        buffer = np.full(CANARY_BYTES + g.layers * step, CANARY, dtype=np.uint8)
        layers, tensors = [], []
        shape, stride = shape_and_stride(g, num_blocks)
        for layer in range(g.layers):
            begin = CANARY_BYTES + layer * step
            flat = buffer[begin : begin + layer_bytes].view(kind)
            flat[:] = random_bits(g.dtype, elements, rng)
            typed = torch.from_numpy(flat.view(np.uint8)).view(getattr(torch, g.dtype))
            layers.append(flat)
            tensors.append(typed.as_strided(shape, stride))
        return cls(g, num_blocks, buffer, layers, tensors)

    def get(self, layer: int, block: int, c: int, h: int, t: int, d: int) -> int:
        """One element's bits, by the closed form."""
        return int(self.layers[layer][element_offset(self.geometry, self.num_blocks, block, c, h, t, d)])

    def put(self, layer: int, block: int, c: int, h: int, t: int, d: int, bits: int) -> None:
        """Sets one element's bits, by the closed form."""
        self.layers[layer][element_offset(self.geometry, self.num_blocks, block, c, h, t, d)] = bits


def random_bits(dtype: str, count: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Random bits of a cache type; 16-bit floats are finite, of normal-distributed values with some outliers."""
    if dtype in ("bfloat16", "float16"):
        values = rng.standard_normal(count).astype(np.float32)
        values[rng.integers(0, count, max(1, count // 50))] *= 30
        tensor = torch.from_numpy(values).to(getattr(torch, dtype))
        return tensor.view(torch.uint16).numpy()
    kind = np.uint32 if dtype == "float32" else np.uint8
    return rng.integers(0, np.iinfo(kind).max, count, dtype=kind, endpoint=True)


def oracle_payload(arena: Arena, payload: PayloadGeometry, table: list[int]) -> bytes:
    """A raw payload, element by element in canonical order."""
    g = arena.geometry
    out = np.empty(payload.payload_bytes // g.element_bytes, dtype=BITS[g.element_bytes])
    position = 0
    for layer in range(g.layers):
        for c in range(g.components):
            for h in range(g.kv_heads):
                for t in range(payload.chunk_tokens):
                    for d in range(g.head_dim):
                        block = table[t // g.block_tokens]
                        out[position] = arena.get(layer, block, c, h, t % g.block_tokens, d)
                        position += 1
    return out.tobytes()


def oracle_unpack(arena: Arena, payload: PayloadGeometry, table: list[int], skip: int, data: bytes) -> None:
    """Writes a raw payload to the pages, element by element, tokens from ``skip`` on."""
    g = arena.geometry
    bits = np.frombuffer(data, dtype=BITS[g.element_bytes])
    shape = (g.layers, g.components, g.kv_heads, payload.chunk_tokens, g.head_dim)
    view = bits.reshape(shape)
    for layer, c, h, t, d in np.ndindex(*shape):
        if t >= skip:
            block = table[t // g.block_tokens]
            arena.put(layer, block, c, h, t % g.block_tokens, d, int(view[layer, c, h, t, d]))


@dataclass
class Case:
    """One drawn case: pages, payload, and the seed of its content."""

    pages: PageGeometry
    payload: PayloadGeometry
    num_blocks: int
    seed: int


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    layouts: tuple[PageLayout, ...] = tuple(PageLayout),
    dims: tuple[int, ...] = (16, 64, 80, 96, 128, 256),
    codec: Codec = Codec.RAW,
    most_tokens: int = 64,
) -> Case:
    """Small geometries over all layouts, types and head sizes; the chunk may end inside its last page."""
    layout = draw(st.sampled_from(layouts))
    if layout is PageLayout.CPU_AMX:
        dtypes, blocks = ["bfloat16"], [32, 64]
    elif codec is not Codec.RAW:
        dtypes, blocks = ["bfloat16", "float16"], [1, 4, 16, 32]
    else:
        dtypes = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
        blocks = [1, 3, 8, 16, 32]
    block_tokens = draw(st.sampled_from(blocks))
    pages = PageGeometry(
        layout,
        layers=draw(st.integers(1, 3)),
        kv_heads=1 if layout is PageLayout.MLA_LATENT else draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from(dims)),
        block_tokens=block_tokens,
        dtype=draw(st.sampled_from(dtypes)),
    )
    chunk_tokens = draw(st.integers(1, max(most_tokens, block_tokens)))
    payload = PayloadGeometry.of(pages, chunk_tokens, codec)
    num_blocks = payload.blocks(block_tokens) * 2 + draw(st.integers(1, 5))
    return Case(pages, payload, num_blocks, draw(st.integers(0, 2**32 - 1)))


def random_gathers(case: Case, rng: np.random.Generator, data: st.DataObject) -> list[GatherMove]:
    """Two gathers of random tokens with payloads left to the caller: all turned in one drawn style, or none."""
    tokens = case.payload.chunk_tokens
    style = data.draw(st.sampled_from([None, "neox", "interleaved"]))
    rotary_dim = data.draw(st.integers(1, case.pages.head_dim // 16)) * 16
    moves = []
    for _ in range(2):
        rotation = None
        if style is not None:
            old = rng.integers(0, 100_000, tokens).tolist()
            new = rng.integers(0, 100_000, tokens).tolist()
            frequencies = inverse_frequencies(rotary_dim, 10_000.0)
            rotation = Rotation.between(old, new, frequencies, interleaved=style == "interleaved")
        slots = rng.integers(0, case.num_blocks * case.pages.block_tokens, tokens).tolist()
        moves.append(GatherMove(memoryview(b""), slots, rotation))
    return moves
