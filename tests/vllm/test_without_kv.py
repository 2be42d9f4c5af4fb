"""An engine without any KV cache, as of an encoder-only embedding model: the connector has nothing to do, and does no harm."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgate_vllm.connector import KVGateConnector
from kvgate_vllm.scheduler_side import SchedulerSide
from kvgate_vllm.session import Session
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import EngineState
from tests.vllm.connector_support import CONNECTOR
from tests.vllm.engine import MODEL, prompt_tokens, running
from tests.vllm.gateway import gateway


@pytest.mark.parametrize(("groups", "wanted"), [(0, True), (1, False), (2, False)])
def test_vllm_asks_no_single_group_of_an_engine_that_has_none(groups: int, wanted: bool) -> None:
    """vLLM passes a request's end by groups only for an engine without any: to all others hybrid KV caches stay switched off."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA

    config = SimpleNamespace(kv_cache_groups=[object()] * groups)
    made = KVGateConnector.__new__(KVGateConnector, None, KVConnectorRole.SCHEDULER, config)
    assert isinstance(made, KVGateConnector)
    assert isinstance(made, SupportsHMA) == wanted
    assert not issubclass(KVGateConnector, SupportsHMA)


@pytest.mark.parametrize("blocks", [(), ([3, 4],)])
def test_steps_are_planned_for_a_request_with_or_without_blocks(tmp_path: Path, blocks: tuple[list[int], ...]) -> None:
    """A step with a new request and one that goes on is planned, whatever groups their blocks come in."""
    side = SchedulerSide(
        Session(str(tmp_path / "none.sock"), None, 1),
        EngineState(),
        ConnectorSettings(),
        block_tokens=32,
        world_size=1,
        in_background=True,
        in_step_allowed=True,
    )
    for name in ("new", "old"):
        side.new_request(
            SimpleNamespace(request_id=name, cache_salt=None, kv_transfer_params=None, num_prompt_tokens=8, num_tokens=8)
        )
    output = SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[SimpleNamespace(req_id="new", block_ids=blocks, num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["old"], new_block_ids=[blocks], resumed_req_ids=set(), num_computed_tokens=[0]
        ),
        num_scheduled_tokens={"new": 8, "old": 1},
    )
    meta = side.build(output)
    assert (meta.loads, meta.stores) == ([], [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_encoder_only_model_gives_its_embeddings(tmp_path: Path) -> None:
    """With the connector, an encoder-only model gives what it gives without it."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    folder = tmp_path / "model"
    transformers.BertModel(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    found: list[Sequence[float]] = []
    with gateway() as process:
        for connector, extra in ((None, None), (CONNECTOR, {"endpoint": process.endpoint})):
            with running(model=folder, connector=connector, extra=extra, runner="pooling", max_model_len=1024) as engine:
                prompts = [{"prompt_token_ids": prompt_tokens(700)}] * 2
                outputs = engine.llm.embed(prompts, use_tqdm=False)
                found.append([value for output in outputs for value in output.outputs.embedding])
    assert found[0] == found[1]
