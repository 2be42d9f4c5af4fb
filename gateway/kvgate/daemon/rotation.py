"""A rotation of the deployment secret: for a while, what was stored under earlier secrets is read too.

An address depends on the secret (by the domain's id and the keys of token and salt digests), and so does who may vouch for an object
(the envelope's MAC). A request has one place a secret; each place is looked at with its own addresses and its own envelope key alone,
so an earlier secret opens nothing that was stored under another. Everything new is stored under the present one. Capabilities of
variants, leases and handles are the present secret's only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgate.contract.access import ORDINARY, Access
from kvgate.contract.address import chunk_chain
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.record import Record
from kvgate.daemon.components import identify
from kvgate.daemon.errors import Refused
from kvgate.daemon.leases import LeaseTable, Place, split
from kvgate.daemon.policy import Domain, Policy
from kvgate.daemon.reads import Reads
from kvgate.daemon.registry import Registry
from kvgate.daemon.secret import DeploymentKeys
from kvgate.daemon.service import Handler, Session
from kvgate.protocol import rotation_messages as messages

_ORDINARY = ORDINARY.digest()


@dataclass(frozen=True, slots=True, repr=False)
class EarlierSecret:
    """One earlier secret: the domains it made, by the ids that the same names have now, and its envelope key."""

    domains: dict[bytes, Domain]
    envelope_key: bytes

    @classmethod
    def of(cls, keys: DeploymentKeys, policy: Policy) -> EarlierSecret:
        """The same domain names under another secret."""
        return cls(policy.domains_under(keys.secret), keys.envelope)


class Rotation:
    """Answers the messages of ``rotation_messages``."""

    def __init__(self, earlier: tuple[EarlierSecret, ...], registry: Registry, leases: LeaseTable, reads: Reads) -> None:
        """``earlier``: in the operator's order."""
        self._earlier = earlier
        self._registry = registry
        self._leases = leases
        self._reads = reads

    def handlers(self) -> dict[type[Record], Handler]:
        """Message → what answers it."""
        return {messages.OpenPrevious: self._open_previous, messages.LookPrevious: self._look_previous}

    def _open_previous(self, session: Session, message: messages.OpenPrevious) -> Record:
        domain = session.own_domain
        self._registry.by_handle(message.handle, domain.id).require_sealed()
        found = self._domains(domain.id)
        return messages.PreviousOpened(
            token_keys=b"".join(one.token_key for one in found), salt_keys=b"".join(one.salt_key for one in found)
        )

    def _domains(self, domain: bytes) -> list[Domain]:
        # All or none: the place in the list is the number of the secret. The domain of `kvgate verify` has none.
        found = [earlier.domains.get(domain) for earlier in self._earlier]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else []

    def _look_previous(self, session: Session, message: messages.LookPrevious) -> Record:
        lease = self._leases.owned(message.lease, session.id)
        if lease.variant is not None:
            raise Refused("denied", "variants are read under the present secret only", field="lease")
        domains = self._domains(lease.registration.domain)
        if message.secret >= len(domains):
            raise Refused("denied", f"{len(domains)} earlier secrets are read here", field="secret", remedy="send OpenPrevious")
        registration, domain = lease.registration, domains[message.secret]
        registration.require_sealed()
        if len(message.tokens) > len(lease.chunks) * DIGEST_BYTES:
            raise Refused("malformed", f"the lease knows {len(lease.chunks)} chunks", field="tokens")
        access = Access(domain=domain.id, salt=message.salt, scope="prefix", scope_key=None).digest()
        root, _ = identify(registration.model_of(lease.adapter), registration.form, access, _ORDINARY)
        key = self._earlier[message.secret].envelope_key
        place = Place(domain.id, chunk_chain(root, split(message.tokens)), (key,))
        new = self._leases.add_earlier(lease, message.secret, place)
        present = self._reads.probes.present(lease)
        # Each probe waits for the one before, so there must be no more of them than places.
        probing = self._reads.probes.start(lease, present) if new else self._reads.probes.running(lease)
        return messages.PreviousLooked(present=present, probing=probing)
