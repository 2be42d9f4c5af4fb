"""Requests without an adapter that ran beside one with an adapter on vLLM's CPU backend: what they computed is not stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvgate_vllm.mixed_steps import MixedSteps, come_out_wrong
from kvgate_vllm.tracking import Track
from tests.vllm.connector_support import ask_all, connected, forget_local
from tests.vllm.engine import KJV, LORA, prompt_tokens
from tests.vllm.gateway import gateway

BLOCK = 32
ADAPTER = SimpleNamespace()


def track(name: str, blocks: list[int], lora: Any = None) -> Track:
    """A request and its blocks."""
    request = SimpleNamespace(request_id=name, lora_request=lora)
    return Track(request=request, chunk_tokens=256, uncacheable=None, adapter=None, salt=None, blocks=blocks)


def step(steps: MixedSteps, *running: tuple[Track, int, int], fresh: tuple[Track, ...] = ()) -> None:
    """One step over requests, their computed tokens, and the tokens they compute now."""
    new = [(one, start) for one, start, _ in running if one in fresh]
    old = [(one, start) for one, start, _ in running if one not in fresh]
    output = SimpleNamespace(
        num_scheduled_tokens={one.request_id: tokens for one, _, tokens in running},
        scheduled_new_reqs=[SimpleNamespace(req_id=one.request_id, num_computed_tokens=start) for one, start in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[one.request_id for one, _ in old], num_computed_tokens=[start for _, start in old]
        ),
    )
    steps.note(output, {one.request_id: one for one, _, _ in running}, {one.request_id for one in fresh})


def test_only_requests_without_an_adapter_are_tainted_and_only_beside_one() -> None:
    """A step of one kind taints nobody; a mixed one those without an adapter."""
    steps = MixedSteps(BLOCK)
    base, other, adapted = track("b", [1, 2]), track("o", [3, 4]), track("a", [5, 6], ADAPTER)
    step(steps, (base, 0, 32), (other, 0, 32), fresh=(base, other))
    step(steps, (adapted, 0, 32), fresh=(adapted,))
    assert not any(one.tainted for one in (base, other, adapted))
    step(steps, (base, 32, 16), (adapted, 32, 16))
    assert (base.tainted, other.tainted, adapted.tainted) == (True, False, False)


@pytest.mark.parametrize(("hit_tokens", "tainted"), [(32, False), (64, True), (96, True)])
def test_whoever_finds_such_blocks_is_tainted_too(hit_tokens: int, tainted: bool) -> None:
    """A later request is tainted if what vLLM's prefix cache gave it reaches into a mixed step, and not for what came before."""
    steps = MixedSteps(BLOCK)
    base, adapted = track("b", [1, 2, 3]), track("a", [7], ADAPTER)
    step(steps, (base, 0, 32), fresh=(base,))
    step(steps, (base, 32, 32), (adapted, 0, 32), fresh=(adapted,))
    step(steps, (base, 64, 32))  # alone again, on what is wrong
    later = track("l", [1, 2, 3, 9])
    step(steps, (later, hit_tokens, 128 - hit_tokens), fresh=(later,))
    assert later.tainted == tainted


@pytest.mark.parametrize("how", ["computed", "restored"])
def test_blocks_with_new_contents_are_good_again(how: str) -> None:
    """A block that another request fills, or that is restored, taints nobody afterwards."""
    steps = MixedSteps(BLOCK)
    base, adapted = track("b", [1]), track("a", [7], ADAPTER)
    step(steps, (base, 0, 32), (adapted, 0, 32), fresh=(base, adapted))
    if how == "computed":
        step(steps, (track("n", [1]), 0, 32), fresh=())
    else:
        steps.restored([1])
    later = track("l", [1, 2])
    step(steps, (later, 32, 32), fresh=(later,))
    assert not later.tainted


@pytest.mark.parametrize(("lora", "device", "wrong"), [(True, "cpu", True), (False, "cpu", False), (True, "cuda", False)])
def test_which_engines_have_such_steps(lora: bool, device: str, wrong: bool) -> None:
    """Engines with adapters on a CPU, and no others."""
    config = SimpleNamespace(lora_config=object() if lora else None, device_config=SimpleNamespace(device_type=device))
    assert come_out_wrong(config) == wrong


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_base_is_not_stored_beside_an_adapter() -> None:
    """In a real engine: a prompt computed while an adapter's request decodes is not restored later; computed alone, it is."""
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    prompt, salt = prompt_tokens(600), "mixed"
    with gateway() as process, connected(process, **LORA) as engine:
        core = engine.llm.llm_engine
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        core.add_request("adapted", {"prompt_token_ids": prompt_tokens(40)}, long, lora_request=LoRARequest("a", 1, str(KJV)))
        while not core.step():
            pass  # until it decodes: from then on it is in every step
        core.add_request("base", {"prompt_token_ids": prompt, "cache_salt": salt}, SamplingParams(temperature=0, max_tokens=4))
        while not any(output.request_id == "base" and output.finished for output in core.step()):
            pass
        core.abort_request(["adapted"])
        found = ask_all(engine, [prompt], salt=salt)[0]  # in vLLM's own prefix cache, where what is wrong lies still
        forget_local(engine)
        computed = ask_all(engine, [prompt], salt=salt)[0]
        forget_local(engine)
        restored = ask_all(engine, [prompt], salt=salt)[0]
    assert found.cached >= 512
    assert (computed.restored, restored.restored) == (0, 512)
    assert restored.tokens == computed.tokens
