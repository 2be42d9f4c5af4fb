"""A client of a real vLLM must read in its reply why its request missed, and the operator the same with ``kvgate explain``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.connector_support import ask_all, connected, forget_local
from tests.vllm.engine import KJV, LORA, PYTHON, Engine, prompt_tokens
from tests.vllm.gateway import KVGATE, START_S, GatewayProcess

pytestmark = pytest.mark.timeout(600)

PROMPT = prompt_tokens(600)
TOKENS = 96
"""Enough steps for the explanation to arrive before the end."""


@pytest.fixture(scope="module")
def engine(gateway_process: GatewayProcess) -> Iterator[Engine]:
    """One engine that takes adapters."""
    with connected(gateway_process, **LORA) as made:
        yield made


def ask(engine: Engine, prompt: list[int], *, lora: Any = None, salt: str) -> dict[str, Any]:
    """The connector's part of one reply, with vLLM's own prefix cache empty before."""
    forget_local(engine)
    return ask_all(engine, [prompt], lora=lora, salt=salt, max_tokens=TOKENS)[0].kvgate


def adapter(path: Any, number: int) -> Any:
    """A request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {number}", number, str(path))


def explained(process: GatewayProcess, *arguments: str) -> list[dict[str, Any]]:
    """What ``kvgate explain --json`` prints."""
    command = [str(KVGATE), "explain", *arguments, "--json", f"--state-dir={process.state_dir}"]
    done = subprocess.run(command, capture_output=True, timeout=START_S, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_adapter_miss_arrives_in_the_reply(engine: Engine, gateway_process: GatewayProcess) -> None:
    """After the base, and after another adapter, stored a prompt, a request with an adapter is told so."""
    first = ask(engine, PROMPT, salt="adapters")
    assert first["miss"] == ["absent"]
    for lora in (adapter(KJV, 1), adapter(PYTHON, 2)):
        told = ask(engine, PROMPT, lora=lora, salt="adapters")
        assert (told["restored_tokens"], told["outcome"], told["miss"]) == (0, "miss", ["adapter"])
        (seen,) = explained(gateway_process, told["reference"])
        assert seen["reasons"] == ["adapter"]
        differing = [name for name in seen["asked"] if seen["asked"][name] != seen["nearest"][name]]
        assert differing == ["adapter"]
    hit = ask(engine, PROMPT, salt="adapters")
    assert (hit["restored_tokens"], hit["outcome"]) == (512, "hit")
    assert "miss" not in hit


def test_other_salt_is_absent_to_the_client(engine: Engine, gateway_process: GatewayProcess) -> None:
    """The reply says "absent" for what another salt stored, whatever the adapter; the operator sees the scope."""
    assert ask(engine, PROMPT, salt="one")["miss"] == ["absent"]
    told = ask(engine, PROMPT, salt="two")
    assert told["miss"] == ["absent"]
    (latest,) = explained(gateway_process, "--last", "1")
    assert (latest["reference"], latest["reasons"], latest["told"]) == (told["reference"], ["scope"], ["absent"])


def test_rest_after_a_hit_is_explained(engine: Engine) -> None:
    """A prompt whose beginning hits tells why the rest did not."""
    changed = PROMPT[:300] + prompt_tokens(600, skip=5000)[:400]
    assert ask(engine, PROMPT, salt="rest")["restored_tokens"] == 0
    told = ask(engine, changed, salt="rest")
    assert (told["restored_tokens"], told["outcome"], told["miss"]) == (256, "hit", ["absent"])


def test_what_the_engine_holds_itself_is_told(engine: Engine) -> None:
    """The same prompt once more: vLLM's own prefix cache has all of it, and the reply says that in place of a miss."""
    assert ask(engine, PROMPT, salt="held")["outcome"] == "miss"
    reply = ask_all(engine, [PROMPT], salt="held", max_tokens=1)[0]
    assert reply.cached >= 512
    assert reply.kvgate == {"restored_tokens": 0, "outcome": "held by the engine"}


def test_short_prompt_is_below_one_chunk(engine: Engine, gateway_process: GatewayProcess) -> None:
    """Below one chunk nobody is asked, and the reply says so."""
    before = explained(gateway_process, "--last", "99999")
    assert ask(engine, PROMPT[:100], salt="short") == {
        "restored_tokens": 0,
        "outcome": "short",
        "miss": ["below one chunk"],
    }
    assert [one["reference"] for one in explained(gateway_process, "--last", "99999")] == [one["reference"] for one in before]
