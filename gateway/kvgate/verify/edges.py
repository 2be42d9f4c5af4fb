"""Two rows that are no lookup of a planted prompt: leases in wrong hands, and fields that must not exist."""

from __future__ import annotations

from typing import Any, Final

from kvgate.contract.table import EXCLUDED as NOT_IDENTITY
from kvgate.verify.engine import Desk, Engine
from kvgate.verify.plants import Run
from kvgate.verify.results import L1, MEMORY, Row

HANDS: Final = "a held lease in another engine's hands"
EXCLUDED: Final = "what is not identity is no field"


async def others_hands(run: Run, row: Row, ordinary: Engine, four: Engine, second: Desk) -> None:
    """A lease that holds its chunks opens nothing for workers of another engine, nor of another domain."""
    request = run.request({})
    prompt = run.prompt(L1, run.plants[0])
    found = await ordinary.find(request, [chunk.digest(ordinary.opened.token_key) for chunk in prompt])
    stranger = await second.engine(run.engine("stranger"), request)
    try:
        row.check(MEMORY, "" if found.held else "there was nothing to hold")
        for engine in (four, stranger):
            row.check(MEMORY, "a worker was let at its bytes" if await engine.may_load(found.bound.lease, 0) else "")
        row.reason = "refused: lease"
    finally:
        stranger.close()
        await ordinary.release(found.bound.lease)


async def excluded(run: Run, desk: Desk, row: Row) -> None:
    """What must not change an address can't be given: the gateway refuses each name as a field it does not know."""
    names = [name for one in NOT_IDENTITY for name in one.names]
    request = run.request({})
    bodies: list[tuple[str, Any]] = []
    for name in names:
        model = {**request["model"], "adapter": None, name: "x"}
        rest = {"representation": request["representation"], "plan": request["plan"]}
        ranks = {"generation": 0, "pp_rank": 0, "tp_rank": 0, "block_tokens": 1}
        bodies.append(("RegisterWorker", {"engine": run.engine("excluded"), **ranks, "model": model, **rest}))
    failures = await desk.links.raw("worker", desk.run, bodies)
    taken = [name for name, failure in zip(names, failures, strict=True) if failure is None or failure.code != "malformed"]
    row.check(L1, f"taken as a field: {', '.join(taken)}" if taken else "")
