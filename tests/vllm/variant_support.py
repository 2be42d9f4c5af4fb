"""Artifacts for the tests of variants, asking with a capability, and what must come of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from demo.reference import ReferenceModel
from kvgate.client.artifacts import Artifact, VariantCapability
from kvgate.client.sdk import Gateway
from tests.vllm.connector_support import CHUNK, TIE, Reply, settle
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


def add_variant(engine: Engine, prompt: Sequence[int], kv: dict[str, Any], max_tokens: int = 60) -> Any:
    """Hand a request to the engine core without running it; returns vLLM's ``Request``."""
    from vllm import SamplingParams

    known = set(engine.core.scheduler.requests)
    parameters = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, extra_args={"kv_transfer_params": kv}
    )
    engine.llm.llm_engine.add_request("variant", {"prompt_token_ids": list(prompt)}, parameters)
    (name,) = set(engine.core.scheduler.requests) - known
    return engine.core.scheduler.requests[name]


def run(engine: Engine, until: Any) -> list[Any]:
    """Step until ``until()``; what came out."""
    outputs, deadline = [], time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline, "the engine did not get there"
        outputs += engine.llm.llm_engine.step()
    return outputs


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


def assert_decoded_from(artifact: Artifact, outcome: Outcome, reference: ReferenceModel, tail: Sequence[int] = TAIL) -> None:
    """The text must be what another implementation decodes from the artifact as it was before it was stored, but for ties."""
    assert outcome.finish == "length", outcome.error
    wanted = reference.decode(
        torch.from_numpy(artifact.keys),
        torch.from_numpy(artifact.values),
        tail,
        len(outcome.reply.tokens),
        outcome.reply.tokens,
    )
    for at, (token, expected) in enumerate(zip(outcome.reply.tokens, wanted.tokens, strict=True)):
        assert token == expected or wanted.gaps[at] <= TIE, f"token {at}: gap {wanted.gaps[at]}"


def assert_failed(engine: Engine, outcome: Outcome, reason: str) -> None:
    """It ended with this reason, gave no token, and took nothing from a cache."""
    assert outcome.finish == "error"
    assert outcome.reply.tokens == ()
    assert outcome.error == f"kvgate: the variant can't be served: {reason}. Send the full prompt instead."
    assert outcome.reply.kvgate["outcome"] == "variant failed"
    assert not engine.core.scheduler.has_requests()


def wrong_requests(capability: VariantCapability) -> list[tuple[str, list[int], dict[str, Any], str, str | None]]:
    """Requests that must fail: name, prompt, kv_transfer_params, reason, salt."""
    prompt, kv = with_capability(capability)
    text = capability.hex

    def flipped(at: int) -> dict[str, Any]:
        data = bytearray(capability.data)
        data[at] ^= 1
        return {"kvgate_variant": data.hex()}

    not_good, malformed = "its capability is not good here", "its capability is malformed"
    other_ids = [*prompt[:10], (prompt[10] + 1) % 4000, *prompt[11:]]
    cases: list[tuple[str, list[int], Any, str, str | None]] = [
        ("no hex", prompt, "z" * len(text), malformed, None),
        ("short", prompt, text[:-2], malformed, None),
        ("long", prompt, text + "00", malformed, None),
        ("empty", prompt, "", malformed, None),
        ("none", prompt, None, malformed, None),
        ("a number", prompt, 7, malformed, None),
        ("bytes in a list", prompt, [text], malformed, None),
        ("zeros", prompt, "00" * len(capability.data), malformed, None),
        ("too short a prompt", prompt[:TOKENS], text, "the prompt must go on after the variant's tokens", None),
        ("half the prompt", prompt[:CHUNK], text, "the prompt must go on after the variant's tokens", None),
        ("another token", other_ids, text, "the prompt does not begin with the variant's tokens", None),
        (
            "another salt",
            prompt,
            text,
            "its capability is of another model, adapter, salt or stored form",
            "another",
        ),
    ]
    named = [(name, ids, {"kvgate_variant": value}, reason, salt) for name, ids, value, reason, salt in cases]
    # Scope, expiry, manifest, scope key, root, end and MAC, one bit each; the first two bytes make another form of it.
    for at in (1, 6, 14, 50, 80, 110, 142, -1):
        reason = malformed if at == 1 and capability.data[1] else not_good
        named.append((f"bit of byte {at}", prompt, flipped(at), reason, None))
    unknown = "the request asks for something that this version of kvgate does not know"
    named.append(("an unknown wish", prompt, {"kvgate_cartridge": text}, unknown, None))
    named.append(("an unknown wish beside", prompt, kv | {"kvgate_variants": text}, unknown, None))
    return named
