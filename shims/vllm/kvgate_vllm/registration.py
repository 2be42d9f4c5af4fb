"""From what the plugin saw to what the gateway is told: model contract, representation, plan, and the worker's pages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvgate.contract.model import (
    Architecture,
    Engine,
    KvQuantization,
    ModelContract,
    Numerics,
    NumericsClass,
    Parameter,
    Rope,
)
from kvgate.contract.plan import PartitionPlan, even_plan
from kvgate.contract.representation import (
    CANONICAL_LAYOUT,
    CANONICAL_LAYOUT_VERSION,
    ComponentFormat,
    KvGroup,
    Representation,
)
from kvgate.protocol.messages import TOKEN_BYTES, RegisterWorker, Welcome
from kvgate_kernels import Codec, PageGeometry, PageLayout, PayloadGeometry, UnsupportedCodec
from kvgate_kernels.geometry import SCALE_DTYPE, VALUE_GROUP
from kvgate_vllm.session import artifact_set
from kvgate_vllm.state import WeightsReport

if TYPE_CHECKING:
    from kvgate_vllm.describe import EngineDescription
    from kvgate_vllm.geometry import Geometry

CONTRACT_DTYPES: Final = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
"""torch's name of a cache element → the contract's."""
ENGINE_DTYPES: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's ``cache_dtype`` where its tensors say only "uint8" → torch's name of the real kind."""
ISA_LAYOUTS: Final = {"vec": PageLayout.CPU_VEC, "vec16": PageLayout.CPU_VEC, "amx": PageLayout.CPU_AMX}
"""vLLM's ISA of a CPU attention layer → page layout. "vec16" differs from "vec" in how it computes, not in where elements lie."""
GPU_BACKENDS: Final = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Attention backends on GPUs in whose pages, [B, H, N, C], C is K then V of one token and head. Of others that is not known."""
GPU_LAYOUTS: Final = {
    "LBNHC": PageLayout.GPU_NHD_PACKED,
    "BLNHC": PageLayout.GPU_NHD_PACKED,
    "LBHNC": PageLayout.GPU_HND_PACKED,
    "BLHNC": PageLayout.GPU_HND_PACKED,
}
"""vLLM's name of a layout → page layout of one layer. With B outermost the layers' blocks interleave; a block's order is the same."""
STORED_CODECS: Final = {codec.value: codec for codec in (Codec.RAW, Codec.K16V8)}
"""The codecs that the contract has. The kernels know one more, for comparison."""
AMX_MULTIPLE: Final = 32
"""Other head and block sizes have no tiles: vLLM's own kernel then writes the vector order under the name of AMX."""


class Uncacheable(Exception):
    """This engine caches nothing; the message says why, without names or paths."""


@dataclass(frozen=True, slots=True)
class WorkerForm:
    """What stays the same for one worker, whatever the gateway says: its description and its pages."""

    description: EngineDescription
    pages: PageGeometry
    engine: bytes
    numerics_class: str

    @property
    def geometry(self) -> Geometry:
        """Shape of the KV cache."""
        return self.description.geometry

    def payload(self, welcome: Welcome) -> PayloadGeometry:
        """Geometry of one payload at that gateway. Raises ``Uncacheable``, by name, where blocks do not divide chunks, or the
        gateway's codec cannot hold this cache."""
        if welcome.chunk_tokens % self.pages.block_tokens:
            raise Uncacheable(
                f"blocks of {self.pages.block_tokens} tokens do not divide the gateway's chunks of {welcome.chunk_tokens}; "
                "set --block-size to a divisor"
            )
        try:
            return PayloadGeometry.of(self.pages, welcome.chunk_tokens, stored_codec(welcome))
        except UnsupportedCodec as error:
            raise Uncacheable(
                f"{error}; set the gateway's codec to raw, or store such caches at a gateway of their own"
            ) from error

    def report(self, weights: WeightsReport, welcome: Welcome) -> RegisterWorker:
        """The registration message. Raises ``Uncacheable``, or ``ContractError`` naming a field."""
        if weights.reason is not None:
            raise Uncacheable(weights.reason)
        self.payload(welcome)
        place = self.geometry.place
        return RegisterWorker(
            engine=self.engine,
            generation=weights.generation,
            pp_rank=place.pp_rank,
            tp_rank=place.tp_rank,
            block_tokens=self.pages.block_tokens,
            model=model_contract(self.description, weights, self.numerics_class),
            representation=representation(self.description, welcome),
            plan=partition_plan(self.geometry),
        )


def worker_form(description: EngineDescription, engine_id: str, numerics_class: str) -> WorkerForm:
    """Raises ``Uncacheable`` where this engine's KV cannot be described or its pages cannot be moved."""
    if description.reason is not None:
        raise Uncacheable(description.reason)
    geometry = description.geometry
    group, rectangle = geometry.groups[0], geometry.rectangles[0]
    dtype = ENGINE_DTYPES.get(description.cache_dtype, group.dtype)
    if dtype not in CONTRACT_DTYPES:
        raise Uncacheable("the KV cache has an element type that kvgate does not know")
    pages = PageGeometry(
        page_layout(geometry),
        layers=rectangle.layer_end - rectangle.layer_start,
        kv_heads=rectangle.head_end - rectangle.head_start,
        head_dim=group.head_dim_k,
        block_tokens=group.block_tokens,
        dtype=dtype,
    )
    # Equal on all ranks of one engine start, and on no other: vLLM makes it when it reads its configuration.
    engine = hashlib.sha256(b"kvgate engine " + engine_id.encode()).digest()[:TOKEN_BYTES]
    return WorkerForm(description, pages, engine, numerics_class)


def page_layout(geometry: Geometry) -> PageLayout:
    """The kernels' name of the page layout, from what the engine says of each layer, never from a shape."""
    if geometry.groups[0].head_dim_v != geometry.groups[0].head_dim_k:
        raise Uncacheable("K and V have different sizes; no kernel moves such pages")
    said = {(page.backend, page.isa, page.layout) for page in geometry.pages}
    if len(said) != 1:
        raise Uncacheable("the layers have different page layouts")
    ((backend, isa, layout),) = said
    known = GPU_LAYOUTS.get(str(layout)) if isa == "none" and backend in GPU_BACKENDS else ISA_LAYOUTS.get(isa)
    if known is None:
        raise Uncacheable(f"page layout {layout} of attention backend {backend} with ISA {isa} has no kernel")
    group = geometry.groups[0]
    if known is PageLayout.CPU_AMX and (group.head_dim_k % AMX_MULTIPLE or group.block_tokens % AMX_MULTIPLE):
        raise Uncacheable(f"the AMX page order has no tiles for heads of {group.head_dim_k} and blocks of {group.block_tokens}")
    return known


def stored_codec(welcome: Welcome) -> Codec:
    """The gateway's codec. Raises ``Uncacheable`` where it is none that payloads are stored with."""
    if welcome.codec not in STORED_CODECS:
        raise Uncacheable(f"the gateway stores payloads with codec {welcome.codec}, which this build does not know")
    return STORED_CODECS[welcome.codec]


def model_contract(description: EngineDescription, weights: WeightsReport, numerics_class: str) -> ModelContract:
    """The base model's contract."""
    rope = description.rope
    return ModelContract(
        base=artifact_set(weights.artifacts),
        architecture=Architecture(settings=_parameters(description.architecture)),
        adapter=None,
        rope=Rope(
            kind=rope.kind,
            theta=rope.theta,
            rotary_dim=rope.rotary_dim,
            style=rope.style,
            max_positions=rope.max_positions,
            parameters=_parameters(rope.parameters),
        ),
        weight_quantization=description.weight_quantization,
        kv_quantization=KvQuantization(cache_dtype=description.cache_dtype, scales=description.kv_scales),
        multimodal=description.multimodal,
        numerics=NumericsClass(name=numerics_class) if numerics_class else _numerics(description),
    )


def representation(description: EngineDescription, welcome: Welcome) -> Representation:
    """How this engine's chunks are stored at that gateway."""
    group = description.geometry.groups[0]
    dtype = CONTRACT_DTYPES[ENGINE_DTYPES.get(description.cache_dtype, group.dtype)]
    plain = ComponentFormat(dtype=dtype, group=None, scale_dtype=None)
    codec = stored_codec(welcome)
    quantised = ComponentFormat(dtype="int8", group=VALUE_GROUP, scale_dtype=SCALE_DTYPE)
    return Representation(
        layout=CANONICAL_LAYOUT,
        layout_version=CANONICAL_LAYOUT_VERSION,
        chunk_tokens=welcome.chunk_tokens,
        codec=codec.value,
        k_format=plain,
        v_format=quantised if codec is Codec.K16V8 else plain,
        groups=(
            KvGroup(
                layers=group.total_layers,
                kv_heads=group.kv_heads,
                head_dim_k=group.head_dim_k,
                head_dim_v=group.head_dim_v,
                window=group.window,
            ),
        ),
    )


def partition_plan(geometry: Geometry) -> PartitionPlan:
    """The whole engine's plan, the same on every rank."""
    group = geometry.groups[0]
    return even_plan(
        layers=group.total_layers,
        kv_heads=group.kv_heads,
        pipeline=geometry.stages,
        tensor_parallel=geometry.place.tp_size,
    )


def _numerics(description: EngineDescription) -> Numerics:
    numerics, engine = description.numerics, description.engine
    return Numerics(
        attention_backend=numerics.attention_backend,
        isa=numerics.isa,
        compute_dtype=numerics.compute_dtype,
        execution=numerics.execution,
        lora_max_rank=numerics.lora_max_rank,
        tensor_parallel=numerics.tensor_parallel,
        pipeline_parallel=numerics.pipeline_parallel,
        other=_parameters(numerics.other),
        engine=Engine(name=engine.name, version=engine.version, build=engine.build, torch=engine.torch),
    )


def _parameters(settings: Any) -> tuple[Parameter, ...]:
    return tuple(Parameter(name=setting.name, value=setting.value) for setting in settings)
