"""Two workers, each with a part of the KV heads: one registration, one root, an object a rectangle, and a hit only where all are there.

The engine has processes of its own here, as ``vllm serve`` has them, and the gateway keeps its objects in LMCache's L2.
"""

from __future__ import annotations

import importlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.connector_support import Reply, ask_all, assert_same_or_tie, connected
from tests.vllm.engine import KJV, LORA, MODEL, ROOT, flip_last_byte, prompt_tokens
from tests.vllm.engine_process import EngineProcess, engine_process, reconnected
from tests.vllm.gateway import GatewayProcess, started, wait_until
from tests.vllm.test_explain import explained

LMCACHE_KVGATE = ROOT / ".venv" / "gateway" / "bin" / "kvgate"
"""LMCache is installed beside the gateway, not beside vLLM."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not LMCACHE_KVGATE.exists(), reason="needs the gateway's environment (make env-gateway)"),
]

TP2: dict[str, Any] = {"tensor_parallel_size": 2, **LORA}
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PROMPT = prompt_tokens(600)
CHUNKS = 2
SETTLE_S = 60.0

Touched = dict[int, dict[int, str]]
"""tp rank → chunk → shard address."""


class LMCacheGateway(GatewayProcess):
    """A gateway whose L2 is a folder, and that says which objects each worker was let at."""

    program = LMCACHE_KVGATE

    def __init__(self, root: Path) -> None:
        flags = {"log-level": "debug", "log-format": "json", "probe-s": "30", "storage-s": "30"}
        super().__init__(root, backend="lmcache", **flags)

    def touched(self, event: str) -> Touched:
        """What each rank reserved ("worker.reserve") or loaded ("worker.load") since the start, by chunk."""
        found: Touched = {}
        for line in self.events(event):
            found.setdefault(line["tp_rank"], {}).update(zip(line["chunks"], line["shards"], strict=True))
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's lines of one event."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def stored(self) -> dict[str, Path]:
        """Files of L2 by shard address."""
        return {path.name.split("@")[3]: path for path in (self.root / "d" / "l2").glob("*.data")}

    def wait_stored(self, shards: set[str]) -> None:
        """Wait until L2 holds at least these objects."""
        wait_until(lambda: shards <= self.stored().keys(), SETTLE_S, "the objects did not reach L2:\n" + self.log[-4000:])


@dataclass
class Story:
    """What happened in one run of the scenario, step by step; the tests below read it."""

    replies: dict[str, Reply] = field(default_factory=dict)
    reserved: Touched = field(default_factory=dict)
    loaded: Touched = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    registrations: list[dict[str, Any]] = field(default_factory=list)
    registered: list[dict[str, Any]] = field(default_factory=list)
    explained: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Store with two workers; start everything anew; restore; lose one worker's object; ask with one worker."""
    folder = tmp_path_factory.mktemp("tp2")
    seen = Story()
    with started(LMCacheGateway) as gateway:
        with engine_process(gateway, folder / "first", environment=TWO_CORES, **TP2) as engine:
            store(engine, gateway, seen)
        gateway.restart()
        with engine_process(gateway, folder / "second", environment=TWO_CORES, **TP2) as engine:
            seen.replies["restored"] = engine.ask(PROMPT)
            seen.loaded = gateway.touched("worker.load")
            seen.replies["adapter restored"] = engine.ask(PROMPT, adapter=KJV)
            lose_a_shard(engine, gateway, seen)
        gateway.restart()
        with connected(gateway, **LORA) as alone:
            reply = seen.replies["alone"] = ask_all(alone, [PROMPT], max_tokens=24)[0]
            seen.explained = explained(gateway, reply.kvgate["reference"])
    return seen


def store(engine: EngineProcess, gateway: LMCacheGateway, seen: Story) -> None:
    """Compute and store; then once more from vLLM's own prefix cache."""
    seen.replies["computed"] = engine.ask(PROMPT)
    seen.registrations = gateway.status()["registrations"]
    seen.registered = gateway.events("worker.registered")
    seen.replies["local"] = engine.ask(PROMPT)
    wait_until(
        lambda: {len(chunks) for chunks in gateway.touched("worker.reserve").values()} == {CHUNKS},
        SETTLE_S,
        "not every worker stored",
    )
    seen.reserved = gateway.touched("worker.reserve")
    gateway.wait_stored(shards(seen.reserved))
    seen.stored = set(gateway.stored())
    seen.replies["adapter computed"] = engine.ask(PROMPT, adapter=KJV)
    seen.replies["adapter local"] = engine.ask(PROMPT, adapter=KJV)
    wait_until(lambda: len(gateway.stored()) >= 2 * len(seen.stored), SETTLE_S, "the adapter's objects did not reach L2")


def lose_a_shard(engine: EngineProcess, gateway: LMCacheGateway, seen: Story) -> None:
    """One worker's object of a chunk is deleted from L2, or a byte of it changed, while the gateway is stopped; then ask again."""
    for chunk, step in ((1, "second chunk lost"), (0, "first chunk lost"), (1, "second chunk damaged")):
        gateway.stop()
        file = gateway.stored()[seen.reserved[1][chunk]]
        if "lost" in step:
            file.unlink()
        else:
            flip_last_byte(file)
        gateway.start()
        reconnected(engine)
        engine.forget_local()
        seen.replies[step] = engine.ask(PROMPT)
        if "lost" in step:
            # What was missing has been computed, and is stored again. (What was damaged is, by the next request that misses it.)
            gateway.wait_stored(shards(seen.reserved))


def one_kv_head(folder: Path) -> Path:
    """A tiny model of random weights with one KV head, for the tokenizer of the model in tests/models."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    return folder


def shards(touched: Touched) -> set[str]:
    """All addresses."""
    return {shard for chunks in touched.values() for shard in chunks.values()}


def test_both_ranks_seal_one_registration(story: Story) -> None:
    """Two workers report, one registration comes of it, sealed by the second; their ranks are their own."""
    assert len(story.registrations) == 1
    assert [(line["tp_rank"], line["sealed"]) for line in story.registered][-1][1]
    assert {line["tp_rank"] for line in story.registered} == {0, 1}
    assert len({line["model"] for line in story.registered}) == 1


def test_each_rank_stores_its_own_object_of_each_chunk(story: Story) -> None:
    """Each worker reserved its own address of each chunk and no other, and L2 holds exactly these objects."""
    assert {rank: sorted(chunks) for rank, chunks in story.reserved.items()} == {0: [0, 1], 1: [0, 1]}
    assert len(shards(story.reserved)) == 2 * CHUNKS
    assert story.stored == shards(story.reserved)


def test_each_rank_loads_exactly_what_it_stored(story: Story) -> None:
    """After a restart of everything each worker is let at the very addresses it stored, and at none of the other's."""
    assert story.loaded == story.reserved


def test_restored_text_is_that_of_the_local_prefix_cache(story: Story) -> None:
    """The text after the restart is what the same kind of engine gives from its own prefix cache."""
    assert story.replies["computed"].restored == 0
    assert story.replies["local"].cached >= CHUNKS * 256
    assert story.replies["restored"].restored == CHUNKS * 256
    assert_same_or_tie(story.replies["restored"], story.replies["local"], "restored with two workers")


def test_an_adapter_that_both_workers_loaded_is_restored(story: Story) -> None:
    """With an adapter nothing of the base is restored, and after the restart all that was stored with it."""
    assert story.replies["adapter computed"].restored == 0
    assert story.replies["adapter local"].tokens != story.replies["local"].tokens
    assert story.replies["adapter restored"].restored == CHUNKS * 256
    assert_same_or_tie(story.replies["adapter restored"], story.replies["adapter local"], "adapter with two workers")


def test_one_lost_rectangle_makes_its_chunk_a_miss(story: Story) -> None:
    """Where one worker's object of a chunk is gone, that chunk and all behind it miss, and the text stays right."""
    assert story.replies["second chunk lost"].restored == 256
    assert story.replies["first chunk lost"].restored == 0
    for step in ("second chunk lost", "first chunk lost"):
        assert_same_or_tie(story.replies[step], story.replies["local"], step)


def test_one_damaged_rectangle_is_computed_by_all(story: Story) -> None:
    """Where only the second worker finds other bytes than were stored, both compute that chunk, and the text stays right."""
    reply = story.replies["second chunk damaged"]
    assert (reply.restored, reply.kvgate["outcome"]) == (256, "load error")
    assert_same_or_tie(reply, story.replies["local"], "damaged")


def test_one_worker_misses_what_two_stored_because_of_the_plan(story: Story) -> None:
    """An engine of one worker restores nothing of it; the operator is told "plan", and nothing else."""
    assert story.replies["alone"].restored == 0
    assert [one["reasons"] for one in story.explained] == [["plan"]]


@pytest.mark.slow
def test_a_kv_head_that_both_workers_hold_is_stored_once(tmp_path: Path) -> None:
    """With one KV head both workers hold equal copies: one object a chunk, whichever of them is first; both load that one."""
    with (
        started(LMCacheGateway) as gateway,
        engine_process(
            gateway, tmp_path / "engine", environment=TWO_CORES, model=str(one_kv_head(tmp_path / "m")), **TP2
        ) as engine,
    ):
        computed = engine.ask(PROMPT)
        wait_until(lambda: len(gateway.events("worker.reserve")) >= 2, SETTLE_S, "not every worker stored")
        wait_until(lambda: len(gateway.stored()) >= CHUNKS, SETTLE_S, "the objects did not reach L2")
        lines = gateway.events("worker.reserve")
        local = engine.ask(PROMPT)
        given = [chunk for line in lines for chunk in line["chunks"]]
        skipped = [status for line in lines for status in line["skipped"]]
        assert {line["tp_rank"] for line in lines} == {0, 1}
        assert sorted(given) == list(range(CHUNKS))
        assert len(skipped) == CHUNKS
        assert set(skipped) <= {"busy", "resident"}
        addresses = shards(gateway.touched("worker.reserve"))
        assert gateway.stored().keys() == addresses
        gateway.restart()
        reconnected(engine)
        engine.forget_local()
        restored = engine.ask(PROMPT)
        loaded = gateway.touched("worker.load")
    assert (computed.restored, restored.restored) == (0, CHUNKS * 256)
    assert_same_or_tie(restored, local, "restored from the one copy")
    assert len(loaded) == 2
    assert loaded[0] == loaded[1]
    assert shards(loaded) == addresses
