"""A variant's wish must be read strictly, separate vLLM's own blocks, and reach the client where it fails; no engine runs."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from kvgate.contract.capability import CAPABILITY_BYTES, Capability
from kvgate_vllm import capture, failures, hooks
from kvgate_vllm.metadata import LoadOp
from kvgate_vllm.state import EngineState
from kvgate_vllm.tracking import Track
from kvgate_vllm.variants import IN_A_SESSION, MALFORMED, UNKNOWN, failed_report, is_variant, local_variant, message, wish_of

KEY = b"k" * 32


def capability(**changes: Any) -> str:
    """A sealed capability as text."""
    fields: dict[str, Any] = {
        "scope": "prefix",
        "chunks": 2,
        "expires_s": 1,
        "manifest": b"m" * 32,
        "scope_key": None,
        "root": b"r" * 32,
        "end": b"e" * 32,
    }
    return Capability(**(fields | changes)).seal(KEY).hex()


def request(parameters: Any) -> Any:
    """What a wish is read from."""
    return SimpleNamespace(kv_transfer_params=parameters, skip_reading_prefix_cache=False)


@pytest.mark.parametrize("parameters", [None, {}, {"kvgate_capture": 5}, {"do_remote_decode": True}, {"kvgate": {}}])
def test_ordinary_requests_have_no_wish(parameters: Any) -> None:
    """Without a capability a request is ordinary, whatever else its kv_transfer_params hold."""
    assert not is_variant(request(parameters))
    assert wish_of(request(parameters)) is None
    assert local_variant(request(parameters)) == b"ordinary"


def test_a_wish_is_what_the_capability_says() -> None:
    """A well-formed capability is read, unproven; it fails nothing by itself."""
    wish = wish_of(request({"kvgate_variant": capability()}))
    assert wish is not None
    assert wish.failure is None
    assert wish.content is not None
    assert (wish.content.chunks, wish.content.root) == (2, b"r" * 32)
    assert capability() not in repr(wish)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        None,
        5,
        b"x",
        ["a"],
        "0" * 2 * CAPABILITY_BYTES,
        "z" * 2 * CAPABILITY_BYTES,
        capability() + "00",
        " " + capability()[1:],
    ],
)
def test_malformed_wishes_fail(text: Any) -> None:
    """What no gateway can have made must fail its request, never make it an ordinary one."""
    wish = wish_of(request({"kvgate_variant": text}))
    assert wish is not None
    assert wish.failure == MALFORMED


@pytest.mark.parametrize("parameters", [5, "kvgate_variant", ["kvgate_variant"], True])
def test_parameters_that_are_no_map_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch, parameters: Any) -> None:
    """They can come past the API server's checks, in extra_args; an exception in the engine core would end it for everybody."""
    wish = wish_of(request(parameters))
    assert wish is not None
    assert wish.failure == UNKNOWN
    assert len(local_variant(request(parameters))) == 32
    assert capture.wish_of(request(parameters), allowed=True) is None
    monkeypatch.setattr(hooks, "active_state", lambda _config: EngineState())
    made = request(parameters)
    hooks._preprocess_add_request(
        lambda _core, _asked: (made, 0), SimpleNamespace(vllm_config=None), SimpleNamespace(lora_request=None)
    )
    again = wish_of(made)
    assert again is not None
    assert again.failure == UNKNOWN
    assert made.kv_transfer_params.get("do_remote_prefill") is None


@pytest.mark.parametrize("name", ["kvgate_variants", "kvgate_", "kvgate_cartridge"])
def test_wishes_of_another_version_fail(name: str) -> None:
    """A name that is not known may be a newer way to say what must not be computed."""
    for parameters in ({name: 1}, {name: 1, "kvgate_variant": capability()}):
        assert is_variant(request(parameters))
        wish = wish_of(request(parameters))
        assert wish is not None
        assert wish.failure == UNKNOWN


def test_local_blocks_are_told_apart_by_root_and_end() -> None:
    """Artifacts with different roots or ends never share blocks, equal ones do, and a malformed wish shares with nobody.

    One root has many ends where a manifest has artifacts of several lengths: what vLLM computes behind the shorter one lies under the
    same tokens as the rest of the longer one.
    """
    first, same, other, longer = (
        local_variant(request({"kvgate_variant": capability(**changes)}))
        for changes in ({}, {"expires_s": 2}, {"root": b"q" * 32}, {"end": b"f" * 32, "chunks": 3})
    )
    assert first == same
    assert len({first, other, longer, b"ordinary", *(local_variant(request({"kvgate_variant": "x"})) for _ in range(3))}) == 7


def test_a_weight_change_does_not_make_a_variant_request_an_ordinary_one() -> None:
    """vLLM computes what may read no cache: only ordinary requests are told to."""
    ordinary, variant = request(None), request({"kvgate_variant": capability()})
    hooks._skip_prefix_cache(SimpleNamespace(scheduler=SimpleNamespace(requests={"o": ordinary, "v": variant})))
    assert ordinary.skip_reading_prefix_cache
    assert not variant.skip_reading_prefix_cache


@pytest.mark.parametrize(("resumable", "known", "ends"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_streaming_session_can_not_go_on_from_a_variant(
    monkeypatch: pytest.MonkeyPatch, resumable: bool, known: bool, ends: bool
) -> None:
    """vLLM takes the next input's tokens into the session's first request and forgets its parameters: it would compute them.

    The input that opens a session fails like any request that is not covered, and the one that closes it has no tokens.
    """
    state = EngineState()
    monkeypatch.setattr(hooks, "active_state", lambda _config: state)
    core = SimpleNamespace(vllm_config=None, scheduler=SimpleNamespace(requests={"session": None} if known else {}))
    update = request({"kvgate_variant": capability()})
    update.request_id, update.resumable = "session", resumable
    added: list[Any] = []
    hooks._add_request(lambda _core, one: added.append(one), core, update)
    assert added == [update]
    failed = state.failed_requests()
    assert list(failed) == (["session"] if ends else [])
    assert not ends or failed["session"]["kvgate"]["error"] == message(IN_A_SESSION)
    assert state.failed_requests() == {}


def test_what_a_failing_request_sampled_in_its_last_step_is_not_told() -> None:
    """It was computed from something that it must not be computed from; outputs of other requests stay."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    failing = SimpleNamespace(
        request_id="failing",
        client_index=1,
        trace_headers=None,
        is_finished=lambda: False,
        get_finished_reason=lambda: FinishReason.ERROR,
        take_events=lambda: None,
    )
    ended: list[Any] = []
    scheduler = SimpleNamespace(requests={"failing": failing}, finish_requests=lambda names, _status: ended.extend(names))
    sampled = [EngineCoreOutput(request_id=name, new_token_ids=[7]) for name in ("other", "failing")]
    outputs = {1: EngineCoreOutputs(outputs=sampled)}
    failures._finish(scheduler, {"failing": failed_report("why"), "gone": failed_report("why")}, outputs)
    assert ended == ["failing"]
    assert [(one.request_id, one.new_token_ids) for one in outputs[1].outputs] == [("other", [7]), ("failing", [])]
    assert failures.error_of(outputs[1].outputs[1]) == message("why")


def test_a_load_of_the_step_that_reports_a_preemption_is_kept() -> None:
    """A request preempted between steps may be resumed by the step that reports it: its load belongs to the new pages."""
    load = LoadOp(1, "r", b"lease", 0, 1, (3, 4), None, skip_tokens=0, asynchronous=True)
    track = Track(request=SimpleNamespace(request_id="r"), chunk_tokens=64, uncacheable=None, adapter=None, salt=None)
    track.pending_load, track.blocks = load, [1, 2]
    track.reset_for_preemption()
    assert track.pending_load is load
    assert track.blocks == []


@pytest.mark.parametrize("name", failures.REQUEST_MODELS)
def test_beam_search_does_not_drop_a_capability(name: str) -> None:
    """vLLM's beam search has no kv_transfer_params: without an error the retained ids would be computed."""
    module = importlib.import_module(name)
    failures.install_request_hook(module)
    model = getattr(module, "CompletionRequest", None) or module.ChatCompletionRequest
    asked: dict[str, Any] = {"model": "m", "use_beam_search": True, "n": 2}
    asked |= {"prompt": [1]} if "prompt" in model.model_fields else {"messages": [{"role": "user", "content": "a"}]}
    assert model(**asked).to_beam_search_params(5, {}).beam_width == 2
    for parameters in ({"kvgate_variant": capability()}, {"kvgate_cartridge": 1}):
        with pytest.raises(Exception, match="beam search is not served from one"):
            model(**asked, kv_transfer_params=parameters).to_beam_search_params(5, {})


def output(error: str | None) -> Any:
    """One output of a stream."""
    told = {"kvgate": {"outcome": "variant failed", "error": error}} if error else None
    return SimpleNamespace(kv_transfer_params=told)


async def test_a_failure_ends_the_stream_with_an_http_error() -> None:
    """Outputs before it pass, the failure is raised with its text and 409, and vLLM's own stream is closed."""
    closed = []

    async def stock(_self: Any, *, outputs: list[Any]) -> AsyncIterator[Any]:
        try:
            for one in outputs:
                yield one
        finally:
            closed.append(True)

    passed = [one async for one in failures._generate(stock, None, outputs=[output(None), output(None)])]
    assert len(passed) == 2
    seen = []
    with pytest.raises(Exception, match="it is no longer stored") as raised:  # noqa: PT012 - the loop is what raises
        async for one in failures._generate(stock, None, outputs=[output(None), output(message("it is no longer stored")), 1]):
            seen.append(one)
    assert len(seen) == 1
    assert closed == [True, True]
    assert getattr(raised.value, "http_status", HTTPStatus.CONFLICT) is HTTPStatus.CONFLICT


def test_older_versions_get_the_nearest_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM has no error with a status of its own, the message still reaches the client as its fault, not the server's."""
    from vllm import exceptions

    monkeypatch.delattr(exceptions, "GracefulHTTPError", raising=False)
    error = failures.http_error("why")
    assert type(error).__name__ == "VLLMUnprocessableEntityError"
    assert str(error) == "why"
    monkeypatch.delattr(exceptions, "VLLMUnprocessableEntityError")
    assert isinstance(failures.http_error("why"), ValueError)


@pytest.mark.parametrize(
    "told", [None, {}, {"kvgate": None}, {"kvgate": {"outcome": "hit"}}, {"kvgate": {"error": 5}}, {"kvgate": "x"}]
)
def test_other_outputs_are_no_failures(told: Any) -> None:
    """Only kvgate's own message is one."""
    assert failures.error_of(SimpleNamespace(kv_transfer_params=told)) is None
