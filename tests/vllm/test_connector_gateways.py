"""Engines and gateways that do not fit, or come late. Each test has both of its own: vLLM has one worker connector a process."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys

import pytest

from kvgate_vllm.state import EngineState
from tests.vllm.connector_support import (
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    connected,
    forget_local,
    reconnect,
)
from tests.vllm.engine import EnginePool, prompt_tokens, running
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


_HOLDER = """
import asyncio, sys
from pathlib import Path
from tests.daemon import makers
from tests.daemon.engine import Engine

async def main():
    report = makers.report(engine=bytes.fromhex(sys.argv[2]), representation=makers.representation(chunk_tokens=256))
    engine = Engine(Path(sys.argv[1]), report, None)
    await engine.join(0)
    print("registered", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.workers[0].close()

asyncio.run(main())
"""


@pytest.mark.slow
def test_engine_id_of_another_live_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with the id of a live one computes all, says why and what mends it, and caches soon after that one's end."""
    said: list[str] = []
    plain = EngineState.log_once

    def log_once(self: EngineState, reason: str) -> None:
        said.append(reason)
        plain(self, reason)

    # Not caplog: vLLM sets all handlers below its own logger back when an engine starts.
    monkeypatch.setattr(EngineState, "log_once", log_once)
    name = hashlib.sha256(b"kvgate engine " + b"fixed").digest()[:16].hex()
    with gateway() as process:
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, process.endpoint, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "registered\n"
            config = {
                "kv_connector": "KVGateConnector",
                "kv_connector_module_path": "kvgate_vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": "fixed",
                "kv_connector_extra_config": {"endpoint": process.endpoint, "register_ms": 1500},
            }
            with running(connector=None, kv_transfer_config=config) as engine:
                reply = ask_all(engine, [prompt_tokens(300)])[0]
                assert (reply.restored, reply.kvgate["outcome"]) == (0, "no gateway")
                (refusal,) = {reason for reason in said if "another running process" in reason}
                assert "engine_id of its own" in refusal
                holder.kill()
                holder.wait()
                reconnect(engine)
                for expected in (0, 256):
                    forget_local(engine)
                    assert ask_all(engine, [prompt_tokens(300)])[0].restored == expected
        finally:
            holder.kill()
            holder.wait()
