"""The same through vLLM's OpenAI server and curl, with two cache salts. Run by `make demo-server`.

One salt stores; server, gateway and LMCache are restarted; the same salt is restored, the other one is a miss.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.gateway import MODEL, DemoError, Gateway, in_folder, vllm_environment

START_S = 180.0
ANSWER_S = 120
TEXT = (MODEL / "held-out" / "python-docs-1.txt").read_text(encoding="utf-8")[1000:5000]


class OpenAIServer:
    """vLLM's OpenAI-compatible server with kvgate's connector, on a free local port."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._log = folder / "server.log"
        self._endpoint = endpoint
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        transfer = {
            "kv_connector": "KVGateConnector",
            "kv_connector_module_path": "kvgate_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": self._endpoint},
        }
        flags = {
            "--model": str(MODEL),
            "--served-model-name": "docs-llama-7m",
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--dtype": "bfloat16",
            "--max-model-len": "2048",
            "--block-size": "32",
            "--kv-transfer-config": json.dumps(transfer),
        }
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--enforce-eager",
            "--enable-prompt-tokens-details",
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *(part for pair in flags.items() for part in pair)],
                env=vllm_environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + START_S
        while self._curl("/health", None, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                raise DemoError(f"the server did not start; its log:\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop it and all its processes."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._process = None

    def complete(self, salt: str) -> dict[str, Any]:
        """One greedy completion."""
        body = {
            "model": "docs-llama-7m",
            "prompt": TEXT,
            "max_tokens": 24,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        answer: dict[str, Any] = json.loads(self._curl("/v1/completions", body).stdout)
        if "choices" not in answer:
            raise DemoError(f"the server refused the request: {answer}")
        return answer

    def _curl(self, path: str, body: dict[str, Any] | None, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["curl", "--silent", "--fail-with-body", "--max-time", str(ANSWER_S), self.url + path]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S + 10, check=check)


def report(what: str, answer: dict[str, Any]) -> tuple[int, str]:
    """Print one line; returns tokens restored and the text."""
    usage = answer["usage"]
    restored = (answer.get("kv_transfer_params") or {}).get("kvgate", {}).get("restored_tokens", 0)
    text = answer["choices"][0]["text"]
    print(f"  {what:<34} prompt {usage['prompt_tokens']:>5}   restored {restored:>5}   {text[:50]!r}", flush=True)
    return restored, text


def run(folder: Path) -> bool:
    """All of it, in ``folder``: restored for its own salt, a miss for the other."""
    gateway = Gateway(folder)
    server = OpenAIServer(folder, gateway.endpoint)
    try:
        print("Start gateway, LMCache and vLLM's OpenAI server", flush=True)
        gateway.start()
        server.start()
        first = report("salt one, first time", server.complete("salt-one"))
        server.stop()
        gateway.stop()
        print("Stop all three, start them again", flush=True)
        gateway.start()
        server.start()
        again = report("salt one, after the restart", server.complete("salt-one"))
        other = report("salt two, after the restart", server.complete("salt-two"))
    finally:
        server.stop()
        gateway.stop()
    return first[0] == 0 and again[0] >= 256 and again[1] == first[1] and other == (0, first[1])


if __name__ == "__main__":
    raise SystemExit(in_folder(run))
