"""The same with the engine core and two workers in processes of their own: each worker reports, and each hears of an update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.vllm.engine import KJV, LORA, MODEL, PYTHON, ROOT, Engine, prompt_tokens, put_adapter, start_engine

PROMPT = prompt_tokens(400)


def scenario(folder: Path) -> None:
    """Runs in a process of its own; writes what it saw to ``result.json``."""
    from vllm.lora.request import LoRARequest

    engine = start_engine(tensor_parallel_size=2, extra={"events_dir": str(folder)}, **LORA)
    adapter = folder / "adapter"
    lora = LoRARequest("a", 1, str(adapter))
    put_adapter(KJV, adapter)
    seen: dict[str, Any] = {"bible": [ask(engine, lora), ask(engine, lora)]}
    put_adapter(PYTHON, adapter)
    seen["python"] = [ask(engine, lora), ask(engine, LoRARequest("p", 2, str(PYTHON)))]
    seen["loras"] = sorted(engine.llm.llm_engine.list_loras())
    engine.llm.collective_rpc("check_health")
    seen["base"] = [ask(engine), ask(engine)]
    engine.llm.collective_rpc(shrink)
    seen["shrunk"] = [ask(engine)]
    engine.llm.llm_engine.reset_prefix_cache()
    seen["shrunk"].append(ask(engine))
    engine.llm.collective_rpc("reload_weights")
    seen["reloaded"] = [ask(engine), ask(engine)]
    (folder / "result.json").write_text(json.dumps(seen))
    engine.close()


def shrink(worker: Any) -> None:
    """Write weights in place."""
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if "layernorm" in name:
            parameter.data.mul_(0.6)


def ask(engine: Engine, lora: Any = None) -> list[Any]:
    """Tokens and how many were cached."""
    answer = engine.ask(PROMPT, lora)
    return [list(answer.tokens), answer.cached]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the scenario ran."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    # A file with a guard: vLLM starts its processes by importing it again.
    lines = ["import sys", "from pathlib import Path", "from tests.vllm.test_loading_processes import scenario"]
    lines += ["if __name__ == '__main__':", "    scenario(Path(sys.argv[1]))", ""]
    (folder / "main.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, str(folder / "main.py"), str(folder)],
        env=environment,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def events(folder: Path, role: str, kind: str) -> list[list[dict[str, Any]]]:
    """What each process of ``role`` was told, in order."""
    found = []
    for path in sorted(folder.glob(f"{role}-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([line for line in lines if line["kind"] == kind])
    return found


pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def test_both_workers_report_the_same_files(ran: Path) -> None:
    """Each worker must have hashed the weights it opened, and all must agree."""
    reports = events(ran, "worker", "WeightsReport")
    expected = {"reason": None, "files": [f"weights {blake3((MODEL / 'model.safetensors').read_bytes()).hexdigest()}"]}
    assert len(reports) == 2
    for report in reports:
        assert {name: report[0][name] for name in expected} == expected


def test_both_workers_confirm_each_adapter(ran: Path) -> None:
    """Each worker must report the files of both adapters, as it opened them."""
    loaded = events(ran, "worker", "LoadedAdapter")
    assert len(loaded) == 2
    for adapters in loaded:
        assert all(adapter["reason"] is None for adapter in adapters)
        found = [adapter["files"] for adapter in adapters]
        for source in (KJV, PYTHON):
            weights = f"adapter_weights {blake3((source / 'adapter_model.safetensors').read_bytes()).hexdigest()}"
            assert any(weights in files for files in found)


def test_an_update_reaches_core_and_workers(ran: Path) -> None:
    """A call that only the engine core sees must revoke in every process; a reload must bring the workers' reports back."""
    for role, count, last in (("worker", 2, None), ("scheduler", 1, "reason")):
        reports = events(ran, role, "WeightsReport")
        assert len(reports) == count
        for report in reports:
            reasons = [event["reason"] for event in report]
            assert "a call that may write weights was made on the workers" in reasons
            assert (reasons[-1] is None) == (last is None)


def test_the_texts_are_right_and_nothing_stale_is_served(ran: Path) -> None:
    """Through the reload of an adapter and an update of the weights, each answer must be that of what was loaded."""
    seen = json.loads((ran / "result.json").read_text())
    assert [cached for _, cached in seen["bible"]] == [0, 384]
    assert [cached for _, cached in seen["python"]] == [0, 0]
    assert seen["python"][0][0] == seen["python"][1][0] != seen["bible"][0][0]
    assert seen["loras"] == [1, 2]
    assert [cached for _, cached in seen["base"]] == [0, 384]
    assert [cached for _, cached in seen["shrunk"]] == [0, 0]
    assert seen["shrunk"][0][0] == seen["shrunk"][1][0] != seen["base"][0][0]
    assert [cached for _, cached in seen["reloaded"]] == [0, 384]
    assert seen["reloaded"][0][0] == seen["base"][0][0]
