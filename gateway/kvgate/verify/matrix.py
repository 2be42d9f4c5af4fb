"""Goes through the matrix: what must miss, while each L2 has its objects alone, then what must hit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from blake3 import blake3

from kvgate.client.errors import GatewayRefused
from kvgate.contract.errors import ContractError
from kvgate.verify import edges
from kvgate.verify.admin import Operator
from kvgate.verify.artifacts import Publisher
from kvgate.verify.engine import Desk, Engine, Rank
from kvgate.verify.engines import Engines
from kvgate.verify.fields import ABSENT as TOLD_ABSENT
from kvgate.verify.fields import COMPONENTS_OF, Other, fields
from kvgate.verify.lookups import Expected, Kind, Verdict, in_order, must_be_refused, must_miss, note, refused
from kvgate.verify.planting import Planting
from kvgate.verify.plants import FOUR, Chunk, Plant, Run
from kvgate.verify.results import HITS, L1, MEMORY, Progress, Report, Row, part
from kvgate.verify.sample import Value, changed
from kvgate.verify.variants import BESIDE, ROWS, Variants

MISSES: Final = "must miss"
IDENTITY: Final = "must miss: identity field"
PREFIX: Final = "common prefix of another prompt"
START: Final = "another start of the same engine"
REMOVED: Final = ("everything planted is removed", "clean-up", "be gone")
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
        self._engines = Engines(run, desk)
        self._planting = Planting(self._engines, report)
        self._variants: Variants | None = None
        self.capabilities: dict[str, bytes] = {}

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers of the gateway, the pool first. Each has objects of its own."""
        return self._engines.tiers

    async def plant(self) -> None:
        """Store everything, and leave it in its tier alone."""
        with part(self._progress, "planting", len(self.run.plants) * len(self.tiers)):
            for plant in self.run.plants:
                for tier in self.tiers:
                    self._progress.step(f"{plant.name} for {tier}")
                    await self._planting.store(plant, tier)
        await self._planting.isolate()
        variants = await self._transformed()
        if variants is not None:
            for tier in self.tiers:
                await variants.plant(tier)

    async def check(self) -> None:
        """Every row, in every tier."""
        await self._planting.isolate()
        await self._planting.learn()
        variants = await self._transformed()
        await self._check_misses()
        if variants is not None:
            await self._check_variants(variants)
        await self._check_hits()
        await self._check_edges()

    async def forget(self) -> None:
        """Remove everything again, and see that nothing is left."""
        row = self.report.row(*REMOVED)
        with part(self._progress, "cleaning up", len(self.run.plants) * len(self.tiers)):
            for plant in self.run.plants:
                for tier in self.tiers:
                    self._progress.step(f"{plant.name} of {tier}")
                    row.check(tier, await self._planting.forget(plant, tier))
        variants = await self._transformed()
        if variants is not None:
            for tier in self.tiers:
                row.check(tier, await variants.forget(tier))

    async def close(self) -> None:
        """Drop the engines."""
        self._engines.close()

    async def _check_misses(self) -> None:
        rows = {path: others for path, others in fields(self.run.shape, self.run.classes).items() if self.wants(path)}
        with part(self._progress, "what must miss", len(rows) + 1):
            for path, others in rows.items():
                self._progress.step(path)
                await self._field(path, others)
            self._progress.step("what was never stored whole")
            await self._never_whole()

    async def _check_variants(self, variants: Variants) -> None:
        with part(self._progress, "variants", len(self.tiers)):
            for tier in self.tiers:
                self._progress.step(tier)
                await variants.isolate(tier)
                await variants.check_misses(tier)
                await variants.check_hits(tier)
            await variants.foreign(await self._engines.kept(self.run.request({}), await self._engines.second()))

    async def _check_hits(self) -> None:
        with part(self._progress, "what must hit", len(self.run.plants) * len(self.tiers)):
            for plant in self.run.plants:
                for tier in self.tiers:
                    self._progress.step(f"{plant.name} in {tier}")
                    if plant.whole and self.wants(plant.same):
                        row, request = self.report.row(plant.same, HITS, "hit"), self._engines.request(plant)
                        await self._must_hit(row, await self._engines.kept(request), request, plant, tier)
            await self._beside()

    async def _check_edges(self) -> None:
        if self.wants(edges.HANDS):
            ordinary = await self._engines.kept(self.run.request({}))
            four = await self._engines.kept(self.run.request(FOUR))
            row = self.report.row(edges.HANDS, MISSES, "be refused")
            await edges.others_hands(self.run, row, ordinary, four, await self._engines.second())
        if self.wants(edges.EXCLUDED):
            await edges.excluded(self.run, self.desk, self.report.row(edges.EXCLUDED, "derivation", "be refused"))

    async def _field(self, path: str, others: list[Other]) -> None:
        row = self.report.row(path, IDENTITY, "miss")
        separate, reasons = False, dict[Kind, str]()
        for other in others:
            verdicts = await self._ask(path, other)
            for tier, verdict in verdicts.items():
                note(row, tier, verdict)
            first = next(iter(verdicts.values()))
            reasons.setdefault(first.kind, first.reason)
            separate |= first.kind is Kind.MISSED and not other.tied
        row.reason = "; alone: ".join(reasons[kind] for kind in (Kind.MISSED, Kind.REFUSED) if kind in reasons)
        if path == "schema":
            row.reason = await self._other_schema(row)
        if not separate:
            # It can't change alone on this gateway, so no lookup proves that it counts: the documented address, which has it, does.
            of = others[0].of if others else "ordinary"
            row.check(L1, self._planting.undocumented[of])

    async def _ask(self, path: str, other: Other) -> dict[str, Verdict]:
        plant = next(one for one in self.run.plants if one.name == other.of)
        request = changed(self._engines.request(plant), other.patch)
        told = in_order(COMPONENTS_OF[path]) if other.told is None else other.told
        expected = Expected(told, told if other.seen is None else other.seen, other.hits)
        desk = await self._engines.second() if other.other_domain else self.desk
        try:
            async with self._engines.lent(desk, request, path) as engine:
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
        key = await self._engines.token_key(await self._engines.second() if other.other_key else self.desk)
        tokens = [chunk.digest(key) for chunk in prompt]
        verdict = await must_miss(engine, self._operator, request, tokens, self._planting.addresses[tier], expected)
        problem = await self._variants.problem_of(engine, request, tier) if self._variants is not None else ""
        return Verdict(Kind.WRONG, verdict.reason, problem) if problem else verdict

    async def _other_schema(self, row: Row) -> str:
        welcome = self.desk.links.welcome
        assert welcome is not None, "the desk has greeted"
        refusal = await self.desk.links.schema_refused(welcome.schema + 1)
        row.check(L1, "" if refusal else "the gateway took a connection of a schema it does not have")
        return refusal

    async def _never_whole(self) -> None:
        for plant in (one for one in self.run.plants if not one.whole and self.wants(one.same)):
            request = self._engines.request(plant)
            engine = await self._engines.kept(request)
            row = self.report.row(plant.same, MISSES, "miss")
            for tier in self.tiers:
                tokens = self._engines.tokens(engine, plant, tier)
                verdict = await must_miss(engine, self._operator, request, tokens, set(), Expected(TOLD_ABSENT, TOLD_ABSENT))
                note(row, tier, verdict)
                row.reason = verdict.reason

    async def _must_hit(
        self, row: Row, engine: Engine, request: Value, plant: Plant, tier: str, hits: int | None = None
    ) -> None:
        """All chunks (or ``hits`` of them, before one that was never stored) are held, and every rank reads what was planted."""
        prompt = self.run.prompt(tier, plant)
        expected = plant.chunks
        if hits is not None:
            expected, prompt[hits:] = hits, [Chunk(self.run.tokens(f"{tier} never stored"))]
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

    async def _wrong_bytes(self, engine: Engine, lease: bytes, rank: Rank, plant: Plant, tier: str, chunks: int) -> str:
        loaded = await engine.load(lease, rank, range(chunks))
        for chunk in range(chunks):
            if chunk not in loaded:
                return "the gateway withdrew the load"
            data, promised = loaded[chunk]
            if data != self._planting.payload(plant, tier, engine, rank, chunk, len(data)):
                return f"chunk {chunk} of {plant.name}, rank {rank}: other bytes than were planted"
            if blake3(data).digest() != promised:
                return f"chunk {chunk} of {plant.name}, rank {rank}: the envelope promises another digest"
        return ""

    async def _beside(self) -> None:
        """What is no identity changes nothing: another start, other blocks, files opened in another order, what follows the prefix."""
        plant = next(one for one in self.run.plants if one.name == "ordinary")
        request = self._engines.request(plant)
        for tier in self.tiers:
            if self.wants(BESIDE) and self._variants is not None:
                await self._planting.isolate_one(plant, tier)
                beside = self.report.row(BESIDE, "must hit: variants", "hit")
                await self._must_hit(beside, await self._engines.kept(request), request, plant, tier)
            if self.wants(PREFIX):
                await self._planting.isolate_one(plant, tier)
                row = self.report.row(PREFIX, HITS, "hit")
                await self._must_hit(row, await self._engines.kept(request), request, plant, tier, 1)
            if self.wants(START):
                start = self.report.row(START, HITS, "hit")
                await self._planting.isolate_one(plant, tier)
                turned = changed(request, {"model.base.artifacts": list(reversed(request["model"]["base"]["artifacts"]))})
                engine = await self.desk.engine(self.run.engine("another start"), turned, generation=3, block_tokens=1)
                try:
                    await self._must_hit(start, engine, request, plant, tier)
                finally:
                    engine.close()

    async def _transformed(self) -> Variants | None:
        """The rows of transformed KV; None where none of them is asked for."""
        if self._variants is None and any(self.wants(name) for name in ROWS):
            engine = await self._engines.kept(self.run.request({}))
            publisher = await Publisher.open(self.run, self.desk, engine)
            publisher.capabilities = self.capabilities
            self._variants = Variants(publisher, self._operator, self.report, self.wants, self._engines.kept)
        return self._variants
