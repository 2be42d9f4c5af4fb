"""Plants what a run needs, and goes through the matrix: what must miss, while each L2 has its objects alone, then what must hit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from blake3 import blake3

from kvgate.client.errors import GatewayRefused
from kvgate.contract.errors import ContractError
from kvgate.protocol.verify_messages import ABSENT, THERE
from kvgate.verify import derive, edges
from kvgate.verify.admin import Operator
from kvgate.verify.artifacts import Publisher
from kvgate.verify.engine import Desk, Engine, pieces
from kvgate.verify.fields import ABSENT as TOLD_ABSENT
from kvgate.verify.fields import COMPONENTS_OF, Other, fields
from kvgate.verify.lookups import Expected, Kind, Verdict, in_order, must_be_refused, must_miss, refused
from kvgate.verify.plants import FOUR, Plant, Run
from kvgate.verify.results import L1, MEMORY, Progress, Report, Row, part
from kvgate.verify.sample import Value, changed
from kvgate.verify.variants import BESIDE, ROWS, Variants

HITS: Final = "must hit"
MISSES: Final = "must miss"
IDENTITY: Final = "must miss: identity field"
PREFIX: Final = "common prefix of another prompt"
START: Final = "another start of the same engine"
PAUSE_S: Final = 0.005
"""Between two lookups, so that a run never takes more than a small share of a busy gateway."""


class Matrix:
    """One run at one gateway. ``wants``: whether a row of that name is asked for."""

    def __init__(
        self,
        run: Run,
        desk: Desk,
        operator: Operator,
        report: Report,
        progress: Progress,
        wants: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.run = run
        self.desk = desk
        self.report = report
        self._operator = operator
        self._progress = progress
        self.wants = wants
        self._engines: dict[bytes, Engine] = {}
        self._other: Desk | None = None
        self._planted: dict[str, set[bytes]] = {}
        self._undocumented: dict[str, str] = {}
        self._variants: Variants | None = None
        self.capabilities: dict[str, bytes] = {}

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers of the gateway, the pool first. Each has objects of its own."""
        return self.desk.entered.tiers

    async def plant(self) -> None:
        """Store everything, and leave it in its tier alone."""
        with part(self._progress, "planting", len(self.run.plants) * len(self.tiers)):
            for plant in self.run.plants:
                for tier in self.tiers:
                    self._progress.step(f"{plant.name} for {tier}")
                    await self._store(plant, tier)
        await self._isolate()
        variants = await self._transformed()
        if variants is not None:
            for tier in self.tiers:
                await variants.plant(tier)

    async def check(self) -> None:
        """Every row, in every tier."""
        await self._isolate()
        await self._learn()
        variants = await self._transformed()
        rows = {path: others for path, others in fields(self.run.shape, self.run.classes).items() if self.wants(path)}
        with part(self._progress, "what must miss", len(rows) + 1):
            for path, others in rows.items():
                self._progress.step(path)
                await self._field(path, others)
            self._progress.step("what was never stored whole")
            await self._never_whole()
        if variants is not None:
            with part(self._progress, "variants", len(self.tiers)):
                for tier in self.tiers:
                    self._progress.step(tier)
                    await variants.isolate(tier)
                    await variants.check_misses(tier)
                    await variants.check_hits(tier)
                await variants.foreign(await self._kept(self.run.request({}), await self._second()))
        with part(self._progress, "what must hit", len(self.run.plants) * len(self.tiers)):
            for plant in self.run.plants:
                for tier in self.tiers:
                    self._progress.step(f"{plant.name} in {tier}")
                    if plant.whole and self.wants(plant.same):
                        row, request = self.report.row(plant.same, HITS, "hit"), self._request(plant)
                        await self._must_hit(row, await self._kept(request), request, plant, tier)
            await self._beside()
        if self.wants(edges.HANDS):
            four = await self._kept(self.run.request(FOUR))
            row = self.report.row(edges.HANDS, MISSES, "be refused")
            await edges.others_hands(self.run, row, await self._kept(self.run.request({})), four, await self._second())
        if self.wants(edges.EXCLUDED):
            await edges.excluded(self.run, self.desk, self.report.row(edges.EXCLUDED, "derivation", "be refused"))

    async def forget(self) -> None:
        """Remove everything again, and see that nothing is left."""
        row = self.report.row("everything planted is removed", "clean-up", "be gone")
        with part(self._progress, "cleaning up", len(self.run.plants) * len(self.tiers)):
            for plant in self.run.plants:
                for tier in self.tiers:
                    self._progress.step(f"{plant.name} of {tier}")
                    row.check(tier, await self._forget_one(plant, tier))
        variants = await self._transformed()
        if variants is not None:
            for tier in self.tiers:
                row.check(tier, await variants.forget(tier))

    async def close(self) -> None:
        """Drop the engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    async def _forget_one(self, plant: Plant, tier: str) -> str:
        async with self._bound(plant, tier) as (engine, lease):
            try:
                await engine.forget(lease)
            except GatewayRefused as error:
                return f"not confirmed: {error.failure.problem}"
        request = self._request(plant)
        engine = await self._kept(request)
        found = await engine.find(request, [chunk.digest(engine.opened.token_key) for chunk in self.run.prompt(tier, plant)])
        await engine.release(found.bound.lease)
        return "something is still there" if found.held or found.bound.present else ""

    async def _store(self, plant: Plant, tier: str) -> None:
        async with self._bound(plant, tier) as (engine, lease):
            for rank in engine.workers:
                if rank == plant.left_out:
                    continue
                payloads = {chunk: partial(self._payload, plant, tier, engine, rank, chunk) for chunk in range(plant.chunks)}
                problem = await engine.store(lease, rank, payloads, give_up=plant.given_up)
                self.report.row("everything is stored", HITS, "be stored").check(tier, problem and f"{plant.name}: {problem}")

    def _payload(self, plant: Plant, tier: str, engine: Engine, rank: tuple[int, int], chunk: int, length: int) -> bytes:
        return self.run.payload(tier, plant, chunk, engine.report.plan.rectangles_of(*rank)[0], length)

    async def _isolate(self) -> None:
        """Have each L2's objects in that L2 alone."""
        for tier in self.tiers[1:]:
            for plant in self.run.plants:
                await self._isolate_one(plant, tier)

    async def _isolate_one(self, plant: Plant, tier: str) -> None:
        if tier == L1:
            return
        async with self._bound(plant, tier) as (engine, lease):
            await engine.settle(lease)
            missing = set(engine.report.plan.rectangles_of(*plant.left_out)) if plant.left_out else set()
            rectangles = len(engine.report.plan.rectangles)
            wanted = (
                bytes(ABSENT if plant.given_up or rectangle in missing else THERE for rectangle in range(rectangles))
                * plant.chunks
            )
            row = self.report.row("objects reach every tier", HITS, "be there alone")
            problem = "" if await engine.leave_only(lease, tier) == wanted else "not there, or not removed from the other tiers"
            row.check(tier, problem and f"{plant.name}: {problem}")

    async def _learn(self) -> None:
        """Note the addresses of what is planted, and whether they are the documented ones."""
        row = self.report.row("every address is the documented one", "derivation", "be equal")
        for plant in self.run.plants:
            for tier in self.tiers:
                problem = await self._compare(plant, tier)
                row.check(tier, problem)
                self._undocumented[plant.name] = self._undocumented.get(plant.name) or problem

    async def _compare(self, plant: Plant, tier: str) -> str:
        request, prompt = self._request(plant), self.run.prompt(tier, plant)
        welcome = self.desk.links.welcome
        assert welcome is not None, "nothing is compared before a connection has greeted"
        engine = await self._kept(request)
        key = engine.opened.token_key
        tokens = [chunk.digest(key) for chunk in prompt]
        bound = await engine.bind(request, tokens)
        try:
            shards = await engine.shards(bound.lease)
        finally:
            await engine.release(bound.lease)
        self._planted.setdefault(tier, set()).update(pieces(bound.addresses))
        documented = [chunk.documented(key) for chunk in prompt]
        expected = derive.chunks(derive.root(request, welcome.schema), documented, welcome.schema)
        for what, same in (
            ("token digests", tokens == documented),
            ("chunk addresses", tuple(expected) == pieces(bound.addresses)),
            ("object addresses", tuple(derive.shards(expected, request["plan"]["rectangles"], welcome.schema)) == shards),
        ):
            if not same:
                return f"the {what} of {plant.name} are not the documented ones"
        return ""

    async def _field(self, path: str, others: list[Other]) -> None:
        row = self.report.row(path, IDENTITY, "miss")
        separate, reasons = False, dict[Kind, str]()
        for other in others:
            verdicts = await self._ask(path, other)
            for tier, verdict in verdicts.items():
                self._note(row, tier, verdict)
            first = next(iter(verdicts.values()))
            reasons.setdefault(first.kind, first.reason)
            separate |= first.kind is Kind.MISSED and not other.tied
        row.reason = "; alone: ".join(reasons[kind] for kind in (Kind.MISSED, Kind.REFUSED) if kind in reasons)
        if path == "schema":
            row.reason = await self._other_schema(row)
        if not separate:
            # It can't change alone on this gateway, so no lookup proves that it counts: the documented address, which has it, does.
            of = others[0].of if others else "ordinary"
            row.check(L1, self._undocumented[of])

    async def _ask(self, path: str, other: Other) -> dict[str, Verdict]:
        plant = next(one for one in self.run.plants if one.name == other.of)
        request = changed(self._request(plant), other.patch)
        told = in_order(COMPONENTS_OF[path]) if other.told is None else other.told
        expected = Expected(told, told if other.seen is None else other.seen, other.hits)
        desk = await self._second() if other.other_domain else self.desk
        try:
            async with self._engine(desk, request, path) as engine:
                return {tier: await self._lookup(engine, tier, plant, other, request, expected) for tier in self.tiers}
        except ContractError:
            return {L1: await must_be_refused(desk, request)}
        except GatewayRefused as error:
            return {L1: refused(error)}

    async def _lookup(
        self, engine: Engine, tier: str, plant: Plant, other: Other, request: Value, expected: Expected
    ) -> Verdict:
        await asyncio.sleep(PAUSE_S)
        prompt = self.run.prompt(tier, plant)
        if other.prompt is not None:
            sibling = next(one for one in self.run.plants if one.name == "sibling")
            prompt = other.prompt(prompt, self.run.prompt(tier, sibling)[0])
        key = (await self._token_key(await self._second())) if other.other_key else await self._token_key(self.desk)
        tokens = [chunk.digest(key) for chunk in prompt]
        verdict = await must_miss(engine, self._operator, request, tokens, self._planted[tier], expected)
        problem = await self._variants.problem_of(engine, request, tier) if self._variants is not None else ""
        return Verdict(Kind.WRONG, verdict.reason, problem) if problem else verdict

    def _note(self, row: Row, tier: str, verdict: Verdict) -> None:
        """A lookup that missed also had no worker let at the bytes in shared memory."""
        if verdict.kind is Kind.UNKNOWN:
            row.unchecked(tier, verdict.problem)
            return
        row.check(tier, verdict.problem)
        if tier == L1 and verdict.kind is not Kind.REFUSED:
            row.check(MEMORY, verdict.problem)

    async def _other_schema(self, row: Row) -> str:
        welcome = self.desk.links.welcome
        assert welcome is not None, "the desk has greeted"
        refusal = await self.desk.links.schema_refused(welcome.schema + 1)
        row.check(L1, "" if refusal else "the gateway took a connection of a schema it does not have")
        return refusal

    async def _never_whole(self) -> None:
        for plant in (one for one in self.run.plants if not one.whole and self.wants(one.same)):
            request = self._request(plant)
            engine = await self._kept(request)
            row = self.report.row(plant.same, MISSES, "miss")
            for tier in self.tiers:
                tokens = [chunk.digest(engine.opened.token_key) for chunk in self.run.prompt(tier, plant)]
                verdict = await must_miss(engine, self._operator, request, tokens, set(), Expected(TOLD_ABSENT, TOLD_ABSENT))
                self._note(row, tier, verdict)
                row.reason = verdict.reason

    async def _must_hit(
        self, row: Row, engine: Engine, request: Value, plant: Plant, tier: str, hits: int | None = None
    ) -> None:
        """All chunks (or ``hits`` of them, before one that was never stored) are held, and every rank reads what was planted."""
        prompt = self.run.prompt(tier, plant)
        expected = plant.chunks
        if hits is not None:
            expected, prompt[hits:] = hits, [type(prompt[0])(self.run.tokens(f"{tier} never stored"))]
        try:
            found = await engine.find(request, [chunk.digest(engine.opened.token_key) for chunk in prompt])
        except GatewayRefused as error:
            row.fails(tier, f"the gateway answered {error.code}: {error.failure.problem}")
            return
        try:
            problem = "" if found.held == expected else f"{found.held} of {expected} chunks hit"
            row.check(tier, problem)
            for rank in engine.workers:
                wrong = problem or await self._wrong_bytes(engine, found.bound.lease, rank, plant, tier, expected)
                row.check(MEMORY if tier == L1 else tier, wrong)
        finally:
            await engine.release(found.bound.lease)

    async def _wrong_bytes(
        self, engine: Engine, lease: bytes, rank: tuple[int, int], plant: Plant, tier: str, chunks: int
    ) -> str:
        loaded = await engine.load(lease, rank, range(chunks))
        for chunk in range(chunks):
            if chunk not in loaded:
                return "the gateway withdrew the load"
            data, promised = loaded[chunk]
            if data != self._payload(plant, tier, engine, rank, chunk, len(data)):
                return f"chunk {chunk} of {plant.name}, rank {rank}: other bytes than were planted"
            if blake3(data).digest() != promised:
                return f"chunk {chunk} of {plant.name}, rank {rank}: the envelope promises another digest"
        return ""

    async def _beside(self) -> None:
        """What is no identity changes nothing: another start, other blocks, files opened in another order, what follows the prefix."""
        plant = next(one for one in self.run.plants if one.name == "ordinary")
        request = self._request(plant)
        for tier in self.tiers:
            if self.wants(BESIDE) and self._variants is not None:
                await self._isolate_one(plant, tier)
                beside = self.report.row(BESIDE, "must hit: variants", "hit")
                await self._must_hit(beside, await self._kept(request), request, plant, tier)
            if self.wants(PREFIX):
                await self._isolate_one(plant, tier)
                row = self.report.row(PREFIX, HITS, "hit")
                await self._must_hit(row, await self._kept(request), request, plant, tier, 1)
            if self.wants(START):
                start = self.report.row(START, HITS, "hit")
                await self._isolate_one(plant, tier)
                turned = changed(request, {"model.base.artifacts": list(reversed(request["model"]["base"]["artifacts"]))})
                engine = await self.desk.engine(self.run.engine("another start"), turned, generation=3, block_tokens=1)
                try:
                    await self._must_hit(start, engine, request, plant, tier)
                finally:
                    engine.close()

    def _request(self, plant: Plant) -> Value:
        return self.run.request({**plant.patch, "access.domain": self.desk.entered.domain})

    async def _transformed(self) -> Variants | None:
        """The rows of transformed KV; None where none of them is asked for."""
        if self._variants is None and any(self.wants(name) for name in ROWS):
            engine = await self._kept(self.run.request({}))
            publisher = await Publisher.open(self.run, self.desk, engine)
            publisher.capabilities = self.capabilities
            self._variants = Variants(publisher, self._operator, self.report, self.wants, self._kept)
        return self._variants

    async def _second(self) -> Desk:
        """The run's other domain."""
        if self._other is None:
            self._other = await Desk.open(self.desk.links, self.run.second())
        return self._other

    async def _token_key(self, desk: Desk) -> bytes:
        return (await self._kept(self.run.request({}), desk)).opened.token_key

    async def _kept(self, request: Value, desk: Desk | None = None) -> Engine:
        """The engine of a planted request; it stays registered for the whole run."""
        desk = desk or self.desk
        name = _engine_name(request) + desk.run
        if name not in self._engines:
            self._engines[name] = await desk.engine(self.run.engine(name.hex()), request)
        return self._engines[name]

    @asynccontextmanager
    async def _engine(self, desk: Desk, request: Value, name: str) -> AsyncIterator[Engine]:
        """An engine of that request: a kept one if it is the same contract, else one for this time only."""
        kept = self._engines.get(_engine_name(request) + desk.run)
        engine = kept or await desk.engine(self.run.engine(name), request)
        try:
            yield engine
        finally:
            if kept is None:
                engine.close()

    @asynccontextmanager
    async def _bound(self, plant: Plant, tier: str) -> AsyncIterator[tuple[Engine, bytes]]:
        """A planted prompt, bound and nothing else: engine and lease."""
        request = self._request(plant)
        engine = await self._kept(request)
        tokens = [chunk.digest(engine.opened.token_key) for chunk in self.run.prompt(tier, plant)]
        bound = await engine.bind(request, tokens)
        try:
            yield engine, bound.lease
        finally:
            await engine.release(bound.lease)


def _engine_name(request: Mapping[str, Any]) -> bytes:
    """What an engine registers, told apart."""
    parts = {
        "model": {**request["model"], "adapter": None},
        "representation": request["representation"],
        "plan": request["plan"],
    }
    return bytes(blake3(repr(parts).encode()).digest())
