"""Who a connection is, and what it may ask for: credentials to isolation domains, sharing scopes, variants."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvgate.config import ConfigError
from kvgate.contract import keys
from kvgate.contract.access import Access, Variant
from kvgate.contract.errors import ContractError
from kvgate.daemon.errors import Refused
from kvgate.protocol.messages import Bind

MAX_CREDENTIALS_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Domain:
    """One isolation domain: its secret key and what is derived from it. Never logged."""

    key: bytes
    id: bytes

    @property
    def token_key(self) -> bytes:
        """Key of the token digests."""
        return keys.token_key(self.key)

    @property
    def salt_key(self) -> bytes:
        """Key of the salt digests."""
        return keys.salt_key(self.key)


class Policy:
    """Maps credentials to domains and requests to access records."""

    def __init__(self, secret: bytes, default_domain: str, credentials: dict[str, str]) -> None:
        self._default = _domain(secret, default_domain)
        self._by_credential = {name: _domain(secret, domain) for name, domain in credentials.items()}

    def domain_of(self, credential: bytes | None) -> Domain:
        """The domain a connection belongs to; raises ``Refused`` for an unknown credential (never a fallback to the default)."""
        if credential is None:
            return self._default
        # The file holds digests only; a lookup by digest does not leak how much of a guess was right.
        domain = self._by_credential.get(hashlib.sha256(credential).hexdigest())
        if domain is None:
            raise Refused("denied", "unknown credential", field="credential", remedy="add its SHA-256 to credentials_file")
        return domain

    @staticmethod
    def access_of(domain: Domain, bind: Bind) -> Access:
        """The access record of one request; raises ``Refused`` for a scope that is not to be had."""
        if bind.scope == "global":
            raise Refused("denied", "no policy allows sharing across domains", field="scope", remedy="use scope prefix")
        try:
            return Access(domain=domain.id, salt=bind.salt, scope=bind.scope, scope_key=bind.scope_key)
        except ContractError as error:
            raise Refused("malformed", error.problem, field=error.field, remedy=error.remedy) from error

    @staticmethod
    def variant_of(bind: Bind) -> Variant:
        """The variant of one request: only ordinary KV is served yet."""
        if bind.manifest is not None:
            raise Refused("denied", "this gateway serves ordinary KV only", field="manifest", remedy="give null")
        return Variant(manifest=None)


def read_credentials(path: str) -> dict[str, str]:
    """The credentials file: SHA-256 of each credential (hexadecimal) → domain name. Raises ``ConfigError``."""
    if not path:
        return {}
    try:
        file = Path(path)
        if file.stat().st_size > MAX_CREDENTIALS_BYTES:
            raise ConfigError(f"credentials_file: larger than {MAX_CREDENTIALS_BYTES} bytes")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"credentials_file: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("credentials_file: not valid JSON") from error
    if not isinstance(value, dict):
        raise ConfigError("credentials_file: must be a JSON object of SHA-256 digests and domain names")
    for number, (digest, domain) in enumerate(value.items(), 1):
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or not isinstance(domain, str) or not domain:
            raise ConfigError(f"credentials_file: entry {number} must map 64 lower-case hexadecimal digits to a domain name")
    return value


def _domain(secret: bytes, name: str) -> Domain:
    key = keys.domain_key(secret, name)
    return Domain(key, keys.domain_id(key))
