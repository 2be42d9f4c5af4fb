"""Parts of variant requests that need no engine: reading the wish, the local block variant, and how a failure reaches the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from kvgate.contract.capability import CAPABILITY_BYTES, Capability
from kvgate_vllm import failures, hooks
from kvgate_vllm.variants import MALFORMED, UNKNOWN, is_variant, local_variant, message, wish_of

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
