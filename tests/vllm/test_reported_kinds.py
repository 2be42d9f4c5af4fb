"""Kinds of reported faults that need a real engine and are tested nowhere else must be impossible (see docs/reported-faults.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.connector_support import Watch, ask_all, assert_same_or_tie, connected, forget_local, watching
from tests.vllm.engine import KJV, LORA, copy_model, flip_last_byte, prompt_tokens
from tests.vllm.gateway import GatewayProcess
from tests.vllm.test_explain import explained

pytestmark = pytest.mark.timeout(300)

PROMPT = prompt_tokens(600)
SALT = "stored by the first engine"


@dataclass(frozen=True)
class First:
    """What the first engine did: restored tokens of both rounds of kind 3, and what it stored under ``SALT``."""

    restored: tuple[tuple[int, ...], ...]
    watch: Watch


@pytest.fixture(scope="module")
def first(gateway_process: GatewayProcess) -> First:
    """The first engine, which has ended: only one can live in a process."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("X", 1, str(KJV))
    with watching() as watch, connected(gateway_process, **LORA) as engine:
        rounds = []
        for _ in range(2):
            seen = []
            for adapter, salt in ((lora, None), (None, "X"), (lora, "X")):
                forget_local(engine)
                seen.append(ask_all(engine, [PROMPT], lora=adapter, salt=salt)[0].restored)
            rounds.append(tuple(seen))
        forget_local(engine)
        assert ask_all(engine, [PROMPT], salt=SALT)[0].restored == 0
    return First(tuple(rounds), watch)


def test_an_adapter_and_a_salt_of_one_name_share_nothing(first: First) -> None:
    """Kind 3: adapter "X" without salt, salt "X" without adapter, and both together miss each other, and each hits itself."""
    assert first.restored == ((0, 0, 0), (512, 512, 512))


@pytest.mark.usefixtures("first")
def test_one_changed_weight_byte_is_a_miss_because_of_the_base(gateway_process: GatewayProcess, tmp_path: Path) -> None:
    """Kind 10: the same model by name, one byte of its weights changed: nothing is restored, because of the base."""
    model = copy_model(tmp_path / "m")
    flip_last_byte(model / "model.safetensors")
    with connected(gateway_process, model=model, **LORA) as other:
        reply = ask_all(other, [PROMPT], salt=SALT, max_tokens=24)[0]
    assert reply.restored == 0
    assert [one["reasons"] for one in explained(gateway_process, reply.kvgate["reference"])] == [["base"]]


def test_pages_of_another_layout_are_restored_exactly(first: First, gateway_process: GatewayProcess) -> None:
    """Kind 13: stored from pages of 32 tokens and restored into pages of 128, which hold the same values in another order."""
    with watching() as watch, connected(gateway_process, block_size=128, **LORA) as other:
        assert ask_all(other, [PROMPT], salt="its own", max_tokens=24)[0].restored == 0
        own = ask_all(other, [PROMPT], salt="its own", max_tokens=24)[0]
        forget_local(other)
        reply = ask_all(other, [PROMPT], salt=SALT, max_tokens=24)[0]
    assert (own.cached, reply.restored) == (512, 512)
    assert_same_or_tie(reply, own, "pages of 128 tokens")
    watch.packed |= first.watch.packed
    watch.assert_exact()
    assert watch.pages_checked
