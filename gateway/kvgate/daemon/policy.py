"""Who a connection is, and what it may ask for: credentials to isolation domains, sharing scopes, variants."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvgate.config import ConfigError
from kvgate.contract import keys
from kvgate.contract.access import Access, Variant
from kvgate.contract.digests import DIGEST_BYTES, Kind, digest
from kvgate.contract.errors import ContractError
from kvgate.contract.manifest import TransformManifest
from kvgate.daemon.errors import Refused
from kvgate.protocol.messages import Bind

MAX_CREDENTIALS_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Domain:
    """One isolation domain: its secret key and what is derived from it. Never logged.

    ``alone``: it takes no part in scope ``global`` either, whatever the operator allows to others.
    """

    key: bytes
    id: bytes
    alone: bool = False

    @property
    def token_key(self) -> bytes:
        """Key of the token digests."""
        return keys.token_key(self.key)

    @property
    def salt_key(self) -> bytes:
        """Key of the salt digests."""
        return keys.salt_key(self.key)


class Policy:
    """Maps credentials to domains, and requests and manifests to access records."""

    def __init__(
        self,
        secret: bytes,
        default_domain: str,
        credentials: dict[str, str],
        determined: frozenset[str] = frozenset(),
        *,
        cross_domain: bool = False,
    ) -> None:
        """``determined``: transforms (``algorithm@version``) that the operator takes as determined by the prefix alone.

        ``cross_domain``: results of those may be shared between isolation domains too.
        """
        self._names = {default_domain, *credentials.values()}
        self._secret = secret
        self._default = _domain(secret, default_domain)
        self._by_credential = {name: _domain(secret, domain) for name, domain in credentials.items()}
        self._determined = determined
        key = digest(Kind.SHARED_DOMAIN_KEY, secret)
        self._shared = Domain(key, keys.domain_id(key)) if cross_domain else None

    def domains_under(self, secret: bytes) -> dict[bytes, Domain]:
        """The domains of the same names under another secret, by the ids that they have under this one."""
        return {_domain(self._secret, name).id: _domain(secret, name) for name in self._names}

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
        """The variant of one request by ``Bind``: always ordinary KV."""
        if bind.manifest is not None:
            raise Refused("denied", "a variant is bound by its capability", field="manifest", remedy="send BindVariant")
        return Variant(manifest=None)

    def shared_with(self, domain: Domain) -> Domain | None:
        """The domain that scope ``global`` is in for ``domain``, keyed like any other; None where it is not allowed."""
        return None if domain.alone else self._shared

    def domain_for(self, domain: Domain, scope: str) -> Domain:
        """In which domain objects of ``scope`` lie that a connection of ``domain`` asks for; raises ``Refused``."""
        if scope != "global":
            return domain
        shared = self.shared_with(domain)
        if shared is None:
            raise Refused(
                "denied",
                "the operator does not allow sharing across domains",
                field="scope",
                remedy="use scope prefix; the setting is cross_domain",
            )
        return shared

    def source_access(self, domain: Domain, salt: bytes | None, scope: str) -> Access:
        """Under which access the source of a manifest of ``scope`` is named."""
        wide = "global" if scope == "global" else "prefix"
        return Access(domain=self.domain_for(domain, scope).id, salt=salt, scope=wide, scope_key=None)

    def variant_access(self, domain: Domain, salt: bytes | None, manifest: TransformManifest, nonce: bytes) -> Access:
        """The access record of an artifact, as far as its manifest proves that it may be shared; raises ``Refused``.

        ``nonce``: fresh random bytes, used for scope ``request``.
        """
        scope = manifest.scope
        if scope in ("prefix", "global") and manifest.transform not in self._determined:
            raise Refused(
                "denied",
                f"the operator does not take this transform as determined by the prefix alone, so it can't have scope {scope}",
                field="manifest.scope",
                remedy="use scope query or request; the setting is determined_transforms",
            )
        scope_key = {"request": nonce, "query": manifest.query}.get(scope)
        return Access(domain=self.domain_for(domain, scope).id, salt=salt, scope=scope, scope_key=scope_key)


def read_credentials(path: str) -> dict[str, str]:
    """The credentials file: SHA-256 of each credential (hexadecimal) → domain name. Raises ``ConfigError``."""
    if not path:
        return {}
    try:
        file = Path(path)
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            raise ConfigError("is not a file", "credentials_file")  # a pipe may never end, and a device never does
        if about.st_size > MAX_CREDENTIALS_BYTES:
            raise ConfigError(f"is larger than {MAX_CREDENTIALS_BYTES} bytes", "credentials_file")
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", "credentials_file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("is not valid JSON, or names a key twice", "credentials_file") from error
    if not isinstance(value, dict):
        raise ConfigError("must be a JSON object of SHA-256 digests and domain names", "credentials_file")
    for number, (name, domain) in enumerate(value.items(), 1):
        if not re.fullmatch(r"[0-9a-f]{64}", name) or not _is_domain(domain):
            raise ConfigError(
                f"entry {number} must map 64 lower-case hexadecimal digits to a domain name of at most {keys.MAX_NAME_BYTES} bytes",
                "credentials_file",
            )
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # One credential in two domains: the last would win silently.
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _is_domain(value: Any) -> bool:
    try:
        keys.domain_key(bytes(DIGEST_BYTES), value)
    except ContractError:
        return False
    return True


def _domain(secret: bytes, name: str) -> Domain:
    key = keys.domain_key(secret, name)
    return Domain(key, keys.domain_id(key))
