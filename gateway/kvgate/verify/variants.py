"""The rows of transformed KV: an artifact goes to whoever asks for its exact manifest, or holds its capability, and to nobody else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from blake3 import blake3

from kvgate.client.errors import GatewayRefused
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.contract.table import MANIFEST
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    Done,
    Explain,
    Explained,
    Extend,
    Extended,
    Failure,
    FinishLoad,
    LoadPlan,
    LoadVerdict,
    Release,
    Reserve,
    Reserved,
)
from kvgate.protocol.variant_messages import LoadRectangle, VariantBound
from kvgate.protocol.verify_messages import THERE, Forget, Forgotten
from kvgate.verify import derive
from kvgate.verify.admin import Operator
from kvgate.verify.artifacts import MANIFESTS, Publisher, bind
from kvgate.verify.engine import ACQUIRE_MS, Engine, pieces
from kvgate.verify.link import call
from kvgate.verify.lookups import REFUSALS, Expected, Kind, Verdict, in_order, judged, note, refused
from kvgate.verify.plants import FOUR
from kvgate.verify.results import L1, MEMORY, Report, Row
from kvgate.verify.sample import Value, adapter, changed, digest_of

HITS: Final = "must hit: variants"
MISSES: Final = "must miss: variants"
FIELDS: Final = "must miss: manifest field"
ARTIFACTS: Final[Mapping[str, str]] = {"shared": "query", "private": "request"}
"""Artifact → its scope. Both have the same source, tokens and manifest but for the scope."""
LITERAL: Final = "SnapKV, asked for as an ordinary prompt of its retained tokens"
PRIVATE: Final = "SnapKV of scope request, asked for by its manifest"
EXACT: Final = "SnapKV, same query, same manifest"
FOREIGN: Final = "a capability in another isolation domain"
BESIDE: Final = "the full prompt, beside its SnapKV"
CLOSED: Final = "anything more, stored under an artifact"
BY_CAPABILITY: Final = {name: f"SnapKV of scope {scope}, by its capability" for name, scope in ARTIFACTS.items()}
CAPABILITIES: Final = (
    "a capability with one bit changed",
    "a capability at an engine of another plan",
    "a capability with an adapter",
    "a capability with a cache salt",
    "a capability for other tokens",
)
_COMPONENTS: Final = {row.path: row.components for row in MANIFEST}
_NAMED: Final = {
    "SnapKV of query A, asked for query B": "manifest.query",
    "SnapKV of source A, asked for source B, same retained tokens": "manifest.source_prefix",
    "SnapKV of ratio 0.5, asked for ratio 0.25": "manifest.parameters[].value",
    "SnapKV version 1, asked for version 2": "manifest.algorithm_version",
}
"""The rows as the design has them."""
ROWS: Final = (BESIDE, *MANIFESTS, *_NAMED, LITERAL, PRIVATE, EXACT, FOREIGN, CLOSED, *BY_CAPABILITY.values(), *CAPABILITIES)
"""Every row that needs the artifacts."""


class Variants:
    """Rows about the artifacts that ``publisher`` plants; ``engine_of`` gives the run's kept engine of a request."""

    def __init__(
        self,
        publisher: Publisher,
        operator: Operator,
        report: Report,
        wants: Callable[[str], bool],
        engine_of: Callable[[Value], Awaitable[Engine]],
    ) -> None:
        self._publisher = publisher
        self._operator = operator
        self._report = report
        self._wants = wants
        self._engine_of = engine_of
        self._request = publisher.run.request({})
        self._undocumented = ""

    async def plant(self, tier: str) -> None:
        """Publish both artifacts, and leave them in their tier alone."""
        publisher = self._publisher
        source = publisher.source(tier)
        for name, scope in ARTIFACTS.items():
            manifest = await publisher.manifest(source, {"scope": scope})
            opened = await publisher.find(manifest, source, publisher.retained(tier))
            try:
                await publisher.store(opened.lease, None, f"{tier} {name}")
                publisher.capabilities[f"{tier} {name}"] = await publisher.seal(opened.lease)
            finally:
                await self._release(opened.lease)
            await self.isolate(tier)

    async def isolate(self, tier: str) -> None:
        """Have the artifacts in ``tier`` alone."""
        if tier == L1:
            return
        for name in ARTIFACTS:
            if f"{tier} {name}" not in self._publisher.capabilities:
                continue
            bound = await self._bound(tier, name)
            try:
                left = await self._publisher.engine.leave_only(bound.lease, tier)
                row = self._report.row("objects reach every tier", "must hit", "be there alone")
                row.check(
                    tier, "" if set(left) == {THERE} else f"artifact {name}: not there, or not removed from the other tiers"
                )
            finally:
                await self._publisher.engine.release(bound.lease)

    async def check_misses(self, tier: str) -> None:
        """Everything that must not be served an artifact."""
        await self._compare(tier)
        for path in MANIFESTS:
            if self._wants(path):
                await self._field(self._report.row(path, FIELDS, "miss"), path, tier)
        for name, path in _NAMED.items():
            if self._wants(name):
                await self._field(self._report.row(name, MISSES, "miss"), path, tier)
        await self._literal(tier)
        await self._private(tier)
        if tier == L1:
            await self._capabilities(tier)
            await self._closed(tier)

    async def check_hits(self, tier: str) -> None:
        """Who holds a capability, or asks for the exact manifest, gets the very bytes."""
        publisher = self._publisher
        for name, title in BY_CAPABILITY.items():
            if self._wants(title):
                await self._must_hit(self._report.row(title, HITS, "hit"), tier, name, publisher.capabilities[f"{tier} {name}"])
        await self.isolate(tier)
        if self._wants(EXACT):
            row = self._report.row(EXACT, HITS, "hit")
            source = publisher.source(tier)
            opened = await publisher.find(await publisher.manifest(source, {}), source, publisher.retained(tier))
            try:
                await self._must_hit(row, tier, "shared", await publisher.seal(opened.lease))
            except GatewayRefused as error:
                row.fails(tier, f"not found: {error.failure.problem}")
            finally:
                await self._release(opened.lease)

    async def forget(self, tier: str) -> str:
        """Remove the artifacts; what was wrong with that. Of scope request only whose capability is known can be named."""
        publisher, source = self._publisher, self._publisher.source(tier)
        try:
            opened = await publisher.find(await publisher.manifest(source, {}), source, publisher.retained(tier))
            await call(publisher.wire, Forget(lease=opened.lease), Forgotten)
            await self._release(opened.lease)
            if f"{tier} private" in publisher.capabilities:
                bound = await self._bound(tier, "private")
                await publisher.engine.forget(bound.lease)
                await publisher.engine.release(bound.lease)
        except GatewayRefused as error:
            return f"an artifact is not removed: {error.failure.problem}"
        return ""

    async def problem_of(self, engine: Engine, request: Value, tier: str) -> str:
        """A capability must be refused for any request but that of the artifact's own identity."""
        capability = self._publisher.capabilities.get(f"{tier} shared")
        if capability is None or (self._identity(request) == self._identity(self._request) and self._at_home(engine)):
            return ""
        try:
            bound = await bind(engine, request, capability, self._publisher.retained(tier))
        except GatewayRefused as error:
            return "" if error.code in REFUSALS else f"a capability got {error.code}"
        await engine.release(bound.lease)
        return "a variant's capability was taken"

    def _at_home(self, engine: Engine) -> bool:
        return engine.desk is self._publisher.desk

    @staticmethod
    def _identity(request: Value) -> tuple[object, ...]:
        return request["model"], request["representation"], request["plan"], request["access"]["salt"]

    async def _compare(self, tier: str) -> None:
        """The artifact's addresses are the documented ones: all of the manifest is in them."""
        publisher = self._publisher
        welcome = publisher.desk.links.welcome
        assert welcome is not None, "a publisher has greeted"
        source, tokens = publisher.source(tier), publisher.retained(tier)
        manifest = await publisher.manifest(source, {})
        opened = await publisher.find(manifest, source, tokens)
        await self._release(opened.lease)
        variant = derive.manifest(manifest, welcome.schema)
        access = {"domain": publisher.desk.entered.domain, "salt": None, "scope": "query", "scope_key": manifest["query"]}
        request = self._request | {"access": access, "variant": {"manifest": variant}}
        expected = derive.chunks(derive.root(request, welcome.schema), tokens, welcome.schema)
        same = opened.variant == variant and tuple(expected) == pieces(opened.addresses)
        self._undocumented = "" if same else "the artifact's address is not the documented one"
        self._report.row("every address is the documented one", "derivation", "be equal").check(tier, self._undocumented)

    async def _field(self, row: Row, path: str, tier: str) -> None:
        separate, reasons = False, dict[Kind, str]()
        # The artifact of scope request has the manifest asked for there: from that, only the access differs.
        components = ("scope",) if path == "manifest.scope" else in_order(_COMPONENTS[path])
        for patch, also in MANIFESTS[path]:
            verdict = await self._ask(patch, also, components, tier)
            note(row, tier, verdict)
            if verdict.kind is Kind.UNKNOWN:
                continue
            reasons.setdefault(verdict.kind, verdict.reason)
            separate |= verdict.kind is Kind.MISSED and also not in ("tied", "shorter source")
        row.reason = "; alone: ".join(reasons[kind] for kind in (Kind.MISSED, Kind.REFUSED) if kind in reasons)
        if not separate:
            row.check(tier, self._undocumented)

    async def _ask(self, patch: Mapping[str, object], also: str, components: tuple[str, ...], tier: str) -> Verdict:
        """Ask for an artifact of the same tokens under another manifest."""
        publisher = self._publisher
        if also == "other query":
            patch = {"query": publisher.query("B")}
        source = publisher.source(tier, other=also == "other source", shorter=also == "shorter source")
        manifest = await publisher.manifest(source, patch)
        try:
            opened = await publisher.find(manifest, source, publisher.retained(tier))
        except ContractError as error:
            return Verdict(Kind.REFUSED, f"refused: manifest.{error.field}")
        except GatewayRefused as error:
            return refused(error)
        try:
            await publisher.seal(opened.lease)
        except GatewayRefused as error:
            if error.failure.field != "tokens":
                return refused(error)
            if await self._may_load(opened.lease):
                return Verdict(Kind.WRONG, problem="a client was let at its bytes")
        else:
            return Verdict(Kind.WRONG, problem="a capability was given")
        finally:
            told = (await call(publisher.wire, Explain(lease=opened.lease), Explained)).reasons
            await self._release(opened.lease)
        # Another query or scope is another access: what is stored there does not exist for the requester.
        expected = ("absent",) if "scope" in components else components
        return judged(told, await self._operator.reasons(opened.reference), Expected(expected, components))

    async def _may_load(self, lease: bytes) -> bool:
        publisher = self._publisher
        try:
            plan = await call(publisher.wire, LoadRectangle(lease=lease, rectangle=0, chunks=(0,)), LoadPlan)
        except GatewayRefused:
            return False
        await call(publisher.wire, FinishLoad(ticket=plan.ticket, mismatched=()), LoadVerdict)
        return True

    async def _literal(self, tier: str) -> None:
        """An ordinary prompt of exactly the retained tokens is not served the artifact."""
        if not self._wants(LITERAL):
            return
        row, engine = self._report.row(LITERAL, MISSES, "miss"), self._publisher.engine
        found = await engine.find(self._request, self._publisher.retained(tier))
        try:
            if found.held or found.bound.present or await engine.may_load(found.bound.lease, 0):
                row.fails(tier, "hit: the artifact was served as ordinary KV")
                return
            told = await engine.explain(found.bound.lease)
            seen = await self._operator.reasons(found.bound.reference)
            verdict = judged(told, seen, Expected(("absent",), ("variant", "scope")))
        finally:
            await engine.release(found.bound.lease)
        row.reason = verdict.reason
        row.check(tier, verdict.problem)
        if tier == L1:
            row.check(MEMORY, verdict.problem)

    async def _private(self, tier: str) -> None:
        """An artifact of scope request is found by nobody, not under the very same manifest either."""
        if self._wants(PRIVATE):
            row = self._report.row(PRIVATE, MISSES, "miss")
            verdict = await self._ask({"scope": "request"}, "", ("scope",), tier)
            row.reason = verdict.reason
            row.check(tier, verdict.problem)
            if tier == L1:
                row.check(MEMORY, verdict.problem)

    async def _capabilities(self, tier: str) -> None:
        """A capability is good for its own request only; altered and foreign ones can't be told apart from made-up ones."""
        publisher, capability = self._publisher, self._publisher.capabilities[f"{tier} shared"]
        tokens = publisher.retained(tier)
        altered = bytes([*capability[:-1], capability[-1] ^ 1])
        four = await self._engine_of(publisher.run.request(FOUR))
        changed_bit, plan, with_adapter, salted, other_tokens = CAPABILITIES
        salt = {"access.salt": digest_of("salt one")}
        root = "capability.root"
        cases: list[tuple[str, Engine, Mapping[str, object], bytes, list[bytes], str]] = [
            (changed_bit, publisher.engine, {}, altered, tokens, "capability"),
            (plan, four, FOUR, capability, tokens, root),
            (with_adapter, publisher.engine, {"model.adapter": adapter()}, capability, tokens, root),
            (salted, publisher.engine, salt, capability, tokens, root),
            (other_tokens, publisher.engine, {}, capability, [b"\6" * 32], "capability.end"),
        ]
        for name, engine, patch, data, asked, wanted in cases:
            if self._wants(name):
                row = self._report.row(name, MISSES, "be refused")
                failure = await self._refusal(engine, changed(self._request, patch), data, asked)
                row.reason = f"refused: {failure.field}" if failure else ""
                row.check(tier, "" if failure and failure.field == wanted else f"not refused as {wanted}")

    async def foreign(self, engine: Engine) -> None:
        """In another domain a genuine capability gets, to the byte, the answer of a made-up one."""
        if self._wants(FOREIGN):
            row, capability = self._report.row(FOREIGN, MISSES, "be refused"), self._publisher.capabilities[f"{L1} shared"]
            tokens = self._publisher.retained(L1)
            found = await self._refusal(engine, self._request, capability, tokens)
            made_up = await self._refusal(engine, self._request, bytes([*capability[:-1], capability[-1] ^ 1]), tokens)
            row.reason = f"refused: {found.field}" if found else ""
            row.check(L1, "" if found and found == made_up else "its refusal differs from that of a made-up one")

    async def _refusal(self, engine: Engine, request: Value, capability: bytes, tokens: list[bytes]) -> Failure | None:
        try:
            bound = await bind(engine, request, capability, tokens)
        except GatewayRefused as error:
            return error.failure
        await engine.release(bound.lease)
        return None

    async def _closed(self, tier: str) -> None:
        """Nothing can be added to a bound artifact: neither chunks by a scheduler nor bytes by a worker."""
        if not self._wants(CLOSED):
            return
        row, engine = self._report.row(CLOSED, MISSES, "be refused"), self._publisher.engine
        bound = await self._bound(tier, "shared")
        extend = Extend(lease=bound.lease, first=1, tokens=b"\7" * 32)
        reserve = Reserve(lease=bound.lease, chunks=(0,))
        worker = next(iter(engine.workers.values()))
        for wire, message, kind in ((engine.desk.scheduler, extend, Extended), (worker, reserve, Reserved)):
            problem = await self._taken(wire, message, kind)
            row.check(tier, problem)
        row.reason = "refused: lease"
        await engine.release(bound.lease)

    async def _taken(self, wire: object, message: Record, kind: type[Record]) -> str:
        try:
            await call(wire, message, kind)  # type: ignore[arg-type]
        except GatewayRefused as error:
            return "" if error.code in REFUSALS else f"the gateway answered {error.code}"
        return f"the gateway took {type(message).__name__}"

    async def _must_hit(self, row: Row, tier: str, name: str, capability: bytes) -> None:
        engine = self._publisher.engine
        try:
            bound = await bind(engine, self._request, capability, self._publisher.retained(tier))
        except GatewayRefused as error:
            row.fails(tier, f"refused: {error.failure.field}: {error.failure.problem}")
            return
        try:
            message = Acquire(lease=bound.lease, first=0, last=1, deadline_ms=ACQUIRE_MS)
            held = (await call(engine.desk.scheduler, message, Acquired)).end
            row.check(tier, "" if held == 1 else "miss")
            if held:
                data, promised = (await engine.load(bound.lease, (0, 0), [0])).get(0, (b"", b""))
                wanted = self._publisher.payload(f"{tier} {name}", len(data))
                same = bool(data) and data == wanted and blake3(data).digest() == promised
                row.check(MEMORY if tier == L1 else tier, "" if same else "other bytes than were planted")
        finally:
            await engine.release(bound.lease)

    async def _bound(self, tier: str, name: str) -> VariantBound:
        capability = self._publisher.capabilities[f"{tier} {name}"]
        bound = await bind(self._publisher.engine, self._request, capability, self._publisher.retained(tier))
        await self._publisher.engine.settle(bound.lease)
        return bound

    async def _release(self, lease: bytes) -> None:
        await call(self._publisher.wire, Release(lease=lease), Done)
