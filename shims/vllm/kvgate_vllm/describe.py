"""What an engine is, as far as KV bytes depend on it: ``describe_engine``.

Everything is plain and frozen, shaped like ``kvgate.contract.model``, and read from the engine after it was built (overrides and
automatic choices included), never from what the user typed. No names, no paths. Floats only as exact text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvgate_vllm.covered import engine_reason
from kvgate_vllm.engine_build import EngineBuild, engine_build
from kvgate_vllm.exact_text import Setting, exact_text, setting_name, settings_digest, sorted_settings
from kvgate_vllm.extras import preprocessing_digest
from kvgate_vllm.geometry import Geometry, attention_layers, read_geometry
from kvgate_vllm.numerics import NumericsSettings, numerics_settings
from kvgate_vllm.rope import RopeSettings, rope_settings
from kvgate_vllm.state import active_state

NOT_SETTINGS: Final = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "_attn_implementation_autoset",
        "transformers_version",
        "auto_map",
        "tokenizer_class",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "id2label",
        "label2id",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "torchscript",
        # In contracts of their own:
        "dtype",
        "torch_dtype",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rope_type",
    }
)
"""Keys of a model configuration that are names, or change no KV value, or are described elsewhere."""

ADAPTER_SETTINGS: Final = ("target_modules", "enable_moe_shared_loras", "enable_tower_connector_lora")
"""Settings of the engine that decide which of an adapter's weights are applied, and how they are laid out."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Everything KV bytes depend on besides weights, adapter and tokens. ``reason`` not None: this engine caches nothing."""

    architecture: tuple[Setting, ...]
    rope: RopeSettings
    weight_quantization: str
    cache_dtype: str
    kv_scales: bytes | None
    multimodal: bytes | None
    numerics: NumericsSettings
    engine: EngineBuild
    geometry: Geometry
    reason: str | None


def describe_engine(vllm_config: Any, kv_cache_config: Any) -> EngineDescription:
    """Describe the engine of ``vllm_config`` in one of its workers, after its KV caches are registered.

    Raises ``RuntimeError`` if no model of this engine was loaded here by a covered loader.
    """
    state = active_state(vllm_config)
    model = None if state is None else state.model()
    if model is None:
        raise RuntimeError("no model of this engine was loaded in this process by a covered loader")
    layers = attention_layers(vllm_config)
    geometry, reason = read_geometry(vllm_config, kv_cache_config, layers)
    rope, rope_reason = rope_settings(vllm_config, model)
    cache_dtype, kv_scales, scale_reason = _kv_quantization(vllm_config, layers)
    return EngineDescription(
        architecture=architecture_settings(vllm_config.model_config, vllm_config.lora_config),
        rope=rope,
        weight_quantization=_weight_quantization(vllm_config),
        cache_dtype=cache_dtype,
        kv_scales=kv_scales,
        multimodal=preprocessing_digest(vllm_config.model_config),
        numerics=numerics_settings(vllm_config, model, geometry, layers),
        engine=engine_build(),
        geometry=geometry,
        reason=engine_reason(vllm_config) or reason or rope_reason or scale_reason,
    )


def architecture_settings(model_config: Any, lora_config: Any) -> tuple[Setting, ...]:
    """The effective text configuration of the model, sorted by name, without names, paths and RoPE.

    Also which parts of an adapter the engine applies: that changes values, not low bits, so no class of engines may stand for it.
    """
    settings = {k: v for k, v in model_config.hf_text_config.to_dict().items() if k not in NOT_SETTINGS}
    values = {setting_name(key): exact_text(value) for key, value in settings.items()}
    for name in ADAPTER_SETTINGS:
        value = getattr(lora_config, name, None)
        if value:
            values[f"lora.{name}"] = exact_text(sorted(value) if isinstance(value, list) else value)
    return sorted_settings(values)


def _weight_quantization(vllm_config: Any) -> str:
    quant = vllm_config.quant_config
    if quant is None:
        return "none"
    # Filled in while the model is built or timed; what they say is in the architecture and the weights.
    passing = {"packed_modules_mapping", "quantized_layers", "quantized_layer_summaries", "online_quantization_time"}
    settings = {k: v for k, v in vars(quant).items() if k not in passing and not k.startswith("_")}
    return f"{quant.get_name()}:{settings_digest((type(quant).__qualname__, settings))}"


def _kv_quantization(vllm_config: Any, layers: dict[str, Any]) -> tuple[str, bytes | None, str | None]:
    """Cache dtype, digest of the scales or None, and a reason if they are not covered."""
    configured = str(vllm_config.cache_config.cache_dtype)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.") if configured == "auto" else configured
    if any(getattr(owner, "calculate_kv_scales", False) for owner in (vllm_config.cache_config, *layers.values())):
        return dtype, None, "KV scales computed while serving are not covered"
    if all(
        str(getattr(layer, "kv_cache_dtype", "auto")) in ("auto", "bfloat16", "float16", "float32") for layer in layers.values()
    ):
        return dtype, None, None
    scales = [
        (exact_text(getattr(layer, "_k_scale_float", None)), exact_text(getattr(layer, "_v_scale_float", None)))
        for layer in layers.values()
    ]
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and len(set(scales)) > 1:
        # No stage knows the others' scales, and all must say the same. They come from the weight files, which are identity.
        return dtype, bytes.fromhex(settings_digest("scales differ by layer, from the checkpoint")), None
    return dtype, bytes.fromhex(settings_digest(sorted(set(scales)) if len(set(scales)) == 1 else scales)), None
