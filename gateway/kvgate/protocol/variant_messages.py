"""Messages of variants (wire 2): fetching the KV of a prefix, publishing what a transform made of it, binding with its capability.

A client (role ``client``) attaches with ``OpenModel``, fetches with ``Bind``, ``Acquire``, ``LoadRectangle``, ``FinishLoad``, and
publishes with ``OpenVariant``, ``ReserveRectangle``, ``Commit``, ``SealVariant``. A scheduler presents the capability with
``BindVariant``; from there on the lease is used like any other, but nothing can be added to it: no ``Extend``, no ``Reserve``.
"""

from __future__ import annotations

from typing import Final

from kvgate.contract import specs
from kvgate.contract.access import SCOPES
from kvgate.contract.capability import CAPABILITY_BYTES
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.manifest import MAX_POSITIONS, TransformManifest
from kvgate.contract.model import ModelContract
from kvgate.contract.plan import MAX_WORKERS, PartitionPlan
from kvgate.contract.record import Record, frozen
from kvgate.contract.representation import Representation
from kvgate.protocol.messages import HANDLE_BYTES, LEASE_BYTES, MAX_BATCH, MAX_CHUNKS, REFERENCE_DIGITS, LoadPlan, Reserved

MAX_ADAPTERS: Final = 4096
MAX_TTL_S: Final = 10 * 365 * 86_400
_LIST_BYTES: Final = MAX_CHUNKS * DIGEST_BYTES


@frozen
class OpenModel(Record):
    """Attach to an engine that is registered and sealed now, in the connection's own domain.

    ``handle``: that very registration (a scheduler's way). ``model``: hexadecimal digits that its model digest begins with. Both None:
    the only model registered; several engines of one model contract, representation and plan count as one.
    """

    handle: bytes | None = specs.optional(specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES))
    model: str | None = specs.optional(specs.text(pattern=r"[0-9a-f]{1,64}"))


@frozen
class ModelOpened(Record):
    """What a client needs: the handle, the domain's keys, and how KV of this engine is made, stored and split.

    ``model`` is the base contract (no adapter); ``adapters`` are the digests of adapters registered there, 32 bytes each.
    ``shared_token_key`` is what tokens of scope ``global`` are hashed with, None where the operator does not allow that scope.
    """

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    domain: bytes = specs.digest32()
    token_key: bytes = specs.digest32()
    salt_key: bytes = specs.digest32()
    shared_token_key: bytes | None = specs.optional(specs.digest32())
    model: ModelContract = specs.record(ModelContract)
    representation: Representation = specs.record(Representation)
    plan: PartitionPlan = specs.record(PartitionPlan)
    adapters: bytes = specs.raw_bytes(max_bytes=MAX_ADAPTERS * DIGEST_BYTES, multiple=DIGEST_BYTES)


@frozen
class DescribeSource(Record):
    """Name a source for a manifest of ``scope``: ``tokens`` are the ``t[n]`` of its full chunks, ``tail`` the token digest of the rest.

    ``source_tokens`` counts all its tokens. For scope ``global`` the digests are made with the shared token key.
    """

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    adapter: bytes | None = specs.optional(specs.digest32())
    salt: bytes | None = specs.optional(specs.digest32())
    scope: str = specs.choice(*SCOPES)
    tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)
    source_tokens: int = specs.uint(minimum=1, maximum=MAX_POSITIONS)
    tail: bytes | None = specs.optional(specs.digest32())


@frozen
class SourceDescribed(Record):
    """Three fields of the manifest as they are right now; publishing is refused once they no longer are."""

    source_prefix: bytes = specs.digest32()
    model: bytes = specs.digest32()
    payload_format: bytes = specs.digest32()


@frozen
class OpenVariant(Record):
    """Open an artifact for writing, or for finding what is stored of it already.

    ``source`` and ``tail`` as in ``DescribeSource``: the gateway works the manifest's source, model and payload format out by itself
    and refuses a manifest that says otherwise. ``tokens``: the ``t[n]`` of the artifact's own (logical) tokens, whole chunks only. An
    artifact of scope ``request`` is a new one each time.
    """

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    adapter: bytes | None = specs.optional(specs.digest32())
    salt: bytes | None = specs.optional(specs.digest32())
    manifest: TransformManifest = specs.record(TransformManifest)
    source: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)
    tail: bytes | None = specs.optional(specs.digest32())
    tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


@frozen
class VariantOpened(Record):
    """A lease over the artifact's chunks; the other fields as in ``Bound``. ``variant`` is the manifest's digest."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    variant: bytes = specs.digest32()
    present: int = specs.uint()
    probing: bool = specs.boolean()
    reference: str = specs.text(pattern=rf"[0-9a-f]{{{REFERENCE_DIGITS}}}")
    addresses: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


@frozen
class ReserveRectangle(Record):
    """From a client that publishes: slots for one rectangle (its index in the plan) of some chunks. ``Commit`` as a worker does."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    rectangle: int = specs.uint(maximum=MAX_WORKERS)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)


@frozen
class LoadRectangle(Record):
    """From a client that fetches: where one rectangle of acquired chunks lies. ``FinishLoad`` as a worker does."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    rectangle: int = specs.uint(maximum=MAX_WORKERS)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)


@frozen
class SealVariant(Record):
    """Ask for the capability of an opened artifact. Every chunk must be stored whole: the gateway acquires them all first."""

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    ttl_s: int = specs.uint(minimum=1, maximum=MAX_TTL_S)
    deadline_ms: int = specs.uint(minimum=1, maximum=600_000)


@frozen
class VariantSealed(Record):
    """The capability and when it ends, in Unix seconds: after ``ttl_s``, or sooner where the gateway's own limit is shorter."""

    capability: bytes = specs.raw_bytes(max_bytes=CAPABILITY_BYTES, exact=CAPABILITY_BYTES)
    expires_s: int = specs.uint()


@frozen
class BindVariant(Record):
    """Bind a request to exactly the artifact of ``capability``; ``tokens`` are the ``t[n]`` of the request's full chunks.

    The first of them must be the artifact's; the rest is ignored. Token digests of an artifact of scope ``global`` are made with the
    shared token key (``kvgate.contract.capability.Capability.read`` tells the scope). Refused with a ``Failure`` whose ``field`` is
    ``capability`` (made up, altered, or of another domain: all the same), ``capability.root`` (of another model, adapter, salt or
    stored form), ``capability.expires_s``, or ``capability.end`` (the prompt does not begin with the artifact's tokens).
    """

    handle: bytes = specs.raw_bytes(max_bytes=HANDLE_BYTES, exact=HANDLE_BYTES)
    adapter: bytes | None = specs.optional(specs.digest32())
    salt: bytes | None = specs.optional(specs.digest32())
    capability: bytes = specs.raw_bytes(max_bytes=CAPABILITY_BYTES, exact=CAPABILITY_BYTES)
    tokens: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


@frozen
class VariantBound(Record):
    """A lease over exactly the artifact's chunks; the other fields as in ``Bound``.

    The request must get all of them by ``Acquire``, or fail: what is gone is never recomputed from the retained tokens.
    """

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    variant: bytes = specs.digest32()
    present: int = specs.uint()
    probing: bool = specs.boolean()
    reference: str = specs.text(pattern=rf"[0-9a-f]{{{REFERENCE_DIGITS}}}")
    addresses: bytes = specs.raw_bytes(max_bytes=_LIST_BYTES, multiple=DIGEST_BYTES)


REPLIES: Final[dict[type[Record], type[Record]]] = {
    OpenModel: ModelOpened,
    DescribeSource: SourceDescribed,
    OpenVariant: VariantOpened,
    ReserveRectangle: Reserved,
    LoadRectangle: LoadPlan,
    SealVariant: VariantSealed,
    BindVariant: VariantBound,
}
"""Request class → class of its reply (any may be answered with ``Failure``)."""
