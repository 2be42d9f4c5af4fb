"""What the daemon does for ``kvgate verify``: a domain of its own for each run, and access to the tiers of what is stored in it.

The domain is safe to give to anybody who may connect. Its key is derived from the deployment secret and 32 random bytes that only the
run knows, in a form that no configured domain's name can have: entering one opens nothing that another client stored, of scope
``global`` neither, and a connection can't leave it again. What removes objects here takes them from a lease of that same domain.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakSet

import structlog

from kvgate.contract import keys
from kvgate.contract.digests import Kind, digest, keyed
from kvgate.contract.record import Record
from kvgate.daemon.errors import Refused
from kvgate.daemon.explain import Explainer
from kvgate.daemon.leases import Lease, LeaseTable
from kvgate.daemon.policy import Domain
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.service import Handler, Session
from kvgate.daemon.shards import shard_refs
from kvgate.protocol import verify_messages as messages
from kvgate.storage.backend import ObjectRef, StorageBackend, StorageUnavailable
from kvgate.storage.tiers import L1, Tiered

log = structlog.get_logger(__name__)

_PREFIX: Final = b"\xffkvgate verify\xff"
"""No domain of a configuration can have a name like this: names are UTF-8, in which a byte 0xff never occurs."""


def verify_domain(secret: bytes, run: bytes) -> Domain:
    """The isolation domain of one run."""
    key = keyed(digest(Kind.DOMAIN_KEY, secret), _PREFIX + run)
    return Domain(key, keys.domain_id(key), alone=True)


class Verify:
    """Answers the messages of ``verify_messages``."""

    def __init__(
        self,
        secret: bytes,
        backend: StorageBackend,
        leases: LeaseTable,
        presence: PresenceIndex,
        explainer: Explainer,
        *,
        storage_s: float,
    ) -> None:
        self._secret = secret
        self._backend = backend
        self._leases = leases
        self._presence = presence
        self._explainer = explainer
        self._storage_s = storage_s
        self._entered: WeakSet[Session] = WeakSet()

    def handlers(self) -> dict[type[Record], Handler]:
        """Message → what answers it."""
        return {
            messages.EnterVerify: self._enter,
            messages.Inspect: self._inspect,
            messages.LeaveOnly: self._leave_only,
            messages.Forget: self._forget,
        }

    async def _enter(self, session: Session, message: messages.EnterVerify) -> Record:
        if session in self._entered or session.registration is not None or self._leases.of_session(session.id):
            raise Refused("malformed", "must come right after Hello, once", field="type", remedy="open another connection")
        # No way back: a domain is left only with the connection.
        self._entered.add(session)
        session.domain = domain = verify_domain(self._secret, message.run)
        tiers = await self._backend.tiers(self._storage_s) if isinstance(self._backend, Tiered) else [L1]
        status = await self._backend.status(self._storage_s)
        return messages.VerifyEntered(
            domain=domain.id, backend=str(status.get("backend", "unknown")), tiers=tuple(tiers[: messages.MAX_TIERS])
        )

    def _inspect(self, session: Session, message: messages.Inspect) -> Record:
        refs = self._objects(self._lease(session, message.lease))
        return messages.Inspected(shards=b"".join(ref.address for ref in refs))

    async def _leave_only(self, session: Session, message: messages.LeaveOnly) -> Record:
        refs = self._objects(self._lease(session, message.lease))
        if not isinstance(self._backend, Tiered):
            raise Refused("denied", "this gateway's storage has one tier", field="tier")
        answers = await self._backend.leave_only(refs, message.tier, self._storage_s)
        codes = {True: messages.THERE, False: messages.ABSENT, None: messages.UNKNOWN}
        return messages.LeftOnly(objects=bytes(codes[answer] for answer in answers))

    async def _forget(self, session: Session, message: messages.Forget) -> Record:
        lease = self._lease(session, message.lease)
        refs = self._objects(lease)
        for chunk in lease.chunks:
            for rectangle in range(lease.rectangles):
                self._presence.discard(chunk, rectangle)
        self._explainer.forgotten(lease.links.first(len(lease.chunks)))
        try:
            await self._backend.delete(refs, self._storage_s)
        except StorageUnavailable:
            log.warning("verify.not_forgotten", objects=len(refs))
            raise
        return messages.Forgotten(objects=len(refs))

    def _lease(self, session: Session, token: bytes) -> Lease:
        """A lease that this connection opened in its verify domain."""
        if session not in self._entered or session.domain is None:
            raise Refused("denied", "this connection is in no verify domain", remedy="send EnterVerify right after Hello")
        lease = self._leases.owned(token, session.id)
        if lease.domain != session.domain.id:
            # Can't be: nothing is shared with this domain. What removes objects asks all the same.
            raise Refused("denied", "the lease is of another isolation domain", field="lease")
        return lease

    def _objects(self, lease: Lease) -> list[ObjectRef]:
        if len(lease.chunks) * lease.rectangles > messages.MAX_OBJECTS:
            raise Refused("malformed", f"is of more than {messages.MAX_OBJECTS} objects", field="lease")
        return [ref for chunk in lease.chunks for ref in shard_refs(lease.registration, chunk, lease.domain)]
