"""An engine or a request that the contract does not describe must be uncacheable, with a reason that says why."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvgate_vllm.covered import engine_reason, request_reason
from tests.vllm.engine import Engine, prompt_tokens


def config_like(**changes: Any) -> Any:
    """As much of a configuration as ``engine_reason`` looks at."""
    values: dict[str, Any] = {
        "model_config": {
            "runner_type": "generate",
            "is_encoder_decoder": False,
            "is_attention_free": False,
            "is_hybrid": False,
        },
        "parallel_config": {},
        "cache_config": {},
        "speculative_config": None,
    }
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            values[section] = {**(values[section] or {}), name: value}
        else:
            values[section] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in values.items()})


@pytest.mark.parametrize(
    "change",
    [
        {"speculative_config__method": "eagle"},
        {"speculative_config__method": "draft_model"},
        {"model_config__runner_type": "pooling"},
        {"model_config__is_encoder_decoder": True},
        {"model_config__is_hybrid": True},
        {"model_config__is_attention_free": True},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
        {"parallel_config__enable_eplb": True},
        {"parallel_config__enable_elastic_ep": True},
        {"cache_config__kv_sharing_fast_prefill": True},
    ],
    ids=str,
)
def test_engines_that_are_not_covered_say_so(change: dict[str, Any]) -> None:
    """Each kind of engine whose KV the contract does not describe must be refused with a reason of its own."""
    assert engine_reason(config_like()) is None
    assert engine_reason(config_like(speculative_config__method="ngram")) is None
    assert engine_reason(config_like(**change))


@pytest.fixture
def request_made(engine: Engine) -> Any:
    """A real request, as it arrived at the scheduler."""
    engine.ask(prompt_tokens(40), max_tokens=1)
    return engine.connector.requests[-1]


def test_an_ordinary_request_is_understood(request_made: Any) -> None:
    """A text completion must have no reason; neither may sampling settings, priority or structured output give one."""
    assert request_reason(request_made) is None
    request_made.priority = 5
    request_made.sampling_params.temperature = 0.7
    request_made.sampling_params.logprobs = 3
    request_made.session_id = "s"
    assert request_reason(request_made) is None


def sampling(name: str, value: Any) -> Callable[[Any], None]:
    """Set a sampling parameter."""
    return lambda request: setattr(request.sampling_params, name, value)


def field(name: str, value: Any) -> Callable[[Any], None]:
    """Set a field of the request."""
    return lambda request: setattr(request, name, value)


@pytest.mark.parametrize(
    "change",
    [
        field("mm_features", [object()]),
        field("prompt_embeds", object()),
        field("prompt_is_token_ids", [True]),
        field("prompt_token_ids", None),
        field("prompt_token_ids", []),
        field("pooling_params", object()),
        field("sampling_params", None),
        field("resumable", True),
        field("ec_transfer_params", {}),
        field("a_field_of_tomorrow", 1),
        field("a_field_of_tomorrow", ""),
        sampling("prompt_logprobs", 1),
        sampling("prompt_logprobs", 0),
        sampling("skip_reading_prefix_cache", True),
    ],
)
def test_a_request_with_anything_else_is_not(request_made: Any, change: Callable[[Any], None]) -> None:
    """Inputs that the contract does not describe, or that are not known, must make a request uncacheable."""
    change(request_made)
    assert request_reason(request_made)


def test_prompt_logprobs_are_refused_end_to_end(engine: Engine) -> None:
    """A request for prompt logprobs must reach the connector with a reason."""
    engine.ask(prompt_tokens(40), max_tokens=1, prompt_logprobs=1)
    assert (
        engine.connector.state.uncacheable_reason(engine.connector.requests[-1]) == "prompt logprobs need the prompt computed"
    )
