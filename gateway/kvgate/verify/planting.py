"""Stores what a run plants, leaves it in its tier alone, and removes it again."""

from __future__ import annotations

from functools import partial

from kvgate.client.errors import GatewayRefused
from kvgate.protocol.verify_messages import ABSENT, THERE
from kvgate.verify import derive
from kvgate.verify.engine import Engine, Rank, pieces
from kvgate.verify.engines import Engines
from kvgate.verify.plants import Plant
from kvgate.verify.results import HITS, L1, Report


class Planting:
    """The planted objects of one run. ``addresses``: of their chunks by tier, once ``learn`` has asked for them.

    ``undocumented``: by plant, what about its addresses is not as documented, or "".
    """

    def __init__(self, engines: Engines, report: Report) -> None:
        self._engines = engines
        self._run = engines.run
        self._report = report
        self.addresses: dict[str, set[bytes]] = {}
        self.undocumented: dict[str, str] = {}

    async def store(self, plant: Plant, tier: str) -> None:
        """Write every rank's rectangle of every chunk, but for what the plant leaves out or gives up."""
        async with self._engines.bound(plant, tier) as (engine, lease):
            for rank in engine.workers:
                if rank == plant.left_out:
                    continue
                payloads = {chunk: partial(self.payload, plant, tier, engine, rank, chunk) for chunk in range(plant.chunks)}
                problem = await engine.store(lease, rank, payloads, give_up=plant.given_up)
                row = self._report.row("everything is stored", HITS, "be stored")
                row.check(tier, problem and f"{plant.name}: {problem}")

    def payload(self, plant: Plant, tier: str, engine: Engine, rank: Rank, chunk: int, length: int) -> bytes:
        """The ``length`` bytes of one rank's object of one chunk."""
        return self._run.payload(tier, plant, chunk, engine.report.plan.rectangles_of(*rank)[0], length)

    async def isolate(self) -> None:
        """Have each L2's objects in that L2 alone."""
        for tier in self._engines.tiers[1:]:
            for plant in self._run.plants:
                await self.isolate_one(plant, tier)

    async def isolate_one(self, plant: Plant, tier: str) -> None:
        """Have one plant's objects in ``tier`` alone; those of the pool are there from the beginning."""
        if tier == L1:
            return
        async with self._engines.bound(plant, tier) as (engine, lease):
            await engine.settle(lease)
            plan = engine.report.plan
            missing = set(plan.rectangles_of(*plant.left_out)) if plant.left_out else set()
            stored = [not plant.given_up and rectangle not in missing for rectangle in range(len(plan.rectangles))]
            wanted = bytes(THERE if there else ABSENT for there in stored) * plant.chunks
            row = self._report.row("objects reach every tier", HITS, "be there alone")
            problem = "" if await engine.leave_only(lease, tier) == wanted else "not there, or not removed from the other tiers"
            row.check(tier, problem and f"{plant.name}: {problem}")

    async def learn(self) -> None:
        """Note the addresses of what is planted, and whether they are the documented ones."""
        row = self._report.row("every address is the documented one", "derivation", "be equal")
        for plant in self._run.plants:
            for tier in self._engines.tiers:
                problem = await self._compare(plant, tier)
                row.check(tier, problem)
                self.undocumented[plant.name] = self.undocumented.get(plant.name) or problem

    async def forget(self, plant: Plant, tier: str) -> str:
        """Remove one plant from every tier, and look for it; what was wrong, or ""."""
        async with self._engines.bound(plant, tier) as (engine, lease):
            try:
                await engine.forget(lease)
            except GatewayRefused as error:
                return f"not confirmed: {error.failure.problem}"
        request = self._engines.request(plant)
        engine = await self._engines.kept(request)
        found = await engine.find(request, self._engines.tokens(engine, plant, tier))
        await engine.release(found.bound.lease)
        return "something is still there" if found.held or found.bound.present else ""

    async def _compare(self, plant: Plant, tier: str) -> str:
        welcome = self._engines.desk.links.welcome
        assert welcome is not None, "nothing is compared before a connection has greeted"
        request = self._engines.request(plant)
        engine = await self._engines.kept(request)
        tokens = self._engines.tokens(engine, plant, tier)
        bound = await engine.bind(request, tokens)
        try:
            shards = await engine.shards(bound.lease)
        finally:
            await engine.release(bound.lease)
        self.addresses.setdefault(tier, set()).update(pieces(bound.addresses))
        documented = [chunk.documented(engine.opened.token_key) for chunk in self._run.prompt(tier, plant)]
        expected = derive.chunks(derive.root(request, welcome.schema), documented, welcome.schema)
        for what, same in (
            ("token digests", tokens == documented),
            ("chunk addresses", tuple(expected) == pieces(bound.addresses)),
            ("object addresses", tuple(derive.shards(expected, request["plan"]["rectangles"], welcome.schema)) == shards),
        ):
            if not same:
                return f"the {what} of {plant.name} are not the documented ones"
        return ""
