"""``ttft.miss``: what the gateway adds to a request that misses. The control plane's part: no engine runs here."""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import Final

from bench.cases import Budget, Case, Env
from bench.gateway import CHUNK_TOKENS, EngineSessions, ask
from bench.lookup import filled_engine, prompt
from bench.measure import Samples, Timed, interleave, micros, timed
from kvgate.contract.address import token_digests
from kvgate.protocol.messages import Acquire, Acquired

SHORT_TOKENS: Final = 200
LONG_TOKENS: Final = 2_000
_BUDGET: Final = (Budget("value", "<=", 500.0),)
_OTHERS: Final = 10_000
"""Prompts from this number on are stored nowhere."""


def below_one_chunk(ours: EngineSessions) -> Timed:
    """No full chunk: the token digests are empty, and nothing is sent."""
    tokens = prompt(SHORT_TOKENS, 0)

    def one() -> None:
        if token_digests(ours.opened.token_key, tokens, CHUNK_TOKENS):
            raise RuntimeError("a prompt below one chunk has a digest")

    return timed(one)


def above_one_chunk(ours: EngineSessions) -> Timed:
    """Token digests, bind, and acquire until the miss is certain; giving the lease back does not hold the request up."""
    numbers = count(_OTHERS)

    def one() -> float:
        tokens = prompt(LONG_TOKENS, next(numbers))
        begin = time.perf_counter()
        bound = ours.bind(tokens)
        if bound.present or bound.probing:
            message = Acquire(lease=bound.lease, first=0, last=LONG_TOKENS // CHUNK_TOKENS, deadline_ms=1_000)
            if ask(ours.scheduler, message, Acquired).end:
                raise RuntimeError("a prompt that was never stored is a hit")
        seconds = time.perf_counter() - begin
        ours.release(bound)
        return seconds

    return one


def miss(env: Env, *, long: bool) -> Samples:
    """µs from the tokens to a certain miss."""
    ours = env.shared("engine", filled_engine(1))
    plan = env.plan(runs=15, repeats=40, warmup=5)
    sides = {"ours": (above_one_chunk if long else below_one_chunk)(ours)}
    taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    return Samples(ours=micros(taken["ours"]), smaller_is_better=True, note="control plane only, no engine")


CASES: Final = (
    Case(
        name="ttft.miss.short",
        family="lookup",
        what="added by a miss of 200 tokens: below one chunk, no round trip",
        unit="us",
        run=partial(miss, long=False),
        budgets=_BUDGET,
    ),
    Case(
        name="ttft.miss",
        family="lookup",
        what="added by a miss of 2,000 tokens: token digests, bind, acquire",
        unit="us",
        run=partial(miss, long=True),
        budgets=_BUDGET,
    ),
)
