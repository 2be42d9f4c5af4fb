"""Kinds of reported faults that need a real engine and are tested nowhere else (see docs/reported-faults.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.connector_support import ask_all, assert_same_or_tie, connected, forget_local, watching
from tests.vllm.engine import KJV, LORA, Engine, copy_model, flip_last_byte, prompt_tokens
from tests.vllm.gateway import GatewayProcess, gateway
from tests.vllm.test_explain import explained

pytestmark = pytest.mark.timeout(300)

PROMPT = prompt_tokens(600)


@pytest.fixture(scope="module")
def gateway_process() -> Iterator[GatewayProcess]:
    """One gateway."""
    with gateway() as process:
        yield process


@pytest.fixture(scope="module")
def engine(gateway_process: GatewayProcess) -> Iterator[Engine]:
    """One engine that takes adapters."""
    with connected(gateway_process, **LORA) as made:
        yield made


def test_an_adapter_and_a_salt_of_one_name_share_nothing(engine: Engine) -> None:
    """Kind 3: adapter "X" without salt, salt "X" without adapter, and both together miss each other, and each hits itself."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("X", 1, str(KJV))
    ways = [(lora, None), (None, "X"), (lora, "X")]
    for restored in (0, 512):
        for adapter, salt in ways:
            forget_local(engine)
            assert ask_all(engine, [PROMPT], lora=adapter, salt=salt)[0].restored == restored, (adapter is None, salt)


def test_one_changed_weight_byte_is_a_miss_because_of_the_base(
    engine: Engine, gateway_process: GatewayProcess, tmp_path: Path
) -> None:
    """Kind 10: the same model by name, one byte of its weights changed: nothing is restored, and both are told "base"."""
    forget_local(engine)
    assert ask_all(engine, [PROMPT], salt="base")[0].restored == 0
    model = copy_model(tmp_path / "m")
    flip_last_byte(model / "model.safetensors")
    with connected(gateway_process, model=model, **LORA) as other:
        reply = ask_all(other, [PROMPT], salt="base", max_tokens=24)[0]
    assert (reply.restored, reply.kvgate["miss"]) == (0, ["base"])
    assert [one["reasons"] for one in explained(gateway_process, reply.kvgate["reference"])] == [["base"]]


def test_pages_of_another_layout_are_restored_exactly(engine: Engine, gateway_process: GatewayProcess) -> None:
    """Kind 13: stored from pages of 32 tokens and restored into pages of 128, which hold the same values in another order."""
    forget_local(engine)
    with watching() as stored:
        assert ask_all(engine, [PROMPT], salt="layout")[0].restored == 0
    with watching() as restored, connected(gateway_process, block_size=128, **LORA) as other:
        assert ask_all(other, [PROMPT], salt="its own", max_tokens=24)[0].restored == 0
        own = ask_all(other, [PROMPT], salt="its own", max_tokens=24)[0]
        forget_local(other)
        reply = ask_all(other, [PROMPT], salt="layout", max_tokens=24)[0]
    assert (own.cached, reply.restored) == (512, 512)
    assert_same_or_tie(reply, own, "pages of 128 tokens")
    restored.packed |= stored.packed
    restored.assert_exact()
    assert restored.pages_checked
