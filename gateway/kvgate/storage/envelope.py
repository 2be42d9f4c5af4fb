"""The self-describing header in front of every payload. ``docs/storage-format.md`` is its specification.

4,096 bytes: a fixed part that the gateway checks on every hit, a keyed MAC, the component digests as CBOR, zero padding. The MAC
is keyed from the deployment secret, so an object that was forged or altered in a shared L2 is never served.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hmac import compare_digest
from typing import Final

from kvgate.contract import specs
from kvgate.contract.decoding import decode
from kvgate.contract.digests import SCHEMAS, keyed
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record, frozen

ENVELOPE_BYTES: Final = 4096
MAGIC: Final = b"KVGATE\x00\x01"
# magic, schema, flags (zero), CBOR length, object address, payload length, payload digest; then the MAC, then the CBOR.
_FIXED: Final = struct.Struct("<8sHHI32sQ32s")
_MAC_BYTES: Final = 32
_CBOR_START: Final = _FIXED.size + _MAC_BYTES
MAX_CBOR_BYTES: Final = ENVELOPE_BYTES - _CBOR_START
_PADDING: Final = bytes(ENVELOPE_BYTES)


class EnvelopeError(Exception):
    """The header does not vouch for its payload; the message is one word of why: it goes into logs and metrics."""


@frozen
class Components(Record):
    """What the object was made of, one digest a component: a miss is explained and an audit is done from these."""

    base: bytes = specs.digest32()
    adapter: bytes | None = specs.optional(specs.digest32())
    rope: bytes = specs.digest32()
    numerics: bytes = specs.digest32()
    engine: bytes = specs.digest32()
    payload_layout: bytes = specs.digest32()
    codec: bytes = specs.digest32()
    plan: bytes = specs.digest32()
    access: bytes = specs.digest32()
    variant: bytes = specs.digest32()


@frozen
class Envelope(Record):
    """The header's content. ``address`` is the shard address, ``payload_digest`` the BLAKE3-256 of the payload bytes."""

    schema: int = specs.uint(minimum=1, maximum=2**16 - 1)
    address: bytes = specs.digest32()
    payload_bytes: int = specs.uint(minimum=1)
    payload_digest: bytes = specs.digest32()
    components: Components = specs.record(Components)


def seal(key: bytes, envelope: Envelope) -> bytes:
    """The 4,096 header bytes of ``envelope``; ``key`` is the deployment's envelope key."""
    body = _body(envelope.components)
    fixed = _FIXED.pack(MAGIC, envelope.schema, 0, len(body), envelope.address, envelope.payload_bytes, envelope.payload_digest)
    return (fixed + keyed(key, fixed + body) + body).ljust(ENVELOPE_BYTES, b"\0")


@lru_cache(maxsize=256)
def _body(components: Components) -> bytes:
    """The components as CBOR. All chunks of a request have the same."""
    body = components.encode()
    if len(body) > MAX_CBOR_BYTES:
        raise ContractError("components", "do not fit the envelope", f"at most {MAX_CBOR_BYTES} bytes")
    return body


def payload_digest_of(keys: tuple[bytes, ...], header: bytes, address: bytes, payload_bytes: int) -> bytes:
    """Check a header for one expected object and give its payload digest; raises ``EnvelopeError``.

    ``keys`` are the envelope keys this deployment accepts, newest first. Runs on every hit, so it does not decode the components:
    the address already commits to all of them.
    """
    fixed = _open(keys, header)[0]
    _, _, _, _, stored_address, stored_bytes, digest = fixed
    if not compare_digest(stored_address, address):
        raise EnvelopeError("address")
    if stored_bytes != payload_bytes:
        raise EnvelopeError("size")
    if not any(digest):
        raise EnvelopeError("digest")
    return bytes(digest)


def read(keys: tuple[bytes, ...], header: bytes) -> Envelope:
    """The whole content of a header, checked; raises ``EnvelopeError``."""
    (_, schema, _, _, address, payload_bytes, digest), body = _open(keys, header)
    try:
        components = Components.from_value(decode(body))
        return Envelope(
            schema=schema,
            address=address,
            payload_bytes=payload_bytes,
            payload_digest=digest,
            components=components,
        )
    except ContractError as error:
        raise EnvelopeError("components") from error


def _open(keys: tuple[bytes, ...], header: bytes) -> tuple[tuple[bytes, int, int, int, bytes, int, bytes], bytes]:
    if len(header) != ENVELOPE_BYTES:
        raise EnvelopeError("length")
    fixed = _FIXED.unpack_from(header)
    magic, schema, flags, cbor_bytes = fixed[:4]
    if magic != MAGIC:
        raise EnvelopeError("magic")
    if schema not in SCHEMAS:
        raise EnvelopeError("schema")
    if flags or cbor_bytes > MAX_CBOR_BYTES:
        raise EnvelopeError("format")
    end = _CBOR_START + cbor_bytes
    body = header[_CBOR_START:end]
    mac = header[_FIXED.size : _CBOR_START]
    signed = header[: _FIXED.size] + body
    if not any(compare_digest(mac, keyed(key, signed)) for key in keys):
        raise EnvelopeError("mac")
    if not header.endswith(_PADDING[end:]):
        raise EnvelopeError("padding")
    return fixed, body
