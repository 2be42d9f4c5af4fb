"""Keys derived from the deployment secret. Raw tenant names and salts go in here and never come out.

All keys, ids and digests are 32 bytes. Every function raises ``ContractError`` for a key of another length and for a name or salt that
is no text, empty, or longer than ``MAX_NAME_BYTES`` in UTF-8.
"""

from __future__ import annotations

from kvgate.contract.digests import DIGEST_BYTES, Kind, digest, keyed
from kvgate.contract.errors import ContractError

MAX_NAME_BYTES = 4096


def domain_key(secret: bytes, domain_name: str) -> bytes:
    """The secret key of one isolation domain."""
    return keyed(digest(Kind.DOMAIN_KEY, _key("secret", secret)), _name_bytes("domain", domain_name))


def domain_id(key: bytes) -> bytes:
    """The opaque id of a domain: enters identities, tells nothing."""
    return digest(Kind.DOMAIN_ID, _key("domain_key", key))


def token_key(key: bytes) -> bytes:
    """The subkey with which shims of this domain hash token chunks."""
    return digest(Kind.TOKEN_KEY, _key("domain_key", key))


def salt_key(key: bytes) -> bytes:
    """The subkey with which shims of this domain hash cache salts."""
    return digest(Kind.SALT_KEY, _key("domain_key", key))


def salt_digest(key: bytes, salt: str | None) -> bytes | None:
    """Keyed digest of a cache salt; None stays the explicit "no salt". An empty salt is refused."""
    return None if salt is None else keyed(_key("salt_key", key), _name_bytes("salt", salt))


def _key(field: str, key: bytes) -> bytes:
    if len(key) != DIGEST_BYTES:
        raise ContractError(field, "must have exactly 32 bytes")
    return key


def _name_bytes(field: str, name: str) -> bytes:
    if not isinstance(name, str):
        raise ContractError(field, f"is {type(name).__name__}", "must be text")
    if not name:
        raise ContractError(field, "is empty", "leave it out, or give a value")
    try:
        # No normalisation: two names that differ in any byte stay two names.
        data = name.encode("utf-8")
    except UnicodeEncodeError:
        raise ContractError(field, "holds a lone surrogate", "valid Unicode") from None
    if len(data) > MAX_NAME_BYTES:
        raise ContractError(field, "is too long", f"at most {MAX_NAME_BYTES} bytes")
    return data
