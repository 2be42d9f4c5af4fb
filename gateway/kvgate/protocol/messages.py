"""The messages of wire version 1, as typed records; ``catalog.py`` joins them with what came later.

``docs/protocol.md`` tells their order and meaning.

A frame carries ``{"id": …, "type": <class name>, "body": {…}}``. Each request has exactly one reply with its id: the reply class
named in ``REPLIES``, or ``Failure``. Lists of digests travel as one byte string of 32-byte pieces: long prompts stay one item.
"""

from __future__ import annotations

from typing import Final

from kvgate.contract import specs
from kvgate.contract.access import SCOPES
from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.model import ModelContract
from kvgate.contract.plan import PartitionPlan
from kvgate.contract.record import Record, frozen
from kvgate.contract.representation import Representation
from kvgate.contract.table import COMPONENTS

MAX_CHUNKS: Final = 16_384
"""Chunks of one request: 4 M tokens at 256 a chunk."""
MAX_BATCH: Final = 1024
"""Chunks moved by one load or reserve."""
TOKEN_BYTES: Final = 16
HANDLE_BYTES: Final = 32
LEASE_BYTES: Final = 32
_LIST_BYTES: Final = MAX_CHUNKS * DIGEST_BYTES

FAILURES: Final = (
    "version",  # no common wire or schema version
    "malformed",  # the message breaks the contract; `field` says where
    "denied",  # unknown credential, handle, lease or reservation, or not this session's
    "unsealed",  # not every rank has registered yet
    "revoked",  # the registration is no longer valid: register again
    "disagree",  # this rank's contract differs from the other ranks'
    "adapter",  # the adapter is not confirmed by every rank
    "busy",  # a queue or limit is full
    "unavailable",  # storage does not answer; treat as a miss
    "deadline",  # not done in time
    "internal",  # a bug; the gateway's log has the details
)

REFERENCE_DIGITS: Final = 16
QUARANTINES: Final = (
    "payload_digest",  # the payload's bytes are not what its envelope says
    *(f"envelope_{word}" for word in ("length", "magic", "schema", "format", "mac", "padding", "address", "size", "digest")),
)
"""Why a stored object was refused and removed."""
MISS_REASONS: Final = (
    *COMPONENTS,  # the nearest stored object of the same tokens differs in this
    "absent",  # nothing is known to be stored for these tokens
    "evicted",  # exactly this was stored, and is gone
    "unavailable",  # storage did not answer, or not in time
    "below one chunk",  # nothing that short is stored
    "unexplained",  # the gateway was too busy to find out
    *(f"refused:{word}" for word in QUARANTINES),
)


@frozen
class Hello(Record):
    """First message of every connection. ``credential`` names the isolation domain (None: the gateway's default domain)."""

    role: str = specs.choice("worker", "scheduler", "admin", "client")
    build: str = specs.text(max_chars=128)
    wire_lowest: int = specs.uint()
    wire_highest: int = specs.uint()
    schema_lowest: int = specs.uint()
    schema_highest: int = specs.uint()
    credential: bytes | None = specs.optional(specs.raw_bytes(max_bytes=1024))


@frozen
class Welcome(Record):
    """The versions chosen, and what a client must know. ``boot`` changes with every start of the gateway."""

    build: str = specs.text(max_chars=128)
    wire: int = specs.uint()
    schema: int = specs.uint()
    boot: bytes = specs.raw_bytes(max_bytes=TOKEN_BYTES, exact=TOKEN_BYTES)
    chunk_tokens: int = specs.uint(minimum=1)
    codec: str = specs.text(max_chars=32)


@frozen
class Failure(Record):
    """The one error reply: ``field`` names the offending field ("" does not exist: "-" where none), ``remedy`` what mends it."""

    code: str = specs.choice(*FAILURES)
    field: str = specs.text(max_chars=200)
    problem: str = specs.text(max_chars=500)
    remedy: str = specs.text(max_chars=500)


@frozen
class Done(Record):
    """Acknowledges a request that has nothing to return."""


@frozen
class RegisterWorker(Record):
    """A worker's report of what it loaded. ``engine`` is the same 16 random bytes on all ranks of one engine start.

    ``model`` is the base contract (adapter None). ``generation`` counts the engine's weight loads: a higher one replaces the
    registration of a lower one.
    """

    engine: bytes = specs.raw_bytes(max_bytes=TOKEN_BYTES, exact=TOKEN_BYTES)
    generation: int = specs.uint()
    pp_rank: int = specs.uint()
    tp_rank: int = specs.uint()
    block_tokens: int = specs.uint(minimum=1)
    model: ModelContract = specs.record(ModelContract)
    representation: Representation = specs.record(Representation)
    plan: PartitionPlan = specs.record(PartitionPlan)


@frozen
class Registered(Record):
    """``handle`` is the capability the scheduler presents; it is equal for all ranks that agree, and after a gateway restart."""

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    sealed: bool = specs.boolean()
    missing_ranks: int = specs.uint()


@frozen
class OpenEngine(Record):
    """A scheduler presents the handle its workers got."""

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)


@frozen
class Opened(Record):
    """What the scheduler needs to bind: the domain's token and salt keys, and the opaque domain id for vLLM's own cache."""

    domain: bytes = specs.digest32()
    token_key: bytes = specs.digest32()
    salt_key: bytes = specs.digest32()
    chunk_tokens: int = specs.uint(minimum=1)


@frozen
class RegisterAdapter(Record):
    """From the engine core, before bind: the adapter files as hashed from the snapshot the engine is made to load."""

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    adapter: ArtifactSet = specs.record(ArtifactSet)


@frozen
class AdapterRegistered(Record):
    """``adapter`` is the digest to bind with; ``confirmed`` whether every rank has confirmed it already."""

    adapter: bytes = specs.digest32()
    confirmed: bool = specs.boolean()


@frozen
class ConfirmAdapter(Record):
    """From a registered worker: the adapter files it really loaded."""

    adapter: ArtifactSet = specs.record(ArtifactSet)


@frozen
class Revoke(Record):
    """Weights changed in place: the session's registration can issue nothing more."""

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)


@frozen
class Bind(Record):
    """One message a request: handle, access, variant and the ``t[n]`` of its full chunks (32 bytes each, in order)."""

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    adapter: bytes | None = specs.optional(specs.digest32())
    salt: bytes | None = specs.optional(specs.digest32())
    scope: str = specs.choice(*SCOPES)
    scope_key: bytes | None = specs.optional(specs.digest32())
    manifest: bytes | None = specs.optional(specs.digest32())
    tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


@frozen
class Bound(Record):
    """An empty lease. ``present`` chunks from the first are believed present; ``probing``: L2 is being asked about more.

    ``present`` is a hint and pins nothing. ``addresses`` are the chunk addresses, 32 bytes each. ``reference`` is a public name of the
    request, for `kvgate explain`: it opens nothing.
    """

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    present: int = specs.uint()
    probing: bool = specs.boolean()
    reference: str = specs.text(pattern=rf"[0-9a-f]{{{REFERENCE_DIGITS}}}")
    addresses: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


@frozen
class Acquire(Record):
    """Hold chunks ``[first, last)`` for loading: waits for the probe, brings objects to L1, checks envelopes. Idempotent."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    first: int = specs.uint(maximum=MAX_CHUNKS)
    last: int = specs.uint(maximum=MAX_CHUNKS)
    deadline_ms: int = specs.uint(minimum=1, maximum=600_000)


@frozen
class Acquired(Record):
    """Chunks ``[first, end)`` are held, whole and envelope-checked: this is a hit. ``end == first`` is a miss."""

    end: int = specs.uint(maximum=MAX_CHUNKS)


@frozen
class Extend(Record):
    """Append the ``t[n]`` of chunks that decoding filled; ``first`` is the index of the first of them."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    first: int = specs.uint(maximum=MAX_CHUNKS)
    tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


@frozen
class Extended(Record):
    """How many chunks the lease knows now."""

    chunks: int = specs.uint()


@frozen
class Release(Record):
    """Give everything the lease holds back. A second release is answered ``Done`` too and does nothing."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)


@frozen
class Explain(Record):
    """Why the request of this lease missed; the lease may have been released a short while ago."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)


@frozen
class Explained(Record):
    """``chunk`` is the first missing one. ``reasons``: as far as the requester may know them, in a fixed order; empty: a hit.

    What is stored under another salt, scope or domain is the same as absent here.
    """

    reasons: tuple[str, ...] = specs.array(specs.choice(*MISS_REASONS), maximum=len(COMPONENTS))
    chunk: int = specs.uint(maximum=MAX_CHUNKS)


@frozen
class Load(Record):
    """From a worker: where this worker's shards of acquired ``chunks`` lie."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)


@frozen
class PayloadSlot(Record):
    """A payload in the pool: bytes ``[offset, offset + length)`` of ``/dev/shm/<pool>``; ``digest`` is its BLAKE3-256."""

    chunk: int = specs.uint()
    offset: int = specs.uint()
    length: int = specs.uint()
    digest: bytes = specs.digest32()


@frozen
class LoadPlan(Record):
    """Slots in the order asked. ``ticket`` closes this load; until then the slots stay as they are."""

    ticket: int = specs.uint()
    pool: str = specs.text(max_chars=128)
    pool_bytes: int = specs.uint()
    slots: tuple[PayloadSlot, ...] = specs.array(specs.record(PayloadSlot), maximum=MAX_BATCH)


@frozen
class FinishLoad(Record):
    """The copy is done. ``mismatched``: chunks whose bytes did not have the digest; they are quarantined."""

    ticket: int = specs.uint()
    mismatched: tuple[int, ...] = specs.array(specs.uint(), maximum=MAX_BATCH)


@frozen
class LoadVerdict(Record):
    """Whether the holds lasted through the whole copy. False: the bytes must not be used."""

    valid: bool = specs.boolean()


@frozen
class Reserve(Record):
    """From a worker: slots to write its shards of ``chunks`` into."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)


@frozen
class ReservedSlot(Record):
    """A payload slot to fill, or why there is none ("resident": stored already; "busy", "full": skip it)."""

    chunk: int = specs.uint()
    status: str = specs.choice("slot", "resident", "busy", "full")
    reservation: int = specs.uint()
    offset: int = specs.uint()
    length: int = specs.uint()


@frozen
class Reserved(Record):
    """One entry a chunk, in the order asked."""

    pool: str = specs.text(max_chars=128)
    pool_bytes: int = specs.uint()
    slots: tuple[ReservedSlot, ...] = specs.array(specs.record(ReservedSlot), maximum=MAX_BATCH)


@frozen
class WrittenPayload(Record):
    """A filled slot and the BLAKE3-256 of its payload."""

    reservation: int = specs.uint()
    digest: bytes = specs.digest32()


@frozen
class Commit(Record):
    """Make filled slots visible, and drop ``aborted`` ones (the worker writes to neither any more)."""

    written: tuple[WrittenPayload, ...] = specs.array(specs.record(WrittenPayload), maximum=MAX_BATCH)
    aborted: tuple[int, ...] = specs.array(specs.uint(), maximum=MAX_BATCH)


@frozen
class Committed(Record):
    """How many of ``written`` are visible now."""

    visible: int = specs.uint()


REPLIES: Final[dict[type[Record], type[Record]]] = {
    Hello: Welcome,
    RegisterWorker: Registered,
    OpenEngine: Opened,
    RegisterAdapter: AdapterRegistered,
    ConfirmAdapter: Done,
    Revoke: Done,
    Bind: Bound,
    Acquire: Acquired,
    Extend: Extended,
    Release: Done,
    Explain: Explained,
    Load: LoadPlan,
    FinishLoad: LoadVerdict,
    Reserve: Reserved,
    Commit: Committed,
}
"""Request class → class of its reply (any may be answered with ``Failure``)."""
