"""What changes low bits of an engine's KV: backends, split, execution mode, libraries, environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from kvgate_vllm.engine_build import device_text, library_versions
from kvgate_vllm.exact_text import Setting, exact_text, settings_digest, sorted_settings
from kvgate_vllm.geometry import Geometry

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


def numerics_settings(vllm_config: Any, model: Any, geometry: Geometry, layers: dict[str, Any]) -> NumericsSettings:
    """Numerics of the engine that runs ``model`` with these attention layers, as it resolved its settings."""
    parallel, lora = vllm_config.parallel_config, vllm_config.lora_config
    return NumericsSettings(
        attention_backend="+".join(sorted({page.backend for page in geometry.pages})) or "none",
        isa="+".join(sorted({page.isa for page in geometry.pages})) or "none",
        compute_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        execution=_execution(vllm_config),
        lora_max_rank=None if lora is None else int(lora.max_lora_rank),
        tensor_parallel=int(parallel.tensor_parallel_size),
        pipeline_parallel=int(parallel.pipeline_parallel_size),
        other=sorted_settings(_other_numerics(vllm_config, model) | attention_numerics(vllm_config, layers)),
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


def attention_numerics(vllm_config: Any, layers: dict[str, Any]) -> dict[str, str]:
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
    import vllm.envs as envs

    factors = envs.compile_factors() if hasattr(envs, "compile_factors") else {}
    return {
        name: value
        for name, value in os.environ.items()
        if name in NUMERIC_VARIABLES
        or (name.startswith("VLLM_") and (not factors or name in factors) and not any(part in name for part in _NOT_NUMERIC))
    }
