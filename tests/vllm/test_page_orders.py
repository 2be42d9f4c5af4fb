"""Where vLLM's own kernel puts every element of a CPU page, against the layouts that the kernels are given for its ISAs.

The operator that writes pages runs on every CPU, that of AMX too: only attention needs the tiles.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops

from kvgate_kernels import ChunkMove, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_vllm.registration import AMX_MULTIPLE, ISA_LAYOUTS

HEADS, BLOCKS = 2, 3
TYPES = (torch.bfloat16, torch.float16, torch.float32)
VECTOR = [
    *itertools.product(("vec", "vec16"), TYPES, (32, 64, 80, 96, 112, 128, 256), (32, 128)),
    *itertools.product(("vec16",), TYPES, (48, 64, 80), (16, 48)),
]
AMX = list(itertools.product(("amx",), (torch.bfloat16,), (32, 64, 96, 128, 256), (32, 64, 128)))


def written_by_vllm(isa: str, kind: torch.dtype, dim: int, block: int, cache_dtype: str = "auto") -> tuple[Any, Any, Any]:
    """Pages that vLLM's operator filled, and the K and V [tokens, heads, dim] it was given."""
    pages = torch.zeros(BLOCKS, HEADS, block, 2 * dim, dtype=kind if cache_dtype == "auto" else torch.uint8)
    key_pages, value_pages = pages.view(BLOCKS, HEADS, 2 * block, dim).chunk(2, dim=2)
    keys, values = (torch.randn(BLOCKS * block, HEADS, dim).to(kind) for _ in range(2))
    slots = torch.arange(BLOCKS * block, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(keys, values, key_pages, value_pages, slots, isa, 1.0, 1.0, cache_dtype)
    return pages, keys, values


def packed(pages: Any, layout: PageLayout, dim: int, block: int, dtype: str) -> Any:
    """The canonical payload [K,V][head][token][dim] of all the pages, in the cache's type."""
    geometry = PageGeometry(layout, 1, HEADS, dim, block, dtype)
    payload = PayloadGeometry.of(geometry, BLOCKS * block)
    stored = bytearray(payload.payload_bytes)
    packer = Packer(geometry, payload, [pages], threads=1)
    packer.pack([ChunkMove(memoryview(stored), list(range(BLOCKS)))])
    packer.close()
    return torch.frombuffer(stored, dtype=pages.dtype).view(2, HEADS, BLOCKS * block, dim)


@pytest.mark.parametrize(("isa", "kind", "dim", "block"), [*VECTOR, *AMX])
def test_pages_written_by_vllm_pack_in_order(isa: str, kind: torch.dtype, dim: int, block: int) -> None:
    """What the engine's kernel wrote under an ISA packs, in the layout registered for it, to exactly the K and V that went in."""
    pages, keys, values = written_by_vllm(isa, kind, dim, block)
    got = packed(pages, ISA_LAYOUTS[isa], dim, block, str(kind).removeprefix("torch."))
    assert torch.equal(got[0], keys.transpose(0, 1))
    assert torch.equal(got[1], values.transpose(0, 1))


@pytest.mark.parametrize(("dim", "block"), [(64, 32), (128, 128)])
def test_pages_restored_are_what_vllm_would_have_written(dim: int, block: int) -> None:
    """K and V written in one order, packed and unpacked into the other, give bit for bit the engine's own pages of that order."""
    own = {}
    for isa in ("vec", "amx"):
        torch.manual_seed(dim)
        own[isa] = written_by_vllm(isa, torch.bfloat16, dim, block)[0]
    assert not torch.equal(own["vec"], own["amx"])
    for source, target in (("vec", "amx"), ("amx", "vec")):
        stored = bytearray(packed(own[source], ISA_LAYOUTS[source], dim, block, "bfloat16").view(torch.uint8).numpy().tobytes())
        geometry = PageGeometry(ISA_LAYOUTS[target], 1, HEADS, dim, block, "bfloat16")
        pages = torch.zeros_like(own[target])
        packer = Packer(geometry, PayloadGeometry.of(geometry, BLOCKS * block), [pages], threads=1)
        packer.unpack([ChunkMove(memoryview(stored), list(range(BLOCKS)))])
        packer.close()
        assert torch.equal(pages.view(torch.int16), own[target].view(torch.int16)), (source, target)


@pytest.mark.parametrize(("cache", "kind"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_pages_lie_in_vector_order(cache: str, kind: torch.dtype) -> None:
    """An fp8 cache of the vector kernels has the same order: powers of two, which both types hold exactly, come back in place."""
    block, dim = 32, 64
    pages = torch.zeros(BLOCKS, HEADS, block, 2 * dim, dtype=torch.uint8)
    key_pages, value_pages = pages.view(BLOCKS, HEADS, 2 * block, dim).chunk(2, dim=2)
    keys, values = (torch.randint(-4, 5, (BLOCKS * block, HEADS, dim)).float().exp2().bfloat16() for _ in range(2))
    slots = torch.arange(BLOCKS * block, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(keys, values, key_pages, value_pages, slots, "vec", 1.0, 1.0, cache)
    got = packed(pages, PageLayout.CPU_VEC, dim, block, str(kind).removeprefix("torch.")).view(kind).float()
    assert torch.equal(got[0], keys.transpose(0, 1).float())
    assert torch.equal(got[1], values.transpose(0, 1).float())


@pytest.mark.parametrize("dim", [48, 80, 112])
def test_amx_without_tiles_is_not_the_amx_order(dim: int) -> None:
    """For heads that are no multiple of 32 vLLM's kernel writes the vector order, though asked for AMX: why such sizes are refused."""
    assert dim % AMX_MULTIPLE
    pages, keys, _values = written_by_vllm("amx", torch.bfloat16, dim, 32)
    assert torch.equal(packed(pages, PageLayout.CPU_VEC, dim, 32, "bfloat16")[0], keys.transpose(0, 1))
    assert not torch.equal(packed(pages, PageLayout.CPU_AMX, dim, 32, "bfloat16")[0], keys.transpose(0, 1))
