"""Leases: what one bound request holds. Opened empty by bind, added to by acquire, extend and reserve, released once.

A lease token is 16 random bytes and a 16-byte MAC under the deployment's lease key, so that a made-up token is told from a stale one
without looking anything up.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Final

from kvgate.contract.access import Access
from kvgate.contract.address import chunk_chain
from kvgate.contract.digests import DIGEST_BYTES, keyed
from kvgate.daemon.errors import Refused
from kvgate.daemon.links import Links
from kvgate.daemon.registry import Registration
from kvgate.protocol.messages import LEASE_BYTES, MAX_CHUNKS
from kvgate.storage.backend import Held
from kvgate.storage.envelope import Components

LEASE_NAME_BYTES: Final = 16
MAX_BOUND_CHUNKS: Final = 1 << 23
"""Chunks of all open leases together: about 1 GiB. One connection may bind half of them, so that it keeps nobody else from binding."""


@dataclass(frozen=True, slots=True, repr=False)
class Place:
    """Where the chunks of a request may lie: their addresses under one secret of the deployment, in the domain that secret makes.

    ``envelope_keys``: what may vouch for objects there, the key of that very secret alone.
    """

    domain: bytes
    chunks: list[bytes]
    envelope_keys: tuple[bytes, ...]


@dataclass(eq=False)
class HeldChunk:
    """One acquired chunk: per rectangle of the plan the hold and the payload digest its envelope vouches for.

    ``quarantined``: a worker found other bytes than that. It stays held till the release, but is handed out no more. ``place``: where
    it was found.
    """

    holds: tuple[Held, ...]
    payload_digests: tuple[bytes, ...]
    place: Place
    quarantined: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class VariantTerms:
    """What a lease of a transformed artifact is for: its manifest's digest, its access, and whether it is being published."""

    manifest: bytes
    access: Access
    writable: bool


@dataclass(eq=False)
class Lease:
    """One bound request. ``chunks`` are its chunk addresses in order; only they can be acquired or stored under it.

    ``variant``: None for ordinary KV. ``links``: the same chunks in the explain chain. ``unanswered``: storage failed or was late at a
    lookup, so a miss may be none. ``earlier``: where its first chunks may lie too, by an earlier secret: read there, never stored.
    """

    token: bytes
    session: int
    registration: Registration
    adapter: bytes | None
    root: bytes
    components: Components
    chunks: list[bytes]
    links: Links
    variant: VariantTerms | None = None
    unanswered: bool = False
    earlier: dict[int, Place] = field(default_factory=dict)  # by the number of the secret
    held: dict[int, HeldChunk] = field(default_factory=dict)
    open_loads: int = 0
    released: bool = False
    probe: asyncio.Task[int] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def usable(self, index: int) -> HeldChunk | None:
        """The chunk if it is held and good."""
        held = self.held.get(index)
        return None if held is None or held.quarantined else held

    @property
    def domain(self) -> bytes:
        """Id of the isolation domain that its objects lie in."""
        return self.registration.domain if self.variant is None else self.variant.access.domain

    @property
    def bound_chunks(self) -> int:
        """Addresses kept for it, all places together."""
        return len(self.chunks) + sum(len(place.chunks) for place in self.earlier.values())

    @property
    def rectangles(self) -> int:
        """Rectangles of the plan: a chunk is a hit only if each is there."""
        return len(self.registration.form.plan.rectangles)

    def extend(self, first: int, tokens: bytes) -> None:
        """Append chunks that decoding filled. Repeating what is known is harmless; a gap or other tokens are refused."""
        if self.variant is not None:
            raise Refused("denied", "an artifact's chunks are fixed", field="lease", remedy="bind what follows as ordinary KV")
        digests = split(tokens)
        known = len(self.chunks)
        if first > known:
            raise Refused("malformed", f"the lease knows {known} chunks", field="first", remedy="extend without a gap")
        if first + len(digests) > MAX_CHUNKS:
            raise Refused("malformed", f"a request has at most {MAX_CHUNKS} chunks", field="tokens")
        parent = self.chunks[first - 1] if first else self.root
        chain = chunk_chain(parent, digests, first)
        overlap = self.chunks[first : first + len(chain)]
        if overlap != chain[: len(overlap)]:
            raise Refused("malformed", "differs from what was bound", field="tokens", remedy="release the lease and bind again")
        self.chunks.extend(chain[len(overlap) :])
        self.links.extend(b"".join(digests[len(overlap) :]))

    def chunk(self, index: int) -> bytes:
        """The address of one chunk; raises ``Refused`` beyond the lease."""
        if not 0 <= index < len(self.chunks):
            raise Refused("denied", f"the lease knows {len(self.chunks)} chunks", field="chunks", remedy="extend it first")
        return self.chunks[index]


class LeaseTable:
    """All open leases, bounded."""

    def __init__(self, key: bytes, max_leases: int) -> None:
        self._key = key
        self._max_leases = max_leases
        self._leases: dict[bytes, Lease] = {}
        self._chunks: Counter[int] = Counter()  # bound, by session
        self._bound = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def open(
        self,
        session: int,
        registration: Registration,
        adapter: bytes | None,
        root: bytes,
        components: Components,
        tokens: bytes,
        variant: VariantTerms | None = None,
    ) -> Lease:
        """A new empty lease over the chunks of ``tokens``."""
        if len(self._leases) >= self._max_leases:
            raise Refused("busy", "too many requests are bound", remedy="raise max_leases, or release finished requests")
        self._require_room(session, len(tokens) // DIGEST_BYTES)
        name = secrets.token_bytes(LEASE_NAME_BYTES)
        token = name + keyed(self._key, name)[: LEASE_BYTES - LEASE_NAME_BYTES]
        domain = registration.domain if variant is None else variant.access.domain
        chunks, links = chunk_chain(root, split(tokens)), Links(domain, tokens)
        lease = Lease(token, session, registration, adapter, root, components, chunks, links, variant)
        self._leases[token] = lease
        self._count(session, len(chunks))
        return lease

    def extend(self, lease: Lease, first: int, tokens: bytes) -> None:
        """``lease.extend``, as far as there is room."""
        known = len(lease.chunks)
        self._require_room(lease.session, first + len(tokens) // DIGEST_BYTES - known)
        lease.extend(first, tokens)
        self._count(lease.session, len(lease.chunks) - known)

    def add_earlier(self, lease: Lease, secret: int, place: Place) -> bool:
        """Note where an earlier secret put the lease's first chunks, as far as there is room. False: a repetition changes nothing."""
        if secret in lease.earlier:
            return False
        self._require_room(lease.session, len(place.chunks))
        lease.earlier[secret] = place
        self._count(lease.session, len(place.chunks))
        return True

    def find(self, token: bytes) -> Lease | None:
        """The open lease of ``token``, None for one already gone; raises ``Refused`` for a token this deployment never made."""
        if not compare_digest(
            token[LEASE_NAME_BYTES:], keyed(self._key, token[:LEASE_NAME_BYTES])[: LEASE_BYTES - LEASE_NAME_BYTES]
        ):
            raise Refused("denied", "not a lease of this deployment", field="lease")
        return self._leases.get(token)

    def get(self, token: bytes) -> Lease:
        """The open lease of ``token``; raises ``Refused`` otherwise."""
        lease = self.find(token)
        if lease is None or lease.released:
            raise Refused("denied", "the lease is released or from before a restart", field="lease", remedy="bind again")
        return lease

    def owned(self, token: bytes, session: int) -> Lease:
        """The open lease of ``token`` that this connection opened; raises ``Refused`` otherwise."""
        lease = self.get(token)
        if lease.session != session:
            raise Refused("denied", "the lease belongs to another connection", field="lease")
        return lease

    def of_session(self, session: int) -> list[Lease]:
        """The leases that one connection opened."""
        return [lease for lease in self._leases.values() if lease.session == session]

    def remove(self, lease: Lease) -> None:
        """Forget a lease whose holds were given back."""
        lease.released = True
        if self._leases.pop(lease.token, None) is not None:
            self._count(lease.session, -lease.bound_chunks)

    def _require_room(self, session: int, chunks: int) -> None:
        if self._bound + chunks > MAX_BOUND_CHUNKS or self._chunks.get(session, 0) + chunks > MAX_BOUND_CHUNKS // 2:
            raise Refused("busy", "too many chunks are bound", remedy="release finished requests")

    def _count(self, session: int, chunks: int) -> None:
        self._bound += chunks
        self._chunks[session] += chunks
        if not self._chunks[session]:
            del self._chunks[session]


def split(tokens: bytes) -> list[bytes]:
    """A byte string of 32-byte digests as a list."""
    return [tokens[at : at + DIGEST_BYTES] for at in range(0, len(tokens), DIGEST_BYTES)]
