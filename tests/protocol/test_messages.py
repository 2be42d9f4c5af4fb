"""Every message round-trips, has one reply, and refuses what it does not know."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, Record
from kvgate.protocol import catalog
from kvgate.protocol import messages as m
from kvgate.protocol.versions import WIRE_VERSIONS
from tests.contract import independent
from tests.protocol.strategies import MESSAGES, PARTS, messages


def declared() -> set[type[Record]]:
    """The record classes of the messages module itself."""
    return {
        thing
        for thing in vars(m).values()
        if isinstance(thing, type) and issubclass(thing, Record) and thing.__module__ == m.__name__
    }


def test_every_record_of_the_module_is_a_message_or_a_part_of_one() -> None:
    """None is left out of the properties below, and the names are those of the classes."""
    assert declared() == MESSAGES.keys() | PARTS.keys()
    assert set(MESSAGES) == {kind for kind, since in catalog.SINCE.items() if since == 1}


def test_every_request_has_one_reply_and_no_reply_is_a_request() -> None:
    """A reader of the socket can tell the direction from the type."""
    assert not set(m.REPLIES) & set(m.REPLIES.values())
    assert set(m.REPLIES) | set(m.REPLIES.values()) | {m.Failure} == set(MESSAGES)


def test_no_message_is_identity() -> None:
    """Messages have no digest: only what they carry has."""
    assert not [kind for kind in declared() if issubclass(kind, IdentityRecord)]


@given(messages)
def test_a_message_survives_its_encoding_and_its_json_form(message: Record) -> None:
    """Every message can be read back."""
    kind = type(message)
    assert kind.decode(message.encode(), 4 << 20) == message
    assert kind.from_json(message.to_json()) == message
    assert kind.decode(message.encode(), 4 << 20).encode() == message.encode()


@given(messages)
def test_a_message_is_encoded_as_the_map_of_its_fields(message: Record) -> None:
    """An implementation written from the standard gives the same bytes."""
    assert message.encode() == encode(message.to_value()) == independent.cbor(message.to_value())


@given(messages, st.data())
def test_a_message_lacking_a_field_is_refused_by_name(message: Record, data: st.DataObject) -> None:
    """Nothing has a default."""
    value = message.to_value()
    if value:
        name = data.draw(st.sampled_from(list(value)))
        del value[name]
        with pytest.raises(ContractError) as caught:
            type(message).from_value(value)
        assert caught.value.field == name


@given(messages)
def test_a_message_with_an_unknown_field_is_refused_by_name(message: Record) -> None:
    """A newer peer's field is not ignored: versions are negotiated instead."""
    with pytest.raises(ContractError) as caught:
        type(message).from_value(message.to_value() | {"priority": 1})
    assert caught.value.field == "priority"


@given(messages)
def test_a_message_is_frozen(message: Record) -> None:
    """As every record."""
    for field in dataclasses.fields(message):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, None)


LEASE = {"lease": b"l" * 32}
BIND: dict[str, Any] = {
    "handle": b"h" * 32,
    "adapter": None,
    "salt": None,
    "scope": "prefix",
    "scope_key": None,
    "manifest": None,
    "tokens": b"",
}
HELLO: dict[str, Any] = {
    "role": "worker",
    "build": "1",
    "wire_lowest": 1,
    "wire_highest": 1,
    "schema_lowest": 1,
    "schema_highest": 1,
    "credential": None,
}

REFUSED: list[tuple[type[Record], dict[str, Any], str]] = [
    (m.Hello, HELLO | {"role": "root"}, "role"),
    (m.Hello, HELLO | {"build": ""}, "build"),
    (m.Hello, HELLO | {"build": "x" * 129}, "build"),
    (m.Hello, HELLO | {"wire_lowest": -1}, "wire_lowest"),
    (m.Hello, HELLO | {"wire_highest": "1"}, "wire_highest"),
    (m.Hello, HELLO | {"credential": b"x" * 1025}, "credential"),
    (m.Hello, HELLO | {"credential": "text"}, "credential"),
    (m.OpenEngine, {"handle": b"h" * 31}, "handle"),
    (m.OpenEngine, {"handle": b""}, "handle"),
    (m.OpenEngine, {"handle": None}, "handle"),
    (m.RegisterAdapter, {"handle": b"h" * 32, "adapter": None}, "adapter"),
    (m.RegisterAdapter, {"handle": b"h" * 32, "adapter": {"artifacts": []}}, "adapter.artifacts"),
    (m.Bind, BIND | {"tokens": b"t" * 33}, "tokens"),
    (m.Bind, BIND | {"tokens": b"t" * 32 * (m.MAX_CHUNKS + 1)}, "tokens"),
    (m.Bind, BIND | {"tokens": [1, 2]}, "tokens"),
    (m.Bind, BIND | {"scope": "any"}, "scope"),
    (m.Bind, BIND | {"salt": b""}, "salt"),
    (m.Bind, BIND | {"salt": bytes(32)}, "salt"),
    (m.Bind, BIND | {"adapter": "kjv"}, "adapter"),
    (m.Bind, BIND | {"adapter": bytes(32)}, "adapter"),
    (m.Acquire, LEASE | {"first": 0, "last": m.MAX_CHUNKS + 1, "deadline_ms": 1}, "last"),
    (m.Acquire, LEASE | {"first": -1, "last": 1, "deadline_ms": 1}, "first"),
    (m.Acquire, LEASE | {"first": 0, "last": 1, "deadline_ms": 0}, "deadline_ms"),
    (m.Acquire, LEASE | {"first": 0, "last": 1, "deadline_ms": 600_001}, "deadline_ms"),
    (m.Extend, LEASE | {"first": 0, "tokens": b"t"}, "tokens"),
    (m.Release, {"lease": b"l" * 33}, "lease"),
    (m.Explain, {"lease": "3f2a9c0011223344"}, "lease"),
    (m.Explained, {"reasons": ["model"], "chunk": 0}, "reasons[0]"),
    (m.Explained, {"reasons": ["absent"] * 11, "chunk": 0}, "reasons"),
    (m.Load, LEASE | {"chunks": []}, "chunks"),
    (m.Load, LEASE | {"chunks": [0] * (m.MAX_BATCH + 1)}, "chunks"),
    (m.Load, LEASE | {"chunks": [0, -1]}, "chunks[1]"),
    (m.Load, LEASE | {"chunks": [True]}, "chunks[0]"),
    (m.Load, LEASE | {"chunks": {"0": 1}}, "chunks"),
    (m.FinishLoad, {"ticket": 1, "mismatched": [0] * (m.MAX_BATCH + 1)}, "mismatched"),
    (m.LoadVerdict, {"valid": 1}, "valid"),
    (m.Reserve, LEASE | {"chunks": [m.MAX_CHUNKS + 1]}, "chunks[0]"),
    (m.Commit, {"written": [{"reservation": 1, "digest": bytes(32)}], "aborted": []}, "written[0].digest"),
    (m.Commit, {"written": [None], "aborted": []}, "written[0]"),
    (m.Failure, {"code": "oops", "field": "-", "problem": "p", "remedy": "r"}, "code"),
    (m.Failure, {"code": "busy", "field": "", "problem": "p", "remedy": "r"}, "field"),
    (m.Failure, {"code": "busy", "field": "-", "problem": "p" * 501, "remedy": "r"}, "problem"),
    (m.Done, {"ok": True}, "ok"),
]


@pytest.mark.parametrize(("kind", "value", "field"), REFUSED, ids=lambda part: getattr(part, "__name__", str(part)[:40]))
def test_a_wrong_field_is_refused_by_name(kind: type[Record], value: dict[str, Any], field: str) -> None:
    """Sizes, ranges, types and closed words of every field that a peer can get wrong."""
    with pytest.raises(ContractError) as caught:
        kind.from_value(value)
    assert caught.value.field == field


def test_the_refused_values_are_right_but_for_the_one_field() -> None:
    """The bases of the cases above are accepted."""
    assert m.Hello.from_value(HELLO).to_value() == HELLO
    assert m.Bind.from_value(BIND).to_value() == BIND
    assert len(m.Bind.from_value(BIND | {"tokens": b"t" * 32 * m.MAX_CHUNKS}).tokens) == 32 * m.MAX_CHUNKS
    assert len(m.Load.from_value(LEASE | {"chunks": [m.MAX_CHUNKS] * m.MAX_BATCH}).chunks) == m.MAX_BATCH


def test_limits_are_part_of_the_wire_version() -> None:
    """Both sides count on them: another limit is another version."""
    assert (m.MAX_CHUNKS, m.MAX_BATCH, max(WIRE_VERSIONS)) == (16_384, 1024, 2)


def test_an_empty_credential_is_not_the_absence_of_one() -> None:
    """The two are encoded apart: an empty one must be refused as unknown, and never be taken for the default domain."""
    empty, none = m.Hello.from_value(HELLO | {"credential": b""}), m.Hello.from_value(HELLO)
    assert empty.encode() != none.encode()
    assert m.Hello.decode(empty.encode()) == empty != none
