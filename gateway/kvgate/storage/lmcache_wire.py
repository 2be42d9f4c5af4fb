"""What the daemon and its LMCache storage process say to each other over their private unix socket.

A frame is a u32 length (little endian) and one CBOR array. Both ends come from the same start, so there is no version
negotiation: the ready line carries ``WIRE`` and a difference is refused. Payload bytes never travel here.

    request  [request id, op, budget in ms, body]      reply  [request id, Code, body]

Lists of equal things travel packed (``<Q`` arrays, one byte per answer), which keeps a call for hundreds of objects cheap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import cbor2

from .backend import ObjectRef
from .refs import ADDRESS_BYTES, DOMAIN_BYTES, check_refs

WIRE = 2
MAX_FRAME_BYTES = 8 << 20

_LENGTH = struct.Struct("<I")
# One answer of RESERVE and of ACQUIRE: id, offset in the pool, code.
_GRANT = struct.Struct("<QQB")

Grant = tuple[int, int, int]


class WireError(Exception):
    """The other end sent something that is not a frame of this protocol."""


class Op(IntEnum):
    """What a request asks for. Body in, body out; ``refs`` as ``encode_refs`` makes them, ``ids`` as ``pack_ids``."""

    RESERVE = 1  # refs -> grants (code: ReserveCode)
    COMMIT = 2  # ids -> one byte each: 1 visible, 0 unknown
    ABORT = 3  # ids -> nothing
    ACQUIRE = 4  # refs -> grants (code: TierCode)
    RELEASE = 5  # ids, no reply
    PROBE = 6  # refs -> one byte each: ProbeCode
    DELETE = 7  # refs -> nothing
    STATUS = 8  # nothing -> map of counters
    STOP = 9  # time for pending L2 writes in ms -> nothing
    TIERS = 10  # nothing -> names of the L2 adapters that are there
    LEAVE_ONLY = 11  # [refs, tier] -> one byte each: ProbeCode, PRESENT means there and nowhere else


class Code(IntEnum):
    """How a request went."""

    OK = 0
    UNAVAILABLE = 1  # body: text for the operator


class ReserveCode(IntEnum):
    """Answer to one reserved object."""

    GRANTED = 0
    RESIDENT = 1
    BUSY = 2
    FULL = 3


class TierCode(IntEnum):
    """Where an acquired object came from; ABSENT: it was not held."""

    ABSENT = 0
    L1 = 1
    L2 = 2


class ProbeCode(IntEnum):
    """Whether a probed object exists."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2


def frame(message: Sequence[object]) -> bytes:
    """``message`` with its length in front. Raises ``WireError`` if it is too large."""
    body: bytes = cbor2.dumps(list(message))
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(body)} bytes, at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Take ``data`` and yield every message now complete. Raises ``WireError``."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield _message(body)
        finally:
            del self._buffer[:start]


def _message(body: bytes) -> list[Any]:
    try:
        message = cbor2.loads(body)
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise WireError("a frame that is not CBOR") from error
    if not isinstance(message, list) or not message or not all(isinstance(head, int) for head in message[:2]):
        raise WireError("a frame that is not a message")
    return message


def encode_refs(refs: Sequence[ObjectRef]) -> list[object]:
    """``refs`` as a body: joined addresses, one size or all sizes, one domain or all domains."""
    sizes = [ref.object_bytes for ref in refs]
    domains = [ref.domain for ref in refs]
    one_size = len(set(sizes)) == 1
    one_domain = len(set(domains)) == 1
    return [
        b"".join(ref.address for ref in refs),
        sizes[0] if one_size else sizes,
        domains[0] if one_domain else b"".join(domains),
    ]


def decode_refs(body: Any) -> list[ObjectRef]:
    """The refs of a body; raises ``WireError`` for anything ``encode_refs`` does not make."""
    try:
        addresses, sizes, domains = body
        if not isinstance(addresses, bytes) or not isinstance(domains, bytes):
            raise WireError("refs whose addresses or domains are not bytes")
        count, rest = divmod(len(addresses), ADDRESS_BYTES)
        if isinstance(sizes, int):
            sizes = [sizes] * count
        if len(domains) == DOMAIN_BYTES:
            domains = domains * count
        if rest or len(sizes) != count or len(domains) != count * DOMAIN_BYTES:
            raise WireError("refs of unequal counts")
        refs = [
            ObjectRef(
                addresses[ADDRESS_BYTES * index : ADDRESS_BYTES * (index + 1)],
                sizes[index],
                domains[DOMAIN_BYTES * index : DOMAIN_BYTES * (index + 1)],
            )
            for index in range(count)
        ]
        check_refs(refs)
    except (TypeError, ValueError) as error:
        raise WireError("a body that is not refs") from error
    return refs


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as an array of u64."""
    return struct.pack(f"<{len(ids)}Q", *ids)


def unpack_ids(body: object) -> list[int]:
    """The ids of a body; raises ``WireError``."""
    if not isinstance(body, bytes) or len(body) % 8:
        raise WireError("a body that is not ids")
    return list(struct.unpack(f"<{len(body) // 8}Q", body))


def pack_grants(grants: Sequence[Grant]) -> bytes:
    """Answers of RESERVE and ACQUIRE: (id, offset, code) each."""
    return b"".join(_GRANT.pack(*grant) for grant in grants)


def unpack_grants(body: object, count: int) -> list[Grant]:
    """``count`` answers; raises ``WireError``."""
    if not isinstance(body, bytes) or len(body) != count * _GRANT.size:
        raise WireError("a body that is not the grants asked for")
    return list(_GRANT.iter_unpack(body))


def unpack_bytes(body: object, count: int) -> bytes:
    """``count`` one-byte answers; raises ``WireError``."""
    if not isinstance(body, bytes) or len(body) != count:
        raise WireError("a body that is not the answers asked for")
    return body
