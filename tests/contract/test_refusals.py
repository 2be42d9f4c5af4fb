"""A wrong value in any field is refused by the field's whole path, in words that do not repeat it."""

from __future__ import annotations

from typing import Any

import pytest

from kvgate.contract.address import Extra
from kvgate.contract.errors import ContractError
from tests.contract.sample import KINDS, changed, hex32, sample

REFUSED: list[tuple[str, Any, str, str]] = [
    ("model.base", None, "model.base", "NoneType"),
    ("model.base", [], "model.base", "list"),
    ("model.base.artifacts", [], "model.base.artifacts", "0 items"),
    ("model.base.artifacts", {}, "model.base.artifacts", "dict"),
    ("model.base.artifacts", None, "model.base.artifacts", "NoneType"),
    ("model.base.artifacts[1]", 5, "model.base.artifacts[1]", "int"),
    ("model.base.artifacts[1].role", "weight", "model.base.artifacts[1].role", "known word"),
    ("model.base.artifacts[1].role", None, "model.base.artifacts[1].role", "known word"),
    ("model.base.artifacts[0].role", "adapter_weights", "model.base", "adapter file"),
    (
        "model.base.artifacts",
        [{"role": "kv_scales", "size_bytes": 1, "digest": hex32(3)}],
        "model.base",
        "no weights",
    ),
    ("model.base.artifacts[1].size_bytes", -1, "model.base.artifacts[1].size_bytes", "range"),
    ("model.base.artifacts[1].size_bytes", 2**64, "model.base.artifacts[1].size_bytes", "range"),
    ("model.base.artifacts[1].size_bytes", 1.0, "model.base.artifacts[1].size_bytes", "float"),
    ("model.base.artifacts[1].size_bytes", True, "model.base.artifacts[1].size_bytes", "bool"),
    ("model.base.artifacts[1].size_bytes", "5", "model.base.artifacts[1].size_bytes", "str"),
    ("model.base.artifacts[1].digest", hex32(0), "model.base.artifacts[1].digest", "all zero"),
    ("model.base.artifacts[1].digest", hex32(1)[:-2], "model.base.artifacts[1].digest", "31 bytes"),
    ("model.base.artifacts[1].digest", hex32(1) + "00", "model.base.artifacts[1].digest", "33 bytes"),
    ("model.base.artifacts[1].digest", "", "model.base.artifacts[1].digest", "0 bytes"),
    ("model.base.artifacts[1].digest", "AB" * 32, "model.base.artifacts[1].digest", "hexadecimal"),
    ("model.base.artifacts[1].digest", "a" * 63, "model.base.artifacts[1].digest", "hexadecimal"),
    ("model.base.artifacts[1].digest", None, "model.base.artifacts[1].digest", "hexadecimal"),
    ("model.base.artifacts[1].digest", hex32(1), "model.base.artifacts[1].size_bytes", "two sizes"),
    ("model.architecture.settings", [], "model.architecture.settings", "0 items"),
    ("model.architecture.settings[0].name", "z", "model.architecture.settings", "sorted"),
    ("model.architecture.settings[0].name", "num_hidden_layers", "model.architecture.settings", "sorted"),
    ("model.architecture.settings[0].name", "Hidden", "model.architecture.settings[0].name", "form"),
    ("model.architecture.settings[0].value", "", "model.architecture.settings[0].value", "empty"),
    ("model.architecture.settings[0].value", 256, "model.architecture.settings[0].value", "int"),
    ("model.architecture.settings[0].value", "x" * 65_537, "model.architecture.settings[0].value", "too long"),
    ("model.adapter.artifacts[1].role", "adapter_config", "model.adapter", "no adapter weights"),
    ("model.adapter.artifacts[0].role", "weights", "model.adapter", "no adapter file"),
    ("model.rope.kind", "", "model.rope.kind", "empty"),
    ("model.rope.theta", 10000.0, "model.rope.theta", "float"),
    ("model.rope.theta", 10000, "model.rope.theta", "int"),
    ("model.rope.theta", "1e4", "model.rope.theta", "own text"),
    ("model.rope.theta", "10000.00", "model.rope.theta", "own text"),
    ("model.rope.theta", "010000", "model.rope.theta", "own text"),
    ("model.rope.theta", "-0", "model.rope.theta", "own text"),
    ("model.rope.theta", "1e999", "model.rope.theta", "own text"),
    ("model.rope.theta", "１0000", "model.rope.theta", "form"),
    ("model.rope.theta", "nan", "model.rope.theta", "form"),
    ("model.rope.theta", "10000.0\n", "model.rope.theta", "form"),
    ("model.rope.theta", " 1.0", "model.rope.theta", "form"),
    ("model.rope.rotary_dim", 65_537, "model.rope.rotary_dim", "range"),
    ("model.rope.style", "gptj", "model.rope.style", "known word"),
    ("model.rope.parameters[1].name", "factor", "model.rope.parameters", "sorted"),
    ("model.rope.parameters", [{"name": f"n{i:03}", "value": "1"} for i in range(65)], "model.rope.parameters", "65 items"),
    ("model.weight_quantization", "", "model.weight_quantization", "empty"),
    ("model.weight_quantization", None, "model.weight_quantization", "NoneType"),
    ("model.weight_quantization", "e\u0301", "model.weight_quantization", "NFC"),
    ("model.weight_quantization", "\ud800", "model.weight_quantization", "surrogate"),
    ("model.weight_quantization", "x" * 257, "model.weight_quantization", "too long"),
    ("model.kv_quantization.scales", "", "model.kv_quantization.scales", "0 bytes"),
    ("model.multimodal", hex32(0), "model.multimodal", "all zero"),
    ("model.numerics", None, "model.numerics", "tagged"),
    ("model.numerics", {}, "model.numerics", "tagged"),
    ("model.numerics", {"is": "Numerics"}, "model.numerics", "tagged"),
    ("model.numerics", {"is": "Engine", "value": {}}, "model.numerics", "tagged"),
    ("model.numerics", {"is": ["Numerics"], "value": {}}, "model.numerics", "tagged"),
    ("model.numerics", {"is": "Numerics", "value": []}, "model.numerics", "list"),
    ("model.numerics", {"is": "Numerics", "value": {"name": "a"}}, "model.numerics.name", "unknown field"),
    ("model.numerics", {"is": "NumericsClass", "value": {"name": "A"}}, "model.numerics.name", "form"),
    ("model.numerics", {"is": "NumericsClass", "value": {"name": "*"}}, "model.numerics.name", "form"),
    ("model.numerics.lora_max_rank", None, "model.adapter", "without LoRA"),
    ("model.numerics.lora_max_rank", 0, "model.numerics.lora_max_rank", "range"),
    ("model.numerics.tensor_parallel", 0, "model.numerics.tensor_parallel", "range"),
    ("model.numerics.execution", "eager mode", "model.numerics.execution", "form"),
    ("model.numerics.engine", None, "model.numerics.engine", "NoneType"),
    ("model.numerics.engine.build", "", "model.numerics.engine.build", "empty"),
    ("representation.chunk_tokens", 0, "representation.chunk_tokens", "range"),
    ("representation.codec", "zstd", "representation.codec", "known word"),
    ("representation.codec", "raw", "representation.v_format.group", "no scales"),
    ("representation.k_format.dtype", "float32", "representation.k_format.dtype", "16 bits"),
    ("representation.k_format.dtype", "int8", "representation.k_format.group", "int8 needs"),
    (
        "representation.k_format",
        {"dtype": "float16", "group": 32, "scale_dtype": "float16"},
        "representation.v_format",
        "only V",
    ),
    ("representation.v_format.dtype", "fp8_e4m3", "representation.v_format", "only V"),
    ("representation.v_format.group", None, "representation.v_format.scale_dtype", "go together"),
    ("representation.v_format.scale_dtype", None, "representation.v_format.scale_dtype", "go together"),
    ("representation.groups", [], "representation.groups", "0 items"),
    ("representation.groups[1].head_dim_v", 0, "representation.groups[1].head_dim_v", "V of its own"),
    ("representation.groups[1].window", 0, "representation.groups[1].window", "range"),
    ("access.domain", None, "access.domain", "hexadecimal"),
    ("access.domain", "default", "access.domain", "hexadecimal"),
    ("access.salt", "", "access.salt", "0 bytes"),
    ("access.scope", "tenant", "access.scope", "known word"),
    ("access.scope", "prefix", "access.scope_key", "no meaning"),
    ("access.scope_key", None, "access.scope_key", "needed"),
    ("variant.manifest", "", "variant.manifest", "0 bytes"),
    ("variant.manifest", "ordinary", "variant.manifest", "hexadecimal"),
]


@pytest.mark.parametrize(("path", "value", "field", "problem"), REFUSED, ids=lambda part: str(part)[:40])
def test_a_wrong_value_is_refused_where_it_stands(path: str, value: Any, field: str, problem: str) -> None:
    """The error names the field by its whole path and says what is wrong, without repeating the value."""
    request = changed(sample(), {path: value})
    name = path.partition(".")[0]
    with pytest.raises(ContractError) as caught:
        KINDS[name].from_json(request[name])
    assert f"{name}.{caught.value.field}" == field
    assert problem in caught.value.problem
    assert hex32(1) not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "image"},
        {"digest": hex32(0)},
        {"digest": hex32(1)[:8]},
        {"offset_tokens": -1},
        {"offset_tokens": 2**32},
        {"length_tokens": 0},
    ],
)
def test_a_wrong_extra_is_refused_by_name(change: dict[str, Any]) -> None:
    """A short digest, above all: 16 bits of an image's hash are not the image."""
    good = {"kind": "multimodal", "digest": hex32(1), "offset_tokens": 2**31, "length_tokens": 2}
    assert Extra.from_json(good).to_json() == good
    with pytest.raises(ContractError) as caught:
        Extra.from_json(good | change)
    assert caught.value.field == next(iter(change))
