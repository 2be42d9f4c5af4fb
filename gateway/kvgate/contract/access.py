"""Access and variant: whose data it is, how far it may be reused, and whether it is ordinary KV."""

from __future__ import annotations

from typing import ClassVar

from kvgate.contract import specs
from kvgate.contract.digests import Kind
from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, frozen

SCOPES = ("request", "query", "prefix", "global")


@frozen
class Access(IdentityRecord):
    """Isolation domain and sharing scope.

    ``domain`` is the opaque id of the isolation domain, ``salt`` the keyed digest of the request's cache salt (None: no salt).
    ``scope_key`` narrows the two narrow scopes: a fresh nonce for ``request``, the query digest for ``query``; None for the wider.
    """

    KIND: ClassVar[Kind] = Kind.ACCESS

    domain: bytes = specs.digest32()
    salt: bytes | None = specs.optional(specs.digest32())
    scope: str = specs.choice(*SCOPES)
    scope_key: bytes | None = specs.optional(specs.digest32())

    def validate(self) -> None:
        narrow = self.scope in ("request", "query")
        if narrow and self.scope_key is None:
            raise ContractError("scope_key", f"is needed by scope {self.scope}", "the request nonce or the query digest")
        if not narrow and self.scope_key is not None:
            raise ContractError("scope_key", f"has no meaning in scope {self.scope}", "give null")


@frozen
class Variant(IdentityRecord):
    """ "Ordinary" KV (``manifest`` None), or the digest of the transform manifest that made it."""

    KIND: ClassVar[Kind] = Kind.VARIANT

    manifest: bytes | None = specs.optional(specs.digest32())


ORDINARY = Variant(manifest=None)
