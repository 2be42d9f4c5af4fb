"""Registrations: what the loaders of one engine start reported, sealed once all ranks agree.

A registration belongs to (domain, engine, generation). It is usable while every rank of its plan has a live session and nobody
revoked it; a higher generation of the same engine revokes it for good. One whose ranks are all gone is set aside: a rank that comes
back finds it as it was, and a revoked one stays revoked for every process that had a part in it. Handles are made with a key of
the deployment, from the contracts and the engine's random bytes: nobody can guess one, and a restarted gateway gives the same engine
the same handle.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.digests import keyed
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.model import ModelContract, NumericsClass
from kvgate.contract.plan import PartitionPlan
from kvgate.contract.representation import Representation
from kvgate.daemon.components import ModelDigests, StoredForm, digest_model
from kvgate.daemon.errors import Refused
from kvgate.daemon.processes import Process
from kvgate.protocol.messages import RegisterWorker

MAX_REGISTRATIONS: Final = 4096
MAX_SET_ASIDE: Final = 1024
MAX_SET_ASIDE_BYTES: Final = 32 << 20
"""Of their contracts, as they are encoded. A usual one has some ten thousand bytes."""
MAX_CONTRACT_BYTES: Final = 1 << 20
"""Of one model contract, representation and plan together."""
MAX_ADAPTERS: Final = 4096

Rank = tuple[int, int]


@dataclass(eq=False)
class AdapterState:
    """One adapter on one engine: its contract's digests, and which ranks confirmed having loaded exactly these files."""

    digests: ModelDigests
    confirmed: set[Rank] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Registration:
    """One engine start's sealed or sealing contract."""

    engine: bytes
    generation: int
    handle: bytes
    domain_key: bytes
    domain: bytes
    model: ModelContract
    digests: ModelDigests
    form: StoredForm
    size_bytes: int
    live: dict[Rank, int] = field(default_factory=dict)  # rank → session that reported it
    processes: dict[Rank, Process] = field(default_factory=dict)  # rank → process that reported it last
    adapters: OrderedDict[bytes, AdapterState] = field(default_factory=OrderedDict)
    revoked: str = ""  # why it can issue nothing more; empty while it can

    @property
    def ranks(self) -> int:
        """How many ranks the plan has."""
        return self.form.plan.pipeline_parallel * self.form.plan.tensor_parallel

    @property
    def sealed(self) -> bool:
        """All ranks have reported, agree and are connected."""
        return not self.revoked and len(self.live) == self.ranks

    def require_sealed(self) -> None:
        """Raise ``Refused`` unless the registration may load and commit now."""
        if self.revoked:
            raise Refused("revoked", f"the registration was revoked: {self.revoked}", remedy="register again after loading")
        if not self.sealed:
            missing = self.ranks - len(self.live)
            raise Refused("unsealed", f"{missing} of {self.ranks} ranks have not registered", remedy="start all workers")

    def model_of(self, adapter: bytes | None) -> ModelDigests:
        """Digests of the contract with ``adapter`` (its artifact set's digest) or with none."""
        if adapter is None:
            return self.digests
        return self.adapter(adapter).digests

    def adapter(self, adapter: bytes) -> AdapterState:
        """The adapter's state; raises ``Refused`` for one that was never registered here."""
        state = self.adapters.get(adapter)
        if state is None:
            raise Refused("denied", "unknown adapter", field="adapter", remedy="send RegisterAdapter first")
        self.adapters.move_to_end(adapter)
        return state

    def adapter_confirmed(self, adapter: bytes) -> bool:
        """Whether every rank has confirmed it."""
        return self.adapter(adapter).confirmed >= self.live.keys() and self.sealed

    def join(self, rank: Rank, session: int, process: Process) -> None:
        """``session`` speaks for ``rank`` from now on; what another one confirmed does not count for it."""
        if self.live.get(rank) != session:
            self.leave(rank)
        self.live[rank] = session
        self.processes[rank] = process

    def whole_without(self, process: Process) -> bool:
        """Whether living processes speak for all ranks, and ``process`` is none of them."""
        holders = [self.processes[rank] for rank in self.live]
        return len(holders) == self.ranks and process not in holders and all(holder.lives() for holder in holders)

    def leave(self, rank: Rank) -> None:
        """Nobody speaks for ``rank`` any more."""
        self.live.pop(rank, None)
        for state in self.adapters.values():
            state.confirmed.discard(rank)

    def add_adapter(self, adapter: ArtifactSet) -> bytes:
        """Make the adapter known, provisionally; returns its digest."""
        key = adapter.digest()
        if key not in self.adapters:
            if len(self.adapters) >= MAX_ADAPTERS:
                self.adapters.popitem(last=False)
            contract = dataclasses.replace(self.model, adapter=adapter)
            self.adapters[key] = AdapterState(digest_model(contract, self.form.plan))
        self.adapters.move_to_end(key)
        return key

    def confirm_adapter(self, rank: Rank, adapter: ArtifactSet) -> None:
        """Note that ``rank`` really loaded these files."""
        state = self.adapters[self.add_adapter(adapter)]
        state.confirmed.add(rank)
        state.changed.set()
        state.changed = asyncio.Event()

    async def wait_adapter(self, adapter: bytes, wait_s: float) -> None:
        """Return once every rank has confirmed ``adapter``; raises ``Refused`` after ``wait_s``."""
        try:
            async with asyncio.timeout(wait_s):
                while not self.adapter_confirmed(adapter):
                    self.require_sealed()
                    await self.adapter(adapter).changed.wait()
        except TimeoutError:
            raise Refused(
                "adapter",
                "not every rank has loaded these adapter files",
                remedy="the request is recomputed; see docs/adapters",
            ) from None


class Registry:
    """All registrations of this gateway."""

    def __init__(self, handle_key: bytes, chunk_tokens: int, codec: str, classes: frozenset[str]) -> None:
        self._handle_key = handle_key
        self._chunk_tokens = chunk_tokens
        self._codec = codec
        self._classes = classes
        self._by_handle: dict[bytes, Registration] = {}
        self._set_aside: dict[bytes, Registration] = {}  # handle → registration without a live rank, oldest first
        self._set_aside_bytes = 0
        self._newest: dict[tuple[bytes, bytes], int] = {}  # (domain, engine) → highest generation seen

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._by_handle.values())

    def __len__(self) -> int:
        return len(self._by_handle)

    def report(self, report: RegisterWorker, session: int, process: Process, domain_key: bytes, domain: bytes) -> Registration:
        """One rank's report. Raises ``Refused``; a rank that disagrees with the others revokes the registration for all."""
        self._require_own_rank(report, process, domain)
        # First of all, whatever becomes of the report: its engine has new weights, so the old contract is wrong.
        self._supersede(report, domain)
        self._check(report)
        registration = self._find(report.engine, report.generation, domain)
        if registration is None:
            registration = self._open(report, domain_key, domain)
        else:
            self._require_agreement(registration, report)
        rank = (report.pp_rank, report.tp_rank)
        registration.join(rank, session, process)
        self._leave(session, registration, rank)
        return registration

    def by_handle(self, handle: bytes, domain: bytes) -> Registration:
        """Look a handle up; raises ``Refused`` where it is unknown in ``domain``."""
        registration = self._by_handle.get(handle) or self._set_aside.get(handle)
        if registration is None or registration.domain != domain:
            # After a gateway restart the workers come back by themselves; a forged handle and one of another domain get the same words.
            raise Refused(
                "unsealed",
                "no worker has registered under this handle",
                field="handle",
                remedy="wait for the workers; they must use the same credential",
            )
        return registration

    def revoke(self, registration: Registration, why: str) -> None:
        """The registration can issue nothing more. Idempotent."""
        if not registration.revoked:
            registration.revoked = why
            for state in registration.adapters.values():
                state.changed.set()

    def drop_session(self, session: int) -> None:
        """A connection is gone: its ranks are missing again; a registration without any rank is set aside."""
        self._leave(session)

    def _leave(self, session: int, stays: Registration | None = None, rank: Rank = (0, 0)) -> None:
        """End all that ``session`` speaks for, but for ``rank`` of ``stays``."""
        for registration in list(self._by_handle.values()):
            gone = [one for one, owner in registration.live.items() if owner == session]
            for one in gone:
                if registration is not stays or one != rank:
                    registration.leave(one)
            if gone and not registration.live:
                self._put_aside(registration)

    def _put_aside(self, registration: Registration) -> None:
        del self._by_handle[registration.handle]
        self._set_aside[registration.handle] = registration
        self._set_aside_bytes += registration.size_bytes
        while len(self._set_aside) > MAX_SET_ASIDE or self._set_aside_bytes > MAX_SET_ASIDE_BYTES:
            # A revoked one is the last to be forgotten: some process may still hold the wrong weights.
            harmless = (handle for handle, one in self._set_aside.items() if not one.revoked)
            self._forget(next(harmless, next(iter(self._set_aside))))
        name = (registration.domain, registration.engine)
        if not any((other.domain, other.engine) == name for other in self._by_handle.values()):
            # A fixed engine id may be used again by the next start, which counts from zero.
            self._newest.pop(name, None)

    def _forget(self, handle: bytes) -> None:
        self._set_aside_bytes -= self._set_aside.pop(handle).size_bytes

    def _require_own_rank(self, report: RegisterWorker, process: Process, domain: bytes) -> None:
        """Raise ``Refused`` where another process speaks for this rank and lives: that is another engine, and nothing of its changes.

        So is one of which all ranks live and this process has none, whatever rank it reports: an engine has no other workers. And an
        earlier start of which only this rank's process has ended: the new one must not be mixed with what is left of it.
        Ranks of processes that have ended are missing from now on, whether or not their connections were seen to close: another
        process may hold a copy of one, and the engine's next start must not wait for that.
        """
        rank = (report.pp_rank, report.tp_rank)
        for registration in list(self._by_handle.values()):
            if (registration.domain, registration.engine) != (domain, report.engine):
                continue
            for one in [one for one in registration.live if registration.processes[one].ended()]:
                registration.leave(one)
            holder = registration.processes.get(rank)
            taken = rank in registration.live and holder is not None and holder != process and holder.lives()
            left = holder is not None and holder != process and holder.ended() and bool(registration.live)
            if taken or left or registration.whole_without(process):
                raise Refused(
                    "denied",
                    "another running process is registered as this rank of an engine with this engine_id",
                    field="engine",
                    remedy="give each engine an engine_id of its own in --kv-transfer-config, or none; or stop the other one",
                )
            if not registration.live:
                self._put_aside(registration)

    def _supersede(self, report: RegisterWorker, domain: bytes) -> None:
        name = (domain, report.engine)
        if report.generation < self._newest.get(name, 0):
            raise Refused("revoked", "the engine has loaded newer weights since", field="generation")
        for other in (*self._by_handle.values(), *self._set_aside.values()):
            if (other.domain, other.engine) == name and other.generation < report.generation:
                self.revoke(other, "the engine loaded its weights anew")
        if any((other.domain, other.engine) == name for other in self._by_handle.values()):
            self._newest[name] = report.generation

    def _find(self, engine: bytes, generation: int, domain: bytes) -> Registration | None:
        for registration in self._by_handle.values():
            if (registration.engine, registration.generation, registration.domain) == (engine, generation, domain):
                return registration
        return None

    def _open(self, report: RegisterWorker, domain_key: bytes, domain: bytes) -> Registration:
        if len(self._by_handle) >= MAX_REGISTRATIONS:
            raise Refused("busy", "too many engines are registered", remedy="stop engines that are not in use")
        digests = digest_model(report.model, report.plan)
        form = StoredForm.of(report.representation, report.plan)
        named = [report.engine, report.generation, domain, digests.model, form.representation_digest, form.plan_digest]
        handle = keyed(self._handle_key, encode(named))
        registration = self._take_back(handle)
        if registration is None:
            registration = Registration(
                report.engine, report.generation, handle, domain_key, domain, report.model, digests, form, _size_bytes(report)
            )
        self._by_handle[handle] = registration
        self._newest[domain, report.engine] = report.generation
        return registration

    def _take_back(self, handle: bytes) -> Registration | None:
        """The registration of this very handle that was set aside; raises ``Refused`` where it was revoked."""
        registration = self._set_aside.get(handle)
        if registration is None:
            return None
        if registration.revoked and any(process.lives() for process in registration.processes.values()):
            registration.require_sealed()
        self._forget(handle)
        # Those that ended were of an earlier start, and say nothing of this one.
        registration.processes = {rank: process for rank, process in registration.processes.items() if not process.ended()}
        return None if registration.revoked else registration

    def _require_agreement(self, registration: Registration, report: RegisterWorker) -> None:
        registration_parts = (registration.model, registration.form.representation, registration.form.plan)
        for name, mine, theirs in zip(
            ("model", "representation", "plan"),
            registration_parts,
            (report.model, report.representation, report.plan),
            strict=True,
        ):
            if mine != theirs:
                self.revoke(registration, f"its ranks disagree about the {name}")
                raise Refused(
                    "disagree", "this rank differs from the other ranks", field=name, remedy="load one model on all ranks"
                )
        if registration.revoked:
            registration.require_sealed()

    def _check(self, report: RegisterWorker) -> None:
        plan, representation = report.plan, report.representation
        if _size_bytes(report) > MAX_CONTRACT_BYTES:
            raise Refused("malformed", f"a contract has at most {MAX_CONTRACT_BYTES} bytes", field="model")
        if report.model.adapter is not None:
            raise Refused("malformed", "a worker registers its base model", field="model.adapter", remedy="give null")
        if representation.chunk_tokens != self._chunk_tokens:
            raise Refused(
                "malformed", f"this gateway's chunks have {self._chunk_tokens} tokens", field="representation.chunk_tokens"
            )
        if representation.codec != self._codec:
            raise Refused("malformed", f"this gateway stores codec {self._codec}", field="representation.codec")
        if self._chunk_tokens % report.block_tokens:
            raise Refused(
                "malformed",
                f"blocks of {report.block_tokens} tokens do not divide chunks of {self._chunk_tokens}",
                field="block_tokens",
                remedy="set the engine's --block-size to a divisor, or the gateway's chunk_tokens to a multiple",
            )
        if len(representation.groups) != 1:
            raise Refused("malformed", "models with several KV groups are not supported", field="representation.groups")
        if not plan.rectangles_of(report.pp_rank, report.tp_rank):
            raise Refused("malformed", "the plan gives this rank nothing", field="pp_rank")
        self._check_geometry(plan, representation)
        numerics = report.model.numerics
        if isinstance(numerics, NumericsClass) and numerics.name not in self._classes:
            raise Refused(
                "denied",
                "this engine class is not declared at the gateway",
                field="model.numerics.name",
                remedy="add it to numerics_classes in the gateway's configuration",
            )

    def _check_geometry(self, plan: PartitionPlan, representation: Representation) -> None:
        sizes = [(group.layers, group.kv_heads) for group in representation.groups]
        if sizes != [(extent.layers, extent.kv_heads) for extent in plan.extents]:
            raise Refused("malformed", "plan and representation disagree about layers or heads", field="plan.extents")
        for rectangle in plan.rectangles:
            try:
                representation.payload_bytes(rectangle)
            except ContractError as error:
                raise Refused("malformed", error.problem, field=f"plan.{error.field}", remedy=error.remedy) from error


def _size_bytes(report: RegisterWorker) -> int:
    return sum(len(part.encode()) for part in (report.model, report.representation, report.plan))
