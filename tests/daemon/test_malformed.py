"""What is no message is answered by name where it has a number, ends its own connection where it has none, and harms nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvgate.contract.encoding import encode
from kvgate.daemon.app import Gateway
from kvgate.protocol.framing import HEADER, MAX_FRAME_BYTES, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import MAX_BATCH, MAX_CHUNKS, Bind, Bound, Failure, Release, Welcome
from tests.daemon import makers
from tests.daemon.wire import WAIT_S, Wire, denied, hello


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
async def test_bad_frame_length_ends_the_connection(gateway: Gateway, length: int) -> None:
    """An empty or oversize frame is not waited for, and takes no memory: the connection ends, others live on."""
    wire = await Wire.open(gateway.config.socket_path)
    other = await Wire.open(gateway.config.socket_path)
    await wire.raw(HEADER.pack(length))
    await wire.hung_up()
    async with denied("unsealed"):
        await other.call(Bind(**bind_values()), Bound)
    await other.close()


def bind_values() -> dict[str, Any]:
    """A bind with a made-up handle."""
    return {
        "handle": makers.name("handle"),
        "adapter": None,
        "salt": None,
        "scope": "prefix",
        "scope_key": None,
        "manifest": None,
        "tokens": makers.tokens("a"),
    }


MALFORMED: dict[str, bytes] = {
    "not CBOR": b"\xff\xff\xff",
    "an array": encode([1, 2, 3]),
    "missing body": encode({"id": 1, "type": "Hello"}),
    "an extra key": encode({"id": 1, "type": "Hello", "body": {}, "x": 1}),
    "negative id": encode({"id": -1, "type": "Hello", "body": {}}),
    "text id": encode({"id": "1", "type": "Hello", "body": {}}),
    "number as type": encode({"id": 1, "type": 5, "body": {}}),
    "trailing bytes": encode({"id": 1, "type": "Hello", "body": {}}) + b"\0",
    "unsorted keys": b"\xa3" + b"\x64type\x65Hello" + b"\x62id\x01" + b"\x64body\xa0",
    "indefinite map": b"\xbf\x62id\x01\xff",
    "nested too deep": b"\x81" * 100 + b"\x00",
    "huge array head": b"\x9b" + b"\xff" * 8,
    "float": b"\xfb" + b"\0" * 8,
    "a tag": b"\xc1\x01",
}


@pytest.mark.parametrize("case", list(MALFORMED))
@pytest.mark.parametrize("greeted", [False, True])
async def test_malformed_frame_ends_its_connection_only(gateway: Gateway, case: str, greeted: bool) -> None:
    """Bytes that are no frame end the connection that sent them, before and after hello; the gateway serves on."""
    wire = await (Wire.open if greeted else Wire.connect)(gateway.config.socket_path)
    await wire.raw(HEADER.pack(len(MALFORMED[case])) + MALFORMED[case])
    await wire.hung_up()
    again = await Wire.open(gateway.config.socket_path)
    await again.close()


BAD_BODIES: dict[str, tuple[str, object]] = {
    "unknown message": ("Nonsense", {}),
    "message of another version": ("BindV2", bind_values()),
    "body that is no map": ("Bind", [1, 2]),
    "null body": ("Bind", None),
    "empty body": ("Bind", {}),
    "unknown field": ("Release", {"lease": bytes(32), "force": True}),
    "short lease": ("Release", {"lease": bytes(31)}),
    "text for bytes": ("Release", {"lease": "x" * 32}),
    "number for bytes": ("Release", {"lease": 7}),
    "bytes for number": ("Acquire", {"lease": bytes(32), "first": b"", "last": 1, "deadline_ms": 1}),
    "bool for number": ("Acquire", {"lease": bytes(32), "first": False, "last": 1, "deadline_ms": 1}),
    "negative number": ("Acquire", {"lease": bytes(32), "first": -1, "last": 1, "deadline_ms": 1}),
    "no deadline": ("Acquire", {"lease": bytes(32), "first": 0, "last": 1, "deadline_ms": 0}),
    "deadline of an hour": ("Acquire", {"lease": bytes(32), "first": 0, "last": 1, "deadline_ms": 3_600_000}),
    "range beyond the limit": ("Acquire", {"lease": bytes(32), "first": 0, "last": MAX_CHUNKS + 1, "deadline_ms": 1}),
    "empty load": ("Load", {"lease": bytes(32), "chunks": []}),
    "load of too many": ("Load", {"lease": bytes(32), "chunks": [0] * (MAX_BATCH + 1)}),
    "reserve of too many": ("Reserve", {"lease": bytes(32), "chunks": [0] * (MAX_BATCH + 1)}),
    "too many aborts": ("Commit", {"written": [], "aborted": [0] * (MAX_BATCH + 1)}),
    "zero payload digest": ("Commit", {"written": [{"reservation": 1, "digest": bytes(32)}], "aborted": []}),
    "half a token digest": ("Bind", bind_values() | {"tokens": bytes(48)}),
    "too many chunks": ("Bind", bind_values() | {"tokens": b"x" * (32 * (MAX_CHUNKS + 1))}),
    "unknown scope": ("Bind", bind_values() | {"scope": "everyone"}),
    "empty salt": ("Bind", bind_values() | {"salt": b""}),
    "zero salt": ("Bind", bind_values() | {"salt": bytes(32)}),
    "zero adapter": ("Bind", bind_values() | {"adapter": bytes(32)}),
}


@pytest.mark.parametrize("case", list(BAD_BODIES))
async def test_invalid_message_is_answered_by_id(gateway: Gateway, case: str) -> None:
    """A well-formed frame with an invalid message gets its own refusal, and the connection lives on."""
    kind, body = BAD_BODIES[case]
    wire = await Wire.connect(gateway.config.socket_path, listen=False)
    await wire.raw(frame_bytes(1, hello()))
    data = encode({"id": 99, "type": kind, "body": body})
    await wire.raw(HEADER.pack(len(data)) + data)
    await wire.raw(frame_bytes(100, Release(lease=bytes(32))))
    replies = {}
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            frame = parse_frame(await wire.reader.readexactly(frame_length(await wire.reader.readexactly(4))))
            replies[frame.id] = frame.message()
    assert isinstance(replies[1], Welcome)
    refused = replies[99]
    assert isinstance(refused, Failure)
    assert refused.code == "malformed"
    assert isinstance(replies[100], Failure)
    await wire.close()
