"""Weights that change in a worker process past the engine core: by a plugin's own thread, say, that fetches them from a trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgate_vllm.loading import engine_core_knows, revoke_in_worker
from kvgate_vllm.metadata import WorkerReport
from kvgate_vllm.scheduler_side import SchedulerSide
from kvgate_vllm.session import Session
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import CONNECTOR_NAME, EngineState, engine_state
from tests.vllm.connector_support import assert_same_or_tie
from tests.vllm.engine import ROOT, copy_model, prompt_tokens
from tests.vllm.engine_process import engine_process, reconnected
from tests.vllm.gateway import gateway, wait_until


class Parallel:
    """Stands for vLLM's parallel configuration: what an engine's state belongs to."""


def loaded_state() -> tuple[EngineState, Any]:
    """The state of a worker whose weights were loaded and announced, and the worker."""
    transfer = SimpleNamespace(kv_connector=CONNECTOR_NAME)
    config = SimpleNamespace(parallel_config=Parallel(), kv_transfer_config=transfer)
    state = engine_state(config)
    state.weights_loaded((), None)
    state.engine_core_knows()
    return state, SimpleNamespace(vllm_config=config)


CHANGES: dict[str, Callable[[EngineState], None]] = {
    "revoked": lambda state: state.weights_revoked("weights were updated in place"),
    "loaded anew": lambda state: state.weights_loaded((), None),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_in_a_worker_is_news_once(how: str) -> None:
    """Every change that a worker sees is told to the engine core, each time once."""
    state, _ = loaded_state()
    assert not state.take_news()
    for _ in range(2):
        CHANGES[how](state)
        assert state.take_news()
        assert not state.take_news()


def test_what_the_engine_core_did_is_no_news() -> None:
    """A change by a call of the engine core's own ends no sharing between the requests after it."""
    state, worker = loaded_state()
    revoke_in_worker(worker, "weights were updated in place")
    state.weights_loaded((), None)
    engine_core_knows(worker)
    assert not state.take_news()


@pytest.mark.parametrize("rank", [0, 1])
def test_news_of_any_rank_count(rank: int) -> None:
    """A report of which one rank has news has news, and is not dropped as empty."""
    reports = [WorkerReport(), WorkerReport()]
    reports[rank].weights_changed = True
    merged = reports[0].aggregate(reports[1])
    assert merged
    assert merged.weights_changed


@pytest.mark.parametrize("changed", [True, False])
def test_the_scheduler_acts_on_news(tmp_path: Path, changed: bool) -> None:
    """After such a report no request reads old blocks, none of what was computed is stored, and new requests share nothing with it."""
    state = EngineState()
    session = Session(str(tmp_path / "none.sock"), None, 1)
    side = SchedulerSide(
        session,
        state,
        ConnectorSettings(),
        block_tokens=32,
        world_size=1,
        in_background=True,
        in_step_allowed=True,
    )
    request = SimpleNamespace(
        request_id="r", cache_salt=None, kv_transfer_params=None, num_prompt_tokens=600, skip_reading_prefix_cache=False
    )
    side.new_request(request)
    epoch = state.weight_epoch()
    report = WorkerReport(weights_changed=changed)
    side.report(
        SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=set(), finished_recving=None, finished_sending=None)
    )
    assert (state.weight_epoch() != epoch) == changed
    assert request.skip_reading_prefix_cache == changed


WORKERS = 2
"""One worker would live in the engine core's own process."""

EXTENSION = """
import gc, os, threading, time
from pathlib import Path

def fetch():
    go = Path({go!r})
    while not go.exists():
        time.sleep(0.05)
    from vllm.v1.worker.gpu_worker import Worker
    worker = next(one for one in gc.get_objects() if Worker in type(one).__mro__)
    worker.reload_weights(weights_path=go.read_text())
    Path({done!r} + str(os.getpid())).touch()

threading.Thread(target=fetch, daemon=True).start()

class Extension:
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kv_of_the_old_weights_is_not_stored_as_the_new(tmp_path: Path) -> None:
    """A worker's own thread reloads other weights: neither vLLM's prefix cache nor the gateway gives old KV to the new weights."""
    other, go = copy_model(tmp_path / "other"), tmp_path / "go"
    file = str(other / "model.safetensors")
    torch.manual_seed(3)
    save_file({k: v + torch.randn_like(v) * v.float().std() * 0.3 for k, v in load_file(file).items()}, file)
    (tmp_path / "fetching.py").write_text(EXTENSION.format(go=str(go), done=str(tmp_path / "done")))
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    prompt = prompt_tokens(600)
    with (
        gateway() as process,
        engine_process(
            process,
            tmp_path / "engine",
            environment=environment,
            worker_extension_cls="fetching.Extension",
            tensor_parallel_size=WORKERS,
        ) as engine,
    ):
        before = engine.ask(prompt)
        (tmp_path / "new").write_text(str(other))
        (tmp_path / "new").rename(go)
        wait_until(lambda: len(list(tmp_path.glob("done*"))) == WORKERS, 60, "the weights were not fetched")
        reconnected(engine)
        local = engine.ask(prompt)
        time.sleep(1)  # for the store
        engine.forget_local()
        again = engine.ask(prompt)
        truth = engine.ask(prompt, salt="nobody's")
    assert (local.cached, local.restored) == (0, 0)
    assert again.restored == 512
    assert truth.tokens != before.tokens
    for name, reply in (("computed", local), ("restored", again)):
        assert_same_or_tie(reply, truth, name)
