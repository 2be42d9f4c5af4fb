"""The engines of a run: each contract is registered once and kept, and what is planted is bound through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from blake3 import blake3

from kvgate.verify.engine import Desk, Engine
from kvgate.verify.plants import Plant, Run
from kvgate.verify.sample import Value


class Engines:
    """Engines by what they register and by domain, from the first use to ``close``. ``desk``: the run's own domain."""

    def __init__(self, run: Run, desk: Desk) -> None:
        self.run = run
        self.desk = desk
        self._kept: dict[bytes, Engine] = {}
        self._second: Desk | None = None

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers of the gateway, the pool first. Each has objects of its own."""
        return self.desk.entered.tiers

    def request(self, plant: Plant) -> Value:
        """The request under which ``plant`` is stored, in the run's own domain."""
        return self.run.request({**plant.patch, "access.domain": self.desk.entered.domain})

    async def second(self) -> Desk:
        """The run's other domain."""
        if self._second is None:
            self._second = await Desk.open(self.desk.links, self.run.second())
        return self._second

    async def token_key(self, desk: Desk) -> bytes:
        """The key under which engines of that domain digest tokens."""
        return (await self.kept(self.run.request({}), desk)).opened.token_key

    async def kept(self, request: Value, desk: Desk | None = None) -> Engine:
        """The engine of that request, in the run's own domain unless another is named; it stays registered for the whole run."""
        desk = desk or self.desk
        name = _name(request, desk)
        if name not in self._kept:
            self._kept[name] = await desk.engine(self.run.engine(name.hex()), request)
        return self._kept[name]

    @asynccontextmanager
    async def lent(self, desk: Desk, request: Value, name: str) -> AsyncIterator[Engine]:
        """An engine of that request: a kept one if it is the same contract, else one for this time only."""
        kept = self._kept.get(_name(request, desk))
        engine = kept or await desk.engine(self.run.engine(name), request)
        try:
            yield engine
        finally:
            if kept is None:
                engine.close()

    @asynccontextmanager
    async def bound(self, plant: Plant, tier: str) -> AsyncIterator[tuple[Engine, bytes]]:
        """A planted prompt, bound and nothing else: engine and lease."""
        request = self.request(plant)
        engine = await self.kept(request)
        bound = await engine.bind(request, self.tokens(engine, plant, tier))
        try:
            yield engine, bound.lease
        finally:
            await engine.release(bound.lease)

    def tokens(self, engine: Engine, plant: Plant, tier: str) -> list[bytes]:
        """``t[]`` of a planted prompt, as ``engine`` digests it."""
        return [chunk.digest(engine.opened.token_key) for chunk in self.run.prompt(tier, plant)]

    def close(self) -> None:
        """Drop all of them."""
        for engine in self._kept.values():
            engine.close()
        self._kept.clear()


def _name(request: Mapping[str, Any], desk: Desk) -> bytes:
    """Tells apart what engines register, and where."""
    parts = {
        "model": {**request["model"], "adapter": None},
        "representation": request["representation"],
        "plan": request["plan"],
    }
    return bytes(blake3(repr(parts).encode()).digest()) + desk.run
