"""What the daemon and a device's transfer process say to each other over the socket pair that the process is born with.

Frames are those of the storage process: u32 length, then one CBOR array. Both ends are of one installation, so there is no
negotiation; the first frame carries ``WIRE``, and a difference is refused. Payload bytes never travel here.

    first    [0, Code, [wire, pid, error text]]
    request  [request id, op, milliseconds left, body]      reply  [request id, Code, body]
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from kvgate.storage.lmcache_wire import FrameReader, WireError, frame
from kvgate.transfer.records import BLOCK_ID_BYTES, DIGEST_BYTES, EVENT_HANDLE_BYTES, MoveSpec, Packed

__all__ = ["MAX_MOVES", "WIRE", "Code", "FrameReader", "MoveBody", "Op", "WireError", "frame", "pack_result", "unpack_result"]

WIRE = 2
MODULE = "kvgate.transfer.process"
MAX_MOVES = 4096
MAX_BLOCKS = 1 << 20
"""Block ids of one request: with their four bytes each they stay well below a frame."""


class Op(IntEnum):
    """What a request asks for. Body in, body out."""

    ATTACH = 1  # [export, payload shape, worker's pid, uid, gate] -> [number, num_blocks, payload_bytes, backend, reason]
    DETACH = 2  # handle number -> nothing; after the moves under way
    POOL = 3  # [name, bytes, align, generation] or nothing -> nothing; the old one goes after the moves under way
    PACK = 4  # MoveBody -> pack_result
    UNPACK = 5  # MoveBody -> digests in a row
    CANCEL = 6  # id of a move, no reply: if it has not begun it is answered EXPIRED, else nothing happens
    STATUS = 7  # nothing -> map of counters
    STOP = 8  # nothing -> nothing; then the process ends


class Code(IntEnum):
    """How a request went. The body of all but OK is a text."""

    OK = 0
    REFUSED = 1  # it names what is not there, or is not what it says; nothing was done
    EXPIRED = 2  # cancelled before it began; nothing was done
    UNAVAILABLE = 3  # the device has no room for it now; nothing was done
    SHUT = 4  # the worker's gate does not let this load through; nothing was done


@dataclass(frozen=True, slots=True)
class MoveBody:
    """One call's moves. ``offsets`` and ``skips`` have an entry a move, ``blocks`` equal runs of u32 block ids."""

    number: int
    generation: int
    digest: bool
    paced: bool
    ready: bytes | None
    gate: int | None
    offsets: tuple[int, ...]
    skips: tuple[int, ...]
    blocks: bytes

    @classmethod
    def of(
        cls,
        number: int,
        generation: int,
        moves: Sequence[MoveSpec],
        ready: bytes | None,
        digest: bool,
        paced: bool,
        gate: int | None,
    ) -> Self:
        """From the daemon's moves. Raises ``WireError`` for too many, and for block lists of unequal or odd lengths."""
        lengths = {len(move.blocks) for move in moves}
        if not 0 < len(moves) <= MAX_MOVES:
            raise WireError(f"a call has 1 to {MAX_MOVES} moves, not {len(moves)}")
        if len(lengths) != 1 or min(lengths) % BLOCK_ID_BYTES or len(moves) * max(lengths) > BLOCK_ID_BYTES * MAX_BLOCKS:
            raise WireError("the moves' block lists are odd, of unequal lengths, or too long")
        if ready is not None and len(ready) != EVENT_HANDLE_BYTES:
            raise WireError(f"an event handle has {EVENT_HANDLE_BYTES} bytes")
        return cls(
            number,
            generation,
            digest,
            paced,
            ready,
            gate,
            tuple(move.offset for move in moves),
            tuple(move.skip_tokens for move in moves),
            b"".join(move.blocks for move in moves),
        )

    def to_value(self) -> list[object]:
        """As it travels."""
        try:
            offsets, skips = (struct.pack(f"<{len(numbers)}Q", *numbers) for numbers in (self.offsets, self.skips))
        except struct.error as error:
            raise WireError("an offset or a skip is no unsigned 64-bit number") from error
        return [self.number, self.generation, self.digest, self.paced, self.ready, self.gate, offsets, skips, self.blocks]

    @classmethod
    def from_value(cls, value: Any) -> Self:
        """The reverse."""
        number, generation, digest, paced, ready, gate, offsets, skips, blocks = value
        count = len(offsets) // 8
        return cls(
            number,
            generation,
            digest,
            paced,
            ready,
            gate,
            struct.unpack(f"<{count}Q", offsets),
            struct.unpack(f"<{count}Q", skips),
            blocks,
        )


def pack_result(count: int, digests: Sequence[bytes], bad: Sequence[int]) -> list[bytes]:
    """The answer to PACK: digests in a row (or none), and a byte a move, 1 where it may not be committed."""
    flags = bytearray(count)
    for index in bad:
        flags[index] = 1
    return [b"".join(digests), bytes(flags)]


def unpack_digests(value: Any, count: int, digest: bool) -> list[bytes]:
    """The answer to UNPACK; raises ``WireError``."""
    if not isinstance(value, bytes) or len(value) != (DIGEST_BYTES * count if digest else 0):
        raise WireError("an answer without the digests that were asked for")
    return [value[at : at + DIGEST_BYTES] for at in range(0, len(value), DIGEST_BYTES)]


def unpack_result(value: Any, count: int, digest: bool) -> list[Packed]:
    """The answer to PACK; raises ``WireError``."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], bytes) or len(value[1]) != count:
        raise WireError("an answer that is not that of a pack")
    digests = unpack_digests(value[0], count, digest) or [b""] * count
    return [Packed(one, bool(flag)) for one, flag in zip(digests, value[1], strict=True)]
