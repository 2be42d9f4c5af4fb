"""Codec k16v8 on the whole path: one setting of the gateway, another identity, three quarters of the bytes, nearly the same V."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.connector_support import (
    FinishedPages,
    Reply,
    as_bytes,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    before_moves,
    connected,
    forget_local,
    reconnect,
    watching,
)
from tests.vllm.engine import BLOCK_TOKENS, MODEL, ROOT, Engine, EnginePool, prompt_tokens
from tests.vllm.gateway import KVGATE, START_S, GatewayProcess, gateway, wait_until

LMCACHE_KVGATE = ROOT / ".venv" / "gateway" / "bin" / "kvgate"
"""LMCache is installed beside the gateway, not beside vLLM."""
PROMPT = prompt_tokens(600)
RESTORED = 512
TOKENS = 24
LARGEST = 0.77
"""Bytes of a k16v8 object against a raw one, at most."""

pytestmark = pytest.mark.timeout(600)


class LMCacheGateway(GatewayProcess):
    """A gateway whose objects outlive it, in a folder."""

    program = LMCACHE_KVGATE

    def objects(self) -> int:
        """How many have reached the folder."""
        return len(list((self.root / "d" / "l2").glob("*.data")))


@pytest.fixture(scope="module", autouse=True)
def no_other_engine(engines: EnginePool) -> None:
    """Close the engine that other modules' tests share."""
    engines.close()


def fresh(engine: Engine, *, salt: str, prompt: Sequence[int] = PROMPT, max_tokens: int = TOKENS) -> Reply:
    """Ask with vLLM's own prefix cache empty: what is cached came from the gateway."""
    forget_local(engine)
    return ask_all(engine, [prompt], salt=salt, max_tokens=max_tokens)[0]


def used_bytes(process: GatewayProcess) -> int:
    """Bytes of the pool that objects take."""
    return int(process.status()["storage"]["pool_used_bytes"])


def explained(process: GatewayProcess, reference: str) -> dict[str, Any]:
    """What the operator is told about one miss."""
    command = [str(KVGATE), "explain", reference, "--json", f"--state-dir={process.state_dir}"]
    (seen,) = json.loads(subprocess.run(command, capture_output=True, timeout=START_S, check=True).stdout)
    return dict(seen)


@pytest.mark.skipif(not LMCACHE_KVGATE.exists(), reason="needs the gateway's environment (make env-gateway)")
def test_another_codec_is_another_identity() -> None:
    """Stored raw; a gateway restarted with k16v8 under a running engine misses, because of the codec, stores anew in three quarters
    of the bytes and restores that; restarted with raw it finds the first objects again."""
    root = Path(tempfile.mkdtemp(prefix="kvg-"))
    patience = {"probe-s": "30", "storage-s": "30"}
    process = LMCacheGateway(root, backend="lmcache", **patience)
    try:
        process.start()
        with connected(process) as engine:
            assert fresh(engine, salt="codec").restored == 0
            own = ask_all(engine, [PROMPT], salt="codec", max_tokens=TOKENS)[0]
            raw_bytes = used_bytes(process)
            wait_until(lambda: process.objects() == 2, START_S, "the raw objects did not reach L2")
            assert fresh(engine, salt="codec").restored == RESTORED

            process.restart(codec="k16v8")
            reconnect(engine)
            before_bytes = used_bytes(process)
            missed = fresh(engine, salt="codec")
            assert (missed.restored, missed.kvgate["outcome"], missed.kvgate["miss"]) == (0, "miss", ["codec"])
            seen = explained(process, missed.kvgate["reference"])
            assert seen["reasons"] == ["codec"]
            assert [name for name in seen["asked"] if seen["asked"][name] != seen["nearest"][name]] == ["codec"]
            assert used_bytes(process) - before_bytes <= LARGEST * raw_bytes
            restored = fresh(engine, salt="codec")
            assert restored.restored == RESTORED
            assert_same_or_tie(restored, own, "k16v8")

            process.restart(codec="raw")
            reconnect(engine)
            back = fresh(engine, salt="codec")
            assert back.restored == RESTORED
            assert_same_or_tie(back, own, "raw again")
            assert_nothing_held(process)
    finally:
        process.stop()
        shutil.rmtree(root, ignore_errors=True)


class TestOneEngine:
    """What k16v8 does to pages and chunks."""

    @pytest.fixture(scope="class")
    @classmethod
    def process(cls) -> Iterator[GatewayProcess]:
        """A gateway with the codec."""
        with gateway(codec="k16v8") as made:
            yield made

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, process: GatewayProcess) -> Iterator[Engine]:
        """An engine that knows nothing of it."""
        with connected(process) as made:
            yield made

    def test_keys_are_exact_and_values_near(self, engine: Engine, process: GatewayProcess) -> None:
        """Restored pages hold the computed keys bit for bit, and values within half a step; not all of them equal."""
        finished = FinishedPages(engine)
        try:
            computed = fresh(engine, salt="pages", max_tokens=1)
            before = finished.pages
            restored = fresh(engine, salt="pages", max_tokens=1)
            after = finished.pages
        finally:
            finished.close()
        assert (computed.restored, restored.restored) == (0, RESTORED)
        changed = 0
        for old, new in zip(before, after, strict=True):
            blocks, heads, block, double = old.shape
            old_k, old_v = old.reshape(blocks, heads, 2, -1)[: RESTORED // BLOCK_TOKENS].unbind(2)
            new_k, new_v = new.reshape(blocks, heads, 2, -1)[: RESTORED // BLOCK_TOKENS].unbind(2)
            assert torch.equal(as_bytes(old_k), as_bytes(new_k))
            groups = old_v.reshape(-1, 32).float()
            largest = groups.abs().amax(-1, keepdim=True)
            # Half a step, its scale rounded up by at most 1/128, and the rounding to bfloat16.
            allowed = largest / 127 * (0.5 * 129 / 128) + largest / 256
            assert ((new_v.reshape(-1, 32).float() - groups).abs() <= allowed).all()
            changed += int((old_v != new_v).sum())
            assert block * double == old_k.shape[-1] * 2
        assert changed
        assert_nothing_held(process)

    def test_a_chunk_with_a_nan_is_not_stored(self, engine: Engine, process: GatewayProcess) -> None:
        """Values that the codec cannot hold keep their chunk out, and only theirs; nothing stays reserved."""
        caches = engine.worker.model_runner.kv_caches

        def spoil(moves: Sequence[Any]) -> None:
            caches[3][moves[1].block_table[0]].fill_(float("nan"))

        before = process.status()["storage"]["objects"]
        with before_moves("pack", spoil):
            assert fresh(engine, salt="nan", max_tokens=1).restored == 0
        assert process.status()["storage"]["objects"] == before + 1
        assert_nothing_held(process)
        for cache in caches:
            cache.zero_()
        assert fresh(engine, salt="nan", max_tokens=1).restored == RESTORED // 2
        assert fresh(engine, salt="nan", max_tokens=1).restored == RESTORED


def test_heads_of_eighty(tmp_path: Path) -> None:
    """A model with heads of 80 (ISA "vec16", a short last group) is stored and restored exactly."""
    model = small_model(tmp_path / "m", head_dim=80)
    with watching() as watch, gateway(codec="k16v8") as process, connected(process, model=model) as engine:
        layers = engine.vllm_config.compilation_config.static_forward_context.values()
        assert {layer.isa for layer in layers if hasattr(layer, "isa")} == {"vec16"}
        computed = fresh(engine, salt="eighty")
        assert computed.restored == 0
        # 2 layers, 1 head, 256 tokens: 80 keys of 2 bytes, 80 codes, 3 scales of 2 bytes, in each of 2 objects.
        assert used_bytes(process) == 2 * (4096 + -(-(2 * 256 * (160 + 80 + 6)) // 4096) * 4096)
        assert fresh(engine, salt="eighty").restored == RESTORED
        watch.assert_exact()
        assert watch.pages_checked
        assert_nothing_held(process)


def small_model(folder: Path, *, head_dim: int) -> Path:
    """A model of random weights with these heads; its text means nothing."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=head_dim, max_position_embeddings=4096, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    return folder


def test_an_engine_with_another_cache_is_uncacheable(caplog: pytest.LogCaptureFixture) -> None:
    """A float32 engine at a k16v8 gateway caches nothing, says why by name, once, and serves."""
    caplog.set_level(logging.WARNING, logger="vllm.kvgate")
    with gateway(codec="k16v8") as process, connected(process, dtype="float32") as engine:
        for _ in range(2):
            reply = fresh(engine, salt="float32", max_tokens=2)
            assert (reply.restored, reply.kvgate["outcome"]) == (0, "no gateway")
        said = [record.getMessage() for record in caplog.records if "k16v8" in record.getMessage()]
        assert len(said) == 1
        assert "float32" in said[0]
        assert process.status()["registrations"] == []
