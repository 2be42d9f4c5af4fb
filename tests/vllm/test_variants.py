"""Variant requests in real vLLM: decoded from exactly their artifact or ended with an error, never computed from the retained ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from demo.reference import ReferenceModel
from kvgate.client.artifacts import Artifact, VariantCapability
from kvgate.client.sdk import Gateway
from kvgate_vllm.state import active_state
from tests.vllm.connector_support import (
    CHUNK,
    TIE,
    Watch,
    assert_nothing_held,
    before_moves,
    connected,
    forget_local,
    free_blocks,
    reconnect,
    settle,
    watching,
)
from tests.vllm.engine import BLOCK_TOKENS, MODEL, Engine, prompt_tokens
from tests.vllm.gateway import GatewayProcess
from tests.vllm.variant_support import (
    TAIL,
    TOKENS,
    add_input,
    add_variant,
    ask,
    assert_decoded_from,
    assert_failed,
    input_outputs,
    run,
    stranger,
    with_capability,
    wrong_requests,
)

pytestmark = pytest.mark.timeout(90)

IDS = prompt_tokens(TOKENS, file=0)
OTHER = prompt_tokens(TOKENS, file=1)
SALT = "salted"


@pytest.fixture(scope="module", params=["background", pytest.param("in step", marks=pytest.mark.slow)])
def watched(gateway_process: GatewayProcess, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Watch]]:
    """An engine for each way to load, every page it restores looked at."""
    with watching() as watch, connected(gateway_process, extra={"async_load": request.param == "background"}) as made:
        yield made, watch


@pytest.fixture
def engine(watched: tuple[Engine, Watch]) -> Engine:
    """The engine."""
    return watched[0]


@pytest.fixture
def sdk(gateway_process: GatewayProcess, engine: Engine) -> Iterator[Gateway]:
    """The SDK at a gateway that answers; afterwards nothing may be held."""
    gateway_process.ensure()
    reconnect(engine)
    with Gateway(gateway_process.endpoint) as made:
        yield made
    gateway_process.ensure()
    state = active_state(engine.vllm_config)
    assert state is not None
    if state.weights().reason is None:
        reconnect(engine)
    assert_nothing_held(gateway_process)
    assert not engine.connector._scheduler._variants


@pytest.fixture
def artifact(engine: Engine, sdk: Gateway) -> Artifact:
    """KV of one text under the ids of another."""
    for salt in (None, SALT):
        ask(engine, [([*OTHER, 5], None)], max_tokens=1, salt=salt)
    return stranger(sdk, IDS, OTHER)


@pytest.fixture
def capability(artifact: Artifact, sdk: Gateway, engine: Engine) -> VariantCapability:
    """It is published, and vLLM's own cache empty."""
    published = sdk.publish(artifact)
    forget_local(engine)
    return published


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    """Another implementation of the model."""
    return ReferenceModel(MODEL)


def test_served_from_the_artifact_and_apart_from_ordinary_prompts(
    watched: tuple[Engine, Watch], artifact: Artifact, capability: VariantCapability, reference: ReferenceModel
) -> None:
    """The artifact's text from the gateway and from vLLM's own cache; ordinary requests for its ids never see it, nor the reverse."""
    engine, watch = watched
    prompt, kv = with_capability(capability)
    free, checked = free_blocks(engine), watch.pages_checked
    loaded = ask(engine, [(prompt, kv)])[0]
    assert watch.pages_checked == checked + TOKENS // BLOCK_TOKENS * artifact.keys.shape[0]
    assert not watch.wrong
    assert (loaded.reply.restored, loaded.reply.cached) == (TOKENS, TOKENS)
    assert_decoded_from(artifact, loaded, reference)
    ordinary = ask(engine, [(prompt, None)])[0]
    assert (ordinary.reply.restored, ordinary.reply.cached) == (0, 0)
    assert ordinary.reply.top[0] != loaded.reply.top[0]
    local = ask(engine, [(prompt, kv)])[0]
    assert (local.reply.restored, local.reply.kvgate["outcome"]) == (0, "hit")
    assert local.reply.cached >= TOKENS
    assert_decoded_from(artifact, local, reference)
    again = ask(engine, [(prompt, None)])[0]
    assert again.reply.cached >= TOKENS
    assert again.reply.tokens == ordinary.reply.tokens
    forget_local(engine)
    third = ask(engine, [(prompt, None)])[0]
    assert third.reply.restored == TOKENS
    assert third.reply.tokens == ordinary.reply.tokens
    assert free_blocks(engine) == free


def test_what_was_computed_behind_a_shorter_artifact_is_not_taken_for_the_longer_one(engine: Engine, sdk: Gateway) -> None:
    """One manifest, two lengths: vLLM computes the second chunk's ids behind the shorter one, and loads them for the longer one."""
    for text in (IDS, OTHER):
        ask(engine, [([*text, 5], None)], max_tokens=1)
    made = stranger(sdk, IDS, OTHER, algorithm="lengths", scope="query", query=(1, 2))
    longer = sdk.publish(made)
    shorter = sdk.find(made.manifest, made.source, IDS[:CHUNK])
    prompt, kv = with_capability(longer)
    forget_local(engine)
    wanted = ask(engine, [(prompt, kv)])[0].reply
    forget_local(engine)
    other = ask(engine, [(prompt, dict(shorter.kv_transfer_params))])[0].reply
    assert other.restored == CHUNK
    got = ask(engine, [(prompt, kv)])[0].reply
    assert (got.restored, got.tokens, got.top) == (TOKENS, wanted.tokens, wanted.top)
    assert other.top != wanted.top


def test_a_streaming_session_ends_at_an_input_with_a_capability(engine: Engine, capability: VariantCapability) -> None:
    """vLLM would go on with the session's own parameters and compute the ids: the session fails, and gives no token of them."""
    add_input(engine, IDS[:40], None)
    assert [len(one.new_token_ids) for one in input_outputs(engine, 1)] == [1]
    add_input(engine, *with_capability(capability))
    (last,) = input_outputs(engine, 1)
    assert last.new_token_ids == []
    assert last.kv_transfer_params["kvgate"]["outcome"] == "variant failed"
    assert not engine.core.scheduler.requests


def test_what_vllm_holds_itself_is_not_loaded_again(engine: Engine, capability: VariantCapability) -> None:
    """Part of the artifact in vLLM's own cache: only the rest is loaded, and the text is the same."""
    prompt, kv = with_capability(capability)
    whole = ask(engine, [(prompt, kv)], max_tokens=4)[0]
    manager = engine.core.scheduler.kv_cache_manager
    request = add_variant(engine, prompt, kv)
    held = manager.get_computed_blocks(request)[0].get_block_ids()[0]
    run(engine, request.is_finished)
    manager.evict_blocks(set(held[TOKENS // BLOCK_TOKENS - 3 :]))
    part = ask(engine, [(prompt, kv)], max_tokens=4)[0]
    assert part.reply.restored == 3 * BLOCK_TOKENS
    assert part.reply.tokens == whole.reply.tokens


def test_nothing_of_a_variant_request_is_stored(
    engine: Engine, capability: VariantCapability, gateway_process: GatewayProcess
) -> None:
    """However much it decodes: no chunk of it is stored under any prefix."""
    prompt, kv = with_capability(capability)
    before = gateway_process.status()["known_chunks"]
    with before_moves("pack", lambda _moves: None) as packs:
        long = ask(engine, [(prompt, kv)], max_tokens=2 * CHUNK)[0]
    assert len(long.reply.tokens) == 2 * CHUNK
    assert not packs
    assert gateway_process.status()["known_chunks"] == before
    forget_local(engine)
    told = ask(engine, [([*prompt, *long.reply.tokens, 5], None)], max_tokens=1)[0].reply.kvgate
    assert told["restored_tokens"] <= TOKENS  # those of an ordinary prompt of the ids themselves, computed in another test


def test_wrong_capabilities_fail_their_request_alone(
    engine: Engine, capability: VariantCapability, artifact: Artifact, reference: ReferenceModel
) -> None:
    """Whatever is wrong with it: a clear error, no token; the right request and an ordinary one beside it are served."""
    prompt, kv = with_capability(capability)
    ordinary = prompt_tokens(100, file=3)
    wanted = ask(engine, [(ordinary, None)])[0].reply.tokens
    for name, ids, wrong, reason, salt in wrong_requests(capability):
        if salt is not None:
            outcomes = [*ask(engine, [(ids, wrong)], salt=salt), *ask(engine, [(prompt, kv), (ordinary, None)])]
        else:
            outcomes = ask(engine, [(ids, wrong), (prompt, kv), (ordinary, None)])
        print(name)
        assert_failed(engine, outcomes[0], reason)
        assert_decoded_from(artifact, outcomes[1], reference)
        assert outcomes[2].reply.tokens == wanted


def test_requests_that_may_read_no_cache_fail(engine: Engine, capability: VariantCapability) -> None:
    """What vLLM would compute in full, and what kvgate does not cover, can't be served from a variant."""
    prompt, kv = with_capability(capability)
    outcome = ask(engine, [(prompt, kv)], skip_reading_prefix_cache=True)[0]
    assert_failed(engine, outcome, "the request asked not to be served from a cache")
    outcome = ask(engine, [(prompt, {"kvgate_variant": "malformed"})], skip_reading_prefix_cache=True)[0]
    assert_failed(engine, outcome, "its capability is malformed")
    outcome = ask(engine, [(prompt, kv)], prompt_logprobs=1)[0]
    assert outcome.finish == "error"
    assert outcome.reply.tokens == ()
    uncovered = ask(engine, [(prompt, kv | {"kvgate": {"restored_tokens": 0}})])[0]
    assert_failed(engine, uncovered, "the scope of the request could not be established")


def test_a_salted_artifact_needs_its_salt(engine: Engine, artifact: Artifact, sdk: Gateway, reference: ReferenceModel) -> None:
    """An artifact of a salted source is served under that salt and no other."""
    salted = stranger(sdk, IDS, OTHER, salt=SALT)
    prompt, kv = with_capability(sdk.publish(salted))
    assert_decoded_from(salted, ask(engine, [(prompt, kv)], salt=SALT)[0], reference)
    for wrong in (None, "another"):
        reason = "its capability is of another model, adapter, salt or stored form"
        assert_failed(engine, ask(engine, [(prompt, kv)], salt=wrong)[0], reason)


def test_an_expired_capability_fails(engine: Engine, artifact: Artifact, sdk: Gateway) -> None:
    """After its time a capability serves nobody, not even from vLLM's own cache."""
    prompt, kv = with_capability(sdk.publish(artifact, ttl_s=2))
    assert ask(engine, [(prompt, kv)])[0].finish == "length"
    time.sleep(2.1)
    assert_failed(engine, ask(engine, [(prompt, kv)])[0], "its capability has expired")


def test_damaged_artifacts_fail_every_request_that_relies_on_them(
    engine: Engine, artifact: Artifact, capability: VariantCapability, sdk: Gateway, reference: ReferenceModel
) -> None:
    """A payload with a flipped bit: the requests that wait for it end, others go on, its pages serve nobody, and it is gone then."""
    prompt, kv = with_capability(capability)
    ordinary = prompt_tokens(100, file=3)
    plain = ask(engine, [(prompt, None)])[0].reply
    forget_local(engine)
    free = free_blocks(engine)

    def damage(moves: Sequence[Any]) -> None:
        moves[1].payload[999] ^= 1

    with before_moves("unpack", damage):
        outcomes = ask(engine, [(prompt, kv), (with_capability(capability, TAIL[:9])[0], kv), (ordinary, None)])
    for outcome in outcomes[:2]:
        assert outcome.finish == "error"
        assert outcome.reply.tokens == ()
        assert outcome.error is not None
    assert "could not be loaded" in str(outcomes[0].error)
    assert outcomes[2].finish == "length"
    assert free_blocks(engine) == free
    assert_failed(engine, ask(engine, [(prompt, kv)])[0], "it is no longer stored")
    assert ask(engine, [(prompt, None)])[0].reply.tokens == plain.tokens
    anew = sdk.publish(artifact)
    assert_decoded_from(artifact, ask(engine, [with_capability(anew)])[0], reference)


def test_a_preempted_request_is_loaded_again(engine: Engine, capability: VariantCapability) -> None:
    """After preemption, with vLLM's own cache empty, the artifact is loaded again; the tokens are those of an undisturbed run."""
    prompt, kv = with_capability(capability)
    wanted = ask(engine, [(prompt, kv)], max_tokens=60)[0].reply
    forget_local(engine)
    request = add_variant(engine, prompt, kv)
    run(engine, lambda: request.num_output_tokens >= 10)
    assert engine.core.reset_prefix_cache(reset_running_requests=True)
    assert request.num_computed_tokens == 0
    outputs = run(engine, request.is_finished)
    (last,) = [output for output in outputs if output.finished]
    assert last.kv_transfer_params["kvgate"]["restored_tokens"] == 2 * TOKENS
    tokens = list(last.outputs[0].token_ids)
    at = next((i for i, (a, b) in enumerate(zip(tokens, wanted.tokens, strict=True)) if a != b), None)
    # Prefill of what was decoded before has other low bits than decoding it had.
    assert at is None or (at >= 10 and wanted.top[at][0] - wanted.top[at][1] <= TIE)
    settle(engine)


def test_an_ordinary_request_preempted_between_steps_is_loaded_again(engine: Engine, sdk: Gateway) -> None:
    """The step that reports its preemption may also resume it: what that step promised must be loaded, and be right."""
    prompt = [*OTHER, *TAIL]
    wanted = ask(engine, [(prompt, None)], max_tokens=30)[0].reply
    forget_local(engine)
    request = add_variant(engine, prompt, {}, 30)
    run(engine, lambda: request.num_output_tokens >= 3)
    assert engine.core.reset_prefix_cache(reset_running_requests=True)
    outputs = run(engine, request.is_finished)
    (last,) = [output for output in outputs if output.finished]
    assert last.kv_transfer_params["kvgate"]["restored_tokens"] == 2 * TOKENS
    tokens = list(last.outputs[0].token_ids)
    at = next((i for i, (a, b) in enumerate(zip(tokens, wanted.tokens, strict=True)) if a != b), None)
    assert at is None or wanted.top[at][0] - wanted.top[at][1] <= TIE
    settle(engine)


def test_a_preempted_request_without_its_artifact_fails(
    engine: Engine, capability: VariantCapability, gateway_process: GatewayProcess, sdk: Gateway
) -> None:
    """Preempted, and the gateway gone or come back without the artifact: it ends with an error instead of being computed."""
    for comes_back in (False, True):
        prompt, kv = with_capability(capability)
        forget_local(engine)
        request = add_variant(engine, prompt, kv)
        run(engine, lambda request=request: request.num_output_tokens >= 3)
        gateway_process.kill()
        if comes_back:
            gateway_process.start()
        assert engine.core.reset_prefix_cache(reset_running_requests=True)
        outputs = run(engine, request.is_finished)
        (last,) = [output for output in outputs if output.finished]
        assert last.outputs[0].finish_reason == "error"
        assert len(last.outputs[0].token_ids) < 60
        print(last.kv_transfer_params)
        settle(engine)
        gateway_process.ensure()
        reconnect(engine)
        ask(engine, [([*OTHER, 5], None)], max_tokens=1)
        capability = sdk.publish(stranger(sdk, IDS, OTHER))


def test_without_a_gateway_or_an_artifact_it_fails(
    engine: Engine, capability: VariantCapability, gateway_process: GatewayProcess
) -> None:
    """No gateway: an error. A new gateway that knows the capability but has no artifact any more: an error too."""
    prompt, kv = with_capability(capability)
    gateway_process.kill()
    assert_failed(engine, ask(engine, [(prompt, kv)])[0], "there is no gateway")
    gateway_process.start()
    reconnect(engine)
    assert_failed(engine, ask(engine, [(prompt, kv)])[0], "it is no longer stored")


def test_a_gateway_killed_during_the_load_fails_it(
    engine: Engine, capability: VariantCapability, gateway_process: GatewayProcess
) -> None:
    """kill -9 during the copy: an error, and the engine goes on."""
    prompt, kv = with_capability(capability)
    with before_moves("unpack", lambda _moves: gateway_process.kill()):
        assert_failed(engine, ask(engine, [(prompt, kv)])[0], "it could not be loaded")
    assert ask(engine, [(prompt_tokens(100, file=3), None)])[0].finish == "length"


def test_changed_weights_fail_what_waits_for_its_variant(engine: Engine, capability: VariantCapability) -> None:
    """Weights change between arrival and lookup: an error. (The last test of an engine: it caches nothing afterwards.)"""
    prompt, kv = with_capability(capability)
    request = add_variant(engine, prompt, kv)
    engine.core.collective_rpc("check_health")
    engine.core.collective_rpc(_touch)
    outputs = run(engine, request.is_finished)
    (last,) = [output for output in outputs if output.finished]
    assert last.outputs[0].finish_reason == "error"
    assert last.outputs[0].token_ids == []
    assert "weights changed" in last.kv_transfer_params["kvgate"]["error"]
    settle(engine)


def _touch(_worker: Any) -> None:
    """Something that kvgate does not know: it may have written weights."""
