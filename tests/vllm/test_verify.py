"""``kvgate verify --vllm`` must pass at vLLM's own OpenAI server, before and after a restart of that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from demo.openai_server import OpenAIServer
from tests.vllm.engine import EnginePool
from tests.vllm.gateway import KVGATE, GatewayProcess, gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = ("*the model", "no cache salt", "*through vLLM*", "same request", "SnapKV*", "access.salt")


def verify(process: GatewayProcess, server: OpenAIServer, *words: str) -> dict[str, Any]:
    """The report of one call of the command."""
    folders = ["--state-dir", str(process.state_dir), "--data-dir", str(process.root / "d")]
    only = [part for row in ROWS for part in ("--only", row)]
    command = [str(KVGATE), "verify", *folders, "--vllm", server.url, "--json", *only, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_vllm_tells_requests_apart(engines: EnginePool, tmp_path: Path) -> None:
    """Salts, tokens and variants are told apart in vLLM's own cache and through kvgate; what was planted hits again after a restart."""
    engines.close()
    with gateway() as process:
        server = OpenAIServer(tmp_path, process.endpoint)
        server.start()
        try:
            verify(process, server, "--write")
            first = verify(process, server, "--check")
            server.stop()
            server.start()
            second = verify(process, server, "--check")
            verify(process, server, "--clean")
        finally:
            server.stop()
    for report in (first, second):
        assert report["failed"] == 0
        rows = {row["row"] for row in report["rows"] if "vllm" in row["tiers"]}
        assert {
            "same request to the model",
            "another cache salt, the model",
            "no cache salt",
            "SnapKV through vLLM, by its capability",
            "SnapKV through vLLM, as an ordinary prompt of its retained tokens",
            "an altered capability through vLLM",
        } <= rows
