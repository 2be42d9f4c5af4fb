"""Small valid records: one model of two layers and two KV heads, chunks of four tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from blake3 import blake3

from kvgate.contract.artifacts import Artifact, ArtifactSet
from kvgate.contract.model import Architecture, Engine, KvQuantization, ModelContract, Numerics, Parameter, Rope
from kvgate.contract.plan import PartitionPlan, even_plan
from kvgate.contract.representation import ComponentFormat, KvGroup, Representation
from kvgate.protocol.messages import RegisterWorker

CHUNK_TOKENS = 4
LAYERS = 2
KV_HEADS = 2


def name(text: str) -> bytes:
    """32 bytes that stand for ``text``."""
    return blake3(text.encode()).digest()


def tokens(*texts: str) -> bytes:
    """The ``t[n]`` of chunks, as Bind and Extend take them."""
    return b"".join(name(text) for text in texts)


def engine_id(text: str) -> bytes:
    """An engine start's 16 bytes."""
    return name(text)[:16]


def artifacts(role: str, text: str) -> ArtifactSet:
    """One file of that content."""
    return ArtifactSet(artifacts=(Artifact(role=role, size_bytes=1000, digest=name(text)),))


def adapter(text: str) -> ArtifactSet:
    """An adapter's files."""
    return artifacts("adapter_weights", text)


def model(weights: str = "weights", **changes: Any) -> ModelContract:
    """A base model contract of an engine with LoRA."""
    contract = ModelContract(
        base=artifacts("weights", weights),
        architecture=Architecture(settings=(Parameter(name="num_hidden_layers", value=str(LAYERS)),)),
        adapter=None,
        rope=Rope(kind="default", theta="10000.0", rotary_dim=4, style="neox", max_positions=512, parameters=()),
        weight_quantization="none",
        kv_quantization=KvQuantization(cache_dtype="bfloat16", scales=None),
        multimodal=None,
        numerics=Numerics(
            attention_backend="CPU_ATTN",
            isa="avx2",
            compute_dtype="bfloat16",
            execution="eager",
            lora_max_rank=8,
            tensor_parallel=1,
            pipeline_parallel=1,
            other=(),
            engine=Engine(name="vllm", version="0.32.0", build="cpu", torch="2.12.0"),
        ),
    )
    return dataclasses.replace(contract, **changes)


def numerics(**changes: Any) -> Numerics:
    """The model's numerics, with changes."""
    strict = model().numerics
    assert isinstance(strict, Numerics)
    return dataclasses.replace(strict, **changes)


def representation(**changes: Any) -> Representation:
    """Raw bfloat16: 64 bytes a token over all layers and heads."""
    plain = ComponentFormat(dtype="bfloat16", group=None, scale_dtype=None)
    values: dict[str, Any] = {
        "layout": "canonical",
        "layout_version": 1,
        "chunk_tokens": CHUNK_TOKENS,
        "codec": "raw",
        "k_format": plain,
        "v_format": plain,
        "groups": (KvGroup(layers=LAYERS, kv_heads=KV_HEADS, head_dim_k=4, head_dim_v=4, window=None),),
    }
    return Representation(**(values | changes))


def plan(tp: int = 1, pp: int = 1) -> PartitionPlan:
    """All layers and heads on ``pp`` stages of ``tp`` workers; more than two workers hold copies."""
    step = LAYERS // pp
    stages = tuple((at, at + step) for at in range(0, LAYERS, step))
    return even_plan(layers=LAYERS, kv_heads=KV_HEADS, pipeline=stages, tensor_parallel=tp)


def report(**changes: Any) -> RegisterWorker:
    """What a lone worker reports, with changes."""
    values: dict[str, Any] = {
        "engine": engine_id("engine"),
        "generation": 0,
        "pp_rank": 0,
        "tp_rank": 0,
        "block_tokens": 2,
        "model": model(),
        "representation": representation(),
        "plan": plan(),
    }
    return RegisterWorker(**(values | changes))
