"""Fixtures of the tests that need vLLM. Without it, nothing in this folder is collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

_spec = importlib.util.find_spec("vllm")
# A folder named vllm on the path is found as a namespace package; the real one has a file.
HAVE_VLLM = _spec is not None and _spec.origin is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]

if HAVE_VLLM:
    from tests.vllm.engine import LORA, Engine, EnginePool
    from tests.vllm.gateway import GatewayProcess, gateway

    @pytest.fixture(scope="module")
    def engines() -> Iterator[EnginePool]:
        """The pool from which a module's tests take engines; closed at its end, so that other modules may start their own."""
        pool = EnginePool()
        yield pool
        pool.close()

    @pytest.fixture
    def engine(engines: EnginePool) -> Engine:
        """An engine with adapters and the stub connector, its prefix cache empty."""
        engine = engines.get(**LORA)
        assert engine.core.reset_prefix_cache()
        return engine

    @pytest.fixture(scope="module")
    def gateway_process(engines: EnginePool) -> Iterator[GatewayProcess]:
        """One gateway for a module; its tests use other salts, or other prompts."""
        engines.close()  # vLLM has one worker connector a process, so one engine at a time
        with gateway() as process:
            yield process
