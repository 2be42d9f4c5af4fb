"""A weight update under a live engine stops caching at once, and vLLM's own prefix cache never serves KV of the old weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgate_vllm import hooks
from kvgate_vllm.loading import READ_ONLY_RPCS, WRITING_METHODS
from kvgate_vllm.state import EngineState, WeightsReport, engine_state, pin_of
from tests.vllm.engine import MODEL, Engine, copy_model, prompt_tokens

WEIGHTS = "model.safetensors"


def shrink_norms(model: torch.nn.Module) -> None:
    """Write weights in place, enough to change the text."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data.mul_(0.6)


def shrink_in_worker(worker: Any) -> None:
    """The same as a remote call."""
    shrink_norms(worker.model_runner.get_model())


def reload_from(engine: Engine, model: Path = MODEL) -> None:
    """Load all weights from disk into the live model."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


@pytest.fixture
def live(engine: Engine) -> Iterator[Engine]:
    """The engine, with its weights as they are on disk before and after."""
    yield engine
    if state(engine).weights().reason is not None or engine.vllm_config.model_config.model != str(MODEL):
        reload_from(engine)
    assert state(engine).weights().reason is None


def state(engine: Engine) -> EngineState:
    """What the plugin knows."""
    found = engine.connector.state
    assert isinstance(found, EngineState)
    return found


def other_model(folder: Path) -> Path:
    """The model with other norms, in files of its own."""
    model = copy_model(folder)
    tensors = {k: v * 0.6 if "layernorm" in k else v for k, v in load_file(str(model / WEIGHTS)).items()}
    save_file(tensors, str(model / WEIGHTS))
    return model


PROMPT = prompt_tokens(400)


def test_an_update_by_remote_call_is_not_served_old_kv(live: Engine) -> None:
    """After a call that wrote weights, a known prompt must be computed afresh and give the new weights' text."""
    old = live.ask(PROMPT)
    assert live.ask(PROMPT).cached == 384
    live.llm.collective_rpc(shrink_in_worker)
    new = live.ask(PROMPT)
    assert new.cached == 0
    assert live.core.reset_prefix_cache()
    truth = live.ask(PROMPT)
    assert new.tokens == truth.tokens
    assert new.tokens != old.tokens


def test_requests_after_an_update_share_among_themselves(live: Engine) -> None:
    """The new weights' KV must be shared again between requests that came after the update."""
    live.llm.collective_rpc(shrink_in_worker)
    first, second = live.ask(PROMPT), live.ask(PROMPT)
    assert (first.cached, second.cached) == (0, 384)
    assert first.tokens == second.tokens


def test_an_unknown_call_revokes_until_files_are_read_again(live: Engine) -> None:
    """After a call that may have written weights the report must carry a reason until a reload from disk hashed them anew."""
    before = state(live).weights()
    assert before.reason is None
    live.llm.collective_rpc(shrink_in_worker)
    revoked = state(live).weights()
    assert revoked.artifacts == ()
    assert revoked.reason is not None
    reload_from(live)
    after = state(live).weights()
    assert (after.artifacts, after.reason) == (before.artifacts, None)
    assert before.generation < revoked.generation < after.generation


def test_reading_calls_change_nothing(live: Engine) -> None:
    """Calls known to write no weights must leave report, epoch and prefix cache as they are."""
    live.ask(PROMPT)
    before = state(live).weights(), state(live).weight_epoch()
    live.llm.collective_rpc("check_health")
    live.llm.llm_engine.list_loras()
    live.core.collective_rpc("get_supported_tasks")
    assert (state(live).weights(), state(live).weight_epoch()) == before
    assert live.ask(PROMPT).cached == 384


def test_the_lists_of_calls_do_not_overlap() -> None:
    """No method may be held both for writing and for reading."""
    assert not READ_ONLY_RPCS & set(WRITING_METHODS)
    assert not READ_ONLY_RPCS & {"reload_weights", "sleep", "wake_up", "load_model", "discard"}


def test_a_reload_reports_the_new_files(live: Engine, tmp_path: Path) -> None:
    """A reload from another folder must report that folder's files, and give that model's text."""
    before, old = state(live).weights(), live.ask(PROMPT)
    model = other_model(tmp_path / "m")
    reload_from(live, model)
    report = state(live).weights()
    assert report.reason is None
    assert report.artifacts != before.artifacts
    new = live.ask(PROMPT)
    assert new.cached == 0
    assert new.tokens != old.tokens
    reload_from(live)
    again = live.ask(PROMPT)
    assert again.cached == 0
    assert again.tokens == old.tokens


def test_a_reload_of_a_part_stays_uncacheable(live: Engine, tmp_path: Path) -> None:
    """A reload whose files lack some weights leaves a mixture: nothing may be reported."""
    model = other_model(tmp_path / "m")
    tensors = load_file(str(model / WEIGHTS))
    save_file({name: tensor for name, tensor in tensors.items() if "layers.3." not in name}, str(model / WEIGHTS))
    reload_from(live, model)
    assert state(live).weights().reason == "a reload left some weights as they were"


def test_weights_that_come_from_a_caller_stay_uncacheable(live: Engine) -> None:
    """A reload from an iterator reads no file: nothing may be reported."""
    tensors = load_file(str(MODEL / WEIGHTS))
    live.worker.reload_weights(weights_iterator=iter(tensors.items()))
    assert state(live).weights().reason is not None


def test_a_load_into_the_live_model_revokes(live: Engine) -> None:
    """Whoever calls the model's own ``load_weights`` must be noticed, however they got at it."""
    old = live.ask(PROMPT)
    tensors = {k: v * 0.6 for k, v in load_file(str(MODEL / WEIGHTS)).items() if "layernorm" in k}
    live.model.load_weights(iter(tensors.items()))
    assert state(live).weights().reason is not None
    new = live.ask(PROMPT)
    assert new.cached == 0
    assert new.tokens != old.tokens


def test_applying_a_function_to_the_model_revokes(live: Engine) -> None:
    """A function that gets at the model may write to it."""
    live.llm.apply_model(lambda _model: None)
    assert state(live).weights().reason == WRITING_METHODS["apply_model"]


@pytest.mark.parametrize("method", ["start_weight_update", "reset_weights", "apply_model"])
def test_the_workers_own_methods_revoke(live: Engine, method: str) -> None:
    """In a worker process, vLLM's writing methods must revoke by themselves, before they do anything."""
    seen: list[float] = []
    norm = next(p for n, p in live.model.named_parameters() if "layernorm" in n)
    before = float(norm.float().sum())
    state(live).on_weights_changed.append(lambda _report: seen.append(float(norm.float().sum())))
    try:
        arguments = [lambda _model: None] if method == "apply_model" else []
        if method == "start_weight_update":
            with pytest.raises(RuntimeError, match="not configured"):
                live.worker.start_weight_update()
        else:
            getattr(live.worker, method)(*arguments)
    finally:
        state(live).on_weights_changed.clear()
    assert state(live).weights().reason == WRITING_METHODS[method]
    assert seen == [before]


def test_deep_sleep_revokes_and_light_sleep_does_not(live: Engine) -> None:
    """Sleeping at level 2 discards weights; levels 0 and 1 bring back the same bits."""
    before = state(live).weights()
    for level in (0, 1):
        live.core.sleep(level)
        live.core.wake_up()
        live.core.resume_scheduler()
        assert state(live).weights() == before
    live.core.sleep(2)
    live.core.wake_up()
    live.core.resume_scheduler()
    assert state(live).weights().reason == "the engine slept at a level that discards weights"
    assert live.ask(PROMPT).cached == 0


def test_callbacks_hear_of_the_loss_before_the_write_and_of_the_new_files_after(live: Engine) -> None:
    """The connector must be told before the first weight is written, and again when files were hashed anew; one that fails must
    disturb nobody."""
    norm = next(p for n, p in live.model.named_parameters() if "layernorm" in n)
    heard: list[tuple[WeightsReport, float]] = []

    def broken(_report: WeightsReport) -> None:
        raise RuntimeError("broken callback")

    state(live).on_weights_changed += [broken, lambda report: heard.append((report, float(norm.float().sum())))]
    before = float(norm.float().sum())
    try:
        live.llm.collective_rpc(shrink_in_worker)
        assert [(report.reason is None, value) for report, value in heard] == [(False, before)]
        assert float(norm.float().sum()) != before
        reload_from(live)
    finally:
        state(live).on_weights_changed.clear()
    assert [report.reason is None for report, _ in heard] == [False] * (len(heard) - 1) + [True]


def test_a_running_request_becomes_uncacheable(live: Engine) -> None:
    """A request that came before the update must not be stored or loaded afterwards; one that came after may be, once reloaded."""
    live.ask(PROMPT)
    request = live.connector.requests[-1]
    assert state(live).uncacheable_reason(request) is None
    reload_from(live)
    assert state(live).uncacheable_reason(request) == "weights changed after the request arrived"
    live.ask(PROMPT)
    assert state(live).uncacheable_reason(live.connector.requests[-1]) is None


def engine_request(request_id: str) -> Any:
    """A request as the front end sends it."""
    import time

    from vllm.v1.engine import EngineCoreRequest

    from vllm import SamplingParams

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@pytest.mark.parametrize("when", ["before it is added", "before it is scheduled"])
def test_a_waiting_request_is_not_served_old_kv(live: Engine, when: str) -> None:
    """A request hashed before an update and run after it must not read blocks of the old weights."""
    live.ask(PROMPT)
    request, wave = live.core.preprocess_add_request(engine_request(f"waiting {when}"))
    if when == "before it is added":
        live.llm.collective_rpc(shrink_in_worker)
        live.core.add_request(request, wave)
    else:
        live.core.add_request(request, wave)
        live.llm.collective_rpc(shrink_in_worker)
    steps = 0
    while live.core.scheduler.has_requests() and steps < 100:
        live.core.step()
        steps += 1
    assert request.is_finished()
    assert request.prefill_stats is None or request.prefill_stats.num_cached_tokens == 0
    new = tuple(request.output_token_ids)
    assert live.core.reset_prefix_cache()
    assert new == live.ask(PROMPT).tokens[: len(new)]


def test_the_epoch_moves_before_and_after_the_write(live: Engine) -> None:
    """Requests hashed before, during and after an update must all have different epochs: none may share with another."""
    epochs: list[int] = []
    pins: list[Any] = []

    def prepare() -> None:
        request, _ = live.core.preprocess_add_request(engine_request(f"epoch {len(epochs)}"))
        pins.append(pin_of(request))
        epochs.append(state(live).weight_epoch())

    prepare()
    live.llm.collective_rpc(lambda _worker: prepare())
    prepare()
    assert len(set(epochs)) == 3
    assert len({pin.extra for pin in pins}) == 3


def test_a_failing_update_is_taken_for_an_update(live: Engine) -> None:
    """A call that fails half way may have written something: caching must stop all the same."""
    live.ask(PROMPT)

    def fail(worker: Any) -> None:
        shrink_in_worker(worker)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        live.llm.collective_rpc(fail)
    assert state(live).weights().reason is not None
    assert live.ask(PROMPT).cached == 0


@pytest.mark.parametrize(("level", "moves", "revokes"), [(0, False, False), (1, True, False), (2, True, True)])
def test_pages_discarded_by_a_sleep_are_never_stored(level: int, moves: bool, revokes: bool) -> None:
    """A sleep that discards pages must end the storing of every request that had some; only one that discards weights revokes."""
    told: list[Any] = []
    core: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=type("ParallelConfig", (), {})(),
            kv_transfer_config=SimpleNamespace(kv_connector="KVGateConnector", kv_connector_extra_config={}),
        ),
        model_executor=SimpleNamespace(collective_rpc=lambda *call, **_more: told.append(call)),
    )
    engine = engine_state(core.vllm_config)
    engine.weights_loaded((), None)
    epochs: list[int] = []
    hooks._sleep(lambda _self, _level: epochs.append(engine.weight_epoch()), core, level)
    assert (epochs[0] > 0) is moves  # before the pages go
    assert (engine.weights().reason is not None, bool(told)) == (revokes, revokes)
