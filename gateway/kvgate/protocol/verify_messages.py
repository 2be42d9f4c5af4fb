"""Messages of ``kvgate verify``: an isolation domain of its own, and what may be done to the objects in it. Wire 2.

``EnterVerify`` takes a connection out of its domain into one that is derived from the deployment secret and 32 random bytes. Nothing
else leads there, and from there nothing leads out. All other messages here are answered on such connections only, for their own leases.
"""

from __future__ import annotations

from typing import Final

from kvgate.contract import specs
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.record import Record, frozen
from kvgate.protocol.messages import LEASE_BYTES

RUN_BYTES: Final = 32
MAX_TIERS: Final = 65
MAX_OBJECTS: Final = 4096
"""Objects of one lease that these messages are answered for: chunks × rectangles."""
ABSENT, THERE, UNKNOWN = 0, 1, 2
"""Answers for one object."""


@frozen
class EnterVerify(Record):
    """Right after ``Hello``, in any role: this connection belongs to the verify domain of ``run`` from now on."""

    run: bytes = specs.raw_bytes(max_bytes=RUN_BYTES, exact=RUN_BYTES)


@frozen
class VerifyEntered(Record):
    """``domain``: its opaque id. ``backend``: the gateway's storage. ``tiers``: "l1", and each L2 adapter as "l2.<place> <type>"."""

    domain: bytes = specs.digest32()
    backend: str = specs.text(max_chars=64)
    tiers: tuple[str, ...] = specs.array(specs.text(max_chars=64), maximum=MAX_TIERS)


@frozen
class Inspect(Record):
    """Which stored objects the chunks of this lease are."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)


@frozen
class Inspected(Record):
    """``shards``: shard addresses, 32 bytes each: all rectangles of chunk 0 in the plan's order, then those of chunk 1, …"""

    shards: bytes = specs.raw_bytes(max_bytes=MAX_OBJECTS * DIGEST_BYTES, multiple=DIGEST_BYTES)


@frozen
class LeaveOnly(Record):
    """Remove the objects of this lease from every tier but ``tier`` (an L2), where they are there."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    tier: str = specs.text(max_chars=64)


@frozen
class LeftOnly(Record):
    """One byte for each object, in the order of ``Inspected``: ``THERE`` and nowhere else, ``ABSENT`` from that tier, ``UNKNOWN``."""

    objects: bytes = specs.raw_bytes(max_bytes=MAX_OBJECTS)


@frozen
class Forget(Record):
    """Remove the objects of this lease from every tier, and what is known of them for explaining misses."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)


@frozen
class Forgotten(Record):
    """Every tier has confirmed the removal of ``objects`` names (stored under them or not)."""

    objects: int = specs.uint()


REPLIES: Final[dict[type[Record], type[Record]]] = {
    EnterVerify: VerifyEntered,
    Inspect: Inspected,
    LeaveOnly: LeftOnly,
    Forget: Forgotten,
}
"""Request class → class of its reply (any may be answered with ``Failure``)."""
