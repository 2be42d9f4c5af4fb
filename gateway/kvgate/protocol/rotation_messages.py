"""Messages of a rotation of the deployment secret: reading what was stored under an earlier one. Wire 2.

Addresses depend on the secret, through the keys of the token digests and the domain's id. So a scheduler digests a prompt with each
earlier key too, and the gateway looks where its chunks lay under that secret. Nothing is ever stored there.
"""

from __future__ import annotations

from typing import Final

from kvgate.contract import specs
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.record import Record, frozen
from kvgate.protocol.messages import HANDLE_BYTES, LEASE_BYTES, MAX_CHUNKS

MAX_PREVIOUS: Final = 4
"""Earlier secrets that one gateway reads."""


@frozen
class OpenPrevious(Record):
    """From a scheduler that opened its engine: which earlier secrets are read here."""

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)


@frozen
class PreviousOpened(Record):
    """The domain's token and salt key under each earlier secret, 32 bytes each, in the operator's order; empty: none is read."""

    token_keys: bytes = specs.raw_bytes(max_bytes=MAX_PREVIOUS * DIGEST_BYTES, multiple=DIGEST_BYTES)
    salt_keys: bytes = specs.raw_bytes(max_bytes=MAX_PREVIOUS * DIGEST_BYTES, multiple=DIGEST_BYTES)


@frozen
class LookPrevious(Record):
    """The chunks of a lease may also lie where the ``secret``-th earlier secret put them: ``salt`` and ``t[n]`` by its keys."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    secret: int = specs.uint(maximum=MAX_PREVIOUS - 1)
    salt: bytes | None = specs.optional(specs.digest32())
    tokens: bytes = specs.raw_bytes(max_bytes=MAX_CHUNKS * DIGEST_BYTES, multiple=DIGEST_BYTES)


@frozen
class PreviousLooked(Record):
    """As in ``Bound``, of all places known to the lease together."""

    present: int = specs.uint()
    probing: bool = specs.boolean()


REPLIES: Final[dict[type[Record], type[Record]]] = {OpenPrevious: PreviousOpened, LookPrevious: PreviousLooked}
"""Request class → class of its reply (any may be answered with ``Failure``)."""
