"""Variant requests must be served and fail in vLLM's OpenAI server as in the engine, though its core is a process of its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from demo.openai_server import OpenAIServer
from kvgate.client.sdk import Gateway, NotStored
from tests.vllm.engine import prompt_tokens
from tests.vllm.gateway import GatewayProcess, wait_until
from tests.vllm.variant_support import TAIL, TOKENS, stranger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IDS = prompt_tokens(TOKENS, file=0)
OTHER = prompt_tokens(TOKENS, file=1)


@pytest.fixture(scope="module")
def server(gateway_process: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """A server that is registered there."""
    made = OpenAIServer(tmp_path_factory.mktemp("server"), gateway_process.endpoint)
    made.start()
    yield made
    made.stop()


def complete(server: OpenAIServer, prompt: list[int], **more: Any) -> tuple[int, str]:
    """HTTP status and body of one greedy completion."""
    body = {
        "model": "docs-llama-7m",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
    } | more
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def refused() -> int:
    """The status of a variant request that can't be served."""
    from vllm import exceptions

    return 409 if hasattr(exceptions, "GracefulHTTPError") else 422


def logprobs(answer: dict[str, Any]) -> list[float]:
    """The log probability of each token of an answer: two caches that differ show here before they show in the text."""
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


def test_a_capability_serves_or_the_client_is_told_why_not(server: OpenAIServer, gateway_process: GatewayProcess) -> None:
    """The right capability gives the artifact's text; a wrong one an error and the reason, in a stream an event; others are served."""
    assert complete(server, [*OTHER, 5])[0] == 200

    def stored() -> bool:
        try:
            sdk.fetch(OTHER)
        except NotStored:
            return False
        return True

    with Gateway(gateway_process.endpoint) as sdk:
        wait_until(stored, 20, "the prompt was not stored")
        capability = sdk.publish(stranger(sdk, IDS, OTHER))
    prompt = [*capability.token_ids, *TAIL]
    status, text = complete(server, prompt, kv_transfer_params=capability.kv_transfer_params)
    assert status == 200
    told = json.loads(text)
    assert told["kv_transfer_params"]["kvgate"]["restored_tokens"] == TOKENS
    status, plain = complete(server, prompt)
    assert status == 200
    assert logprobs(json.loads(plain)) != logprobs(told)

    altered = bytearray(capability.data)
    altered[-1] ^= 1
    reason = "kvgate: the variant can't be served: its capability is not good here. Send the full prompt instead."
    status, text = complete(server, prompt, kv_transfer_params={"kvgate_variant": altered.hex()})
    assert status == refused(), text
    assert json.loads(text)["error"]["message"] == reason
    status, events = complete(server, prompt, kv_transfer_params={"kvgate_variant": altered.hex()}, stream=True)
    assert reason in events
    assert '"text"' not in events
    status, text = complete(server, prompt, kv_transfer_params=capability.kv_transfer_params)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, told["choices"][0]["text"])
    gateway_process.kill()
    status, text = complete(server, prompt, kv_transfer_params=capability.kv_transfer_params)
    assert (status, json.loads(text)["error"]["message"].count("there is no gateway")) == (refused(), 1)
    assert complete(server, [*OTHER, 6])[0] == 200
