"""Frames on the control socket: u32 little-endian length, then one contract-encoded map ``{"body", "id", "type"}``."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from kvgate.contract.decoding import decode
from kvgate.contract.encoding import INT_MAX, MAX_VALUES, encode
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.contract.specs import MAP, UINT, head, text_bytes
from kvgate.protocol.catalog import BY_NAME

HEADER: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 4 << 20
UNKNOWN: Final = "is not a message of this wire version"
DIFFERENT_BUILDS: Final = (
    "gateway and client are different builds of kvgate, and the side that says this is the older one (the gateway, where it refuses a"
    " request): upgrade kvgate there and restart it"
)
_KEYS: Final = {"id", "type", "body"}
# A frame's map in pieces, keys in their one order.
_ID: Final = head(MAP, 3) + text_bytes("id")
_BODY: Final = text_bytes("body")
_TAILS: Final = {kind: text_bytes("type") + text_bytes(name) for name, kind in BY_NAME.items()}


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame. ``body`` is decoded but not validated yet: its errors can be answered by id."""

    id: int
    type: str
    body: Any

    def message(self) -> Record:
        """The typed message; raises ``ContractError`` naming the field."""
        kind = BY_NAME.get(self.type)
        if kind is None:
            raise ContractError("type", UNKNOWN, DIFFERENT_BUILDS)
        return kind.from_value(self.body)


def frame_bytes(frame_id: int, message: Record) -> bytes:
    """A whole frame, header included. Raises ``ContractError`` where it is over ``MAX_FRAME_BYTES`` or holds too many values."""
    kind = type(message)
    tail = _TAILS.get(kind)
    if tail is None or type(frame_id) is not int or not 0 <= frame_id <= INT_MAX:
        payload = encode({"id": frame_id, "type": kind.__name__, "body": message.to_value()})
    else:
        payload = b"".join((_ID, head(UINT, frame_id), _BODY, message.encode_unbounded(), tail))
        if len(payload) > MAX_VALUES:
            # Long enough to hold too many values: the general encoder counts them.
            payload = encode({"id": frame_id, "type": kind.__name__, "body": message.to_value()})
    if len(payload) > MAX_FRAME_BYTES:
        raise ContractError("frame", "is too large", f"at most {MAX_FRAME_BYTES} bytes")
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes) -> int:
    """Length of the payload after ``header``; raises ``ContractError`` where it is beyond the limit."""
    (length,) = HEADER.unpack(header)
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ContractError("frame", "has a bad length", f"1 to {MAX_FRAME_BYTES} bytes")
    return int(length)


def parse_frame(payload: bytes) -> Frame:
    """Decode a frame's payload strictly. Raises ``ContractError``; its body is not validated yet."""
    value = decode(payload, MAX_FRAME_BYTES)
    if not isinstance(value, dict) or value.keys() != _KEYS:
        raise ContractError("frame", "is not a map of id, type and body")
    if type(value["id"]) is not int or not 0 <= value["id"] < 2**64 or type(value["type"]) is not str:
        raise ContractError("frame", "has a bad id or type")
    return Frame(value["id"], value["type"], value["body"])
