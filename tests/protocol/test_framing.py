"""Frames: bounded, decoded strictly, and whatever arrives, nothing but an error of the contract."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.protocol.framing import HEADER, MAX_FRAME_BYTES, Frame, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import Bind, Done
from tests.contract.strategies import u64s, values
from tests.protocol.strategies import messages


@given(u64s, messages)
def test_a_frame_carries_its_message_and_id(frame_id: int, message: Record) -> None:
    """What was sent is what is read."""
    sent = frame_bytes(frame_id, message)
    assert frame_length(sent[: HEADER.size]) == len(sent) - HEADER.size
    frame = parse_frame(sent[HEADER.size :])
    assert (frame.id, frame.type) == (frame_id, type(message).__name__)
    assert frame.message() == message


@given(u64s, messages)
def test_a_frame_is_one_encoded_map_of_three_entries(frame_id: int, message: Record) -> None:
    """The form that the module states, byte for byte."""
    sent = frame_bytes(frame_id, message)
    body = encode({"body": message.to_value(), "id": frame_id, "type": type(message).__name__})
    assert sent == struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_outside_the_limit_is_refused_before_anything_is_read(length: int) -> None:
    """Neither an empty frame nor one beyond the limit."""
    with pytest.raises(ContractError, match="frame: has a bad length"):
        frame_length(struct.pack("<I", length))


@pytest.mark.parametrize("length", [1, 4096, MAX_FRAME_BYTES])
def test_lengths_within_the_limit_are_taken(length: int) -> None:
    """Both ends included; lowest byte first."""
    assert frame_length(length.to_bytes(4, "little")) == length


def test_a_payload_beyond_the_limit_is_refused() -> None:
    """Also where the length was not asked for."""
    with pytest.raises(ContractError, match="too large"):
        parse_frame(b"\x00" * (MAX_FRAME_BYTES + 1))


def test_a_message_that_is_not_known_says_which_build_is_too_old() -> None:
    """Two builds of one wire version: the refusal says whose is the older, and what to do."""
    with pytest.raises(ContractError, match=r"^type: ") as caught:
        parse_frame(encode({"id": 1, "type": "Tomorrow", "body": {}})).message()
    remedy = caught.value.remedy
    assert "different builds" in remedy
    assert "upgrade kvgate there and restart it" in remedy


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    """The sender learns it, not the peer."""

    class Huge(Done):
        def to_value(self) -> dict[str, Any]:
            return {"filler": b"x" * MAX_FRAME_BYTES}

    with pytest.raises(ContractError, match="frame: is too large"):
        frame_bytes(1, Huge())


def test_the_largest_lists_fit_a_frame() -> None:
    """A bind of as many chunks as a request may have is one frame."""
    bind = Bind(
        handle=b"h" * 32, adapter=None, salt=None, scope="prefix", scope_key=None, manifest=None, tokens=b"t" * 32 * 16_384
    )
    assert parse_frame(frame_bytes(1, bind)[HEADER.size :]).message() == bind


GOOD: dict[str, Any] = {"id": 1, "type": "Done", "body": {}}


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        [],
        [1, "Done", {}],
        {},
        {"id": 1, "type": "Done"},
        {"id": 1, "body": {}},
        {"type": "Done", "body": {}},
        GOOD | {"more": 1},
        GOOD | {"id": -1},
        GOOD | {"id": True},
        GOOD | {"id": None},
        GOOD | {"id": "1"},
        GOOD | {"id": b"1"},
        GOOD | {"type": 1},
        GOOD | {"type": None},
        GOOD | {"type": b"Done"},
        GOOD | {"type": ["Done"]},
    ],
    ids=str,
)
def test_a_frame_of_another_form_is_refused(value: Any) -> None:
    """Exactly three entries, an unsigned id, a type in text."""
    assert parse_frame(encode(GOOD)) == Frame(1, "Done", {})
    with pytest.raises(ContractError) as caught:
        parse_frame(encode(value))
    assert caught.value.field == "frame"


@pytest.mark.parametrize("name", ["Nothing", "done", "", "Record", "PayloadSlot", "ModelContract", "__class__"])
def test_an_unknown_type_is_refused_when_the_message_is_asked_for(name: str) -> None:
    """The frame is read, so that the refusal can carry its id; records that are no messages are no types."""
    frame = parse_frame(encode(GOOD | {"type": name}))
    with pytest.raises(ContractError) as caught:
        frame.message()
    assert caught.value.field == "type"
    assert not name or name not in str(caught.value).split(":")[1]


@pytest.mark.parametrize("body", [None, 0, [], "x", b"x", {"extra": 1}, {"Bearer secret": 1}])
def test_a_wrong_body_is_refused_and_not_repeated(body: Any) -> None:
    """No part of what was sent comes back, except a field's name that looks like one."""
    with pytest.raises(ContractError) as caught:
        parse_frame(encode(GOOD | {"body": body})).message()
    assert "secret" not in str(caught.value)


def test_frames_that_are_not_deterministic_are_refused() -> None:
    """Entries in another order, a longer head, a repeated entry, bytes after the map."""
    good = encode(GOOD)
    assert good.hex() == "a36269640164626f6479a06474797065" + "64446f6e65"
    for wrong in (
        "a364626f6479a06269640164747970656444" + "6f6e65",
        "a3626964180164626f6479a0647479706564446f6e65",
        "a46269640162696401" + "64626f6479a0647479706564446f6e65",
        good.hex() + "00",
        good.hex()[:-2],
        "bf" + good.hex()[2:] + "ff",
    ):
        with pytest.raises(ContractError):
            parse_frame(bytes.fromhex(wrong))


def read_safely(payload: bytes) -> None:
    """Read a frame and its message; nothing but an error of the contract may come out."""
    try:
        frame = parse_frame(payload)
        message = frame.message()
    except ContractError:
        return
    # Read again, the answer is the same; only the order of artifacts may have been another on the way.
    assert parse_frame(frame_bytes(frame.id, message)[HEADER.size :]).message() == message


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    """Fuzz: no other exception than ContractError."""
    read_safely(payload)


@settings(max_examples=300)
@given(st.sampled_from(("Hello", "Bind", "Commit", "LoadPlan", "RegisterWorker", "Failure", "x")), values)
def test_any_body_is_read_or_refused(name: str, body: Any) -> None:
    """Fuzz: a well-formed frame around any value."""
    read_safely(encode({"id": 0, "type": name, "body": body}))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value where something can be put."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]
    return []


@settings(max_examples=300)
@given(messages, values, st.data())
def test_any_value_anywhere_in_a_message_is_read_or_refused(message: Record, value: Any, data: st.DataObject) -> None:
    """Fuzz: a valid message with one value replaced by another."""
    whole = {"id": 7, "type": type(message).__name__, "body": message.to_value()}
    holder, key = data.draw(st.sampled_from(places(whole)))
    holder[key] = value
    read_safely(encode(whole))


@settings(max_examples=300)
@given(messages, st.data())
def test_a_frame_with_one_byte_changed_is_read_or_refused(message: Record, data: st.DataObject) -> None:
    """Fuzz: bit rot on the way."""
    payload = frame_bytes(3, message)[HEADER.size :]
    at = data.draw(st.integers(0, len(payload) - 1))
    read_safely(payload[:at] + data.draw(st.binary(max_size=2)) + payload[at + 1 :])
