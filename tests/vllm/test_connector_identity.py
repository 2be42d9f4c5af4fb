"""What must miss, and what must not, through a real vLLM: the tokens are the same every time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.connector_support import (
    BOUND,
    Reply,
    Watch,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    connected,
    forget_local,
    settle,
    watching,
)
from tests.vllm.engine import KJV, LORA, PYTHON, Engine, copy_model, flip_last_byte, prompt_tokens, put_adapter
from tests.vllm.gateway import GatewayProcess, wait_until

pytestmark = pytest.mark.timeout(600)

PROMPT = prompt_tokens(600)
CHUNKS_TOKENS = 512
"""What of PROMPT can be restored."""


@pytest.fixture(scope="module")
def engine(gateway_process: GatewayProcess) -> Iterator[Engine]:
    """One engine that takes adapters."""
    with connected(gateway_process, **LORA) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays_held(gateway_process: GatewayProcess) -> Iterator[None]:
    """After each test every lease is given back."""
    yield
    assert_nothing_held(gateway_process)


def adapter(path: Path, name: str = "an adapter", number: int = 1) -> Any:
    """A request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path))


def fresh(engine: Engine, *, lora: Any = None, salt: str | None = None) -> Reply:
    """Ask with vLLM's own prefix cache empty: what is cached came from the gateway."""
    forget_local(engine)
    return ask_all(engine, [PROMPT], lora=lora, salt=salt, max_tokens=24)[0]


def own(engine: Engine, *, lora: Any = None, salt: str) -> Reply:
    """What the engine gives from its own prefix cache."""
    return ask_all(engine, [PROMPT], lora=lora, salt=salt, max_tokens=24)[0]


def test_base_and_adapters_share_nothing(engine: Engine) -> None:
    """Base, one adapter and another adapter miss each other's chunks and hit their own, with their own text."""
    texts = {}
    variants = {"base": None, "kjv": adapter(KJV, "a", 1), "python": adapter(PYTHON, "b", 2)}
    for name, lora in variants.items():
        computed = fresh(engine, lora=lora, salt="adapters")
        assert computed.restored == 0, name
        texts[name] = own(engine, lora=lora, salt="adapters")
    for name, lora in variants.items():
        restored = fresh(engine, lora=lora, salt="adapters")
        assert restored.restored == CHUNKS_TOKENS, name
        assert_same_or_tie(restored, texts[name], name)
    assert len({reply.tokens for reply in texts.values()}) == 3


def test_name_and_number_of_an_adapter_are_not_identity(engine: Engine, tmp_path: Path) -> None:
    """The same adapter bytes hit under another name, number and path."""
    stored = fresh(engine, lora=adapter(KJV, "one", 3), salt="names")
    assert stored.restored == 0
    restored = fresh(engine, lora=adapter(put_adapter(KJV, tmp_path / "moved"), "two", 4), salt="names")
    assert restored.restored == CHUNKS_TOKENS
    assert_same_or_tie(restored, stored, "renamed adapter")


def test_other_bytes_under_the_same_name_and_path_miss(engine: Engine, tmp_path: Path) -> None:
    """An adapter whose files were replaced gets its own text and not the old one's chunks; the old bytes hit again when they return."""
    folder = put_adapter(KJV, tmp_path / "adapter")
    request = adapter(folder, "same", 5)
    first = fresh(engine, lora=request, salt="reload")
    assert first.restored == 0
    put_adapter(PYTHON, folder)
    replaced = fresh(engine, lora=request, salt="reload")
    assert replaced.restored == 0
    truth = own(engine, lora=adapter(PYTHON, "truth", 6), salt="reload truth")
    assert_same_or_tie(replaced, truth, "replaced adapter")
    assert replaced.tokens != first.tokens
    put_adapter(KJV, folder)
    again = fresh(engine, lora=request, salt="reload")
    assert again.restored == CHUNKS_TOKENS
    assert_same_or_tie(again, first, "returned adapter")


def test_salts_separate(engine: Engine) -> None:
    """Another salt, and no salt, miss what one salt stored; the same salt hits it."""
    assert fresh(engine, salt="salt one").restored == 0
    assert fresh(engine, salt="salt two").restored == 0
    assert fresh(engine, salt="Salt one").restored == 0
    assert fresh(engine).restored == 0
    assert fresh(engine, salt="salt one").restored == CHUNKS_TOKENS
    assert fresh(engine).restored == CHUNKS_TOKENS


def test_scheduling_choices_are_not_identity(gateway_process: GatewayProcess, engine: Engine) -> None:
    """Sampling, request ids and prompt tails differ all the time: a common prefix hits."""
    forget_local(engine)
    assert ask_all(engine, [PROMPT], salt="tails", max_tokens=3)[0].restored == 0
    forget_local(engine)
    other = PROMPT[:CHUNKS_TOKENS] + prompt_tokens(40, file=1)
    reply = ask_all(engine, [other], salt="tails", max_tokens=5, repetition_penalty=1.1)[0]
    assert reply.restored == CHUNKS_TOKENS


def test_changed_tokens_miss_from_their_chunk_on(engine: Engine) -> None:
    """One other token in the second chunk: the first chunk hits and the second misses."""
    fresh(engine, salt="tokens")
    forget_local(engine)
    changed = [*PROMPT]
    changed[300] = (changed[300] + 1) % 4000
    assert ask_all(engine, [changed], salt="tokens")[0].restored == 256


class TestNewEngines:
    """Each of these needs an engine of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def stored(cls, gateway_process: GatewayProcess, engines: Any) -> tuple[Watch, Reply, Reply]:
        """What one engine stored: with the base model, and with an adapter."""
        engines.close()
        with watching() as watch, connected(gateway_process, **LORA) as engine:
            base = fresh(engine, salt="engines")
            tuned = fresh(engine, lora=adapter(KJV), salt="engines")
        assert base.restored == tuned.restored == 0
        return watch, base, tuned

    def test_a_new_engine_of_the_same_identity_hits(
        self, gateway_process: GatewayProcess, stored: tuple[Watch, Reply, Reply], tmp_path: Path
    ) -> None:
        """After a restart, from a copy of the model elsewhere and with other limits, chunks and adapter chunks are restored exactly."""
        watch, base, tuned = stored
        with (
            watching() as after,
            connected(
                gateway_process, model=copy_model(tmp_path / "m"), max_num_seqs=3, max_num_batched_tokens=1024, **LORA
            ) as engine,
        ):
            restored = fresh(engine, salt="engines")
            adapted = fresh(engine, lora=adapter(KJV, "other name", 9), salt="engines")
        assert restored.restored == adapted.restored == CHUNKS_TOKENS
        assert_same_or_tie(restored, base, "new engine")
        assert_same_or_tie(adapted, tuned, "new engine, adapter")
        after.packed |= watch.packed
        after.assert_exact()
        assert after.pages_checked

    @pytest.mark.parametrize("change", ["weights", "rope", "dtype", "lora rank"])
    def test_another_identity_misses(
        self, change: str, gateway_process: GatewayProcess, stored: tuple[Watch, Reply, Reply], tmp_path: Path
    ) -> None:
        """One byte of the weights, the RoPE theta, the dtype, or the engine's LoRA rank: nothing is restored."""
        options: dict[str, Any] = dict(LORA)
        if change == "weights":
            options["model"] = copy_model(tmp_path / "m")
            flip_last_byte(options["model"] / "model.safetensors")
        elif change == "rope":
            options["hf_overrides"] = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
        elif change == "dtype":
            options["dtype"] = "float32"
        else:
            options["max_lora_rank"] = 16
        with connected(gateway_process, **options) as engine:
            reply = fresh(engine, salt="engines")
            assert reply.kvgate.items() >= {"restored_tokens": 0, "outcome": "miss"}.items()
            assert fresh(engine, salt="engines").restored == CHUNKS_TOKENS

    def test_weights_changed_in_place_are_never_cached(self, gateway_process: GatewayProcess) -> None:
        """After an in-place update the registration is revoked and nothing is stored or restored; a watched reload brings caching back,
        and the chunks of the unchanged files with it."""
        with connected(gateway_process) as engine:
            before = fresh(engine, salt="in place")
            engine.llm.collective_rpc(shrink_norms)
            changed = fresh(engine, salt="in place")
            assert changed.restored == 0
            assert changed.tokens != before.tokens
            assert fresh(engine, salt="in place").restored == 0
            assert [r["revoked"] != "" for r in gateway_process.status()["registrations"]] == [True]
            engine.llm.collective_rpc("reload_weights")
            settle(engine)
            wait_until(lambda: registered(engine), 10, "the worker did not register again")
            again = fresh(engine, salt="in place")
            assert again.restored == CHUNKS_TOKENS
            assert_same_or_tie(again, before, "reloaded weights")


def shrink_norms(worker: Any) -> None:
    """Change the weights of a live engine."""
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if "layernorm" in name:
            parameter.data.mul_(0.6)


def registered(engine: Engine) -> bool:
    """Whether requests can be bound: each try also lets the worker report a new handle."""
    reply = ask_all(engine, [prompt_tokens(300, file=1)], salt="probe")[0]
    return reply.kvgate["outcome"] in BOUND
