"""The envelope: one encoding, sealed by a key, refused for any change."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.storage.envelope import ENVELOPE_BYTES, MAGIC, Components, Envelope, EnvelopeError, payload_digest_of, read, seal

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))

digests = st.binary(min_size=32, max_size=32).filter(any)
components = st.builds(
    Components,
    base=digests,
    adapter=st.none() | digests,
    rope=digests,
    numerics=digests,
    engine=digests,
    payload_layout=digests,
    codec=digests,
    plan=digests,
    access=digests,
    variant=digests,
)
envelopes = st.builds(
    Envelope,
    schema=st.just(1),
    address=digests,
    payload_bytes=st.integers(1, 2**64 - 1),
    payload_digest=digests,
    components=components,
)


def name(text: str) -> bytes:
    """32 bytes for a text."""
    return blake3(text.encode()).digest()


def example() -> Envelope:
    """One envelope."""
    parts = {field: name(field) for field, _ in Components._specs}
    return Envelope(
        schema=1, address=name("address"), payload_bytes=1000, payload_digest=name("payload"), components=Components(**parts)
    )


def reason(header: bytes, keys: tuple[bytes, ...] = (KEY,), address: bytes | None = None, payload_bytes: int = 1000) -> str:
    """Why a header is refused."""
    with pytest.raises(EnvelopeError) as caught:
        payload_digest_of(keys, header, address or name("address"), payload_bytes)
    return str(caught.value)


@given(envelope=envelopes)
def test_sealed_envelope_reads_back(envelope: Envelope) -> None:
    """What was sealed is read back equal, in exactly 4,096 bytes, and vouches for its payload's digest."""
    header = seal(KEY, envelope)
    assert len(header) == ENVELOPE_BYTES
    assert read((KEY,), header) == envelope
    assert payload_digest_of((KEY,), header, envelope.address, envelope.payload_bytes) == envelope.payload_digest


@given(envelope=envelopes, position=st.integers(0, ENVELOPE_BYTES - 1), mask=st.integers(1, 255))
def test_any_changed_byte_is_refused(envelope: Envelope, position: int, mask: int) -> None:
    """Changing any byte, padding included, in any way, makes it vouch for nothing."""
    header = bytearray(seal(KEY, envelope))
    header[position] ^= mask
    with pytest.raises(EnvelopeError):
        payload_digest_of((KEY,), bytes(header), envelope.address, envelope.payload_bytes)
    with pytest.raises(EnvelopeError):
        read((KEY,), bytes(header))


def test_every_bit_of_an_envelope_counts() -> None:
    """Exhaustively: each single flipped bit of the part before the padding is refused."""
    header = seal(KEY, example())
    for bit in range(8 * len(header.rstrip(b"\0"))):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        reason(bytes(flipped))


@pytest.mark.parametrize("length", [0, 1, 119, ENVELOPE_BYTES - 1, ENVELOPE_BYTES + 1])
def test_other_length_is_refused(length: int) -> None:
    """A short or long header is refused before anything in it is believed."""
    header = seal(KEY, example())
    assert reason((header + b"\0")[:length]) == "length"


@pytest.mark.parametrize("header", [bytes(ENVELOPE_BYTES), b"\xff" * ENVELOPE_BYTES, MAGIC.ljust(ENVELOPE_BYTES, b"\0")])
def test_blank_header_is_refused(header: bytes) -> None:
    """Zeros, ones, or a magic and nothing else are no envelope."""
    assert reason(header) in ("magic", "schema")


@pytest.mark.parametrize("field", [field for field, _ in Envelope._specs if field != "schema"])
def test_every_field_is_in_the_header(field: str) -> None:
    """Changing any field of the envelope changes its bytes, MAC included."""
    values: dict[str, Any] = {
        "address": name("other"),
        "payload_bytes": 1001,
        "payload_digest": name("other"),
        "components": dataclasses.replace(example().components, rope=name("other")),
    }
    first, second = seal(KEY, example()), seal(KEY, dataclasses.replace(example(), **{field: values[field]}))
    assert first != second
    assert first[88:120] != second[88:120]


@pytest.mark.parametrize("field", [field for field, _ in Components._specs])
def test_every_component_is_in_the_header(field: str) -> None:
    """Changing any component changes the bytes."""
    other = dataclasses.replace(example(), components=dataclasses.replace(example().components, **{field: name("other")}))
    assert seal(KEY, other) != seal(KEY, example())


def test_no_adapter_differs_from_any_adapter() -> None:
    """The explicit "no adapter" has its own form."""
    none = dataclasses.replace(example(), components=dataclasses.replace(example().components, adapter=None))
    assert read((KEY,), seal(KEY, none)).components.adapter is None


def test_expected_address_and_size_are_checked() -> None:
    """A genuine envelope vouches for its own address and length only."""
    header = seal(KEY, example())
    assert reason(header, address=name("other")) == "address"
    for payload_bytes in (999, 1001, 0, 2**40):
        assert reason(header, payload_bytes=payload_bytes) == "size"


def test_only_this_deployments_keys_count() -> None:
    """Another key is refused; during a rotation both the new and the old one are accepted."""
    header = seal(KEY, example())
    assert reason(header, keys=(OTHER_KEY,)) == "mac"
    assert reason(header, keys=()) == "mac"
    assert payload_digest_of((OTHER_KEY, KEY), header, name("address"), 1000) == name("payload")


@pytest.mark.parametrize("schema", [2, 3, 2**16 - 1])
def test_unknown_schema_is_refused(schema: int) -> None:
    """An envelope of a schema this build does not know is refused, though its MAC is good."""
    assert reason(seal(KEY, dataclasses.replace(example(), schema=schema))) == "schema"


def sealed_raw(fixed_changes: dict[int, bytes], body: bytes, padding: bytes = b"\0") -> bytes:
    """A header with a right MAC over arbitrary content: what a buggy writer with the key could make."""
    fixed = bytearray(seal(KEY, example())[:88])
    fixed[12:16] = struct.pack("<I", len(body))
    for offset, data in fixed_changes.items():
        fixed[offset : offset + len(data)] = data
    mac = blake3(bytes(fixed) + body, key=KEY).digest()
    return (bytes(fixed) + mac + body).ljust(ENVELOPE_BYTES, padding)[:ENVELOPE_BYTES]


def test_good_mac_does_not_excuse_bad_content() -> None:
    """Flags, a zero digest, dirty padding and components that are no components are refused, MAC or not."""
    body = encode(example().components.to_value())
    assert reason(sealed_raw({10: b"\1\0"}, body)) == "format"
    assert reason(sealed_raw({56: bytes(32)}, body)) == "digest"
    assert reason(sealed_raw({}, body, padding=b"x")) == "padding"
    assert reason(sealed_raw({12: struct.pack("<I", ENVELOPE_BYTES)}, body)) == "format"
    for broken in (b"", b"\xff", encode({}), encode([1]), encode({**example().components.to_value(), "more": 1})):
        with pytest.raises(EnvelopeError, match="components"):
            read((KEY,), sealed_raw({}, broken))


def test_envelope_wants_a_whole_description() -> None:
    """An empty payload, a zero digest or a short address can't be described at all."""
    for field, value in (("payload_bytes", 0), ("payload_digest", bytes(32)), ("address", bytes(31)), ("schema", 0)):
        with pytest.raises(ContractError, match=field):
            dataclasses.replace(example(), **{field: value})  # type: ignore[arg-type]
