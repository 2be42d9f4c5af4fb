"""What each control message does. One method a message; transport, framing and tasks are ``server.py``'s."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import structlog

from kvgate import __version__
from kvgate.config import Config
from kvgate.contract.record import Record
from kvgate.daemon.components import identify
from kvgate.daemon.errors import Refused
from kvgate.daemon.explain import Explainer, reference
from kvgate.daemon.leases import Lease, LeaseTable
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.policy import Domain, Policy
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.processes import Process
from kvgate.daemon.reads import Reads
from kvgate.daemon.registry import Rank, Registration, Registry
from kvgate.daemon.shards import shard_ref
from kvgate.daemon.writers import Writer
from kvgate.daemon.writes import Writes
from kvgate.protocol import messages
from kvgate.protocol.catalog import SINCE
from kvgate.protocol.versions import SCHEMA_VERSIONS, WIRE_VERSIONS, Range, VersionMismatch, negotiate

log = structlog.get_logger(__name__)

BIND_PROBE_S: Final = 0.002
"""So long a bind waits for its probe of storage: an answer that comes with it spares the engine a round trip, above all at a miss."""


@dataclass(eq=False)
class Session:
    """One connection: who it is and what it registered."""

    id: int
    pid: int
    role: str = ""
    domain: Domain | None = None
    registration: Registration | None = None
    rank: Rank = (0, 0)
    rectangle: int = 0
    writer: Writer | None = None
    wire: int = 0
    closed: bool = False

    @property
    def greeted(self) -> bool:
        """Whether its hello was accepted."""
        return self.domain is not None

    @property
    def own_domain(self) -> Domain:
        """Its isolation domain; nothing but its hello is answered before there is one."""
        assert self.domain is not None, "answer() lets nothing but Hello through before"
        return self.domain


Answer = Record | Coroutine[Any, Any, Record]
"""A reply, or where something has to be waited for first what gives it."""
Handler = Callable[[Session, Any], Answer]


class Service:
    """The gateway's answer to every message."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        registry: Registry,
        leases: LeaseTable,
        presence: PresenceIndex,
        reads: Reads,
        writes: Writes,
        explainer: Explainer,
        metrics: Metrics,
        extra_handlers: Mapping[type[Record], Handler] | None = None,
        on_close: Callable[[Session], Awaitable[None]] | None = None,
    ) -> None:
        """``extra_handlers``: what other parts of the daemon answer, by message. ``on_close``: awaited when a connection is lost and
        none of its requests runs any more."""
        self._config = config
        self._policy = policy
        self._registry = registry
        self._leases = leases
        self._presence = presence
        self._reads = reads
        self._writes = writes
        self._explainer = explainer
        self._metrics = metrics
        self._on_close = on_close
        self._boot = secrets.token_bytes(messages.TOKEN_BYTES)
        self._session_ids = count(1)
        self._handlers: dict[type[Record], Handler] = {
            messages.RegisterWorker: self._register_worker,
            messages.OpenEngine: self._open_engine,
            messages.RegisterAdapter: self._register_adapter,
            messages.ConfirmAdapter: self._confirm_adapter,
            messages.Revoke: self._revoke,
            messages.Bind: self._bind,
            messages.Acquire: self._acquire,
            messages.Extend: self._extend,
            messages.Release: self._release,
            messages.Explain: self._explain,
            messages.Load: self._load,
            messages.FinishLoad: self._finish_load,
            messages.Reserve: self._reserve,
            messages.Commit: self._commit,
            **(extra_handlers or {}),
        }

    def open_session(self, pid: int) -> Session:
        """A connection was accepted from process ``pid`` (0: in a PID namespace that can't be seen from here)."""
        return Session(next(self._session_ids), pid)

    def answer(self, session: Session, message: Record) -> Answer:
        """The reply to one message; raises ``Refused``, also when it is awaited."""
        if isinstance(message, messages.Hello):
            return self._hello(session, message)
        if session.closed:
            raise Refused("denied", "the connection is closed")
        if not session.greeted:
            raise Refused("malformed", "the first message must be Hello", field="type", remedy="send Hello")
        if SINCE[type(message)] > session.wire:
            problem = f"is not a message of wire version {session.wire}"
            raise Refused("malformed", problem, field="type", remedy="upgrade the older side")
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refused("malformed", "is a reply, not a request", field="type")
        return handler(session, message)

    async def leave_session(self, session: Session) -> None:
        """The connection is lost: nothing new begins, its ranks are missing, its holds are given back at once."""
        session.closed = True
        self._registry.drop_session(session.id)
        await self._reads.drop_session(session.id)

    async def close_session(self, session: Session) -> None:
        """No request of the connection runs any more: give back what the last ones still took.

        Its reservations wait for the process to commit, abort or end.
        """
        await self._reads.drop_session(session.id)
        if self._on_close is not None:
            await self._on_close(session)
        if session.writer is not None:
            self._writes.writers.leave(session.writer)
            session.writer = None

    async def undelivered(self, session: Session, reply: Record) -> None:
        """The connection was gone before ``reply`` was sent. Slots its peer never heard of are not written to: free again."""
        if isinstance(reply, messages.Reserved) and session.writer is not None:
            await self._writes.abandon(session.writer, [slot.reservation for slot in reply.slots if slot.status == "slot"])

    def _hello(self, session: Session, hello: messages.Hello) -> messages.Welcome:
        if session.domain is not None:
            raise Refused("malformed", "Hello was sent already", field="type")
        try:
            wire = negotiate("wire", Range.of(WIRE_VERSIONS), Range(hello.wire_lowest, hello.wire_highest))
            schema = negotiate("schema", Range.of(SCHEMA_VERSIONS), Range(hello.schema_lowest, hello.schema_highest))
        except VersionMismatch as error:
            raise Refused("version", str(error), field="wire or schema", remedy="upgrade the older side") from error
        session.wire = wire
        session.domain = self._policy.domain_of(hello.credential)
        session.role = hello.role
        return messages.Welcome(
            build=f"kvgate {__version__}",
            wire=wire,
            schema=schema,
            boot=self._boot,
            chunk_tokens=self._config.chunk_tokens,
            codec=self._config.codec,
        )

    def _register_worker(self, session: Session, report: messages.RegisterWorker) -> Record:
        domain = session.own_domain
        if session.role != "worker":
            raise Refused("denied", "only workers register", field="role", remedy="say role worker in Hello")
        if session.writer is None:
            session.writer = self._writes.writers.join(session.pid)
        process = Process.of(session.pid)
        registration = self._registry.report(report, session.id, process, domain.key, domain.id)
        session.registration = registration
        session.rank = (report.pp_rank, report.tp_rank)
        session.rectangle = registration.form.plan.rectangles_of(*session.rank)[0]
        log.info(
            "worker.registered",
            pp_rank=report.pp_rank,
            tp_rank=report.tp_rank,
            generation=report.generation,
            sealed=registration.sealed,
            model=registration.digests.model.hex()[:16],
        )
        missing = registration.ranks - len(registration.live)
        return messages.Registered(handle=registration.handle, sealed=registration.sealed, missing_ranks=missing)

    def _open_engine(self, session: Session, message: messages.OpenEngine) -> Record:
        registration = self._registration(session, message.handle)
        registration.require_sealed()
        domain = session.own_domain
        return messages.Opened(
            domain=domain.id,
            token_key=domain.token_key,
            salt_key=domain.salt_key,
            chunk_tokens=self._config.chunk_tokens,
        )

    def _register_adapter(self, session: Session, message: messages.RegisterAdapter) -> Record:
        _require_engine(session)
        registration = self._registration(session, message.handle)
        adapter = registration.add_adapter(message.adapter)
        return messages.AdapterRegistered(adapter=adapter, confirmed=registration.adapter_confirmed(adapter))

    def _confirm_adapter(self, session: Session, message: messages.ConfirmAdapter) -> Record:
        worker_registration(session).confirm_adapter(session.rank, message.adapter)
        return messages.Done()

    def _revoke(self, session: Session, message: messages.Revoke) -> Record:
        _require_engine(session)
        registration = self._registration(session, message.handle)
        self._registry.revoke(registration, "weights were changed in place")
        log.info("registration.revoked", model=registration.digests.model.hex()[:16])
        return messages.Done()

    def _bind(self, session: Session, bind: messages.Bind) -> Answer:
        registration = self._registration(session, bind.handle)
        registration.require_sealed()
        domain = session.own_domain
        access = self._policy.access_of(domain, bind).digest()
        variant = self._policy.variant_of(bind).digest()
        root, components = identify(registration.model_of(bind.adapter), registration.form, access, variant)
        lease = self._leases.open(session.id, registration, bind.adapter, root, components, bind.tokens)
        present = self._presence.contiguous(lease.chunks, lease.rectangles)
        self._metrics.bound_chunks.labels("known").inc(present)
        self._metrics.bound_chunks.labels("unknown").inc(len(lease.chunks) - present)
        if self._reads.probes.start(lease, present):
            return self._bound_when_probed(lease)
        return _bound(lease, present, probing=False)

    async def _bound_when_probed(self, lease: Lease) -> Record:
        present, probing = await self._reads.probes.answer(lease, BIND_PROBE_S)
        return _bound(lease, present, probing=probing)

    async def _acquire(self, session: Session, message: messages.Acquire) -> Record:
        lease = self._leases.owned(message.lease, session.id)
        end = await self._reads.acquire(lease, message.first, message.last, message.deadline_ms / 1000)
        return messages.Acquired(end=end)

    def _extend(self, session: Session, message: messages.Extend) -> Record:
        lease = self._leases.owned(message.lease, session.id)
        self._leases.extend(lease, message.first, message.tokens)
        return messages.Extended(chunks=len(lease.chunks))

    async def _release(self, session: Session, message: messages.Release) -> Record:
        lease = self._leases.find(message.lease)
        if lease is not None and lease.session == session.id:
            await self._reads.release(lease)
        return messages.Done()

    async def _explain(self, session: Session, message: messages.Explain) -> Record:
        lease = self._leases.find(message.lease)
        missing = self._reads.probes.present(lease) if lease is not None else 0
        return await self._explainer.answer(session.id, message.lease, lease, missing)

    def _load(self, session: Session, message: messages.Load) -> Answer:
        self._require_shared_pool(session)
        lease = known_lease(session, self._leases, message.lease)
        if lease.adapter is not None and not lease.registration.adapter_confirmed(lease.adapter):
            return self._load_when_confirmed(session, message)
        return self._load_plan(session, lease, message)

    async def _load_when_confirmed(self, session: Session, message: messages.Load) -> Record:
        lease = await worker_lease(session, self._leases, message.lease, self._config.adapter_wait_s)
        return self._load_plan(session, lease, message)

    def _load_plan(self, session: Session, lease: Lease, message: messages.Load) -> Record:
        plan = self._reads.plan_load(session.id, lease, session.rectangle, message.chunks)
        self._log_touched("worker.load", session, lease, [slot.chunk for slot in plan.slots])
        return plan

    def _finish_load(self, session: Session, message: messages.FinishLoad) -> Answer:
        valid, idle = self._reads.settle_load(session.id, message.ticket, message.mismatched)
        verdict = messages.LoadVerdict(valid=valid)
        return verdict if idle is None else self._freed(idle, verdict)

    async def _freed(self, lease: Lease, answer: Record) -> Record:
        await self._reads.free(lease)
        return answer

    async def _reserve(self, session: Session, message: messages.Reserve) -> Record:
        self._require_shared_pool(session)
        lease = await worker_lease(session, self._leases, message.lease, self._config.adapter_wait_s)
        reserved = await self._writes.reserve(
            self._writer(session), lease, session.rectangle, message.chunks, session=session.id
        )
        given = [slot.chunk for slot in reserved.slots if slot.status == "slot"]
        skipped = [slot.status for slot in reserved.slots if slot.status != "slot"]
        self._log_touched("worker.reserve", session, lease, given, skipped=skipped)
        return reserved

    async def _commit(self, session: Session, message: messages.Commit) -> Record:
        return messages.Committed(visible=await self._writes.commit(self._writer(session), message.written, message.aborted))

    def _log_touched(self, event: str, session: Session, lease: Lease, chunks: list[int], **more: list[str]) -> None:
        """For an audit at level debug: which stored objects a worker was let at. Addresses tell nothing but that they are equal."""
        if self._config.log_level == "debug":
            refs = [shard_ref(lease.registration, lease.chunks[index], session.rectangle, lease.domain) for index in chunks]
            shards = [ref.address.hex() for ref in refs]
            log.debug(event, pp_rank=session.rank[0], tp_rank=session.rank[1], chunks=chunks, shards=shards, **more)

    def _registration(self, session: Session, handle: bytes) -> Registration:
        """The registration behind a handle; a handle of another domain is as good as unknown."""
        return self._registry.by_handle(handle, session.own_domain.id)

    def _require_shared_pool(self, session: Session) -> None:
        if session.role == "worker" and self._config.transfer == "gateway":
            raise Refused(
                "denied",
                "workers of this gateway don't see its pool",
                remedy='leave the copies to the gateway: "transfer": "gateway" in kv_connector_extra_config',
            )

    def _writer(self, session: Session) -> Writer:
        if session.writer is None and session.role == "client":
            # A process of the SDK may end on a new connection what it wrote on a lost one: writes are the process's.
            session.writer = self._writes.writers.join(session.pid)
        if session.writer is None:
            raise Refused("denied", "this connection has registered no worker", remedy="send RegisterWorker first")
        return session.writer


def _bound(lease: Lease, present: int, *, probing: bool) -> messages.Bound:
    return messages.Bound(
        lease=lease.token,
        present=present,
        probing=probing,
        reference=reference(lease.token),
        addresses=b"".join(lease.chunks),
    )


def _require_engine(session: Session) -> None:
    """What an engine has loaded only its own processes say; a client is handed its handle too, by ``OpenModel``."""
    if session.role not in ("worker", "scheduler"):
        raise Refused(
            "denied", "is for an engine to say, not for its clients", field="role", remedy="use the SDK's own messages"
        )


def worker_registration(session: Session) -> Registration:
    """The registration of which this connection is a rank now; raises ``Refused``."""
    registration = session.registration
    if registration is None:
        raise Refused("denied", "this connection has registered no worker", remedy="send RegisterWorker first")
    if not registration.revoked and registration.live.get(session.rank) != session.id:
        raise Refused("denied", "another connection has taken this rank", remedy="one process a rank; register again")
    return registration


def known_lease(session: Session, leases: LeaseTable, token: bytes) -> Lease:
    """A lease that this worker may load from and store to once its adapter is confirmed: of its own registration, sealed."""
    registration, lease = worker_registration(session), leases.get(token)
    if lease.registration is not registration:
        raise Refused("denied", "the lease belongs to another engine", field="lease")
    if lease.variant is not None and lease.variant.writable:
        raise Refused("denied", "the lease belongs to a client that publishes", field="lease")
    registration.require_sealed()
    return lease


async def worker_lease(session: Session, leases: LeaseTable, token: bytes, adapter_wait_s: float) -> Lease:
    """The same, with its adapter confirmed."""
    lease = known_lease(session, leases, token)
    if lease.adapter is not None:
        await lease.registration.wait_adapter(lease.adapter, adapter_wait_s)
    return lease
