"""``lookup.*``: from a prompt's tokens to how many of its chunks are there, against LMCache's MP client and server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

from bench import peer
from bench.cases import Budget, Case, Env, Skipped
from bench.gateway import CHUNK_TOKENS, Daemon, EngineSessions, Geometry, ask, daemon, engine
from bench.measure import Samples, Timed, interleave, micros, timed
from kvgate.protocol.messages import Acquire, Acquired, Bound

SIZES: Final = {"256": 256, "8k": 8192, "32k": 32_768}
PROMPTS: Final = 4
"""Different prompts of each length that are stored, taken in turn."""
WIDE_WORKERS: Final = 8
POOL_BYTES: Final = 512 << 20

# Small objects: a lookup reads no payload, and so many of them fit a small pool.
_GEOMETRY: Final = Geometry(layers=1, kv_heads=WIDE_WORKERS, head_dim=16)


def prompt(tokens: int, number: int) -> list[int]:
    """The ``number``-th prompt of that length; no two share a chunk."""
    begin = number * 100_000 + tokens
    return [(begin + 7 * position) % 2_000_000_000 for position in range(tokens)]


@contextmanager
def running_gateway(env: Env) -> Iterator[Daemon]:
    """The gateway of this family."""
    with daemon(env.folder, env.backend, POOL_BYTES) as running:
        env.versions["storage"] = running.backend
        yield running


def filled_engine(workers: int) -> Callable[[Env], Any]:
    """A fixture: an engine of so many workers, in which all prompts are stored."""

    @contextmanager
    def make(env: Env) -> Iterator[EngineSessions]:
        with engine(env.shared("gateway", running_gateway), _GEOMETRY, workers=workers) as made:
            for tokens in SIZES.values():
                for number in range(PROMPTS):
                    bound = made.bind(prompt(tokens, number))
                    made.fill(bound, tokens // CHUNK_TOKENS)
                    made.release(bound)
            yield made

    return make


@contextmanager
def filled_peer(env: Env) -> Iterator[peer.Client]:
    """LMCache with the same prompts stored."""
    import torch

    chunks = [torch.zeros(2, 1, CHUNK_TOKENS, _GEOMETRY.kv_heads * _GEOMETRY.head_dim, dtype=torch.bfloat16)] * 128
    with peer.server(env.folder, POOL_BYTES) as running, peer.client(running, _GEOMETRY) as made:
        for tokens in SIZES.values():
            for number in range(PROMPTS):
                made.store(tuple(prompt(tokens, number)), f"fill-{tokens}-{number}", chunks[: tokens // CHUNK_TOKENS])
                made.end(f"fill-{tokens}-{number}")
        yield made


@dataclass(slots=True)
class Turns:
    """Prompts in turn: the stored ones over and over, or always new ones that are stored nowhere."""

    tokens: int
    present: bool
    numbers: count[int]

    def next(self) -> tuple[list[int], int]:
        """The next prompt, and how many chunks of it must be found."""
        number = next(self.numbers)
        if self.present:
            return prompt(self.tokens, number % PROMPTS), self.tokens // CHUNK_TOKENS
        return prompt(self.tokens, PROMPTS + 1 + number), 0


def our_bind(ours: EngineSessions, turns: Turns) -> Timed:
    """Token digests and bind count; giving the empty lease back does not."""

    def one() -> float:
        tokens, expected = turns.next()
        begin = time.perf_counter()
        bound = ours.bind(tokens)
        seconds = time.perf_counter() - begin
        _require(bound.present == expected)
        ours.release(bound)
        return seconds

    return one


def our_round_trip(ours: EngineSessions, turns: Turns) -> Timed:
    """The same with ready-made token digests: the round trip alone."""

    def one() -> float:
        tokens, expected = turns.next()
        message = ours.bind_message(tokens)
        begin = time.perf_counter()
        bound = ask(ours.scheduler, message, Bound)
        seconds = time.perf_counter() - begin
        _require(bound.present == expected)
        ours.release(bound)
        return seconds

    return one


def our_hold(ours: EngineSessions, turns: Turns) -> Timed:
    """Token digests, bind, acquire, release."""

    def one() -> None:
        tokens, expected = turns.next()
        bound = ours.bind(tokens)
        message = Acquire(lease=bound.lease, first=0, last=tokens_chunks(tokens), deadline_ms=10_000)
        _require(ask(ours.scheduler, message, Acquired).end == expected)
        ours.release(bound)

    return timed(one)


def tokens_chunks(tokens: list[int]) -> int:
    """Full chunks of a prompt."""
    return len(tokens) // CHUNK_TOKENS


def peer_lookup(theirs: peer.Client, turns: Turns, *, unlock_counts: bool) -> Timed:
    """lookup + wait + end count; freeing the locks of a hit only where asked."""
    requests = count()

    def one() -> float:
        tokens, expected = turns.next()
        key, request = tuple(tokens), f"{turns.tokens}-{turns.present}-{unlock_counts}-{next(requests)}"
        begin = time.perf_counter()
        found = theirs.lookup(key, request)
        looked = time.perf_counter()
        _require(found == expected)
        if found:
            theirs.unlock(key, request)
        unlocked = time.perf_counter()
        theirs.end(request)
        ended = time.perf_counter()
        return ended - begin if unlock_counts else (looked - begin) + (ended - unlocked)

    return one


def _require(right: bool) -> None:
    if not right:
        raise RuntimeError("a lookup gave another number of chunks than are stored")


def lookup(env: Env, tokens: int, what: str) -> Samples:
    """One length; ``what`` is "present", "absent" or "held"."""
    ours, present = env.shared("engine", filled_engine(1)), what != "absent"
    plan = env.plan(runs=15, repeats=20 if tokens < 10_000 else 10, warmup=3)
    make = our_hold if what == "held" else our_bind
    sides = {"ours": make(ours, Turns(tokens, present, count()))}
    note = ""
    try:
        theirs = env.shared("peer", filled_peer)
        sides["peer"] = peer_lookup(theirs, Turns(tokens, present, count()), unlock_counts=what == "held")
    except Skipped as why:
        note = str(why)
    taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    calls = "lookup + wait + free locks + end" if what == "held" else "lookup + wait + end"
    return Samples(
        ours=micros(taken["ours"]),
        smaller_is_better=True,
        peer=peer.name(f"client, {calls}") if "peer" in taken else "",
        peers=micros(taken.get("peer", ())),
        note=note,
    )


def round_trip(env: Env, tokens: int) -> Samples:
    """The bind round trip alone, all present."""
    ours = env.shared("engine", filled_engine(1))
    plan = env.plan(runs=15, repeats=20, warmup=3)
    sides = {"ours": our_round_trip(ours, Turns(tokens, True, count()))}
    taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    return Samples(ours=micros(taken["ours"]), smaller_is_better=True)


def wide(env: Env, tokens: int) -> Samples:
    """A plan of eight workers against a plan of one, on the same gateway."""
    narrow, broad = env.shared("engine", filled_engine(1)), env.shared("wide", filled_engine(WIDE_WORKERS))
    plan = env.plan(runs=15, repeats=20 if tokens < 10_000 else 10, warmup=3)
    sides = {
        "ours": our_bind(broad, Turns(tokens, True, count())),
        "peer": our_bind(narrow, Turns(tokens, True, count())),
    }
    taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    return Samples(
        ours=micros(taken["ours"]),
        smaller_is_better=True,
        peer="this gateway, plan of one worker",
        peers=micros(taken["peer"]),
    )


def _cases(label: str, tokens: int, ratio: float) -> tuple[Case, ...]:
    budget = (Budget("ratio", ">=", ratio),)
    name = f"lookup.{label}"
    words = f"{tokens:,} tokens"

    def case(suffix: str, what: str, run: Callable[[Env], Samples], budgets: tuple[Budget, ...]) -> Case:
        return Case(name=name + suffix, family="lookup", what=what, unit="us", run=run, budgets=budgets)

    return (
        case("", f"token digests + bind of {words}, all present", partial(lookup, tokens=tokens, what="present"), budget),
        case(".absent", f"the same of {words}, none present", partial(lookup, tokens=tokens, what="absent"), budget),
        case(".held", f"{words}: token digests, bind, acquire, release", partial(lookup, tokens=tokens, what="held"), ()),
        case(".trip", f"the bind round trip of {words} alone", partial(round_trip, tokens=tokens), ()),
        case(
            ".plan8",
            f"token digests + bind of {words}, plan of 8 workers, against a plan of one",
            partial(wide, tokens=tokens),
            (Budget("ratio", ">=", 1 / 1.2),),
        ),
    )


CASES: Final = (
    *_cases("256", SIZES["256"], 4.0),
    *_cases("8k", SIZES["8k"], 4.0),
    *_cases("32k", SIZES["32k"], 3.0),
)
