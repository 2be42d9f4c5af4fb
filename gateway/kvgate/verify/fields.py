"""The identity fields as rows of the matrix: for each of the contract's table, other values that must miss.

``FIELDS`` covers the table exactly; a test holds that. A value that stands alone is one patch; where the contract ties fields together
(a plan's shape, geometry and plan) the tied ones change with it, and the row also asks that the field is in the documented address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvgate.contract.table import IDENTITY
from kvgate.verify import sample
from kvgate.verify.plants import FOUR, MULTIMODAL, Chunk, Prompt
from kvgate.verify.sample import (
    EARLY,
    HEADS,
    LATE,
    LAYERS,
    WHOLE,
    Shape,
    Value,
    adapter,
    digest_of,
    file_digest,
    plan,
    split_into,
)


@dataclass(frozen=True, slots=True)
class Other:
    """A request that must not be served what was planted for ``of``.

    ``patch``: what differs from that plant's request; ``prompt``: what differs in its prompt, given the sibling's chunk too.
    ``hits``: chunks that must hit all the same, as a common prefix. ``told``, ``seen``: reasons the requester is told and the operator
    sees; None: the components that the table names. ``tied``: the field can't change alone. ``other_domain``: asked for there.
    ``other_key``: tokens hashed with the other domain's key.
    """

    patch: Mapping[str, Any] = field(default_factory=dict)
    of: str = "ordinary"
    prompt: Callable[[Prompt, Chunk], Prompt] | None = None
    hits: int = 0
    told: tuple[str, ...] | None = None
    seen: tuple[str, ...] | None = None
    tied: bool = False
    other_domain: bool = False
    other_key: bool = False


COMPONENTS_OF: Final = {row.path: row.components for row in IDENTITY}
ABSENT: Final = ("absent",)
_SCOPE: Final = ("scope",)
_GEOMETRY: Final = ("payload layout", "plan")
_OTHER_CODEC: Final = {"raw": "k16v8", "k16v8": "raw"}


def _plain(path: str, *values: Any, index: str = "0", of: str = "ordinary") -> list[Other]:
    """The field at ``path`` with other values, each alone; ``[]`` is item ``index`` of an array."""
    return [Other({path.replace("[]", f"[{index}]"): value}, of) for value in values]


def _model(shape: Shape) -> dict[str, list[Other]]:
    files = "model.base.artifacts[]"
    numerics = "model.numerics"
    return {
        f"{files}.role": _plain(f"{files}.role", "quantization", index="1"),
        f"{files}.size_bytes": _plain(f"{files}.size_bytes", 1),
        f"{files}.digest": _plain(f"{files}.digest", file_digest(4, "other"), index="2"),
        "model.architecture.settings[].name": _plain("model.architecture.settings[].name", "head_dim"),
        "model.architecture.settings[].value": _plain("model.architecture.settings[].value", "4", index="1"),
        "model.adapter.artifacts[].role": _plain("model.adapter.artifacts[].role", "adapter_weights", of="adapter"),
        "model.adapter.artifacts[].size_bytes": _plain("model.adapter.artifacts[].size_bytes", 1, index="1", of="adapter"),
        "model.adapter.artifacts[].digest": [
            Other({"model.adapter": adapter("other")}, "adapter"),
            Other({"model.adapter": None}, "adapter"),
            Other({"model.adapter": adapter()}),
        ],
        "model.rope.kind": _plain("model.rope.kind", "llama3"),
        "model.rope.theta": _plain("model.rope.theta", "10000.000000000002", "10000"),
        "model.rope.rotary_dim": _plain("model.rope.rotary_dim", 2 * shape.head_dim),
        "model.rope.style": _plain("model.rope.style", "interleaved"),
        "model.rope.max_positions": _plain("model.rope.max_positions", 4097),
        "model.rope.parameters[].name": _plain("model.rope.parameters[].name", "originals", index="1"),
        "model.rope.parameters[].value": _plain("model.rope.parameters[].value", "4"),
        "model.weight_quantization": _plain("model.weight_quantization", "gptq"),
        "model.kv_quantization.cache_dtype": _plain("model.kv_quantization.cache_dtype", "fp8_e5m2"),
        "model.kv_quantization.scales": _plain("model.kv_quantization.scales", digest_of("other scales"), None),
        "model.multimodal": _plain("model.multimodal", digest_of("other preprocessing"), None),
        f"{numerics}.attention_backend": _plain(f"{numerics}.attention_backend", "FLASHINFER"),
        f"{numerics}.isa": _plain(f"{numerics}.isa", "sm100"),
        f"{numerics}.compute_dtype": _plain(f"{numerics}.compute_dtype", "float16"),
        f"{numerics}.execution": _plain(f"{numerics}.execution", "eager"),
        f"{numerics}.lora_max_rank": _plain(f"{numerics}.lora_max_rank", 32, None),
        f"{numerics}.tensor_parallel": _plain(f"{numerics}.tensor_parallel", 2),
        f"{numerics}.pipeline_parallel": _plain(f"{numerics}.pipeline_parallel", 2),
        f"{numerics}.other[].name": _plain(f"{numerics}.other[].name", "batch_invariance"),
        f"{numerics}.other[].value": [
            *_plain(f"{numerics}.other[].value", "true"),
            Other({f"{numerics}.other": []}),
        ],
        f"{numerics}.engine.name": _plain(f"{numerics}.engine.name", "vllm"),
        f"{numerics}.engine.version": _plain(f"{numerics}.engine.version", "2"),
        f"{numerics}.engine.build": _plain(f"{numerics}.engine.build", "cu130"),
        f"{numerics}.engine.torch": _plain(f"{numerics}.engine.torch", "2.13.0"),
    }


def _classes(names: tuple[str, ...]) -> dict[str, list[Other]]:
    """Engine classes: one that is not declared is refused; of those declared, none is served another's, nor a strict engine's."""
    asked = [Other({"model.numerics": sample.numerics_class("kvgate-verify-undeclared")}, told=("numerics", "engine"))]
    if names:
        asked.append(Other({"model.numerics": sample.numerics_class(names[0])}, told=("numerics", "engine")))
    if len(names) > 1:
        asked.append(Other({"model.numerics": sample.numerics_class(names[1])}, "class"))
    return {"model.numerics.name": asked}


def _representation(shape: Shape) -> dict[str, list[Other]]:
    part, group = "representation", "representation.groups[]"
    other_formats = {f"{part}.{name}": value for name, value in sample.formats(_OTHER_CODEC[shape.codec]).items()}
    layers, heads, dim = LAYERS + 1, HEADS + 1, shape.head_dim
    taller = {f"{part}.groups[0].layers": layers, "plan": plan([(0, layers)], WHOLE, layers=layers)}
    wider = {f"{part}.groups[0].kv_heads": heads, "plan": plan(WHOLE, [(0, heads)])}
    return {
        f"{part}.layout": _plain(f"{part}.layout", "packed"),
        f"{part}.layout_version": _plain(f"{part}.layout_version", 2),
        f"{part}.chunk_tokens": _plain(f"{part}.chunk_tokens", 2 * shape.chunk_tokens),
        f"{part}.codec": [*_plain(f"{part}.codec", _OTHER_CODEC[shape.codec]), Other(other_formats, tied=True)],
        f"{part}.k_format.dtype": _plain(f"{part}.k_format.dtype", "float16"),
        f"{part}.k_format.group": _plain(f"{part}.k_format.group", 32),
        f"{part}.k_format.scale_dtype": _plain(f"{part}.k_format.scale_dtype", "float16"),
        f"{part}.v_format.dtype": _plain(f"{part}.v_format.dtype", "float16"),
        f"{part}.v_format.group": _plain(f"{part}.v_format.group", 64),
        f"{part}.v_format.scale_dtype": _plain(f"{part}.v_format.scale_dtype", "bfloat16"),
        f"{group}.layers": [*_plain(f"{group}.layers", layers), Other(taller, told=_GEOMETRY, tied=True)],
        f"{group}.kv_heads": [*_plain(f"{group}.kv_heads", heads), Other(wider, told=_GEOMETRY, tied=True)],
        f"{group}.head_dim_k": _plain(f"{group}.head_dim_k", dim + 1),
        f"{group}.head_dim_v": _plain(f"{group}.head_dim_v", dim + 1),
        f"{group}.window": _plain(f"{group}.window", 128),
    }


def _plan(shape: Shape) -> dict[str, list[Other]]:
    representation = _representation(shape)
    stages, heads = plan(EARLY, WHOLE), plan(WHOLE, EARLY)

    def whole(value: Value, of: str = "four") -> Other:
        return Other(split_into(value), of, tied=True)

    return {
        "plan.extents[].layers": [
            *_plain("plan.extents[].layers", LAYERS + 1),
            representation["representation.groups[].layers"][1],
        ],
        "plan.extents[].kv_heads": [
            *_plain("plan.extents[].kv_heads", HEADS + 1),
            representation["representation.groups[].kv_heads"][1],
        ],
        "plan.pipeline_parallel": [*_plain("plan.pipeline_parallel", 2), whole(heads)],
        "plan.tensor_parallel": [*_plain("plan.tensor_parallel", 2), whole(stages)],
        "plan.replication": [*_plain("plan.replication", 2), whole(plan(WHOLE, WHOLE, 2), "ordinary")],
        "plan.rectangles[].group": _plain("plan.rectangles[].group", 1),
        "plan.rectangles[].layer_start": [
            *_plain("plan.rectangles[].layer_start", 1),
            whole(plan(LATE, EARLY)),
        ],
        "plan.rectangles[].layer_end": [*_plain("plan.rectangles[].layer_end", 2), whole(plan(LATE, EARLY))],
        "plan.rectangles[].head_start": [*_plain("plan.rectangles[].head_start", 1), whole(plan(EARLY, LATE))],
        "plan.rectangles[].head_end": [*_plain("plan.rectangles[].head_end", 2), whole(plan(EARLY, LATE))],
        "plan.places[].pp_rank": [*_plain("plan.places[].pp_rank", 1), whole(plan(EARLY, EARLY, swap_stages=True))],
        "plan.places[].tp_rank": [*_plain("plan.places[].tp_rank", 1), whole(plan(EARLY, EARLY, swap_heads=True))],
        "plan.places[].rectangle": [
            *_plain("plan.places[].rectangle", 1),
            whole(plan(EARLY, EARLY, swap_stages=True, swap_heads=True)),
        ],
    }


def _access() -> dict[str, list[Other]]:
    def scoped(of: str, **access: Any) -> Other:
        # What is stored under another salt or scope does not exist for the requester; the operator of the domain is told.
        return Other({f"access.{name}": value for name, value in access.items()}, of, told=ABSENT, seen=_SCOPE)

    key = digest_of("request one")
    return {
        # Domains have no link in common, so not even the operator is told.
        "access.domain": [Other(of="ordinary", told=ABSENT, seen=ABSENT, other_domain=True)],
        "access.salt": [
            scoped("ordinary", salt=digest_of("salt one")),
            scoped("salted", salt=digest_of("salt two")),
            scoped("salted", salt=None),
        ],
        "access.scope": [
            scoped("request", scope="query"),
            scoped("request", scope="prefix", scope_key=None),
            scoped("ordinary", scope="global"),
            scoped("ordinary", scope="request", scope_key=key),
        ],
        "access.scope_key": [scoped("request", scope_key=digest_of("request two"))],
        "variant.manifest": [Other({"variant.manifest": digest_of("manifest")})],
    }


def _with_extra(**changes: Any) -> Callable[[Prompt, Chunk], Prompt]:
    return lambda prompt, _: [*prompt[:-1], Chunk(prompt[-1].tokens, ({**MULTIMODAL, **changes},))]


def _with_tokens(chunk: int, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Prompt, Chunk], Prompt]:
    return lambda prompt, _: [Chunk(change(one.tokens), one.extras) if at == chunk else one for at, one in enumerate(prompt)]


def _chain(shape: Shape) -> dict[str, list[Other]]:
    def chain(change: Callable[[Prompt, Chunk], Prompt], hits: int = 0, of: str = "ordinary", **more: Any) -> Other:
        return Other(of=of, prompt=change, hits=hits, told=ABSENT, **more)

    def split(value: Value) -> list[Other]:
        return [Other(split_into(value), "four", tied=True)]

    return {
        "chunk.parent": [chain(lambda prompt, sibling: [sibling, prompt[1]], 1)],
        "chunk.index": [chain(lambda prompt, _: [prompt[0], prompt[0]], 1, tied=True)],
        "chunk.token_key": [Other(told=ABSENT, other_key=True)],
        "chunk.tokens[]": [
            chain(_with_tokens(0, lambda tokens: (tokens[0] ^ 1, *tokens[1:]))),
            chain(_with_tokens(1, lambda tokens: (*tokens[:-1], tokens[-1] ^ 1)), 1),
            chain(_with_tokens(1, lambda tokens: (tokens[0] ^ 2, *tokens[1:])), 1),
            *([chain(_with_tokens(1, lambda tokens: tokens[1:] + tokens[:1]), 1)] if shape.chunk_tokens > 1 else []),
        ],
        "chunk.extras[].kind": [chain(_with_extra(kind="embedding"), of="extras")],
        "chunk.extras[].digest": [
            chain(_with_extra(digest=digest_of("other picture")), of="extras"),
            chain(lambda prompt, _: [*prompt[:-1], Chunk(prompt[-1].tokens)], of="extras"),
        ],
        "chunk.extras[].offset_tokens": [chain(_with_extra(offset_tokens=2**31 + 1), of="extras")],
        "chunk.extras[].length_tokens": [chain(_with_extra(length_tokens=2), of="extras")],
        "shard.chunk": [chain(_with_tokens(0, lambda tokens: (*tokens[:-1], tokens[-1] ^ 1)), of="four", tied=True)],
        "shard.rectangle.group": split(plan(WHOLE, WHOLE)),
        "shard.rectangle.layer_start": split(plan(LATE, EARLY)),
        "shard.rectangle.layer_end": split(plan(LATE, EARLY)),
        "shard.rectangle.head_start": split(plan(EARLY, LATE)),
        "shard.rectangle.head_end": split(plan(EARLY, LATE)),
    }


def fields(shape: Shape, classes: tuple[str, ...]) -> dict[str, list[Other]]:
    """Path of the table → requests that differ in it. In the table's order; ``schema`` has none: a gateway speaks one at a time."""
    found = (
        _model(shape) | _classes(classes) | _representation(shape) | _plan(shape) | _access() | _chain(shape) | {"schema": []}
    )
    return {row.path: found[row.path] for row in IDENTITY}


def needed(shape: Shape, classes: tuple[str, ...], wants: Callable[[str], bool]) -> frozenset[str]:
    """Names of the plants without which the wanted fields can't be asked for; the others are nobody's."""
    others = [other for path, found in fields(shape, classes).items() if wants(path) for other in found]
    return frozenset({"ordinary", "sibling"} | {other.of for other in others})


__all__ = ["ABSENT", "COMPONENTS_OF", "FOUR", "Other", "fields", "needed"]
