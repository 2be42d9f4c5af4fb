"""Variants: clients publish what a transform made of a prefix, schedulers bind exactly that, and nothing else ever meets either."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

import structlog

from kvgate.config import Config
from kvgate.contract.access import ORDINARY, Access, Variant
from kvgate.contract.address import chunk_chain
from kvgate.contract.capability import Capability, check, domain_capability_key
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.errors import ContractError
from kvgate.contract.manifest import TransformManifest, source_prefix
from kvgate.contract.record import Record
from kvgate.daemon.components import identify
from kvgate.daemon.errors import Refused
from kvgate.daemon.explain import reference
from kvgate.daemon.leases import Lease, LeaseTable, VariantTerms, split
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.policy import Domain, Policy
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.reads import Reads
from kvgate.daemon.registry import Registration, Registry
from kvgate.daemon.service import Handler, Session
from kvgate.daemon.writes import Writes
from kvgate.protocol import variant_messages as messages

log = structlog.get_logger(__name__)

_RESEND: Final = "send the full prompt without a capability"
_ORDINARY: Final = ORDINARY.digest()


def _wrong(field: str, problem: str, remedy: str) -> Refused:
    return Refused("malformed", problem, field=f"manifest.{field}", remedy=remedy)


class Variants:
    """Answers the messages of ``variant_messages``."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        registry: Registry,
        leases: LeaseTable,
        presence: PresenceIndex,
        reads: Reads,
        writes: Writes,
        metrics: Metrics,
        capability_key: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``capability_key``: the deployment's. ``clock``: Unix seconds."""
        self._config = config
        self._policy = policy
        self._registry = registry
        self._leases = leases
        self._presence = presence
        self._reads = reads
        self._writes = writes
        self._metrics = metrics
        self._capability_key = capability_key
        self._clock = clock

    def handlers(self) -> dict[type[Record], Handler]:
        """Message → what answers it."""
        return {
            messages.OpenModel: self._open_model,
            messages.DescribeSource: self._describe_source,
            messages.OpenVariant: self._open_variant,
            messages.ReserveRectangle: self._reserve_rectangle,
            messages.LoadRectangle: self._load_rectangle,
            messages.SealVariant: self._seal_variant,
            messages.BindVariant: self._bind_variant,
        }

    def _open_model(self, session: Session, message: messages.OpenModel) -> Record:
        domain = session.own_domain
        registration = self._named(domain, message.handle, message.model)
        registration.require_sealed()
        shared = self._policy.shared_with(domain)
        return messages.ModelOpened(
            handle=registration.handle,
            domain=domain.id,
            token_key=domain.token_key,
            salt_key=domain.salt_key,
            shared_token_key=shared.token_key if shared else None,
            model=registration.model,
            representation=registration.form.representation,
            plan=registration.form.plan,
            adapters=b"".join(registration.adapters),
        )

    def _named(self, domain: Domain, handle: bytes | None, model: str | None) -> Registration:
        if handle is not None:
            return self._registry.by_handle(handle, domain.id)
        found: dict[tuple[bytes, bytes, bytes], Registration] = {}
        for one in self._registry:
            if one.domain == domain.id and one.sealed and one.digests.model.hex().startswith(model or ""):
                found.setdefault((one.digests.model, one.form.representation_digest, one.form.plan_digest), one)
        if not found:
            raise Refused(
                "unsealed",
                "no such engine is registered now",
                field="model",
                remedy="start it; it must use the same credential",
            )
        if len(found) > 1:
            raise Refused(
                "denied",
                f"{len(found)} engines of different contracts are registered",
                field="model",
                remedy="name one by the first digits of its model digest; `kvgate status` shows them",
            )
        return next(iter(found.values()))

    def _describe_source(self, session: Session, message: messages.DescribeSource) -> Record:
        domain, registration = self._sealed(session, message.handle)
        prefix = self._source_prefix(
            domain,
            registration,
            message.adapter,
            message.salt,
            message.scope,
            (message.tokens, message.source_tokens, message.tail),
        )
        return messages.SourceDescribed(
            source_prefix=prefix,
            model=registration.model_of(message.adapter).model,
            payload_format=registration.form.representation_digest,
        )

    def _source_prefix(
        self,
        domain: Domain,
        registration: Registration,
        adapter: bytes | None,
        salt: bytes | None,
        scope: str,
        source: tuple[bytes, int, bytes | None],
    ) -> bytes:
        """The digest of a source, worked out here from its token digests; ``source``: those, its length, its tail's."""
        tokens, count, tail = source
        chunks, rest = divmod(count, self._config.chunk_tokens)
        if len(tokens) != chunks * DIGEST_BYTES or (tail is not None) != (rest > 0):
            raise Refused("malformed", "does not fit the chunks and the tail given", field="source_tokens")
        access = self._policy.source_access(domain, salt, scope).digest()
        root, _ = identify(registration.model_of(adapter), registration.form, access, _ORDINARY)
        chain = chunk_chain(root, split(tokens))
        return source_prefix(chain[-1] if chain else root, count, tail)

    def _open_variant(self, session: Session, message: messages.OpenVariant) -> Record:
        domain, registration = self._sealed(session, message.handle)
        manifest = message.manifest
        self._check_manifest(domain, registration, message)
        if not message.tokens:
            raise Refused(
                "malformed", "an artifact has one chunk at least", field="tokens", remedy="whole chunks of logical tokens"
            )
        nonce = secrets.token_bytes(DIGEST_BYTES)
        access = self._policy.variant_access(domain, message.salt, manifest, nonce)
        terms = VariantTerms(manifest.digest(), access, writable=True)
        lease = self._open_lease(session, registration, message.adapter, terms, message.tokens)
        # An artifact of scope request has just been given its address: nothing can be there.
        present, probing = self._look(lease) if manifest.scope != "request" else (0, False)
        return messages.VariantOpened(
            lease=lease.token,
            variant=terms.manifest,
            present=present,
            probing=probing,
            reference=reference(lease.token),
            addresses=b"".join(lease.chunks),
        )

    def _check_manifest(self, domain: Domain, registration: Registration, message: messages.OpenVariant) -> None:
        """Refuse a manifest that says anything else than what can be worked out here."""
        manifest = message.manifest
        if manifest.model != registration.model_of(message.adapter).model:
            raise _wrong(
                "model", "is not this engine's contract with this adapter", "make the artifact anew from this engine's KV"
            )
        if manifest.payload_format != registration.form.representation_digest:
            raise _wrong("payload_format", "is not the form in which this engine's KV is stored", "fetch anew")
        source = (message.source, manifest.source_tokens, message.tail)
        prefix = self._source_prefix(domain, registration, message.adapter, message.salt, manifest.scope, source)
        if manifest.source_prefix != prefix:
            raise _wrong("source_prefix", "is not that of the source given", "use the source's own, and its adapter and salt")
        self._check_shape(manifest, registration)

    @staticmethod
    def _check_shape(manifest: TransformManifest, registration: Registration) -> None:
        group, kept = registration.form.representation.groups[0], manifest.retained
        if kept.per != "model" and kept.layers != group.layers:
            raise _wrong("retained.layers", "differs from the model's layers", f"{group.layers}")
        if kept.per == "head" and kept.heads != group.kv_heads:
            raise _wrong("retained.heads", "differs from the model's KV heads", f"{group.kv_heads}")

    async def _reserve_rectangle(self, session: Session, message: messages.ReserveRectangle) -> Record:
        lease = await self._ready_lease(session, message.lease, message.rectangle)
        if lease.variant is None or not lease.variant.writable:
            raise Refused("denied", "a client writes artifacts that it has opened", field="lease", remedy="send OpenVariant")
        if session.writer is None:
            session.writer = self._writes.writers.join(session.pid)
        return await self._writes.reserve(session.writer, lease, message.rectangle, message.chunks)

    async def _load_rectangle(self, session: Session, message: messages.LoadRectangle) -> Record:
        lease = await self._ready_lease(session, message.lease, message.rectangle)
        return self._reads.plan_load(session.id, lease, message.rectangle, message.chunks)

    async def _seal_variant(self, session: Session, message: messages.SealVariant) -> Record:
        lease = self._leases.owned(message.lease, session.id)
        terms = lease.variant
        if terms is None or not terms.writable:
            raise Refused("denied", "was not opened by OpenVariant", field="lease", remedy="send OpenVariant")
        end = await self._reads.acquire(lease, 0, len(lease.chunks), message.deadline_ms / 1000)
        if end < len(lease.chunks):
            self._metrics.variants.labels("not stored").inc()
            if lease.unanswered:
                raise Refused("unavailable", "storage did not answer in time", field="tokens", remedy="try again")
            raise Refused("denied", "the artifact is not stored whole", field="tokens", remedy="publish it")
        expires_s = int(self._clock()) + min(message.ttl_s, self._config.capability_ttl_s)
        capability = Capability(
            scope=terms.access.scope,
            chunks=len(lease.chunks),
            expires_s=expires_s,
            manifest=terms.manifest,
            scope_key=terms.access.scope_key,
            root=lease.root,
            end=lease.chunks[-1],
        )
        self._metrics.variants.labels("sealed").inc()
        log.info("variant.sealed", scope=terms.access.scope, chunks=len(lease.chunks), variant=terms.manifest.hex()[:16])
        key = domain_capability_key(self._capability_key, session.own_domain.id)
        return messages.VariantSealed(capability=capability.seal(key), expires_s=expires_s)

    def _bind_variant(self, session: Session, message: messages.BindVariant) -> Record:
        domain, registration = self._sealed(session, message.handle)
        capability = self._opened(domain, message.capability)
        terms = VariantTerms(capability.manifest, self._access_of(domain, capability, message.salt), writable=False)
        tokens = message.tokens[: capability.chunks * DIGEST_BYTES]
        lease = self._open_lease(session, registration, message.adapter, terms, tokens)
        if lease.root != capability.root:
            self._leases.remove(lease)
            raise self._refused(
                "root",
                "belongs to another model, adapter, salt or stored form",
                "send the request as the artifact was published",
            )
        if len(lease.chunks) != capability.chunks or lease.chunks[-1] != capability.end:
            self._leases.remove(lease)
            raise self._refused(
                "end", "is for a prompt that begins with other tokens", "begin the prompt with the artifact's token ids"
            )
        present, probing = self._look(lease)
        self._metrics.variants.labels("bound").inc()
        return messages.VariantBound(
            lease=lease.token,
            variant=capability.manifest,
            present=present,
            probing=probing,
            reference=reference(lease.token),
            addresses=b"".join(lease.chunks),
        )

    def _opened(self, domain: Domain, data: bytes) -> Capability:
        """The content of a capability of this domain that is still good; raises ``Refused``.

        Until its MAC is found right it is just bytes: one of another domain gets the words, and the work, of one that was made up.
        """
        if not check(domain_capability_key(self._capability_key, domain.id), data):
            self._metrics.variants.labels("refused").inc()
            raise Refused("denied", "is no capability of this isolation domain", field="capability", remedy=_RESEND)
        try:
            capability = Capability.read(data)
        except ContractError as error:
            raise Refused("malformed", error.problem, field=error.field, remedy=_RESEND) from error
        if self._clock() >= capability.expires_s:
            raise self._refused("expires_s", "has expired", "publish or find the artifact again")
        return capability

    def _access_of(self, domain: Domain, capability: Capability, salt: bytes | None) -> Access:
        return Access(
            domain=self._policy.domain_for(domain, capability.scope).id,
            salt=salt,
            scope=capability.scope,
            scope_key=capability.scope_key,
        )

    def _refused(self, field: str, problem: str, remedy: str) -> Refused:
        """To the holder of a genuine capability of this domain."""
        self._metrics.variants.labels("refused").inc()
        return Refused("denied", problem, field=f"capability.{field}", remedy=f"{remedy}, or {_RESEND}")

    def _open_lease(
        self, session: Session, registration: Registration, adapter: bytes | None, terms: VariantTerms, tokens: bytes
    ) -> Lease:
        variant = Variant(manifest=terms.manifest).digest()
        root, components = identify(registration.model_of(adapter), registration.form, terms.access.digest(), variant)
        return self._leases.open(session.id, registration, adapter, root, components, tokens, terms)

    def _look(self, lease: Lease) -> tuple[int, bool]:
        """How many chunks are believed present, and whether storage is being asked about the rest."""
        present = self._presence.contiguous(lease.chunks, lease.rectangles)
        return present, self._reads.probes.start(lease, present)

    def _sealed(self, session: Session, handle: bytes) -> tuple[Domain, Registration]:
        domain = session.own_domain
        registration = self._registry.by_handle(handle, domain.id)
        registration.require_sealed()
        return domain, registration

    async def _ready_lease(self, session: Session, token: bytes, rectangle: int) -> Lease:
        """A lease of this connection from which one rectangle may be read or written now."""
        if self._config.transfer == "gateway":
            raise Refused(
                "denied",
                "nobody but the gateway sees its pool",
                field="transfer",
                remedy="fetch and publish at a gateway whose setting transfer is any or worker; it may share the L2",
            )
        lease = self._leases.owned(token, session.id)
        lease.registration.require_sealed()
        if rectangle >= lease.rectangles:
            raise Refused("malformed", f"the plan has {lease.rectangles} rectangles", field="rectangle")
        if lease.adapter is not None:
            await lease.registration.wait_adapter(lease.adapter, self._config.adapter_wait_s)
        return lease
