"""What no kernel can move must be refused by name, before a byte moves."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from kvgate_kernels import (
    Codec,
    GeometryError,
    Packer,
    PageGeometry,
    PageLayout,
    PayloadGeometry,
    UnsupportedCodec,
    UnsupportedLayout,
)

PAGES = PageGeometry(PageLayout.CPU_VEC, 2, 2, 64, 32, "bfloat16")


def test_an_unknown_layout_is_refused_by_name() -> None:
    """The message names the layout that has no kernel."""
    with pytest.raises(UnsupportedLayout, match="'CPU_NEON'"):
        PageLayout.named("CPU_NEON")


def test_a_layout_given_as_text_is_refused() -> None:
    """Only a named layout is a layout; a string never slips through."""
    with pytest.raises(UnsupportedLayout, match="CPU_VEC"):
        PageGeometry("CPU_VEC", 1, 1, 64, 32, "bfloat16")  # type: ignore[arg-type]


def test_an_unknown_codec_is_refused_by_name() -> None:
    """The message names the codec."""
    with pytest.raises(UnsupportedCodec, match="'k8v8'"):
        Codec.named("k8v8")


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("layers", 5000), ("kv_heads", -1), ("head_dim", 0), ("block_tokens", 0), ("dtype", "int4")],
)
def test_numbers_out_of_range_are_refused(field: str, value: object) -> None:
    """Every field has its limits."""
    with pytest.raises(GeometryError, match=field):
        replace(PAGES, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"head_dim": 72}, {"block_tokens": 24}])
def test_amx_pages_exist_for_whole_bfloat16_tiles_only(change: dict[str, object]) -> None:
    """The AMX order is defined on 16 by 16 tiles of bfloat16."""
    with pytest.raises(UnsupportedLayout, match="CPU_AMX"):
        replace(PAGES, layout=PageLayout.CPU_AMX, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("codec", [Codec.K16V8, Codec.K16V8_E4M3])
def test_k16v8_needs_16_bit_floats(dtype: str, codec: Codec) -> None:
    """Keys bit-exact in 16 bits exist only for 16-bit caches."""
    with pytest.raises(UnsupportedCodec, match=codec.value):
        PayloadGeometry.of(replace(PAGES, dtype=dtype), 256, codec)


def test_a_latent_cache_is_raw_only() -> None:
    """MLA has no separate V to quantise."""
    latent = PageGeometry(PageLayout.MLA_LATENT, 2, 1, 576, 64, "bfloat16")
    assert PayloadGeometry.of(latent, 256).payload_bytes == 2 * 256 * 576 * 2
    with pytest.raises(UnsupportedCodec, match="raw only"):
        PayloadGeometry.of(latent, 256, Codec.K16V8)


def test_payload_bytes_are_exact() -> None:
    """Llama-3-8B: 33.5 MB a chunk of 256 tokens, and 0.766 of that under k16v8."""
    pages = PageGeometry(PageLayout.GPU_NHD_PACKED, 32, 8, 128, 16, "bfloat16")
    raw = PayloadGeometry.of(pages, 256).payload_bytes
    assert raw == 33_554_432
    coded = PayloadGeometry.of(pages, 256, Codec.K16V8).payload_bytes
    assert coded / raw == pytest.approx(0.765625)
    short = PayloadGeometry(1, 1, 80, 10, "float16", Codec.K16V8)
    assert short.payload_bytes == 10 * 80 * 2 + 10 * 80 + 10 * 3 * 2


def test_geometries_are_frozen() -> None:
    """A geometry never changes under a packer."""
    with pytest.raises(FrozenInstanceError):
        PAGES.layers = 3  # type: ignore[misc]


@pytest.mark.parametrize("change", [{"layers": 3}, {"kv_heads": 1}, {"head_dim": 128}, {"dtype": "float16"}])
def test_a_payload_of_other_geometry_is_refused(change: dict[str, object]) -> None:
    """Pages and payload must agree in everything but block and chunk size."""
    payload = replace(PayloadGeometry.of(PAGES, 256), **change)  # type: ignore[arg-type]
    with pytest.raises(GeometryError, match=next(iter(change))):
        Packer(PAGES, payload, [])


def layer(blocks: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """One layer's tensor as vLLM's CPU backend registers it for ``PAGES``."""
    return torch.zeros(blocks, 2, 32, 128, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([layer()], "2 layers"),
        ([layer(), layer(5)], "differ"),
        ([layer(), layer(dtype=torch.float16)], "bfloat16"),
        ([layer(), layer()[:, :1]], "along axis 1"),
        ([layer(), layer()[0]], "dimensions"),
        ([layer(), torch.zeros(4, 32, 2, 128, dtype=torch.bfloat16).transpose(1, 2)], "stride"),
        ([layer(), layer().to_sparse()], "strided"),
        ([layer(0), layer(0)], "no blocks"),
    ],
)
def test_tensors_that_cannot_have_the_layout_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    """Count, shape, type, strides and device are checked before any kernel sees an address."""
    with pytest.raises(GeometryError, match=message):
        Packer(PAGES, PayloadGeometry.of(PAGES, 256), tensors)


def test_an_fp8_cache_may_lie_in_uint8_tensors_under_its_real_name() -> None:
    """vLLM holds both fp8 kinds in uint8 tensors: the kind comes from the geometry, and both move as bytes."""
    for kind in ("float8_e4m3fn", "float8_e5m2"):
        pages = replace(PAGES, dtype=kind, layers=1)
        packer = Packer(pages, PayloadGeometry.of(pages, 32), [layer(dtype=torch.uint8)])
        assert packer.payload.dtype == kind
        packer.close()


def test_interleaved_blocks_of_several_layers_are_accepted() -> None:
    """Only the block stride is free: layers may share each block's memory."""
    shared = torch.zeros(4, 2, 2, 32, 128, dtype=torch.bfloat16)
    packer = Packer(PAGES, PayloadGeometry.of(PAGES, 32), [shared[:, 0], shared[:, 1]])
    assert packer.num_blocks == 4
    packer.close()
