"""Messages of variants round-trip, are not spoken in wire 1, and refuse what is too long or too short."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.capability import CAPABILITY_BYTES
from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, Record
from kvgate.protocol import catalog
from kvgate.protocol import variant_messages as m
from kvgate.protocol.messages import MAX_CHUNKS
from tests.contract.strategies import digests, manifests, models, optional, plans, representations, u64s
from tests.protocol.strategies import batches, booleans, digest_lists, handles, leases, references, scopes

counts = st.integers(1, 2**31)
capabilities = st.binary(min_size=CAPABILITY_BYTES, max_size=CAPABILITY_BYTES)
bound = {
    "lease": leases,
    "variant": digests,
    "present": u64s,
    "probing": booleans,
    "reference": references,
    "addresses": digest_lists,
}
asked = {"handle": handles, "adapter": optional(digests), "salt": optional(digests)}

MESSAGES: dict[type[Record], st.SearchStrategy[Any]] = {
    m.OpenModel: st.builds(
        m.OpenModel, handle=optional(handles), model=optional(st.from_regex(r"[0-9a-f]{1,64}", fullmatch=True))
    ),
    m.ModelOpened: st.builds(
        m.ModelOpened,
        handle=handles,
        domain=digests,
        token_key=digests,
        salt_key=digests,
        shared_token_key=optional(digests),
        model=models(),
        representation=representations(),
        plan=plans(),
        adapters=digest_lists,
    ),
    m.DescribeSource: st.builds(
        m.DescribeSource, **asked, scope=scopes, tokens=digest_lists, source_tokens=counts, tail=optional(digests)
    ),
    m.SourceDescribed: st.builds(m.SourceDescribed, source_prefix=digests, model=digests, payload_format=digests),
    m.OpenVariant: st.builds(
        m.OpenVariant, **asked, manifest=manifests(), source=digest_lists, tail=optional(digests), tokens=digest_lists
    ),
    m.VariantOpened: st.builds(m.VariantOpened, **bound),
    m.ReserveRectangle: st.builds(m.ReserveRectangle, lease=leases, rectangle=st.integers(0, 1024), chunks=batches),
    m.LoadRectangle: st.builds(m.LoadRectangle, lease=leases, rectangle=st.integers(0, 1024), chunks=batches),
    m.SealVariant: st.builds(
        m.SealVariant, lease=leases, ttl_s=st.integers(1, m.MAX_TTL_S), deadline_ms=st.integers(1, 600_000)
    ),
    m.VariantSealed: st.builds(m.VariantSealed, capability=capabilities, expires_s=u64s),
    m.BindVariant: st.builds(m.BindVariant, **asked, capability=capabilities, tokens=digest_lists),
    m.VariantBound: st.builds(m.VariantBound, **bound),
}
messages = st.one_of(*MESSAGES.values())


def test_every_record_of_the_module_is_a_message_of_wire_2() -> None:
    """None is left out, none has a digest, and no client of wire 1 is sent one."""
    declared = {
        thing
        for thing in vars(m).values()
        if isinstance(thing, type) and issubclass(thing, Record) and thing.__module__ == m.__name__
    }
    assert declared == set(MESSAGES)
    assert all(catalog.SINCE[kind] == 2 and not issubclass(kind, IdentityRecord) for kind in declared)
    assert {request: reply for request, reply in catalog.REPLIES.items() if request in m.REPLIES} == m.REPLIES


@given(messages)
def test_a_message_survives_its_encoding_and_its_json_form(message: Record) -> None:
    """Every message can be read back."""
    kind = type(message)
    assert kind.decode(message.encode(), 4 << 20) == message
    assert kind.from_json(message.to_json()) == message


@given(messages, st.data())
def test_a_message_lacking_a_field_is_refused_by_name(message: Record, data: st.DataObject) -> None:
    """Nothing has a default."""
    value = message.to_value()
    name = data.draw(st.sampled_from(list(value)))
    del value[name]
    with pytest.raises(ContractError) as caught:
        type(message).from_value(value)
    assert caught.value.field == name


HANDLE = {"handle": b"h" * 32, "adapter": None, "salt": None}
LEASE = {"lease": b"l" * 32, "rectangle": 0, "chunks": [0]}
SOURCE = HANDLE | {"scope": "prefix", "tokens": b"", "source_tokens": 1, "tail": b"t" * 32}
BIND = HANDLE | {"capability": b"\x01" * CAPABILITY_BYTES, "tokens": b""}
SEAL = {"lease": b"l" * 32, "ttl_s": 1, "deadline_ms": 1}

REFUSED: list[tuple[type[Record], dict[str, Any], str]] = [
    (m.OpenModel, {"handle": None, "model": ""}, "model"),
    (m.OpenModel, {"handle": None, "model": "0" * 65}, "model"),
    (m.OpenModel, {"handle": None, "model": "AB"}, "model"),
    (m.OpenModel, {"handle": b"h", "model": None}, "handle"),
    (m.DescribeSource, SOURCE | {"source_tokens": 0}, "source_tokens"),
    (m.DescribeSource, SOURCE | {"source_tokens": 2**31 + 1}, "source_tokens"),
    (m.DescribeSource, SOURCE | {"tail": b""}, "tail"),
    (m.DescribeSource, SOURCE | {"tail": bytes(32)}, "tail"),
    (m.DescribeSource, SOURCE | {"scope": "any"}, "scope"),
    (m.DescribeSource, SOURCE | {"tokens": b"t" * 31}, "tokens"),
    (m.DescribeSource, SOURCE | {"tokens": b"t" * 32 * (MAX_CHUNKS + 1)}, "tokens"),
    (m.OpenVariant, HANDLE | {"manifest": None, "source": b"", "tail": None, "tokens": b""}, "manifest"),
    (m.OpenVariant, HANDLE | {"manifest": {}, "source": b"", "tail": None, "tokens": b""}, "manifest.algorithm"),
    (m.ReserveRectangle, LEASE | {"rectangle": -1}, "rectangle"),
    (m.ReserveRectangle, LEASE | {"rectangle": 1025}, "rectangle"),
    (m.ReserveRectangle, LEASE | {"chunks": []}, "chunks"),
    (m.LoadRectangle, LEASE | {"chunks": [0] * 1025}, "chunks"),
    (m.LoadRectangle, LEASE | {"chunks": [-1]}, "chunks[0]"),
    (m.SealVariant, SEAL | {"ttl_s": 0}, "ttl_s"),
    (m.SealVariant, SEAL | {"ttl_s": m.MAX_TTL_S + 1}, "ttl_s"),
    (m.SealVariant, SEAL | {"deadline_ms": 0}, "deadline_ms"),
    (m.BindVariant, BIND | {"capability": b""}, "capability"),
    (m.BindVariant, BIND | {"capability": b"\x01" * (CAPABILITY_BYTES - 1)}, "capability"),
    (m.BindVariant, BIND | {"capability": b"\x01" * (CAPABILITY_BYTES + 1)}, "capability"),
    (m.BindVariant, BIND | {"capability": "01" * CAPABILITY_BYTES}, "capability"),
    (m.BindVariant, BIND | {"capability": None}, "capability"),
    (m.BindVariant, BIND | {"salt": bytes(32)}, "salt"),
]


@pytest.mark.parametrize(("kind", "value", "field"), REFUSED)
def test_a_message_out_of_bounds_is_refused_by_name(kind: type[Record], value: dict[str, Any], field: str) -> None:
    """Every input has a limit."""
    with pytest.raises(ContractError) as caught:
        kind.from_value(value)
    assert caught.value.field == field
