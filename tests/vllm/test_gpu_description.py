"""How GPU engines are described: page layouts by the engine's word, and what their attention runs with. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from kvgate_kernels import PageLayout
from kvgate_vllm.describe import _attention_numerics, _module_text, numeric_environment
from kvgate_vllm.geometry import Geometry, KvGroupShape, Place, RectangleShape, _declared_layout
from kvgate_vllm.geometry import PageLayout as Pages
from kvgate_vllm.registration import Uncacheable, page_layout


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


def config_like(device: str = "cuda", *, v2: bool = True, **attention: Any) -> Any:
    """As much of a configuration as the attention numerics look at."""
    settings = {"backend": None, "flash_attn_version": None, "flash_attn_max_num_splits_for_cuda_graph": 32} | attention
    return SimpleNamespace(
        attention_config=SimpleNamespace(**settings),
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=v2,
    )


class FlashImpl:
    """A layer's implementation, as far as it is looked at."""

    def __init__(self, version: int | None) -> None:
        self.vllm_flash_attn_version = version


def layers(*impls: Any) -> dict[str, Any]:
    """Attention layers with these implementations."""
    return {f"layers.{index}": SimpleNamespace(impl=impl) for index, impl in enumerate(impls)}


def test_attention_is_described_as_it_was_resolved() -> None:
    """Asking for the backend that is chosen anyway must change nothing; its version and the runner must be there."""
    plain = _attention_numerics(config_like(), layers(FlashImpl(3)))
    assert plain == _attention_numerics(config_like(backend="FLASH_ATTN"), layers(FlashImpl(3), FlashImpl(3)))
    assert (plain["attention.code"], plain["attention.flash"], plain["runner"]) == ('["FlashImpl"]', "<3>", "v2")


@pytest.mark.parametrize(
    ("config", "impl"),
    [
        (config_like(v2=False), FlashImpl(3)),
        (config_like(), FlashImpl(2)),
        (config_like(), FlashImpl(None)),
        (config_like(), object()),
        (config_like(flash_attn_max_num_splits_for_cuda_graph=16), FlashImpl(3)),
    ],
    ids=["runner", "version", "no version", "implementation", "splits"],
)
def test_what_changes_low_bits_is_in_it(config: Any, impl: Any) -> None:
    """Another runner, FlashAttention version, implementation or split limit must be other numerics."""
    assert _attention_numerics(config, layers(impl)) != _attention_numerics(config_like(), layers(FlashImpl(3)))


def test_the_cpu_has_one_runner() -> None:
    """A setting that only other devices obey must not keep CPU engines apart."""
    one, other = (_attention_numerics(config_like("cpu", v2=v2), layers(object())) for v2 in (False, True))
    assert one == other


@pytest.mark.parametrize("name", ["VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT", "VLLM_CONFIG_ROOT"])
def test_what_is_described_otherwise_is_no_numeric_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is described as resolved, and a page layout is no identity: their variables must not count."""
    before = numeric_environment()
    monkeypatch.setenv(name, "1")
    assert numeric_environment() == before


def test_which_kernel_applies_rope_is_not_rope() -> None:
    """A compiled engine says of each kernel that it does not use it, an eager one nothing: both turn keys alike."""
    one, other = (SimpleNamespace(rotary_dim=64, base=1e4, use_aiter=said, training=False) for said in (None, False))
    assert _module_text(one) == _module_text(other)
    other.base = 10001.0
    assert _module_text(one) != _module_text(other)
