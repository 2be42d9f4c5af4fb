"""Adapters in a real engine: whatever happens to a folder, the text is that of the bytes bound, and nothing stale is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvgate_vllm.state import Adapter, EngineState, LoadedAdapter
from tests.vllm.engine import KJV, LORA, PYTHON, Answer, Engine, EnginePool, flip_last_byte, prompt_tokens, put_adapter

PROMPT = prompt_tokens(400)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter folder that tests write to."""
    return tmp_path / "adapter"


def lora(folder: Path, **more: Any) -> LoRARequest:
    """The same name, id and path every time."""
    return LoRARequest("a", 1, str(folder), **more)


def truth(engine: Engine, adapter: Path) -> tuple[int, ...]:
    """The text of an adapter, computed under a scope of its own."""
    return engine.ask(PROMPT, LoRARequest(adapter.name, 50, str(adapter)), kv={"domain": "truth"}).tokens


def state(engine: Engine) -> EngineState:
    """What the plugin knows."""
    found = engine.connector.state
    assert isinstance(found, EngineState)
    return found


def test_the_test_can_tell_the_adapters_apart(engine: Engine) -> None:
    """The two adapters must give different text for the prompt used here."""
    assert truth(engine, KJV) != truth(engine, PYTHON)


@pytest.mark.parametrize("how", ["add_lora with load_inplace", "request with load_inplace", "file replaced silently"])
def test_a_reload_under_one_name_and_path_is_never_served_old_kv(engine: Engine, folder: Path, how: str) -> None:
    """After the bytes at one path changed, a known prompt must be computed afresh and give the new adapter's text, however the engine
    was told, or if it was not told at all."""
    put_adapter(KJV, folder)
    assert engine.ask(PROMPT, lora(folder)).tokens == truth(engine, KJV)
    assert engine.ask(PROMPT, lora(folder)).cached == 384
    put_adapter(PYTHON, folder)
    if how == "add_lora with load_inplace":
        assert engine.llm.llm_engine.add_lora(lora(folder, load_inplace=True))
    answer = engine.ask(PROMPT, lora(folder, load_inplace=how == "request with load_inplace"))
    assert answer == Answer(truth(engine, PYTHON), 0)
    assert engine.ask(PROMPT, lora(folder)).cached == 384


def test_the_old_bytes_are_found_again_when_they_return(engine: Engine, folder: Path) -> None:
    """Putting the first adapter back must find its KV again: identity is the bytes, not the moment."""
    put_adapter(KJV, folder)
    first = engine.ask(PROMPT, lora(folder))
    put_adapter(PYTHON, folder)
    engine.ask(PROMPT, lora(folder))
    put_adapter(KJV, folder)
    assert engine.ask(PROMPT, lora(folder)) == Answer(first.tokens, 384)


def test_base_and_adapters_do_not_share(engine: Engine) -> None:
    """No adapter is not any adapter, and one adapter is not another."""
    engine.ask(PROMPT)
    assert engine.ask(PROMPT, lora(KJV)).cached == 0
    assert engine.ask(PROMPT, LoRARequest("a", 2, str(PYTHON))).cached == 0
    assert engine.ask(PROMPT).cached == 384


def adapters_of(engine: Engine, *requests: LoRARequest) -> list[Adapter | None]:
    """What is pinned to requests with these adapters."""
    found = []
    for request in requests:
        engine.ask(PROMPT, request)
        found.append(state(engine).adapter_of(engine.connector.requests[-1]))
    return found


def test_names_ids_and_paths_are_not_identity(engine: Engine, folder: Path) -> None:
    """The same bytes under another name, id and path must be pinned as the same adapter."""
    put_adapter(KJV, folder)
    one, other = adapters_of(engine, lora(folder), LoRARequest("other", 9, str(KJV)))
    assert one is not None
    assert one == other


def test_the_worker_confirms_what_was_bound(engine: Engine) -> None:
    """What the worker opened must carry the digest that was pinned to the request, with both files."""
    (adapter,) = adapters_of(engine, lora(KJV))
    assert adapter is not None
    loaded = state(engine).loaded_adapter(adapter.int_id)
    assert loaded is not None
    assert (loaded.digest, loaded.reason) == (adapter.digest, None)
    assert set(loaded.artifacts) == set(adapter.artifacts)
    assert state(engine).loaded_adapter(adapter.int_id + 1000) is None


def test_the_worker_tells_on_a_changed_copy(engine: Engine, folder: Path) -> None:
    """If the bytes a worker opens are not those bound, its digest must differ, so that the connector can refuse."""
    put_adapter(KJV, folder)
    flip_last_byte(folder / "adapter_config.json")
    (folder / "adapter_config.json").write_bytes((KJV / "adapter_config.json").read_bytes() + b" ")
    adapters = state(engine).adapters
    assert adapters is not None
    binding = adapters.bind(lora(folder))
    assert binding.adapter is not None
    heard: list[LoadedAdapter] = []
    state(engine).on_adapter_loaded.append(heard.append)
    weights = Path(binding.lora_request.lora_path) / "adapter_model.safetensors"
    weights.chmod(0o600)
    flip_last_byte(weights)
    try:
        engine.core.model_executor.add_lora(binding.lora_request)
    finally:
        state(engine).on_adapter_loaded.clear()
        adapters.let_go(binding)
    assert [loaded.int_id for loaded in heard] == [binding.adapter.int_id]
    assert heard[0].digest is not None
    assert heard[0].digest != binding.adapter.digest


def test_an_adapter_evicted_from_the_workers_comes_back_as_itself(engine: Engine, tmp_path: Path) -> None:
    """An adapter that the workers dropped and read again must give the same text and the same confirmation."""
    first = engine.ask(PROMPT, lora(KJV))
    (adapter,) = adapters_of(engine, lora(KJV))
    assert adapter is not None
    for number in range(3):  # the engine keeps two
        other = put_adapter(PYTHON, tmp_path / str(number))
        with (other / "adapter_config.json").open("ab") as file:
            file.write(b" " * number)
        engine.ask(PROMPT, LoRARequest(str(number), 10 + number, str(other)))
    assert engine.core.reset_prefix_cache()
    again = engine.ask(PROMPT, lora(KJV))
    assert again == Answer(first.tokens, 0)
    loaded = state(engine).loaded_adapter(adapter.int_id)
    assert loaded is not None
    assert loaded.digest == adapter.digest


def fresh(folder: Path, number: int) -> Path:
    """An adapter whose bytes no other test has loaded."""
    put_adapter(KJV, folder)
    with (folder / "adapter_config.json").open("ab") as file:
        file.write(b" " * (100 + number))
    return folder


def test_the_front_end_sees_its_own_ids(engine: Engine, tmp_path: Path) -> None:
    """Adding, listing, pinning and removing must work by the ids that the front end gave."""
    llm = engine.llm.llm_engine
    for user_id in llm.list_loras():
        llm.remove_lora(user_id)
    assert llm.list_loras() == set()
    assert llm.add_lora(LoRARequest("k", 31, str(fresh(tmp_path / "k", 1))))
    assert llm.add_lora(LoRARequest("p", 32, str(fresh(tmp_path / "p", 2))))
    assert llm.list_loras() == {31, 32}
    assert llm.pin_lora(31)
    assert llm.remove_lora(32)
    assert llm.list_loras() == {31}
    assert llm.remove_lora(31)
    assert not llm.remove_lora(31)
    assert llm.list_loras() == set()


def test_two_names_for_one_adapter_are_removed_one_by_one(engine: Engine, tmp_path: Path) -> None:
    """Removing one of two ids for the same bytes must leave the other usable."""
    llm = engine.llm.llm_engine
    for user_id in llm.list_loras():
        llm.remove_lora(user_id)
    one, other = fresh(tmp_path / "one", 3), fresh(tmp_path / "other", 3)
    llm.add_lora(LoRARequest("k", 41, str(one)))
    llm.add_lora(LoRARequest("l", 42, str(other)))
    assert llm.list_loras() == {41, 42}
    assert llm.remove_lora(41)
    assert llm.list_loras() == {42}
    assert engine.ask(PROMPT, LoRARequest("l", 42, str(other))).tokens == truth(engine, KJV)


def test_the_copy_is_released_with_the_request(engine: Engine, folder: Path) -> None:
    """Once a request is over, its copy must be evictable."""
    import gc

    put_adapter(KJV, folder)
    engine.ask(PROMPT, lora(folder))
    (adapter,) = adapters_of(engine, lora(folder))
    assert adapter is not None
    engine.connector.requests.clear()
    gc.collect()
    adapters = state(engine).adapters
    assert adapters is not None
    assert all(copy.holders == 0 for copy in adapters._copies.values())


def test_an_adapter_above_the_limit_runs_uncached(engines: EnginePool, folder: Path) -> None:
    """An adapter too large to copy must give the right text, and never be served from a cache."""
    engine = engines.get(extra={"adapter_max_bytes": 1000}, **LORA)
    put_adapter(KJV, folder)
    answers = [engine.ask(PROMPT, lora(folder)) for _ in range(2)]
    assert [answer.cached for answer in answers] == [0, 0]
    assert answers[0].tokens == answers[1].tokens
    request = engine.connector.requests[-1]
    assert state(engine).adapter_of(request) is None
    assert state(engine).uncacheable_reason(request) == "the adapter is larger than the limit for one"
    assert request.lora_request.lora_path == str(folder)
    assert engine.ask(PROMPT).tokens != answers[0].tokens
    assert engine.ask(PROMPT).cached == 384


@pytest.mark.parametrize("value", [0, -1, "5", 2.5, True])
def test_a_limit_of_the_wrong_form_is_refused(engine: Engine, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that is not a positive integer must be refused by name."""
    from kvgate_vllm.plugin import attach_scheduler

    config = engine.vllm_config
    monkeypatch.setitem(config.kv_transfer_config.kv_connector_extra_config, "adapter_max_bytes", value)
    monkeypatch.setattr(state(engine), "adapters", None)
    with pytest.raises(ValueError, match="adapter_max_bytes"):
        attach_scheduler(config)


def test_snapshots_lie_where_they_were_configured(engines: EnginePool, tmp_path: Path) -> None:
    """The configured folder must be used; one that others can write to must leave adapters uncached, and the engine running."""
    engine = engines.get(extra={"adapter_snapshot_dir": str(tmp_path / "mine")}, **LORA)
    engine.ask(PROMPT, lora(KJV))
    assert Path(engine.connector.requests[-1].lora_request.lora_path).is_relative_to(tmp_path / "mine")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    engine = engines.get(extra={"adapter_snapshot_dir": str(tmp_path / "open")}, **LORA)
    assert [engine.ask(PROMPT, lora(KJV)).cached for _ in range(2)] == [0, 0]
    assert state(engine).uncacheable_reason(engine.connector.requests[-1]) is not None
