"""Engines and gateways that do not fit, or come late. Each test has both of its own: vLLM has one worker connector a process."""

from __future__ import annotations

import logging

import pytest

from tests.vllm.connector_support import (
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    connected,
    forget_local,
    reconnect,
)
from tests.vllm.engine import EnginePool, prompt_tokens
from tests.vllm.gateway import gateway

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def no_other_engine(engines: EnginePool) -> None:
    """Close the engine that other tests share."""
    engines.close()


def test_no_gateway_at_all() -> None:
    """An engine whose gateway was never there serves as if it had no connector, and caches once the gateway comes."""
    prompt = prompt_tokens(600)
    with gateway() as process:
        process.kill()
        with connected(process, extra={"register_ms": 50}) as engine:
            alone = ask_all(engine, [prompt], salt="late")[0]
            assert (alone.restored, alone.kvgate["outcome"]) == (0, "no gateway")
            process.start()
            reconnect(engine)
            for expected in (0, 512):
                forget_local(engine)
                reply = ask_all(engine, [prompt], salt="late")[0]
                assert reply.restored == expected
                assert_same_or_tie(reply, alone, "late gateway")
            assert_nothing_held(process)


def test_blocks_that_do_not_divide_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """An engine whose block size does not divide the gateway's chunk caches nothing, and says so by name, once."""
    caplog.set_level(logging.WARNING, logger="vllm.kvgate")
    with gateway(chunk_tokens="48") as process, connected(process) as engine:
        for _ in range(2):
            forget_local(engine)
            reply = ask_all(engine, [prompt_tokens(300)])[0]
            assert (reply.restored, reply.kvgate["outcome"]) == (0, "no gateway")
        said = [record for record in caplog.records if "do not divide" in record.getMessage()]
        assert len(said) == 1
        assert "32" in said[0].getMessage()
        assert "48" in said[0].getMessage()
        assert process.status()["registrations"] == []


def test_other_chunk_sizes() -> None:
    """Chunks of the gateway's size are promised, whatever that is."""
    with gateway(chunk_tokens="64") as process, connected(process) as engine:
        for expected in (0, 256):
            forget_local(engine)
            assert ask_all(engine, [prompt_tokens(300)])[0].restored == expected
        assert_nothing_held(process)
