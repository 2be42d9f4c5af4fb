"""vLLM's own prefix cache keeps apart what must be apart, and still shares what is the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core import kv_cache_utils

from kvgate_vllm import block_hash
from kvgate_vllm.block_hash import Construction, constructing, local_extra, pin
from kvgate_vllm.state import Adapter, EngineState, pin_of
from tests.vllm.engine import LORA, Engine, EnginePool, prompt_tokens

PROMPT = prompt_tokens(400)
PARTS = st.tuples(
    st.binary(min_size=1, max_size=40),
    st.none() | st.binary(min_size=1, max_size=40),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=1, max_size=40),
)


def test_known_value() -> None:
    """The value must not drift between builds: a fleet upgraded one by one would otherwise be harder to reason about."""
    extra = local_extra(b"domain", b"\x11" * 32, 3, b"ordinary")
    assert extra.hex() == "f6e197fc605fc5cf9ae2e420e365fc851ddb08690bdc7aad94601aa4aa43dc55"
    assert len(extra) == 32


@given(one=PARTS, other=PARTS)
def test_different_parts_give_different_values(one: Any, other: Any) -> None:
    """Two requests must have one value only if domain, adapter, epoch and variant are all the same."""
    assert (local_extra(*one) == local_extra(*other)) == (one == other)


def test_parts_do_not_run_into_each_other() -> None:
    """Moving bytes from one part to its neighbour must change the value, and no adapter must be unlike any adapter."""
    assert local_extra(b"ab", None, 0, b"c") != local_extra(b"a", None, 0, b"bc")
    assert local_extra(b"a", b"b", 0, b"c") != local_extra(b"ab", None, 0, b"c")
    assert local_extra(b"a", None, 0, b"c") != local_extra(b"a", b"\0" * 32, 0, b"c")


def fake_request() -> Any:
    """As much of a request as a scope provider is shown."""
    return SimpleNamespace(kv_transfer_params=None)


def pinned(state: EngineState | None, request: Any, **about: Any) -> Any:
    """Pin a request as the engine core does."""
    with constructing(Construction(state, **about)):
        return pin(request)


def test_a_pin_is_made_once() -> None:
    """The provider must be asked once a request; later epochs and answers must not change what was pinned."""
    state, calls = EngineState(), 0

    def provider(_request: Any) -> tuple[bytes, bytes]:
        nonlocal calls
        calls += 1
        return b"d%d" % calls, b"v"

    state.set_scope_provider(provider)
    request = fake_request()
    first = pinned(state, request)
    state.bump_epoch()
    assert pin(request) is first
    assert pinned(state, request) is first
    assert calls == 1
    assert pinned(state, fake_request()).extra != first.extra


@pytest.mark.parametrize(
    "provider",
    [
        lambda _request: 1 / 0,
        lambda _request: ("d", b"v"),
        lambda _request: (b"", b"v"),
        lambda _request: (b"d", b"v" * 65),
        lambda _request: (b"d",),
        lambda _request: None,
    ],
)
def test_a_broken_provider_shares_with_nobody(provider: Callable[[Any], Any]) -> None:
    """If a request's scope cannot be established it must be uncacheable and unlike every other request."""
    state = EngineState()
    state.set_scope_provider(provider)
    one, other = pinned(state, fake_request()), pinned(state, fake_request())
    assert one.reason == other.reason == "the scope of the request could not be established"
    assert one.extra != other.extra


def test_a_request_from_elsewhere_shares_with_nobody() -> None:
    """A request built past the engine core has no scope: it must be uncacheable and unlike every other."""
    one, other = pin(fake_request()), pin(fake_request())
    assert one is not None
    assert other is not None
    assert one.reason is not None
    assert one.extra != other.extra


def test_an_adapter_without_identity_shares_with_nobody() -> None:
    """With a reason and no adapter to pin, two requests must not share, not even with each other."""
    one, other = (pinned(EngineState(), fake_request(), reason="no") for _ in range(2))
    assert one.extra != other.extra
    assert (one.adapter, one.reason) == (None, "no")


def test_a_local_adapter_shares_locally_and_stays_out_of_the_gateway() -> None:
    """With a reason beside an adapter, requests must share in this engine and be uncacheable outside it."""
    state, adapter = EngineState(), Adapter(b"\x11" * 32, (), 5)
    one, other = (pinned(state, fake_request(), adapter=adapter, reason="no") for _ in range(2))
    assert one == other
    assert (one.adapter, one.reason) == (None, "no")
    assert one.extra != pinned(state, fake_request()).extra


def test_requests_of_other_engines_keep_vllms_keys() -> None:
    """A request of an engine without our connector must have no value of ours, in its prompt and in what it generates."""
    request = fake_request()
    assert pinned(None, request) is None
    assert pin(request) is None
    assert pin_of(request) is None


def test_installing_twice_wraps_once() -> None:
    """Several connectors in one process must not put several values into a block."""
    block_hash.install()
    wrapped = kv_cache_utils.generate_block_hash_extra_keys
    block_hash.install()
    assert kv_cache_utils.generate_block_hash_extra_keys is wrapped


# With a real engine


def test_equal_requests_share(engine: Engine) -> None:
    """The same prompt under the same scope must be served from vLLM's prefix cache as always."""
    first, second = engine.ask(PROMPT), engine.ask(PROMPT)
    assert (first.cached, second.cached) == (0, 384)
    assert first.tokens == second.tokens


@pytest.mark.parametrize("part", ["domain", "variant"])
def test_other_scopes_do_not_share(engine: Engine, part: str) -> None:
    """Another domain or another variant must find nothing, and must find its own again."""
    engine.ask(PROMPT)
    assert engine.ask(PROMPT, kv={part: "other"}).cached == 0
    assert engine.ask(PROMPT, kv={part: "other"}).cached == 384
    assert engine.ask(PROMPT).cached == 384


def test_salt_and_domain_of_one_name_do_not_meet(engine: Engine) -> None:
    """A salt must separate as before, and must not be confused with a domain of the same text."""
    engine.ask(PROMPT, salt="x")
    assert engine.ask(PROMPT, salt="x").cached == 384
    assert engine.ask(PROMPT, kv={"domain": "x"}).cached == 0
    assert engine.ask(PROMPT).cached == 0


def test_generated_blocks_carry_the_same_value(engine: Engine) -> None:
    """Blocks filled while generating must be found by a prompt that continues them, in the same scope only."""
    prompt = PROMPT[:60]
    answer = engine.ask(prompt, max_tokens=80)
    continued = [*prompt, *answer.tokens]
    assert engine.ask(continued).cached == 128
    assert engine.ask(continued, kv={"domain": "other"}).cached == 0


def test_a_short_prompt_is_pinned_too(engine: Engine) -> None:
    """A prompt below one block, which vLLM does not hash on arrival, must have its pin all the same."""
    engine.ask(PROMPT[:5], max_tokens=1)
    request = engine.connector.requests[-1]
    assert pin_of(request) is not None
    assert engine.connector.state.uncacheable_reason(request) is None


def test_a_broken_provider_does_not_break_the_request(engine: Engine) -> None:
    """With a provider that raises, requests must run and never be served from the cache."""
    state = engine.connector.state
    truth = engine.ask(PROMPT)

    def broken(_request: Any) -> tuple[bytes, bytes]:
        raise RuntimeError("broken")

    state.set_scope_provider(broken)
    try:
        for _ in range(2):
            answer = engine.ask(PROMPT)
            assert (answer.cached, answer.tokens) == (0, truth.tokens)
        assert state.uncacheable_reason(engine.connector.requests[-1]) is not None
    finally:
        state.set_scope_provider(engine.connector.scope)


def test_an_engine_without_our_connector_is_untouched(engines: EnginePool, engine: Engine) -> None:
    """In the same process, with every hook installed, an engine without our connector must hash and load as vLLM does."""
    from vllm.lora.request import LoRARequest

    from tests.vllm.engine import KJV

    del engine  # it installed the hooks
    plain = engines.get(connector=None, **LORA)
    seen: list[Any] = []
    stock = type(plain.core.scheduler).add_request

    def add_request(self: Any, request: Any) -> Any:
        seen.append(request)
        return stock(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(plain.core.scheduler), "add_request", add_request)
        plain.ask(PROMPT)
        assert plain.ask(PROMPT, kv={"domain": "other"}).cached == 384
        plain.ask(PROMPT, LoRARequest("k", 3, str(KJV)), max_tokens=40)
    function = kv_cache_utils.generate_block_hash_extra_keys
    stock_keys: Any = function.kvgate_stock
    for request in seen:
        assert pin_of(request) is None
        assert function(request, 0, 32, 0) == stock_keys(request, 0, 32, 0)
    assert (seen[-1].lora_request.lora_int_id, seen[-1].lora_request.lora_path) == (3, str(KJV))
    assert plain.llm.llm_engine.list_loras() == {3}
    plain.llm.collective_rpc(lambda _worker: None)
    assert plain.ask(PROMPT).cached == 384
