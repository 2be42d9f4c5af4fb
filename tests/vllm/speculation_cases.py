"""Run by ``test_connector_speculation.py`` in a process of its own: vLLM cannot start another engine after one that speculates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.connector_support import FinishedPages, assert_nothing_held, check_decoded_chunks, connected
from tests.vllm.engine import Engine, prompt_tokens
from tests.vllm.gateway import GatewayProcess, gateway

SPECULATION: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


@pytest.fixture(scope="module")
def process() -> Iterator[GatewayProcess]:
    """A gateway."""
    with gateway() as made:
        yield made


@pytest.fixture(scope="module")
def engine(process: GatewayProcess) -> Iterator[Engine]:
    """An engine that speculates."""
    with connected(process, speculative_config=SPECULATION) as made:
        yield made


@pytest.mark.parametrize("total", [512, 513])
def test_drafts_are_never_stored(engine: Engine, process: GatewayProcess, total: int) -> None:
    """Chunks filled by speculative decoding hold accepted tokens only, as they lie in the pages."""
    finished = FinishedPages(engine)
    # Repetitive, so that drafts are made, and some of them accepted.
    prompt = (prompt_tokens(60, skip=500) * 4)[:200]
    check_decoded_chunks(engine, finished, prompt, total, f"speculative {total}")
    finished.close()
    assert_nothing_held(process)
