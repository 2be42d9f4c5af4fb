"""One lookup that must miss, and what was wrong with it if it did not."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvgate.client.errors import GatewayRefused
from kvgate.contract.table import COMPONENTS
from kvgate.verify.admin import Operator
from kvgate.verify.engine import Desk, Engine
from kvgate.verify.results import L1, MEMORY, Row
from kvgate.verify.sample import Value

REFUSALS: Final = ("malformed", "denied")
"""Codes that say "this is not to be had", not "not now"."""


class Kind(Enum):
    """How a lookup ended."""

    MISSED = "missed"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` is for the table; ``problem`` says what was wrong, or why nothing can be said (UNKNOWN)."""

    kind: Kind
    reason: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """``hits``: chunks of a common prefix that are rightly held. ``told``, ``seen``: reasons of the miss behind them."""

    told: tuple[str, ...]
    seen: tuple[str, ...]
    hits: int = 0


async def must_miss(
    engine: Engine, operator: Operator, request: Value, tokens: Sequence[bytes], planted: Set[bytes], expected: Expected
) -> Verdict:
    """Look ``tokens`` up as ``request``. None of ``planted`` (chunk addresses) may be among what it is given, or held, or loaded."""
    verdict = Verdict(Kind.UNKNOWN)
    for _ in range(2):
        verdict = await _once(engine, operator, request, tokens, planted, expected)
        if verdict.kind is not Kind.UNKNOWN:
            break
    return verdict


async def _once(
    engine: Engine, operator: Operator, request: Value, tokens: Sequence[bytes], planted: Set[bytes], expected: Expected
) -> Verdict:
    try:
        found = await engine.find(request, tokens)
    except GatewayRefused as error:
        return refused(error)
    lease = found.bound.lease
    try:
        if not planted.isdisjoint(found.addresses[expected.hits :]):
            return Verdict(Kind.WRONG, problem="it has the address of what was planted")
        if found.bound.present > expected.hits or found.held > expected.hits:
            return Verdict(Kind.WRONG, problem=f"hit: {max(found.held, found.bound.present)} chunks, not {expected.hits}")
        if found.held < expected.hits:
            return Verdict(Kind.WRONG, problem=f"the common prefix missed: {found.held} chunks, not {expected.hits}")
        if await engine.may_load(lease, expected.hits):
            return Verdict(Kind.WRONG, problem="a worker was let at its bytes")
        told = await engine.explain(lease)
        seen = await operator.reasons(found.bound.reference)
    finally:
        await engine.release(lease)
    return judged(told, seen, expected)


def judged(told: tuple[str, ...], seen: tuple[str, ...] | None, expected: Expected) -> Verdict:
    """A miss with the reasons that the requester was told and the operator sees (None: not asked) against what they must be."""
    if {"unavailable", "unexplained"} & set(told):
        return Verdict(Kind.UNKNOWN, problem=f"the gateway could not say: {words(told)}")
    reason = words(told) + (f" (operator: {words(seen)})" if seen is not None and seen != told else "")
    if told != expected.told:
        return Verdict(Kind.WRONG, reason, f"the reason is {words(told)}, not {words(expected.told)}")
    if seen is not None and seen != expected.seen:
        return Verdict(Kind.WRONG, reason, f"the operator sees {words(seen)}, not {words(expected.seen)}")
    return Verdict(Kind.MISSED, reason)


def note(row: Row, tier: str, verdict: Verdict) -> None:
    """Enter a verdict into its row. A lookup that missed in the pool also had no worker let at the bytes in shared memory."""
    if verdict.kind is Kind.UNKNOWN:
        row.unchecked(tier, verdict.problem)
        return
    row.check(tier, verdict.problem)
    if tier == L1 and verdict.kind is not Kind.REFUSED:
        row.check(MEMORY, verdict.problem)


async def must_be_refused(desk: Desk, request: Value) -> Verdict:
    """Register an engine whose contract no record can hold: another build could send it, and the gateway has to turn it away."""
    body = {
        "engine": desk.run[:16],
        "generation": 0,
        "pp_rank": 0,
        "tp_rank": 0,
        "block_tokens": request["representation"]["chunk_tokens"],
        "model": {**request["model"], "adapter": None},
        "representation": request["representation"],
        "plan": request["plan"],
    }
    (failure,) = await desk.links.raw("worker", desk.run, [("RegisterWorker", body)])
    if failure is None:
        return Verdict(Kind.WRONG, problem="the gateway took a contract that does not exist")
    return refused(GatewayRefused(failure))


def refused(error: GatewayRefused) -> Verdict:
    """A lookup or registration that was turned away."""
    if error.code in REFUSALS:
        return Verdict(Kind.REFUSED, f"refused: {error.failure.field}")
    return Verdict(Kind.UNKNOWN, problem=f"the gateway answered {error.code}: {error.failure.problem}")


def words(reasons: tuple[str, ...]) -> str:
    """Reasons for reading."""
    return ", ".join(reasons) or "none"


def in_order(components: tuple[str, ...]) -> tuple[str, ...]:
    """Components in the order in which a miss names them."""
    return tuple(name for name in COMPONENTS if name in components)
