"""A description changes with everything that changes KV bytes, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import LoRAConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

from kvgate_vllm import engine_build as build_module
from kvgate_vllm.describe import (
    EngineDescription,
    architecture_settings,
    describe_engine,
)
from kvgate_vllm.engine_build import package_digest
from kvgate_vllm.geometry import attention_layers
from tests.vllm.engine import MODEL, Engine, EnginePool, copy_model, loaded_model


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, engines: EnginePool) -> None:
    """Most tests here set up vLLM's process groups themselves."""
    if "engine" not in request.fixturenames:
        engines.close()


def describe(
    model: Path = MODEL, *, isa: str | None = "vec", prepare: Callable[[Any], None] = lambda _layer: None, **options: Any
) -> EngineDescription:
    """Load a model and describe it as a worker would, with ``isa`` as its attention backend sets it.

    prepare: called with each attention layer before.
    """
    with loaded_model(model, **options) as (config, _model):
        for layer in attention_layers(config).values():
            layer.isa = isa
            if isa is None and hasattr(layer.impl, "isa"):
                layer.impl.isa = None  # where vLLM before 0.32 keeps it
            prepare(layer)
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in attention_layers(config).items()}
        config.cache_config.kv_cache_layout = "LBNHC"  # as the engine core resolves it on the CPU
        (kv_cache_config,) = get_kv_cache_configs(config, [specs], [1 << 28])
        return describe_engine(config, kv_cache_config)


@pytest.fixture(scope="module")
def plain(engines: EnginePool) -> EngineDescription:
    """The small model with nothing special."""
    engines.close()
    return describe()


def differing(one: EngineDescription, other: EngineDescription) -> set[str]:
    """Names of the parts that differ; numerics by field."""
    parts = {f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name)}
    if "numerics" in parts:
        parts.remove("numerics")
        fields = dataclasses.fields(one.numerics)
        parts |= {f"numerics.{f.name}" for f in fields if getattr(one.numerics, f.name) != getattr(other.numerics, f.name)}
    return parts


def test_the_small_model_is_described(plain: EngineDescription) -> None:
    """The description must hold what is known of this model, and no reason."""
    assert plain.reason is None
    assert (plain.rope.kind, plain.rope.theta, plain.rope.rotary_dim) == ("default", "10000.0", 64)
    assert (plain.rope.style, plain.rope.max_positions) == ("neox", 4096)
    assert (plain.cache_dtype, plain.kv_scales, plain.weight_quantization) == ("bfloat16", None, "none")
    assert plain.numerics.attention_backend == "CPU_ATTN"
    assert (plain.numerics.lora_max_rank, plain.numerics.tensor_parallel, plain.numerics.pipeline_parallel) == (None, 1, 1)
    assert plain.numerics.execution.startswith("eager,cudagraph=NONE,settings=")
    (group,) = plain.geometry.groups
    assert (group.total_layers, group.kv_heads, group.head_dim_k, group.head_dim_v) == (8, 2, 64, 64)
    assert (group.window, group.dtype, group.block_tokens) == (None, "bfloat16", 32)
    (rectangle,) = plain.geometry.rectangles
    assert dataclasses.astuple(rectangle) == (0, 0, 8, 0, 2)
    assert (plain.geometry.stages, plain.geometry.replication) == (((0, 8),), 1)
    assert len(plain.geometry.pages) == 8
    assert {page.isa for page in plain.geometry.pages} == {"vec"}


def test_settings_are_sorted_and_named_once(plain: EngineDescription) -> None:
    """The contract refuses settings that are unsorted or named twice."""
    for settings in (plain.architecture, plain.rope.parameters, plain.numerics.other):
        names = [setting.name for setting in settings]
        assert names == sorted(set(names))
        assert all(setting.value for setting in settings)


def test_nothing_of_paths_and_names_is_in_it(plain: EngineDescription, tmp_path: Path) -> None:
    """No folder, model name or version of a library that only read the configuration may be in the description."""
    text = repr(plain)
    for secret in ("/home", "/root", str(tmp_path), "docs-llama-7m", "transformers_version", "_name_or_path"):
        assert secret not in text


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 7},
        {"gpu_memory_utilization": 0.5},
        {"served_model_name": "other"},
        {"seed": 5},
        {"max_num_batched_tokens": 4096},
        {"disable_log_stats": True},
        {"trust_remote_code": True},
        {"hf_overrides": {"eos_token_id": 3, "transformers_version": "1.0"}},
    ],
    ids=str,
)
def test_what_does_not_change_kv_is_not_in_it(plain: EngineDescription, options: dict[str, Any]) -> None:
    """Limits, names, seeds and other settings that change no KV value must leave the description as it is."""
    assert differing(plain, describe(**options)) == set()


def test_moving_the_model_changes_nothing(plain: EngineDescription, tmp_path: Path) -> None:
    """The same model in another folder must be described alike."""
    assert differing(plain, describe(copy_model(tmp_path / "elsewhere"))) == set()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}}, {"rope"}),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.000000000002}}}, {"rope"}),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}}, {"rope"}),
        (
            {
                "hf_overrides": {
                    "rope_parameters": {
                        "rope_type": "llama3",
                        "rope_theta": 10000.0,
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 2048,
                    }
                }
            },
            {"rope"},
        ),
        ({"hf_overrides": {"rms_norm_eps": 1e-6}}, {"architecture"}),
        ({"hf_overrides": {"max_position_embeddings": 8192}}, {"architecture", "rope"}),
        ({"enable_lora": True, "max_lora_rank": 8}, {"numerics.lora_max_rank", "numerics.other"}),
        ({"additional_config": {"prefill_backend": "other"}}, {"numerics.other"}),
        ({"dtype": "float32"}, {"numerics.compute_dtype", "cache_dtype", "geometry"}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"cache_dtype", "kv_scales", "geometry"}),
        ({"block_size": 64}, {"geometry"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_changes_kv_is_in_it(plain: EngineDescription, options: dict[str, Any], parts: set[str]) -> None:
    """Each setting that changes KV values must change the part of the description that it belongs to."""
    assert differing(plain, describe(**options)) == parts


def test_ranks_of_adapters_differ() -> None:
    """Engines that take adapters of different maximum rank have other kernels: they must differ."""
    one, other = (describe(enable_lora=True, max_lora_rank=rank) for rank in (8, 16))
    assert differing(one, other) == {"numerics.lora_max_rank"}


@pytest.mark.parametrize(
    "setting",
    [{"target_modules": ["q_proj"]}, {"enable_moe_shared_loras": True}, {"enable_tower_connector_lora": True}],
    ids=lambda setting: next(iter(setting)),
)
def test_which_parts_of_an_adapter_are_applied_is_in_the_architecture(setting: dict[str, Any]) -> None:
    """Engines that apply other parts of one adapter give other KV: no shared identity, under a class of engines neither."""
    model = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}))
    plain, restricted = (architecture_settings(model, LoRAConfig(max_lora_rank=8, **extra)) for extra in ({}, setting))
    assert plain == architecture_settings(model, None)
    assert set(plain) < set(restricted)


def test_the_order_of_target_modules_is_no_identity() -> None:
    """Two engines that apply the same modules share, however the list was written."""
    model = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=dict))
    one, other = (LoRAConfig(target_modules=names) for names in (["q_proj", "o_proj"], ["o_proj", "q_proj"]))
    assert architecture_settings(model, one) == architecture_settings(model, other)


def test_the_isa_is_read_from_the_layers(plain: EngineDescription) -> None:
    """Two page orders of one shape are told apart only by the layers' ISA: it must be in numerics and pages."""
    changed = describe(isa="amx")
    assert differing(plain, changed) == {"numerics.isa", "geometry"}
    assert {page.isa for page in changed.geometry.pages} == {"amx"}


def test_an_unknown_page_order_is_refused() -> None:
    """If the CPU backend has not said in which order it keeps its pages, the engine must not be cached."""
    assert describe(isa=None).reason == "the page order of the CPU attention backend is not known"


@pytest.mark.parametrize("part", ["attn_backend", "impl"])
def test_attention_code_from_outside_vllm_is_refused(part: str) -> None:
    """A plugin's attention is told from another only by its name, which it chooses itself: its engine must not be cached."""

    def replace(layer: Any) -> None:
        if part == "impl":
            layer.impl.__class__ = type("Outside", (type(layer.impl),), {"__module__": "plugin.attention"})
        else:
            layer.attn_backend = type("Outside", (layer.attn_backend,), {"__module__": "plugin.attention"})

    assert describe(prepare=replace).reason == "attention code comes from outside vLLM, which is not covered"


def test_a_real_engine_knows_its_page_order(engine: Engine) -> None:
    """By the time KV caches are registered the layers of a real engine must say how their pages lie."""
    description = describe_engine(engine.vllm_config, engine.connector.kv_cache_config)
    assert description.reason is None
    # Before 0.32 neither the configuration nor this backend names a layout; the ISA alone says how its pages lie.
    named = getattr(engine.connector.kv_cache_config, "kv_cache_layout", None)
    assert {page.layout for page in description.geometry.pages} == {named}
    assert {page.isa for page in description.geometry.pages} <= {"vec", "vec16", "amx", "neon"}


def test_numeric_environment_variables_count(plain: EngineDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable that chooses kernels must change the numerics, without its text appearing; others must not."""
    monkeypatch.setenv("VLLM_PORT", "1234")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert differing(plain, describe()) == set()
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    changed = describe()
    assert differing(plain, changed) == {"numerics.other"}
    assert "SPLIT_KV" not in repr(changed)


def test_the_engine_build_is_the_installed_code(tmp_path: Path) -> None:
    """Two installations that differ in one byte of code, or in a file's name, must be two builds; other files must not matter."""
    root = tmp_path / "package"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("one")
    (root / "sub" / "b.abi3.so").write_bytes(bytes(2 << 20))
    first = package_digest(root)
    (root / "notes.txt").write_text("else")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert package_digest(root) == first
    (root / "a.py").write_text("two")
    second = package_digest(root)
    (root / "sub" / "b.abi3.so").write_bytes(bytes((2 << 20) - 1) + b"\1")
    third = package_digest(root)
    (root / "a.py").rename(root / "c.py")
    assert len({first, second, third, package_digest(root)}) == 4


def test_another_build_is_another_description(plain: EngineDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description must carry the build of the engine that runs."""
    assert plain.engine == build_module.engine_build()
    assert (plain.engine.name, len(plain.engine.build)) == ("vllm", 64)
    changed = dataclasses.replace(plain, engine=dataclasses.replace(plain.engine, build="0" * 64))
    assert differing(plain, changed) == {"engine"}


def test_an_engine_that_reuses_pages_of_a_running_request_is_uncacheable(tmp_path: Path) -> None:
    """Layers with a sliding window must say so in their group, and their engine must not be cached."""
    model = copy_model(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256}
    (model / "config.json").write_text(json.dumps(config))
    description = describe(model)
    assert description.geometry.groups[0].window == 256
    # vLLM reuses a page once it has left the window: a store would read another request's bytes.
    assert description.reason == "pages that leave a sliding window are reused while their request runs, which is not covered"


def test_an_engine_without_a_covered_load_cannot_be_described(engines: EnginePool) -> None:
    """Where no covered loader ran there is nothing to describe."""
    engines.close()
    with loaded_model(load_format="dummy") as (config, _model), pytest.raises(RuntimeError, match="covered loader"):
        describe_engine(config, None)
