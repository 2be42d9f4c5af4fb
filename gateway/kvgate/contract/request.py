"""The request descriptor: the digests of everything a request's KV depends on besides its tokens. Its digest is the root."""

from __future__ import annotations

from typing import ClassVar

from kvgate.contract import specs
from kvgate.contract.digests import Kind
from kvgate.contract.record import IdentityRecord, frozen


@frozen
class RequestDescriptor(IdentityRecord):
    """All five are required; tokens enter below the root, through the chunk chain, so that common prefixes share."""

    KIND: ClassVar[Kind] = Kind.REQUEST

    model: bytes = specs.digest32()
    representation: bytes = specs.digest32()
    plan: bytes = specs.digest32()
    access: bytes = specs.digest32()
    variant: bytes = specs.digest32()

    def root(self) -> bytes:
        """The request-wide identity, 32 bytes."""
        return self.digest()
