"""The pages of GPU engines must be described by the engine's own word, or not at all. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvgate_kernels import PageLayout
from kvgate_vllm.geometry import Geometry, KvGroupShape, Place, RectangleShape, _declared_layout
from kvgate_vllm.geometry import PageLayout as Pages
from kvgate_vllm.registration import Uncacheable, page_layout
from kvgate_vllm.rope import module_text


def geometry(*said: tuple[str, str, str | None], dim_v: int = 128) -> Geometry:
    """Layers that say backend, ISA and layout, one each."""
    names = tuple(f"layers.{index}" for index in range(len(said)))
    return Geometry(
        groups=(KvGroupShape(names, len(said), 8, 128, dim_v, None, "bfloat16", 16),),
        rectangles=(RectangleShape(0, 0, len(said), 0, 8),),
        stages=((0, len(said)),),
        replication=1,
        place=Place(0, 0, 1, 1),
        pages=tuple(Pages(name, *each) for name, each in zip(names, said, strict=True)),
    )


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
@pytest.mark.parametrize(
    ("layout", "known"),
    [
        ("LBNHC", PageLayout.GPU_NHD_PACKED),
        ("BLNHC", PageLayout.GPU_NHD_PACKED),
        ("LBHNC", PageLayout.GPU_HND_PACKED),
        ("BLHNC", PageLayout.GPU_HND_PACKED),
    ],
)
def test_layouts_with_a_kernel(backend: str, layout: str, known: PageLayout) -> None:
    """Each layout that vLLM names for a known backend picks the kernel of that memory order."""
    assert page_layout(geometry((backend, "none", layout))) is known


@pytest.mark.parametrize(
    "said",
    [
        ("FLASH_ATTN", "none", None),
        ("FLASH_ATTN", "none", "LHBNC"),
        ("FLASH_ATTN", "none", "BHLNC"),
        ("FLASH_ATTN", "none", "NHD"),
        ("FLASHINFER", "none", "LBNHC"),
        ("FLEX_ATTENTION", "none", "LBNHC"),
        ("ROCM_ATTN", "none", "LBNHC"),
        ("CPU_ATTN", "none", "LBNHC"),
        ("FLASH_ATTN", "sve", "LBNHC"),
    ],
    ids=str,
)
def test_anything_else_is_refused_by_name(said: tuple[str, str, str | None]) -> None:
    """A backend or a layout whose memory order is not known is uncacheable, and the message names both."""
    with pytest.raises(Uncacheable, match=rf"layout {said[2]} of attention backend {said[0]} with ISA {said[1]} has no kernel"):
        page_layout(geometry(said))


def test_layers_must_agree() -> None:
    """Layers of two backends, or of two layouts, cannot be moved by one kernel, known or not."""
    for other in (("TRITON_ATTN", "none", "LBNHC"), ("FLASH_ATTN", "none", "LBHNC")):
        with pytest.raises(Uncacheable, match="different page layouts"):
            page_layout(geometry(("FLASH_ATTN", "none", "LBNHC"), other))


def backend_declaring(shape: Any, order: Any) -> Any:
    """An attention backend as vLLM before 0.32 has them."""

    class Backend:
        @staticmethod
        def get_kv_cache_shape(
            blocks: int, tokens: int, heads: int, dim: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return tuple(shape(blocks, tokens, heads, dim))

        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
            if order is None:
                raise NotImplementedError
            return tuple(order)

    return Backend


def packed(blocks: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    """The shape [B, H, N, 2*D]."""
    return (blocks, heads, tokens, 2 * dim)


def split(blocks: int, tokens: int, heads: int, dim: int) -> tuple[int, ...]:
    """The shape [2, B, N, H, D] of older backends."""
    return (2, blocks, tokens, heads, dim)


@pytest.mark.parametrize(
    ("shape", "order", "name"),
    [
        (packed, (0, 2, 1, 3), "LBNHC"),
        (packed, (0, 1, 2, 3), "LBHNC"),
        (packed, (1, 0, 2, 3), None),
        (packed, None, None),
        (split, (0, 1, 2, 3, 4), None),
        (split, (0, 1, 2, 3), None),
    ],
)
def test_older_backends_declare_their_layout(shape: Any, order: Any, name: str | None) -> None:
    """Before 0.32 the layout is what the backend declares; a declaration that is not understood names none."""
    assert _declared_layout(VllmConfig(), backend_declaring(shape, order)) == name


def test_a_backend_that_declares_nothing_has_no_name() -> None:
    """vLLM's own CPU backend declares no stride order: its pages are known by their ISA."""
    assert _declared_layout(VllmConfig(), SimpleNamespace()) is None


def test_which_kernel_applies_rope_is_not_rope() -> None:
    """A compiled engine says of each kernel that it does not use it, an eager one nothing: both turn keys alike."""
    one, other = (SimpleNamespace(rotary_dim=64, base=1e4, use_aiter=said, training=False) for said in (None, False))
    assert module_text(one) == module_text(other)
    other.base = 10001.0
    assert module_text(one) != module_text(other)
