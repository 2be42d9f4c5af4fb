"""Artifacts for the tests of variants, and asking with a capability."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.client.artifacts import Artifact, VariantCapability
from kvgate.client.sdk import Gateway
from tests.vllm.connector_support import Reply, settle
from tests.vllm.engine import Engine, prompt_tokens

TOKENS = 512
"""Tokens of an artifact here: two chunks."""
TAIL = tuple(prompt_tokens(TOKENS + 4, file=1)[TOKENS:])
"""What the artifact's text goes on with."""


@dataclass(frozen=True)
class Outcome:
    """One request's end. ``error``: what its client is told; None: it was served."""

    reply: Reply
    finish: str

    @property
    def error(self) -> str | None:
        """The message, if it failed."""
        return self.reply.kvgate.get("error")


def ask(
    engine: Engine,
    prompts: Sequence[tuple[Sequence[int], dict[str, Any] | None]],
    *,
    max_tokens: int = 8,
    salt: str | None = None,
    **sampling: Any,
) -> list[Outcome]:
    """Run prompts at once, each with its own kv_transfer_params; then let everything settle."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {}) for prompt, _ in prompts]
    parameters = [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=2,
            extra_args={"kv_transfer_params": kv} if kv else None,
            **sampling,
        )
        for _, kv in prompts
    ]
    outputs = engine.llm.generate(requests, parameters, use_tqdm=False)
    settle(engine)
    return [_outcome(output) for output in outputs]


def _outcome(output: Any) -> Outcome:
    completion = output.outputs[0]
    places = completion.logprobs or ()
    top = tuple(tuple(sorted((p.logprob for p in place.values()), reverse=True)[:2]) for place in places)
    told = (output.kv_transfer_params or {}).get("kvgate", {})
    reply = Reply(tuple(completion.token_ids), top, output.num_cached_tokens or 0, told)
    return Outcome(reply, str(completion.finish_reason))


def with_capability(capability: VariantCapability, tail: Sequence[int] = TAIL) -> tuple[list[int], dict[str, Any]]:
    """A prompt that goes on with ``tail`` after the artifact, and its kv_transfer_params."""
    return [*capability.token_ids, *tail], dict(capability.kv_transfer_params)


def stranger(sdk: Gateway, ids: Sequence[int], other: Sequence[int], *, salt: str | None = None, **manifest: Any) -> Artifact:
    """An artifact whose KV is that of ``other`` (stored already) under the logical ids ``ids``: its text does not follow from them."""
    held = sdk.fetch(other, salt=salt)
    settings = {"algorithm": "stranger", "version": "1", "scope": "request"} | manifest
    return Artifact(held.keys, held.values, tuple(ids), held.source.manifest(**settings), held.source)


def add_input(engine: Engine, prompt: Sequence[int], kv: dict[str, Any] | None) -> None:
    """Hand the engine core the next input of one streaming session."""
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0,
        max_tokens=1,
        extra_args={"kv_transfer_params": kv} if kv else None,
        output_kind=RequestOutputKind.DELTA,
    )
    asked = engine.llm.llm_engine.input_processor.process_inputs(
        request_id="session",
        prompt={"prompt_token_ids": list(prompt)},
        params=parameters,
        resumable=True,
        supported_tasks=("generate",),
    )
    engine.core.add_request(*engine.core.preprocess_add_request(asked))


def input_outputs(engine: Engine, count: int) -> list[Any]:
    """Step the engine core until ``count`` outputs have come."""
    found: list[Any] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, "no output came"
        for of_client in (engine.core.step_fn()[0] or {}).values():
            found += of_client.outputs
    return found
