"""Valid changes of single fields of the sample request, for every identity field that can hold another value."""

from __future__ import annotations

from tests.contract.sample import Json, hex32


def _first_stage_ends_at(layer: int) -> Json:
    starts_and_ends = ((0, "end"), (1, "end"), (2, "start"), (3, "start"))
    return {f"plan.rectangles[{n}].layer_{side}": layer for n, side in starts_and_ends}


def _three_heads_split_at(head: int) -> Json:
    starts_and_ends = ((0, "end"), (1, "start"), (2, "end"), (3, "start"))
    cut = {f"plan.rectangles[{n}].head_{side}": head for n, side in starts_and_ends}
    return cut | {"plan.extents[0].kv_heads": 3, "plan.rectangles[1].head_end": 3, "plan.rectangles[3].head_end": 3}


_RAW: Json = {
    "representation.codec": "raw",
    "representation.v_format.group": None,
    "representation.v_format.scale_dtype": None,
}

# For each path, changes that leave a valid request. The path's own leaf changes in each; where the contract ties fields
# together, the tied ones change with it.
CHANGES: dict[str, list[Json]] = {
    "model.base.artifacts[].role": [
        {"model.base.artifacts[1].role": "quantization"},
        {"model.base.artifacts[2].role": "weights"},
    ],
    "model.base.artifacts[].size_bytes": [{"model.base.artifacts[0].size_bytes": 1002}],
    "model.base.artifacts[].digest": [{"model.base.artifacts[1].digest": hex32(2 + (1 << 255))}],
    "model.architecture.settings[].name": [{"model.architecture.settings[0].name": "head_dim"}],
    "model.architecture.settings[].value": [{"model.architecture.settings[1].value": "5"}],
    "model.adapter.artifacts[].role": [{"model.adapter.artifacts[0].role": "adapter_weights"}],
    "model.adapter.artifacts[].size_bytes": [{"model.adapter.artifacts[1].size_bytes": 0}],
    "model.adapter.artifacts[].digest": [{"model.adapter.artifacts[1].digest": hex32(50)}, {"model.adapter": None}],
    "model.rope.kind": [{"model.rope.kind": "llama3"}],
    "model.rope.theta": [{"model.rope.theta": "10000.000000000002"}, {"model.rope.theta": "10000"}],
    "model.rope.rotary_dim": [{"model.rope.rotary_dim": 32}],
    "model.rope.style": [{"model.rope.style": "interleaved"}],
    "model.rope.max_positions": [{"model.rope.max_positions": 4097}],
    "model.rope.parameters[].name": [{"model.rope.parameters[1].name": "originals"}],
    "model.rope.parameters[].value": [{"model.rope.parameters[0].value": "4"}],
    "model.weight_quantization": [{"model.weight_quantization": "gptq"}],
    "model.kv_quantization.cache_dtype": [{"model.kv_quantization.cache_dtype": "fp8_e5m2"}],
    "model.kv_quantization.scales": [{"model.kv_quantization.scales": hex32(60)}, {"model.kv_quantization.scales": None}],
    "model.multimodal": [{"model.multimodal": hex32(70)}, {"model.multimodal": None}],
    "model.numerics.attention_backend": [{"model.numerics.attention_backend": "FLASHINFER"}],
    "model.numerics.isa": [{"model.numerics.isa": "sm100"}],
    "model.numerics.compute_dtype": [{"model.numerics.compute_dtype": "float16"}],
    "model.numerics.execution": [{"model.numerics.execution": "eager"}],
    "model.numerics.lora_max_rank": [{"model.numerics.lora_max_rank": 32}],
    "model.numerics.tensor_parallel": [{"model.numerics.tensor_parallel": 1}],
    "model.numerics.pipeline_parallel": [{"model.numerics.pipeline_parallel": 1}],
    "model.numerics.other[].name": [{"model.numerics.other[0].name": "batch_invariance"}],
    "model.numerics.other[].value": [{"model.numerics.other[0].value": "true"}, {"model.numerics.other": []}],
    "model.numerics.engine.name": [{"model.numerics.engine.name": "sglang"}],
    "model.numerics.engine.version": [{"model.numerics.engine.version": "0.32.1"}],
    "model.numerics.engine.build": [{"model.numerics.engine.build": "cu131"}],
    "model.numerics.engine.torch": [{"model.numerics.engine.torch": "2.12.1"}],
    "model.numerics.name": [{"model.numerics.name": "h100-fleet.2"}],
    "representation.chunk_tokens": [{"representation.chunk_tokens": 8}],
    "representation.codec": [_RAW | {"representation.v_format.dtype": "bfloat16"}],
    "representation.k_format.dtype": [{"representation.k_format.dtype": "float16"}],
    "representation.v_format.dtype": [_RAW | {"representation.v_format.dtype": "fp8_e4m3"}],
    "representation.v_format.group": [{"representation.v_format.group": 64}],
    "representation.v_format.scale_dtype": [{"representation.v_format.scale_dtype": "bfloat16"}],
    "representation.groups[].layers": [{"representation.groups[0].layers": 5}],
    "representation.groups[].kv_heads": [{"representation.groups[1].kv_heads": 4}],
    "representation.groups[].head_dim_k": [{"representation.groups[0].head_dim_k": 80}],
    "representation.groups[].head_dim_v": [{"representation.groups[1].head_dim_v": 80}],
    "representation.groups[].window": [{"representation.groups[1].window": 129}, {"representation.groups[1].window": None}],
    "plan.extents[].layers": [
        {"plan.extents[1].layers": 5, "plan.rectangles[6].layer_end": 5, "plan.rectangles[7].layer_end": 5}
    ],
    "plan.extents[].kv_heads": [
        {"plan.extents[1].kv_heads": 3, "plan.rectangles[5].head_end": 3, "plan.rectangles[7].head_end": 3}
    ],
    "plan.rectangles[].layer_start": [_first_stage_ends_at(1)],
    "plan.rectangles[].layer_end": [_first_stage_ends_at(3)],
    "plan.rectangles[].head_start": [_three_heads_split_at(2)],
    "plan.rectangles[].head_end": [_three_heads_split_at(1)],
    "plan.places[].rectangle": [{"plan.places[0].rectangle": 1, "plan.places[2].rectangle": 0}],
    "access.domain": [{"access.domain": hex32(80)}],
    "access.salt": [{"access.salt": hex32(90)}, {"access.salt": None}],
    "access.scope": [
        {"access.scope": "request"},
        {"access.scope": "prefix", "access.scope_key": None},
        {"access.scope": "global", "access.scope_key": None},
    ],
    "access.scope_key": [{"access.scope_key": hex32(100)}],
    "variant.manifest": [{"variant.manifest": hex32(110)}, {"variant.manifest": None}],
}

# One valid value only (a miss would need a second layout, or a codec that scales K): no record can hold another yet.
CLOSED = {
    "representation.layout",
    "representation.layout_version",
    "representation.k_format.group",
    "representation.k_format.scale_dtype",
}
# A plan's shape is tied together: these change in whole plans, below.
WHOLE_PLAN = {
    "plan.pipeline_parallel",
    "plan.tensor_parallel",
    "plan.replication",
    "plan.rectangles[].group",
    "plan.places[].pp_rank",
    "plan.places[].tp_rank",
}


def whole_plans() -> dict[str, Json]:
    """Plans of one group of 4 layers and 2 heads that differ in shape only."""

    def plan(stages: list[tuple[int, int]], heads: list[tuple[int, int]], copies: int, flip: bool = False) -> Json:
        rectangles = [
            {"group": 0, "layer_start": a, "layer_end": b, "head_start": low, "head_end": high}
            for a, b in stages
            for low, high in heads
        ]
        workers = len(heads) * copies
        order = [worker // copies for worker in range(workers)]
        if flip:
            order.reverse()
        places = [
            {"pp_rank": pp, "tp_rank": tp, "rectangle": pp * len(heads) + order[tp]}
            for pp in range(len(stages))
            for tp in range(workers)
        ]
        return {
            "extents": [{"layers": 4, "kv_heads": 2}],
            "pipeline_parallel": len(stages),
            "tensor_parallel": workers,
            "replication": copies,
            "rectangles": rectangles,
            "places": places,
        }

    both, halves = [(0, 2)], [(0, 1), (1, 2)]
    return {
        "one worker": plan([(0, 4)], both, 1),
        "two stages": plan([(0, 2), (2, 4)], both, 1),
        "uneven stages": plan([(0, 1), (1, 4)], both, 1),
        "two workers": plan([(0, 4)], halves, 1),
        "two workers, swapped": plan([(0, 4)], halves, 1, flip=True),
        "a copy": plan([(0, 4)], both, 2),
        "copies of halves": plan([(0, 4)], halves, 2),
        "four": plan([(0, 2), (2, 4)], halves, 1),
    }
