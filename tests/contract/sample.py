"""One request in which every field has a value, as JSON, and ways to change single fields of it."""

from __future__ import annotations

import copy
import re
from typing import Any

from kvgate.contract.access import Access, Variant
from kvgate.contract.model import ModelContract
from kvgate.contract.plan import PartitionPlan
from kvgate.contract.record import IdentityRecord
from kvgate.contract.representation import Representation

KINDS: dict[str, type[IdentityRecord]] = {
    "model": ModelContract,
    "representation": Representation,
    "plan": PartitionPlan,
    "access": Access,
    "variant": Variant,
}

Json = dict[str, Any]


def hex32(number: int) -> str:
    """A digest in JSON form, recognisable."""
    return f"{number:064x}"


def _artifact(role: str, number: int) -> Json:
    return {"role": role, "size_bytes": 1000 + number, "digest": hex32(number)}


def _numerics() -> Json:
    return {
        "attention_backend": "FLASH_ATTN",
        "isa": "sm90",
        "compute_dtype": "bfloat16",
        "execution": "compiled",
        "lora_max_rank": 16,
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "other": [{"name": "batch_invariant", "value": "false"}],
        "engine": {"name": "vllm", "version": "0.32.0", "build": "cu130", "torch": "2.12.0"},
    }


def _plan() -> Json:
    rectangles = [
        {"group": group, "layer_start": start, "layer_end": start + 2, "head_start": head, "head_end": head + 1}
        for group in (0, 1)
        for start in (0, 2)
        for head in (0, 1)
    ]
    places = [
        {"pp_rank": pp, "tp_rank": tp, "rectangle": 4 * group + 2 * pp + tp}
        for pp in (0, 1)
        for tp in (0, 1)
        for group in (0, 1)
    ]
    return {
        "extents": [{"layers": 4, "kv_heads": 2}, {"layers": 4, "kv_heads": 2}],
        "pipeline_parallel": 2,
        "tensor_parallel": 2,
        "replication": 1,
        "rectangles": rectangles,
        "places": places,
    }


def sample() -> Json:
    """A fresh copy of the request: adapter, K16/V8, two KV groups, two stages of two workers, a salt, a manifest."""
    return {
        "model": {
            "base": {"artifacts": [_artifact("weights", 1), _artifact("weights", 2), _artifact("kv_scales", 3)]},
            "architecture": {
                "settings": [{"name": "hidden_size", "value": "256"}, {"name": "num_hidden_layers", "value": "4"}]
            },
            "adapter": {"artifacts": [_artifact("adapter_config", 4), _artifact("adapter_weights", 5)]},
            "rope": {
                "kind": "yarn",
                "theta": "10000.0",
                "rotary_dim": 64,
                "style": "neox",
                "max_positions": 4096,
                "parameters": [{"name": "factor", "value": "4.0"}, {"name": "original", "value": "1024"}],
            },
            "weight_quantization": "awq",
            "kv_quantization": {"cache_dtype": "fp8_e4m3", "scales": hex32(6)},
            "multimodal": hex32(7),
            "numerics": {"is": "Numerics", "value": _numerics()},
        },
        "representation": {
            "layout": "canonical",
            "layout_version": 1,
            "chunk_tokens": 4,
            "codec": "k16v8",
            "k_format": {"dtype": "bfloat16", "group": None, "scale_dtype": None},
            "v_format": {"dtype": "int8", "group": 32, "scale_dtype": "float16"},
            "groups": [
                {"layers": 4, "kv_heads": 2, "head_dim_k": 64, "head_dim_v": 64, "window": None},
                {"layers": 4, "kv_heads": 2, "head_dim_k": 64, "head_dim_v": 64, "window": 128},
            ],
        },
        "plan": _plan(),
        "access": {"domain": hex32(8), "salt": hex32(9), "scope": "query", "scope_key": hex32(10)},
        "variant": {"manifest": hex32(11)},
    }


def sample_of_a_class() -> Json:
    """The same request of an engine class in place of numerics and engine."""
    changed = sample()
    changed["model"]["numerics"] = {"is": "NumericsClass", "value": {"name": "h100-fleet"}}
    return changed


def records_of(request: Json) -> dict[str, IdentityRecord]:
    """The five records of a request."""
    return {name: kind.from_json(request[name]) for name, kind in KINDS.items()}


def put(request: Json, path: str, value: Any) -> None:
    """Set the leaf at ``path`` (``[n]`` indexes an array); records behind an ``is`` are entered by themselves."""
    holder, key = _locate(request, path)
    holder[key] = value


def get(request: Json, path: str) -> Any:
    """The leaf at ``path``."""
    holder, key = _locate(request, path)
    return holder[key]


def _locate(request: Json, path: str) -> tuple[Any, Any]:
    *steps, last = re.findall(r"[a-z_0-9]+", path)
    holder: Any = request
    for step in steps:
        holder = _inner(holder)[_key(holder, step)]
    holder = _inner(holder)
    key = _key(holder, last)
    assert isinstance(holder, list) or key in holder, f"{path} is not in the request"
    return holder, key


def _inner(holder: Any) -> Any:
    return holder["value"] if isinstance(holder, dict) and "is" in holder else holder


def _key(holder: Any, step: str) -> Any:
    return int(step) if isinstance(holder, list) else step


def changed(request: Json, patch: dict[str, Any]) -> Json:
    """A copy of ``request`` with the leaves of ``patch`` replaced."""
    copied = copy.deepcopy(request)
    for path, value in patch.items():
        put(copied, path, value)
    return copied
