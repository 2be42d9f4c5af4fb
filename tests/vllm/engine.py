"""Real engines for the tests of this folder: the 7M-parameter model of tests/models on the CPU, in this process.

One engine at a time and one for as many tests as possible: starting one takes seconds.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before vLLM is imported: the engine core in this process, little memory, no affinity games on a shared machine.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(_name, _value)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "models" / "docs-llama-7m"
BLOCK_TOKENS = 32
KJV = MODEL / "adapters" / "kjv"
PYTHON = MODEL / "adapters" / "python"


@dataclass(frozen=True)
class Answer:
    """What an engine gave: token ids, and how many prompt tokens came from its prefix cache."""

    tokens: tuple[int, ...]
    cached: int


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    @property
    def core(self) -> Any:
        """vLLM's ``EngineCore``."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def vllm_config(self) -> Any:
        """Its configuration."""
        return self.core.vllm_config

    @property
    def worker(self) -> Any:
        """Its one worker."""
        return self.core.model_executor.driver_worker.worker

    @property
    def model(self) -> Any:
        """The loaded model."""
        return self.worker.model_runner.get_model()

    @property
    def connector(self) -> Any:
        """The scheduler side of its connector."""
        return self.core.scheduler.get_kv_connector()

    def ask(
        self,
        tokens: Sequence[int],
        lora: Any = None,
        *,
        max_tokens: int = 12,
        salt: str | None = None,
        kv: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Generate greedily from ``tokens``; ``kv`` goes along as kv_transfer_params."""
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt is not None:
            prompt["cache_salt"] = salt
        extra = {"kv_transfer_params": kv} if kv else None
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling)
        output = self.llm.generate([prompt], parameters, lora_request=lora, use_tqdm=False)[0]
        return Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0)

    def close(self) -> None:
        """End the engine and free its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def start_engine(
    *,
    model: Path = MODEL,
    connector: str | None = "tests.vllm.stub_connector",
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """Start an engine; ``connector`` is the module of a ``KVGateConnector``, None for an engine without one."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "seed": 0,
        "block_size": BLOCK_TOKENS,
    }
    if connector is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "KVGateConnector",
            "kv_connector_module_path": connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra or {},
        }
    return Engine(LLM(**(settings | options)))


@contextmanager
def running(**options: Any) -> Iterator[Engine]:
    """An engine for the length of a ``with`` block."""
    engine = start_engine(**options)
    try:
        yield engine
    finally:
        engine.close()


class EnginePool:
    """At most one engine alive: the same one again for the same options, another one after closing it."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._engine: Engine | None = None

    def get(self, **options: Any) -> Engine:
        """The engine with these options, started if it is not the one alive."""
        key = tuple(sorted((name, repr(value)) for name, value in options.items()))
        if self._engine is None or key != self._key:
            self.close()
            self._engine, self._key = start_engine(**options), key
        return self._engine

    def close(self) -> None:
        """End the engine that is alive, if any."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


@contextmanager
def loaded_model(model: Path = MODEL, *, connector: bool = True, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Load a model as a worker would, without an engine around it; gives its configuration and the model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.network_utils import get_open_port
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    if connector:
        options["kv_transfer_config"] = {
            "kv_connector": "KVGateConnector",
            "kv_connector_module_path": "tests.vllm.stub_connector",
            "kv_role": "kv_both",
        }
    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 2048, "block_size": BLOCK_TOKENS} | options
    config = EngineArgs(model=str(model), **settings).create_engine_config()
    _set_torch_accelerator_to_noop()  # as the CPU worker does: torch has no accelerator here
    try:
        with set_current_vllm_config(config):
            init_worker_distributed_environment(config, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
            yield config, get_model(vllm_config=config)
    finally:
        cleanup_dist_env_and_memory()


LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
"""Options of an engine that takes adapters."""


def prompt_tokens(count: int, *, file: int = 0, skip: int = 2000) -> list[int]:
    """``count`` token ids of held-out text, from character ``skip`` on."""
    from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]

    text = (MODEL / "held-out" / f"python-docs-{file}.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text[skip : skip + count * 8]).ids
    assert len(ids) >= count
    return list(ids[:count])


def copy_model(target: Path) -> Path:
    """A writable copy of the model without its adapters and texts."""
    target.mkdir(parents=True)
    for source in MODEL.iterdir():
        if source.is_file():
            shutil.copyfile(source, target / source.name)
    return target


def put_adapter(source: Path, target: Path) -> Path:
    """Write the adapter ``source`` into the folder ``target``, over what is there."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
    return target


def flip_last_byte(path: Path) -> None:
    """Change one byte of a file and nothing else: same size, same name."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
