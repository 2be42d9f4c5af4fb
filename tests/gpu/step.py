"""One engine: starts it as a job says, takes the job's steps, and writes after each what came of it. Runs where a GPU is.

A job: ``model`` (folder), ``options`` (for ``vllm.LLM``), ``connector`` (``kv_connector_extra_config``, or null for none), ``steps``,
and ``result`` (the file written anew after each step: ``ready`` and one entry a step). A step is a map with one of

    ask      token ids; with max_tokens, salt, adapter {name, source, path, reload}, pages (hash those of the whole chunks), settle
             (false: go on while stores are under way), skip_lookup (compute it all: nothing is looked up)
    forget   empty vLLM's own prefix cache
    describe what the engine is
    wait_s   do nothing so long
    mark     write this file, so that the driver knows how far the job is
    await    wait until the driver has written this file
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 256
SETTLE_S = 60.0
AWAIT_S = 90.0


def run_job(job: dict[str, Any]) -> None:
    """Start the engine and take all steps; raises what the engine raises."""
    from vllm import LLM

    began = time.monotonic()
    options = {
        "model": job["model"],
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "seed": 0,
        "gpu_memory_utilization": 0.05,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
    } | job["options"]
    if job["connector"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KVGateConnector",
            "kv_connector_module_path": "kvgate_vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": job["connector"],
        }
    told: dict[str, Any] = {"ready": False, "steps": []}
    engine = Engine(LLM(**options))
    told |= {"ready": True, "init_s": round(time.monotonic() - began, 1)}
    _write(job["result"], told)
    for step in job["steps"]:
        told["steps"].append(engine.take(step))
        _write(job["result"], told)
    engine.close()


def _write(name: str, told: dict[str, Any]) -> None:
    path = Path(name)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(told))
    partial.replace(path)


class Engine:
    """A running engine, in this process or with processes of its own."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._count = 0
        # Workers in processes of their own spin for as long as they are asked.
        self._pause_s = 0.0002 if self.core is None or hasattr(self.core.model_executor, "driver_worker") else 0.002

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore`` where it is in this process, else None."""
        return getattr(self._llm.llm_engine.engine_core, "engine_core", None)

    @property
    def runner(self) -> Any:
        """The model runner of the one worker."""
        return _runner_of(self.core.model_executor.driver_worker)

    def _on_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(worker, *arguments)`` gives on each worker, by rank; in this process or in theirs."""
        executor = self.core.model_executor
        if hasattr(executor, "driver_worker"):
            return [function(executor.driver_worker, *arguments)]
        found: list[Any] = executor.collective_rpc(function, args=arguments)
        return found

    def take(self, step: dict[str, Any]) -> dict[str, Any]:
        """One step."""
        if "ask" in step:
            return self._ask(step)
        if "forget" in step:
            return {"done": self._forget()}
        if "describe" in step:
            return self._describe()
        if "wait_s" in step:
            time.sleep(step["wait_s"])
            return {}
        if "await" in step:
            until = time.monotonic() + AWAIT_S
            while not Path(step["await"]).exists():
                if time.monotonic() > until:
                    raise RuntimeError("the driver did not go on")
                time.sleep(0.005)
            return {}
        Path(step["mark"]).write_text("here")
        return {}

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _ask(self, step: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        request: dict[str, Any] = {"prompt_token_ids": step["ask"]}
        if step.get("salt"):
            request["cache_salt"] = step["salt"]
        self._count += 1
        parameters = SamplingParams(
            temperature=0,
            max_tokens=step.get("max_tokens", 16),
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            skip_reading_prefix_cache=True if step.get("skip_lookup") else None,
        )
        engine, output, first_s = self._llm.llm_engine, None, 0.0
        with self._pages(step) as pages:
            began = time.perf_counter()
            engine.add_request(str(self._count), request, parameters, lora_request=self._adapter(step.get("adapter")))
            while engine.has_unfinished_requests():
                outputs = engine.step()
                if not outputs:
                    time.sleep(self._pause_s)  # else this loop keeps the interpreter from the connector's threads
                for output in outputs:
                    if not first_s and output.outputs[0].token_ids:
                        first_s = time.perf_counter() - began
            if step.get("settle", True):
                self._settle()
        if output is None:
            raise RuntimeError("the engine finished without an answer")
        completion = output.outputs[0]
        tops = [sorted((entry.logprob for entry in place.values()), reverse=True)[:2] for place in completion.logprobs]
        report = (output.kv_transfer_params or {}).get("kvgate", {})
        return {
            "tokens": list(completion.token_ids),
            "gaps": [round(best - second, 4) for best, second in tops],
            "prompt_tokens": len(step["ask"]),
            "cached": output.num_cached_tokens or 0,
            "restored": report.get("restored_tokens", 0),
            "report": report,
            "ttft_ms": round(first_s * 1000, 2),
            **pages,
        }

    def _adapter(self, wanted: dict[str, Any] | None) -> Any:
        if wanted is None:
            return None
        from vllm.lora.request import LoRARequest

        path = Path(wanted["path"])
        path.mkdir(parents=True, exist_ok=True)
        for file in Path(wanted["source"]).iterdir():
            shutil.copy(file, path / file.name)
        return LoRARequest(wanted["name"], 1, str(path), load_inplace=bool(wanted.get("reload")))

    def _settle(self) -> None:
        """Step on while blocks are held for saves: an engine in this process only steps when told to."""
        if self.core is None:
            time.sleep(0.5)
            return
        until = time.monotonic() + SETTLE_S
        while self.core.scheduler.has_requests():
            if time.monotonic() > until:
                raise RuntimeError("saves did not settle")
            self._llm.llm_engine.step()
            time.sleep(0.001)

    def _forget(self) -> bool:
        until = time.monotonic() + SETTLE_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    @contextlib.contextmanager
    def _pages(self, step: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """At the request's end, a digest of its pages: those of the whole chunks that a restore would fill. Read past our kernels."""
        found: dict[str, Any] = {}
        if not step.get("pages") or self.core is None:
            yield found
            return
        connector = self.core.scheduler.get_kv_connector()
        plain = connector.request_finished
        tokens = (len(step["ask"]) - 1) // CHUNK_TOKENS * CHUNK_TOKENS

        def finished(request: Any, block_ids: list[int]) -> Any:
            found["pages"] = self._on_workers(pages_digest, list(block_ids), tokens)
            return plain(request, block_ids)

        connector.request_finished = finished
        try:
            yield found
        finally:
            del connector.request_finished

    def _describe(self) -> dict[str, Any]:
        """What the engine is: for the record, and for the tests that look at it. Each part on its own, since each may fail."""
        config = self._llm.llm_engine.vllm_config
        parts: dict[str, Callable[[], Any]] = {
            "block_tokens": lambda: config.cache_config.block_size,
            "blocks": lambda: config.cache_config.num_gpu_blocks,
            "async_scheduling": lambda: config.scheduler_config.async_scheduling,
            "compilation": lambda: f"{config.compilation_config.mode} {config.compilation_config.cudagraph_mode}",
        }
        if self.core is not None:
            parts["workers"] = lambda: self._on_workers(worker_process)
        if self.core is not None and hasattr(self.core.model_executor, "driver_worker"):
            parts |= {
                "runner": lambda: f"{type(self.runner).__module__}.{type(self.runner).__name__}",
                "tensor": lambda: [str(self.runner.kv_caches[0].shape), str(self.runner.kv_caches[0].stride())],
                "kvgate": _worker_facts,
            }
        found: dict[str, Any] = {}
        for name, part in parts.items():
            try:
                found[name] = part()
            except Exception as error:  # noqa: BLE001 - the text is the answer
                found[name] = f"? {error!r}"[:300]
        return found


def _runner_of(worker: Any) -> Any:
    return getattr(worker, "worker", worker).model_runner


def pages_digest(worker: Any, block_ids: list[int], tokens: int) -> str:
    """Runs on a worker: a digest of these pages' first ``tokens`` in all layers, read by torch."""
    import torch
    from blake3 import blake3

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    hasher = blake3()
    for layer in _runner_of(worker).kv_caches:
        wanted = torch.tensor(block_ids[: tokens // layer.shape[2]], device=layer.device)
        hasher.update(layer[wanted].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hasher.hexdigest()


def worker_process(worker: Any) -> dict[str, Any]:
    """Runs on a worker: its process, and its device as the gateway calls it."""
    import torch

    device = _runner_of(worker).kv_caches[0].device
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type
    return {"pid": os.getpid(), "device": name}


def _worker_facts() -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side: Any = get_kv_transfer_group()._worker
    form, registration = side._form, side._registration
    if form is None:
        return {"cached": "no: see the log"}
    description = form.description
    return {
        "registered": registration is not None,
        "transfers": type(registration.transfers).__name__ if registration else "",
        "pages": form.pages.layout.value,
        "layouts": sorted({f"{page.backend} {page.isa} {page.layout}" for page in description.geometry.pages}),
        "rope": {setting.name: setting.value for setting in description.rope.parameters},
        "numerics": {
            "backend": description.numerics.attention_backend,
            "execution": description.numerics.execution,
            **{setting.name: setting.value for setting in description.numerics.other},
        },
        "packers": [str(packers.any.describe()) for packers in side._ways._packers.values()],
    }
