"""What an engine is, as far as KV bytes depend on it: ``describe_engine``. And which requests are understood: ``request_reason``.

Everything is plain and frozen, shaped like ``kvgate.contract.model``, and read from the engine after it was built (overrides and
automatic choices included), never from what the user typed. No names, no paths. Floats only as exact text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvgate_vllm.engine_build import EngineBuild, device_text, engine_build, library_versions
from kvgate_vllm.exact_text import exact_text, setting_name, settings_digest
from kvgate_vllm.extras import has_inputs, preprocessing_digest
from kvgate_vllm.geometry import Geometry, attention_layers, read_geometry
from kvgate_vllm.state import active_state, pin_of

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

NOT_ROPE: Final = frozenset({"training", "use_flashinfer", "use_aiter"})
"""Attributes of a rotary embedding that say which kernel applies it: with the execution mode and the libraries, numerics."""

ADAPTER_SETTINGS: Final = ("target_modules", "enable_moe_shared_loras", "enable_tower_connector_lora")
"""Settings of the engine that decide which of an adapter's weights are applied, and how they are laid out."""

DRAFTLESS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation methods without a model of their own."""

COMPILATION_SETTINGS: Final = (
    "mode",
    "backend",
    "custom_ops",
    "cudagraph_mode",
    "splitting_ops",
    "use_inductor_graph_partition",
    "inductor_compile_config",
    "inductor_passes",
    "pass_config",
)
"""Those that change low bits. Sizes to compile or capture for follow from batch limits, which are not identity."""

KNOWN_REQUEST_FIELDS: Final = frozenset(
    {
        "abort_immediately", "arrival_time", "block_hashes", "cache_salt", "client_index", "drop_stale_output", "ec_transfer_params",
        "events", "is_prefill_chunk", "kv_cache_report_mode", "kv_hints", "kv_transfer_params", "lora_request", "max_tokens",
        "mm_features", "next_decode_eligible_step", "num_cached_tokens", "num_computed_tokens", "num_external_computed_tokens",
        "num_in_flight_tokens", "num_nans_in_logits", "num_output_placeholders", "num_preemptions", "num_prompt_tokens",
        "num_stale_output_tokens", "output_token_ids", "all_token_ids", "last_sched_seq", "pooling_params", "prefill_stats",
        "priority", "prompt_embeds", "prompt_is_token_ids", "prompt_token_ids", "request_id", "resumable", "sampling_params",
        "session_id", "shared_prefix_boundary", "skip_reading_prefix_cache", "spec_decode_metrics", "spec_token_ids", "status",
        "stop_reason", "streaming_queue", "structured_output_request", "trace_headers", "replay_start", "get_hash_new_full_blocks",
        "discard_latest_async_tokens", "eos_token_id", "mm_positions", "mm_hashes", "mm_kwargs", "has_encoder_inputs",
        "num_encoder_inputs", "async_tokens_to_discard", "reasoning_ended",
    }
)  # fmt: skip
"""Public attributes of vLLM's ``Request``, 0.26 to 0.33. Any other that is set makes the request uncacheable."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One named setting as exact text."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding as the layers apply it. ``kind`` "none": there is none, and the rest is "0.0", 0, "none", 0, ()."""

    kind: str
    theta: str
    rotary_dim: int
    style: str
    max_positions: int
    parameters: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class NumericsSettings:
    """What changes low bits of KV for the same weights and tokens."""

    attention_backend: str
    isa: str
    compute_dtype: str
    execution: str
    lora_max_rank: int | None
    tensor_parallel: int
    pipeline_parallel: int
    other: tuple[Setting, ...]


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
    rope, rope_reason = _rope(vllm_config, model)
    cache_dtype, kv_scales, scale_reason = _kv_quantization(vllm_config, layers)
    return EngineDescription(
        architecture=architecture_settings(vllm_config.model_config, vllm_config.lora_config),
        rope=rope,
        weight_quantization=_weight_quantization(vllm_config),
        cache_dtype=cache_dtype,
        kv_scales=kv_scales,
        multimodal=preprocessing_digest(vllm_config.model_config),
        numerics=_numerics(vllm_config, model, geometry, layers),
        engine=engine_build(),
        geometry=geometry,
        reason=engine_reason(vllm_config) or reason or rope_reason or scale_reason,
    )


def engine_reason(vllm_config: Any) -> str | None:
    """Why an engine of this configuration caches nothing, or None. Needs no model: the scheduler side can ask, too."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    checks = (
        (speculative is not None and speculative.method not in DRAFTLESS, "speculation with a draft model is not covered"),
        (model.runner_type == "pooling", "a pooling engine is not covered"),
        (model.is_encoder_decoder, "an encoder-decoder model is not covered"),
        (model.is_attention_free or model.is_hybrid, "a model with state other than attention is not covered"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallelism is not covered"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism is not covered"),
        (getattr(parallel, "enable_eplb", False), "expert load balancing moves experts, which is not covered"),
        (getattr(parallel, "enable_elastic_ep", False), "elastic expert parallelism is not covered"),
        (getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False), "KV sharing between layers is not covered"),
        (getattr(vllm_config, "diffusion_config", None) is not None, "a diffusion model is not covered"),
    )
    return next((reason for holds, reason in checks if holds), None)


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


def sorted_settings(values: dict[str, str]) -> tuple[Setting, ...]:
    """Settings sorted by name."""
    return tuple(Setting(name, values[name]) for name in sorted(values))


def _rope(vllm_config: Any, model: Any) -> tuple[RopeSettings, str | None]:
    given = getattr(vllm_config.model_config.hf_text_config, "rope_parameters", None)
    if given is None:
        text = vllm_config.model_config.hf_text_config
        given = {key: getattr(text, key) for key in ("rope_theta", "rope_scaling") if getattr(text, key, None) is not None}
    kinds: dict[str, list[Any]] = {}
    for _name, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "rotary_dim") and hasattr(module, "is_neox_style"):
            kinds.setdefault(_module_text(module), []).append(module)
    if not kinds:
        reason = "the model applies rotary embedding in a way that is not known" if given else None
        return RopeSettings("none", "0.0", 0, "none", 0, ()), reason
    ordered = sorted(kinds, key=lambda text: (-len(kinds[text]), text))
    main = kinds[ordered[0]][0]
    values = {f"config.{setting_name(str(key))}": exact_text(value) for key, value in dict(given).items()}
    values |= {"layers" if index == 0 else f"layers.{index}": text for index, text in enumerate(ordered)}
    kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else "default"
    return (
        RopeSettings(
            kind=str(kind),
            theta=repr(float(main.base)) if isinstance(getattr(main, "base", None), (int, float)) else "0.0",
            rotary_dim=int(main.rotary_dim),
            style="neox" if main.is_neox_style else "interleaved",
            max_positions=int(getattr(main, "max_position_embeddings", 0)),
            parameters=sorted_settings(values),
        ),
        None,
    )


def _module_text(module: Any) -> str:
    """Class and plain settings of a rotary embedding: scaling factors, sections, which of two factor lists is in use."""
    plain = (bool, int, float, str, list, tuple)
    settings = {
        k: v
        for k, v in vars(module).items()
        if k not in NOT_ROPE and not k.startswith(("_", "torchdynamo_")) and isinstance(v, plain)
    }
    return f"{type(module).__name__} {exact_text(settings)}"


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


def _numerics(vllm_config: Any, model: Any, geometry: Geometry, layers: dict[str, Any]) -> NumericsSettings:
    parallel, lora = vllm_config.parallel_config, vllm_config.lora_config
    return NumericsSettings(
        attention_backend="+".join(sorted({page.backend for page in geometry.pages})) or "none",
        isa="+".join(sorted({page.isa for page in geometry.pages})) or "none",
        compute_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        execution=_execution(vllm_config),
        lora_max_rank=None if lora is None else int(lora.max_lora_rank),
        tensor_parallel=int(parallel.tensor_parallel_size),
        pipeline_parallel=int(parallel.pipeline_parallel_size),
        other=sorted_settings(_other_numerics(vllm_config, model) | _attention_numerics(vllm_config, layers)),
    )


def _execution(vllm_config: Any) -> str:
    compilation = vllm_config.compilation_config
    mode = exact_text(compilation.mode)
    how = "eager" if mode in ("NONE", "0") else f"mode={mode}"
    settings = {name: getattr(compilation, name, None) for name in COMPILATION_SETTINGS}
    return f"{how},cudagraph={exact_text(compilation.cudagraph_mode)},settings={settings_digest(settings)[:32]}"


def _other_numerics(vllm_config: Any, model: Any) -> dict[str, str]:
    parallel, lora = vllm_config.parallel_config, vllm_config.lora_config
    values = {
        "device": device_text(),
        "libraries": library_versions(model),
        "environment": settings_digest(numeric_environment()),
        "model.class": f"{type(model).__module__}.{type(model).__qualname__}",
        "kernels": settings_digest(_without_warmup(getattr(vllm_config, "kernel_config", None))),
        "cascade_attention": exact_text(not getattr(vllm_config.model_config, "disable_cascade_attn", True)),
    }
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        values["split.custom_all_reduce"] = exact_text(not parallel.disable_custom_all_reduce)
    if getattr(parallel, "enable_expert_parallel", False):
        values["expert_parallel"] = exact_text((parallel.data_parallel_size, getattr(parallel, "all2all_backend", None)))
    elif parallel.data_parallel_size > 1 and getattr(parallel, "is_moe_model", None) is not False:
        values["expert_split"] = exact_text(parallel.data_parallel_size)  # experts are split over all engines, in other sums
    if getattr(vllm_config, "additional_config", None):
        values["platform"] = settings_digest(vllm_config.additional_config)
    if lora is not None:
        names = ("lora_dtype", "fully_sharded_loras", "enable_mixed_moe_lora_format", "specialize_active_lora")
        values["lora"] = exact_text({name: getattr(lora, name, None) for name in names})
    return values


def _attention_numerics(vllm_config: Any, layers: dict[str, Any]) -> dict[str, str]:
    """What attention runs with, as the engine resolved it: who asked for it, or whether anyone did, is no difference."""
    config = getattr(vllm_config, "attention_config", None)
    settings = {name: value for name, value in vars(config).items() if name != "backend"} if config is not None else {}
    versions = {getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None) for layer in layers.values()}
    values = {
        "attention": settings_digest(settings),
        "attention.code": exact_text(sorted({type(getattr(layer, "impl", None)).__qualname__ for layer in layers.values()})),
    }
    if versions != {None}:
        values["attention.flash"] = exact_text(versions)
    if vllm_config.device_config.device_type != "cpu":  # the CPU has a runner of its own
        values["runner"] = "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1"
    return values


def _without_warmup(config: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(config).items() if "warmup" not in k} if config is not None else {}


def numeric_environment() -> dict[str, str]:
    """vLLM's environment variables that someone set and that are not plainly about something else.

    What nobody set follows from the engine build. The digest of these is identity, never their text: they may be secret.
    """
    import os

    import vllm.envs as envs

    factors = envs.compile_factors() if hasattr(envs, "compile_factors") else {}
    return {
        name: value
        for name, value in os.environ.items()
        if name in NUMERIC_VARIABLES
        or (name.startswith("VLLM_") and (not factors or name in factors) and not any(part in name for part in _NOT_NUMERIC))
    }


NUMERIC_VARIABLES: Final = frozenset(
    {
        # vLLM's, that the rules below would leave out
        "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION", "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE", "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB", "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
        "VLLM_TUNED_CONFIG_FOLDER", "VLLM_ZENTORCH_WEIGHT_PREPACK",
        # of the libraries below it: precision and instruction sets they may use
        "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE",
        "ONEDNN_MAX_CPU_ISA", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS", "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_F32_DEFAULT",
    }
)  # fmt: skip
"""Environment variables that change low bits, whatever their names look like."""

_NOT_NUMERIC: Final = (
    "PLUGINS", "ALLOW_", "TIMEOUT", "_PORT", "_HOST", "_PATH", "_DIR", "LOG", "VLLM_DP_", "RAY_", "NIXL", "MOONCAKE", "CPU_OMP",
    "CPU_NUM_OF", "CPU_CI", "MAX_", "USAGE", "INSECURE", "RUST_", "SERVER", "SIDE_CHANNEL", "P2P_", "DEBUG", "TRACE", "IMAGE_TAG",
    "BUILD", "MULTIPROC", "KVCACHE_SPACE", "CACHE_MB", "MSGPACK", "REGEX", "XGRAMMAR", "REQUEST_ID", "API_KEY", "CONFIG_ROOT",
    "KV_CACHE_LAYOUT",  # picks the kernel that packs
    "USE_V2_MODEL_RUNNER",  # described as the engine resolved it
)  # fmt: skip


def request_reason(request: Any) -> str | None:
    """Why ``request`` (vLLM's ``Request``) is not one whose KV the contract describes, or None."""
    sampling = request.sampling_params
    pin = pin_of(request)
    digested = pin is not None and pin.inputs is not None
    unknown = (
        name
        for name, value in vars(request).items()
        if not name.startswith("_") and name not in KNOWN_REQUEST_FIELDS and value is not None and value is not False
    )
    checks = (
        (has_inputs(request) and not digested, "an input besides tokens that was not digested is not covered"),
        (not request.prompt_token_ids and request.prompt_embeds is None, "a prompt without token ids is not covered"),
        (request.pooling_params is not None or sampling is None, "a pooling request is not covered"),
        (getattr(request, "resumable", False), "a streaming session is not covered"),
        (getattr(request, "ec_transfer_params", None) is not None, "an encoder cache transfer is not covered"),
        (sampling is not None and sampling.prompt_logprobs is not None, "prompt logprobs need the prompt computed"),
        (getattr(sampling, "prompt_logprob_token_ids", None) is not None, "prompt logprobs need the prompt computed"),
        (getattr(sampling, "skip_reading_prefix_cache", None) is True, "the request asked not to be served from a cache"),
        (next(unknown, None) is not None, "the request carries an input that is not known"),
    )
    return next((reason for holds, reason in checks if holds), None)
