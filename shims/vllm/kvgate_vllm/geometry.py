"""The shape of the KV cache: which layers, heads and dimensions, which part of them this worker holds, and how its pages lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

KNOWN_SPECS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Cache specs whose pages hold nothing but K and V (or the one latent vector of MLA) of a token."""
UNSCALED: Final = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Quantisation modes that keep no scales in the pages."""
STRIDE_ORDERS: Final = {(0, 1, 2, 3): "LBHNC", (0, 2, 1, 3): "LBNHC"}
"""Memory order of a page tensor [B, H, N, C] as vLLM's attention backends gave it before 0.32 → the layout's name since."""


@dataclass(frozen=True, slots=True)
class KvGroupShape:
    """One KV group as this worker holds it. ``kv_heads`` are those of the whole model; ``dtype`` is torch's name of an element."""

    layer_names: tuple[str, ...]
    total_layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None
    dtype: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class RectangleShape:
    """What this worker holds of a group: layers and KV heads, numbered over the whole model, ends excluded."""

    group: int
    layer_start: int
    layer_end: int
    head_start: int
    head_end: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How one layer's pages lie: the backend, its ISA ("none" where it has none), and the layout by vLLM's name."""

    layer_name: str
    backend: str
    isa: str
    layout: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """This worker's ranks and the sizes of the groups they are in."""

    pp_rank: int
    tp_rank: int
    pp_size: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything above. ``stages`` gives each pipeline stage's layers; ``replication`` how many workers hold each head."""

    groups: tuple[KvGroupShape, ...]
    rectangles: tuple[RectangleShape, ...]
    stages: tuple[tuple[int, int], ...]
    replication: int
    place: Place
    pages: tuple[PageLayout, ...]


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """The attention layers of this worker's model, by name, in model order."""
    context = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "attn_backend")}


def read_geometry(vllm_config: Any, kv_cache_config: Any, layers: dict[str, Any]) -> tuple[Geometry, str | None]:
    """This worker's geometry, and a reason if it is one that cannot be cached."""
    place = _place(vllm_config)
    stages = _stages(vllm_config)
    groups, rectangles, reasons = [], [], []
    replication = 1
    named = _layout(vllm_config, kv_cache_config)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        shape, rectangle, copies, reason = _group(vllm_config, index, group, place, stages[place.pp_rank])
        groups.append(shape)
        rectangles.append(rectangle)
        reasons.append(reason or _group_reason(group, layers, rectangle))
        replication = copies
    layouts = {layer.attn_backend: named or _declared_layout(vllm_config, layer.attn_backend) for layer in layers.values()}
    pages = tuple(
        _page(name, layers[name], layouts[layers[name].attn_backend])
        for group in groups
        for name in group.layer_names
        if name in layers
    )
    if any(page.isa == "none" and page.backend.startswith("CPU") for page in pages):
        # Pages of one shape lie in different orders there, and only the ISA tells which.
        reasons.insert(0, "the page order of the CPU attention backend is not known")
    if len(groups) != 1:
        reasons.insert(0, "an engine with several KV groups, or none, is not covered")
    geometry = Geometry(tuple(groups), tuple(rectangles), stages, replication, place, pages)
    return geometry, next((reason for reason in reasons if reason), None)


def _layout(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """vLLM's own name of the page layout, as the engine resolved it. Before 0.32 it is not in the configuration."""
    named = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(vllm_config.cache_config, "kv_cache_layout", None)
    return None if named is None else str(named)


def _declared_layout(vllm_config: Any, backend: Any) -> str | None:
    """The layout that an attention backend before 0.32 declares for its pages, by the name it has since; None: it declares none.

    What it declares is asked for, never what a tensor looks like.
    """
    from vllm.config import set_current_vllm_config

    blocks, tokens, heads, head_dim = 3, 32, 5, 64
    with set_current_vllm_config(vllm_config):  # the declaration depends on it
        try:
            shape = tuple(backend.get_kv_cache_shape(blocks, tokens, heads, head_dim))
            order = tuple(backend.get_kv_cache_stride_order())
        except (AttributeError, NotImplementedError):
            return None
    return STRIDE_ORDERS.get(order) if shape == (blocks, heads, tokens, 2 * head_dim) else None


def _place(vllm_config: Any) -> Place:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    return Place(
        pp_rank=int(get_pp_group().rank_in_group),
        tp_rank=int(get_tp_group().rank_in_group),
        pp_size=int(parallel.pipeline_parallel_size),
        tp_size=int(parallel.tensor_parallel_size),
    )


def _stages(vllm_config: Any) -> tuple[tuple[int, int], ...]:
    from vllm.distributed.utils import get_pp_indices

    total = int(vllm_config.model_config.get_total_num_hidden_layers())
    size = int(vllm_config.parallel_config.pipeline_parallel_size)
    return tuple((int(start), int(end)) for start, end in (get_pp_indices(total, rank, size) for rank in range(size)))


def _group(
    vllm_config: Any, index: int, group: Any, place: Place, stage: tuple[int, int]
) -> tuple[KvGroupShape, RectangleShape, int, str | None]:
    model = vllm_config.model_config
    spec = group.kv_cache_spec
    local_heads = int(getattr(spec, "num_kv_heads", 0))
    total_heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    copies = max(1, place.tp_size // total_heads)
    head_start = place.tp_rank // copies * local_heads
    reason = None
    if total_heads % place.tp_size and place.tp_size % total_heads:
        reason = "the KV heads do not divide over the workers"
    elif local_heads != max(1, total_heads // place.tp_size):
        reason = "the layers of this engine have other numbers of KV heads than its model says"
    shape = KvGroupShape(
        layer_names=tuple(group.layer_names),
        total_layers=int(model.get_total_num_hidden_layers()),
        kv_heads=total_heads,
        head_dim_k=int(getattr(spec, "head_size", 0)),
        head_dim_v=int(getattr(spec, "head_size_v", getattr(spec, "head_size", 0)) or 0),
        window=getattr(spec, "sliding_window", None),
        dtype=str(getattr(spec, "dtype", "unknown")).removeprefix("torch."),
        block_tokens=int(spec.block_size),
    )
    return shape, RectangleShape(index, *stage, head_start, head_start + local_heads), copies, reason


def _group_reason(group: Any, layers: dict[str, Any], rectangle: RectangleShape) -> str | None:
    from vllm.model_executor.models.utils import extract_layer_index

    spec = group.kv_cache_spec
    if type(spec).__name__ == "SlidingWindowSpec":
        # vLLM gives such pages to another request in the very step in which this one's chunks would be stored.
        return "pages that leave a sliding window are reused while their request runs, which is not covered"
    if type(spec).__name__ not in KNOWN_SPECS:
        return "a kind of KV cache that kvgate does not know"
    if getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") not in UNSCALED:
        return "KV quantisation with scales inside the pages is not covered"
    if getattr(spec, "non_causal", False) or getattr(spec, "attention_chunk_size", None) is not None:
        return "attention that is not plainly causal is not covered"
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(group, "host_resident", False):
        return "a kind of KV cache that kvgate does not know"
    try:
        numbers = [extract_layer_index(name) for name in group.layer_names]
    except AssertionError:
        return "the layers have names without one number each"
    if sorted(numbers) != list(range(rectangle.layer_start, rectangle.layer_end)):
        return "the layers with a KV cache are not those of this pipeline stage"
    for name in group.layer_names:
        if name not in layers:
            return "a layer with a KV cache is not an attention layer"
        code = (layers[name].attn_backend, type(getattr(layers[name], "impl", None)))
        if any(kind.__module__.partition(".")[0] not in ("vllm", "builtins") for kind in code):
            return "attention code comes from outside vLLM, which is not covered"
        if getattr(layers[name], "kv_sharing_target_layer_name", None) is not None:
            return "KV sharing between layers is not covered"
    return None


def _page(name: str, layer: Any, layout: str | None) -> PageLayout:
    # Before 0.32 it is the layer's implementation that says so.
    isa = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
    return PageLayout(name, str(layer.attn_backend.get_name()), "none" if isa is None else str(isa), layout)
