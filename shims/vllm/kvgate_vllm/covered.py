"""Which engines and which requests the contract describes. Of all others nothing is cached, with a reason."""

from __future__ import annotations

from typing import Any, Final

from kvgate_vllm.extras import has_inputs
from kvgate_vllm.state import pin_of

DRAFTLESS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Speculation methods without a model of their own."""

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
