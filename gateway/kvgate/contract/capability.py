"""Variant capabilities: what whoever publishes an artifact gets, and whoever wants to decode from it presents.

174 bytes: format, scope, number of chunks, expiry, manifest digest, scope key (zero: none), root, address of the last chunk, MAC. All
but the MAC can be read by the holder; only a gateway of the deployment can make or check the MAC, under a key of the isolation domain.
So a gateway needs no memory of what it issued: a capability survives restarts and is good at every gateway of the deployment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

from kvgate.contract.access import SCOPES
from kvgate.contract.digests import DIGEST_BYTES, keyed
from kvgate.contract.errors import ContractError

FORMAT: Final = 1
_BODY: Final = struct.Struct("<BBIQ32s32s32s32s")
CAPABILITY_BYTES: Final = _BODY.size + DIGEST_BYTES
_NO_KEY: Final = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True, repr=False)
class Capability:
    """The content of a capability. ``chunks`` full chunks, the last of them at address ``end``; ``expires_s`` in Unix seconds.

    ``scope_key`` is what the artifact's access record has. Reading one proves nothing: ``check`` does.
    """

    scope: str
    chunks: int
    expires_s: int
    manifest: bytes
    scope_key: bytes | None
    root: bytes
    end: bytes

    @classmethod
    def read(cls, data: bytes) -> Capability:
        """The content as written, unproven; raises ``ContractError`` for what no gateway of this version can have made."""
        if len(data) != CAPABILITY_BYTES:
            raise ContractError("capability", "has the wrong length", f"exactly {CAPABILITY_BYTES} bytes")
        form, scope, chunks, expires_s, manifest, key, root, end = _BODY.unpack_from(data)
        if form != FORMAT or scope >= len(SCOPES) or not chunks:
            raise ContractError("capability", "has an unknown form", "as the gateway gave it")
        return cls(SCOPES[scope], chunks, expires_s, manifest, None if key == _NO_KEY else key, root, end)

    def seal(self, key: bytes) -> bytes:
        """The bytes to hand out; ``key`` is ``domain_capability_key``'s."""
        body = _BODY.pack(
            FORMAT,
            SCOPES.index(self.scope),
            self.chunks,
            self.expires_s,
            self.manifest,
            self.scope_key or _NO_KEY,
            self.root,
            self.end,
        )
        return body + keyed(key, body)


def domain_capability_key(deployment_key: bytes, domain: bytes) -> bytes:
    """The key of one isolation domain's capabilities; ``domain`` is its id."""
    return keyed(deployment_key, domain)


def check(key: bytes, data: bytes) -> bool:
    """Whether a capability of the right length was sealed with ``key``; takes equally long whatever is wrong with it."""
    return compare_digest(data[_BODY.size :], keyed(key, data[: _BODY.size]))
