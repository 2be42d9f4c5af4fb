"""At the edges of the main path (decoded chunks, speculation, inputs not understood) bytes must be exact or not cached at all."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.connector_support import (
    UNCACHEABLE,
    FinishedPages,
    Watch,
    ask_all,
    assert_nothing_held,
    check_decoded_chunks,
    connected,
    forget_local,
    scheduled_asynchronously,
    watching,
)
from tests.vllm.engine import Engine, prompt_tokens
from tests.vllm.gateway import GatewayProcess

pytestmark = pytest.mark.timeout(600)

WAYS = ("plain", "scheduled ahead")


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    """Everything that moves in this module."""
    with watching() as made:
        yield made


@pytest.fixture(scope="module", params=WAYS)
def engine(gateway_process: GatewayProcess, watch: Watch, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine for each way to decode."""
    with scheduled_asynchronously(request.param == "scheduled ahead"), connected(gateway_process) as made:
        yield made


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """Another one for each test, and so a cache of its own."""
    return str(request.node.name)


@pytest.fixture
def finished(engine: Engine) -> Iterator[FinishedPages]:
    """Pages of whichever request ended last."""
    watcher = FinishedPages(engine)
    yield watcher
    watcher.close()


@pytest.mark.parametrize("total", [511, 512, 513, 600])
def test_decoded_chunks_are_stored_as_they_lie(
    engine: Engine, watch: Watch, gateway_process: GatewayProcess, finished: FinishedPages, salt: str, total: int
) -> None:
    """Chunks that decoding fills, the last step included, are stored under the tokens that were accepted, and restored bit for bit."""
    prompt = prompt_tokens(200, skip=500)
    check_decoded_chunks(engine, finished, prompt, total, salt)
    watch.assert_exact()
    assert_nothing_held(gateway_process)


def test_a_single_token_answer_is_stored(engine: Engine, salt: str) -> None:
    """A request that ends with its first token still leaves its prompt's chunks."""
    prompt = prompt_tokens(520, skip=4000)
    for expected in (0, 512):
        forget_local(engine)
        assert ask_all(engine, [prompt], salt=salt, max_tokens=1)[0].restored == expected


def test_below_one_chunk_the_gateway_is_not_asked(engine: Engine, gateway_process: GatewayProcess, salt: str) -> None:
    """Prompts of up to 256 tokens cost no round trip; 257 do."""
    before = binds(gateway_process)
    forget_local(engine)
    for length in (1, 100, 255):
        reply = ask_all(engine, [prompt_tokens(length, skip=700)], salt=salt, max_tokens=1)[0]
        assert (reply.restored, reply.kvgate["outcome"]) == (0, "short")
    assert binds(gateway_process) == before
    ask_all(engine, [prompt_tokens(257, skip=700)], salt=salt, max_tokens=1)
    assert binds(gateway_process) == before + 1


@pytest.mark.parametrize("how", ["prompt logprobs", "unserved variant", "encoder cache"])
def test_what_is_not_understood_is_not_cached(engine: Engine, gateway_process: GatewayProcess, salt: str, how: str) -> None:
    """A request with an input that the contract does not cover is computed, and neither looked up nor stored."""
    prompt = prompt_tokens(600, skip=1500)
    inputs: dict[str, dict[str, Any]] = {
        "prompt logprobs": {"prompt_logprobs": 1},
        "unserved variant": {"extra_args": {"kv_transfer_params": {"kvgate": 1}}},
        "encoder cache": UNCACHEABLE,
    }
    before = binds(gateway_process)
    forget_local(engine)
    reply = ask_all(engine, [prompt], salt=salt, **inputs[how])[0]
    assert reply.restored == 0
    assert reply.kvgate["outcome"].startswith("uncacheable: ")
    assert binds(gateway_process) == before
    forget_local(engine)
    assert ask_all(engine, [prompt], salt=salt)[0].restored == 0


def binds(process: GatewayProcess) -> int:
    """How many chunks were ever bound at the gateway, in requests: from its metrics page."""
    connection = http.client.HTTPConnection("kvgate")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(5)
    connection.sock.connect(str(process.state_dir / "admin.sock"))
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r'^kvgate_requests_total\{[^}]*message="Bind"[^}]*\} ([0-9.]+)', page, re.MULTILINE)
    assert found or "kvgate_requests_total" in page, page
    return int(sum(float(value) for value in found))
