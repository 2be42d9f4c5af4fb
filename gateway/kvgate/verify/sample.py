"""The request that a run plants, as the nested maps that records encode to, and how single fields of it are changed.

Geometry is small: nine cells of layers × heads, cut into four rectangles of different sizes or kept whole. No number of it is that of
a real model; the run's isolation domain keeps it apart from real data anyway.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

Value = dict[str, Any]

LAYERS: Final = 3
HEADS: Final = 3
MAX_HEAD_DIM: Final = 4
_CHUNK_BYTES: Final = 64 << 10
Spans = Sequence[tuple[int, int]]
WHOLE: Final[Spans] = ((0, 3),)
EARLY: Final[Spans] = ((0, 1), (1, 3))
LATE: Final[Spans] = ((0, 2), (2, 3))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a gateway fixes for all its clients."""

    chunk_tokens: int
    codec: str

    @property
    def head_dim(self) -> int:
        """Small enough that a chunk stays small, whatever its tokens."""
        return max(1, min(MAX_HEAD_DIM, _CHUNK_BYTES // (LAYERS * HEADS * 4 * self.chunk_tokens)))


def digest_of(text: str) -> bytes:
    """32 bytes that stand for ``text``."""
    return bytes(blake3(f"kvgate verify {text}".encode()).digest())


def file_digest(number: int, text: str = "") -> bytes:
    """What one file holds: another ``text``, another file, in the same place of the order."""
    return bytes([number]) + digest_of(f"file {number} {text}")[1:]


def artifact(role: str, number: int, text: str = "") -> Value:
    """One file of that content."""
    return {"role": role, "size_bytes": 1000 + number, "digest": file_digest(number, text)}


def artifact_set(*files: Value) -> Value:
    """Files in the contract's order."""
    return {"artifacts": sorted(files, key=lambda one: (one["role"], one["digest"], one["size_bytes"]))}


def adapter(text: str = "") -> Value:
    """An adapter's two files, the weights of that content."""
    return artifact_set(artifact("adapter_config", 1), artifact("adapter_weights", 2, text))


def numerics_class(name: str) -> Value:
    """A declared class of engines."""
    return {"is": "NumericsClass", "value": {"name": name}}


def formats(codec: str) -> Value:
    """A codec with its formats of K and V."""
    plain = {"dtype": "bfloat16", "group": None, "scale_dtype": None}
    if codec == "raw":
        return {"codec": codec, "k_format": plain, "v_format": dict(plain)}
    return {"codec": codec, "k_format": plain, "v_format": {"dtype": "int8", "group": 32, "scale_dtype": "float16"}}


def plan(
    stages: Spans, heads: Spans, copies: int = 1, *, swap_stages: bool = False, swap_heads: bool = False, layers: int = LAYERS
) -> Value:
    """Rectangles of ``stages`` × ``heads``, each held by ``copies`` workers; swapped: the ranks hold each other's."""
    rectangles = [
        {"group": 0, "layer_start": a, "layer_end": b, "head_start": low, "head_end": high}
        for a, b in stages
        for low, high in heads
    ]
    workers = len(heads) * copies
    places = []
    for pp in range(len(stages)):
        for tp in range(workers):
            stage = len(stages) - 1 - pp if swap_stages else pp
            head = tp // copies
            head = len(heads) - 1 - head if swap_heads else head
            places.append({"pp_rank": pp, "tp_rank": tp, "rectangle": stage * len(heads) + head})
    return {
        "extents": [{"layers": layers, "kv_heads": heads[-1][1]}],
        "pipeline_parallel": len(stages),
        "tensor_parallel": workers,
        "replication": copies,
        "rectangles": rectangles,
        "places": places,
    }


def request(shape: Shape) -> Value:
    """The ordinary request on one worker: every field that can have a value has one, but adapter, salt, scope key and manifest."""
    dim = shape.head_dim
    numerics = {
        "attention_backend": "FLASH_ATTN",
        "isa": "sm90",
        "compute_dtype": "bfloat16",
        "execution": "compiled",
        "lora_max_rank": 16,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "other": [{"name": "batch_invariant", "value": "false"}],
        "engine": {"name": "kvgate-verify", "version": "1", "build": "none", "torch": "none"},
    }
    return {
        "model": {
            "base": artifact_set(artifact("weights", 3), artifact("weights", 4), artifact("kv_scales", 5)),
            "architecture": {"settings": [{"name": "hidden_size", "value": "12"}, {"name": "num_hidden_layers", "value": "3"}]},
            "adapter": None,
            "rope": {
                "kind": "yarn",
                "theta": "10000.0",
                "rotary_dim": dim,
                "style": "neox",
                "max_positions": 4096,
                "parameters": [{"name": "factor", "value": "4.0"}, {"name": "original", "value": "1024"}],
            },
            "weight_quantization": "awq",
            "kv_quantization": {"cache_dtype": "bfloat16", "scales": digest_of("kv scales")},
            "multimodal": digest_of("preprocessing"),
            "numerics": {"is": "Numerics", "value": numerics},
        },
        "representation": {
            "layout": "canonical",
            "layout_version": 1,
            "chunk_tokens": shape.chunk_tokens,
            **formats(shape.codec),
            "groups": [{"layers": LAYERS, "kv_heads": HEADS, "head_dim_k": dim, "head_dim_v": dim, "window": None}],
        },
        "plan": plan(WHOLE, WHOLE),
        "access": {"domain": None, "salt": None, "scope": "prefix", "scope_key": None},
        "variant": {"manifest": None},
    }


def split_into(value: Value) -> dict[str, Any]:
    """The patch that puts the plan ``value`` into a request, its engine's worker split with it."""
    return {
        "plan": value,
        "model.numerics.tensor_parallel": value["tensor_parallel"],
        "model.numerics.pipeline_parallel": value["pipeline_parallel"],
    }


def changed(value: Value, patch: Mapping[str, Any]) -> Value:
    """A copy of ``value`` with what lies at the paths of ``patch`` replaced; records behind an ``is`` are entered by themselves."""
    made = copy.deepcopy(value)
    for path, leaf in patch.items():
        *steps, last = re.findall(r"[a-z_0-9]+", path)
        holder: Any = made
        for step in steps:
            holder = _inner(holder)[_key(holder, step)]
        holder = _inner(holder)
        holder[_key(holder, last)] = leaf
    return made


def _inner(holder: Any) -> Any:
    return holder["value"] if isinstance(holder, dict) and "is" in holder else holder


def _key(holder: Any, step: str) -> Any:
    return int(step) if isinstance(holder, list) else step
