"""One vLLM engine in one process: reads a job as JSON from a file, runs its steps, writes the results as JSON. Used by main_path.py."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """argv: job file, result file."""
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    options: dict[str, Any] = {
        "model": job["model"],
        "served_model_name": "docs-llama-7m",
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "seed": 0,
        "block_size": 32,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 2,
        "hf_overrides": job["hf_overrides"],
    }
    if job["endpoint"]:
        options["kv_transfer_config"] = {
            "kv_connector": "KVGateConnector",
            "kv_connector_module_path": "kvgate_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": job["endpoint"]},
        }
    llm = LLM(**options)
    prompt = llm.get_tokenizer().encode(job["text"])[: job["prompt_tokens"]]
    # First another prompt of the same length: the first steps of an engine are slow for reasons of its own.
    _generate(llm, prompt[::-1], 2, None, None)
    results = [_step(llm, prompt, step) for step in job["steps"]]
    Path(sys.argv[2]).write_text(json.dumps(results))


def _step(llm: Any, prompt: list[int], step: dict[str, Any]) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    adapter = None
    if step.get("adapter"):
        path = Path(step["adapter_path"])
        path.mkdir(parents=True, exist_ok=True)
        for file in Path(step["adapter"]).iterdir():
            shutil.copy(file, path / file.name)
        adapter = LoRARequest("tuned", 1, str(path), load_inplace=bool(step.get("reload")))
    return _generate(llm, prompt, step["max_tokens"], adapter, step.get("salt"))


def _generate(llm: Any, prompt: list[int], max_tokens: int, adapter: Any, salt: str | None) -> dict[str, Any]:
    from vllm import SamplingParams

    request: dict[str, Any] = {"prompt_token_ids": prompt}
    if salt:
        request["cache_salt"] = salt
    _generate.count += 1  # type: ignore[attr-defined]
    engine = llm.llm_engine
    started = time.perf_counter()
    engine.add_request(
        str(_generate.count),  # type: ignore[attr-defined]
        request,
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        lora_request=adapter,
    )
    first_s, output = 0.0, None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if not outputs:
            # As vLLM's engine process does on an idle step; spinning would keep the interpreter from the connector's threads.
            time.sleep(0.001)
        for output in outputs:
            if not first_s and output.outputs[0].token_ids:
                first_s = time.perf_counter() - started
    if output is None:
        raise RuntimeError("the engine finished without an answer")
    report = (output.kv_transfer_params or {}).get("kvgate", {})
    return {
        "tokens": len(prompt),
        "restored": report.get("restored_tokens", 0),
        "reference": report.get("reference", ""),
        "cached": output.num_cached_tokens,
        "ttft_ms": first_s * 1000,
        "text": output.outputs[0].text,
        "token_ids": list(output.outputs[0].token_ids),
    }


_generate.count = 0  # type: ignore[attr-defined]

if __name__ == "__main__":
    main()
