"""An engine with processes of its own, as ``vllm serve`` has them: engine core and workers, driven by commands on standard input.

``EngineProcess`` is the test's side; run as a program this file is the engine's side. Replies come as files: a worker that prints, or
one that outlives its engine, can then neither garble nor hold up an answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.vllm.connector_support import BOUND, CONNECTOR, Reply
from tests.vllm.engine import ROOT, prompt_tokens, start_engine
from tests.vllm.gateway import GatewayProcess

START_S = 240.0
ANSWER_S = 120.0
STOP_S = 60.0
POLL_S = 0.05


class EngineProcess:
    """A running engine. ``options`` go to ``start_engine`` as JSON; ``environment`` over that of this process."""

    def __init__(self, folder: Path, options: dict[str, Any], environment: dict[str, str]) -> None:
        self._folder = folder
        self._count = 0
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(folder), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | environment,
        )
        self._reply(START_S)

    @property
    def log(self) -> str:
        """What its processes printed."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def ask(
        self, prompt: Sequence[int], *, max_tokens: int = 24, salt: str | None = None, adapter: Path | None = None
    ) -> Reply:
        """Generate greedily, with the logits of every token."""
        lora = None if adapter is None else str(adapter)
        told = self._command({"prompt": list(prompt), "max_tokens": max_tokens, "salt": salt, "adapter": lora})
        return Reply(tuple(told["tokens"]), tuple(tuple(top) for top in told["top"]), told["cached"], told["kvgate"])

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache, once no block is held for a save any more."""
        until = time.monotonic() + ANSWER_S
        while not self._command({"forget": True})["done"]:
            assert time.monotonic() < until, "saves did not settle"
            time.sleep(POLL_S)

    def close(self) -> None:
        """End it, as an operator does."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait(STOP_S)
            self._log.close()

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._reply(ANSWER_S)

    def _reply(self, within_s: float) -> dict[str, Any]:
        path = self._folder / f"reply-{self._count}.json"
        until = time.monotonic() + within_s
        while not path.exists():
            assert self._process.poll() is None, f"the engine ended:\n{self.log[-6000:]}"
            assert time.monotonic() < until, f"the engine did not answer:\n{self.log[-6000:]}"
            time.sleep(POLL_S)
        self._count += 1
        told: dict[str, Any] = json.loads(path.read_text())
        return told


@contextmanager
def engine_process(
    gateway: GatewayProcess, folder: Path, *, environment: dict[str, str] | None = None, **options: Any
) -> Iterator[EngineProcess]:
    """An engine with the real connector, registered at ``gateway``."""
    folder.mkdir()
    process = EngineProcess(
        folder, {"connector": CONNECTOR, "extra": {"endpoint": gateway.endpoint}} | options, environment or {}
    )
    try:
        yield process
    finally:
        process.close()


def reconnected(engine: EngineProcess, within_s: float = 30.0) -> None:
    """Wait until requests can be bound (each probe also lets the workers report their new registration)."""
    until = time.monotonic() + within_s
    probe = prompt_tokens(300, file=1)
    while engine.ask(probe, max_tokens=1, salt="probe").kvgate["outcome"] not in BOUND:
        assert time.monotonic() < until, "the engine did not come back to the gateway"


def _serve(folder: Path, options: dict[str, Any]) -> None:
    """The engine's side: one reply a line of standard input, until that ends."""
    if "model" in options:
        options["model"] = Path(options["model"])
    engine = start_engine(**options)
    _put(folder, 0, {"done": True})
    for number, line in enumerate(sys.stdin, 1):
        command = json.loads(line)
        if "forget" in command:
            _put(folder, number, {"done": bool(engine.llm.reset_prefix_cache())})
        else:
            _put(folder, number, asdict(_ask(engine.llm, command)))
    engine.close()


def _ask(llm: Any, command: dict[str, Any]) -> Reply:
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    lora = LoRARequest("an adapter", 1, command["adapter"]) if command["adapter"] else None
    prompt = {"prompt_token_ids": command["prompt"]} | ({"cache_salt": command["salt"]} if command["salt"] else {})
    parameters = SamplingParams(temperature=0, max_tokens=command["max_tokens"], ignore_eos=True, logprobs=2)
    output = llm.generate([prompt], parameters, lora_request=lora, use_tqdm=False)[0]
    completion = output.outputs[0]
    top = tuple(tuple(sorted((p.logprob for p in place.values()), reverse=True)[:2]) for place in completion.logprobs)
    reported = (output.kv_transfer_params or {}).get("kvgate", {})
    return Reply(tuple(completion.token_ids), top, output.num_cached_tokens or 0, reported)


def _put(folder: Path, number: int, reply: dict[str, Any]) -> None:
    fresh = folder / f"new-{number}"
    fresh.write_text(json.dumps(reply))
    fresh.rename(folder / f"reply-{number}.json")


if __name__ == "__main__":
    # vLLM starts its processes by importing this file again: only this one serves.
    _serve(Path(sys.argv[1]), json.loads(sys.argv[2]))
