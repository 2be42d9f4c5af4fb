"""``oracle.*``: can one tenant tell by the clock whether another tenant has stored a prompt?

A prober binds, acquires and releases prompts in random order: half of them are stored by the other tenant, half by nobody. It speaks to
the gateway over a bare blocking socket, so that it sees finer than any real client. The figure is the AUC of its latencies: 0.5 is no
knowledge at all. Beside it as the peer: the same prober and its own stored prompts, which it may see, so that the figure shows it can.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from bench.auc import Auc, auc
from bench.cases import Budget, Case, Env
from bench.gateway import CALL_S, CHUNK_TOKENS, EngineSessions, Geometry, ask, daemon, engine, storage_of
from bench.lookup import prompt
from bench.measure import Samples
from kvgate.client.client import product_build
from kvgate.contract.address import token_digests
from kvgate.contract.record import Record
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    Bind,
    Bound,
    Hello,
    Opened,
    OpenEngine,
    Release,
    Welcome,
)
from kvgate.protocol.versions import SCHEMA_VERSIONS, WIRE_VERSIONS

CHUNKS: Final = 4
PROMPTS: Final = 1000
"""Prompts of each kind; each is probed once a round."""
ROUNDS: Final = 26
OWN_PROMPTS: Final = 40
"""Prompts that the prober stored itself: they show what a difference looks like."""
QUICK_PROMPTS: Final = 60
QUICK_ROUNDS: Final = 2
POOL_BYTES: Final = 256 << 20
DEADLINE_MS: Final = 10_000
STORE_S: Final = 60.0
SEED: Final = 6
"""Of the order of the probes: written down, so that a run can be repeated."""
FRAME_ID: Final = 1
DETERMINED: Final = "recency@1"
"""The transform whose artifacts these gateways let be shared by prefix."""
# Small objects: what is probed for is never read.
_GEOMETRY: Final = Geometry(layers=1, kv_heads=1, head_dim=8)


R = TypeVar("R", bound=Record)


class BareSocket:
    """One session over a blocking socket: a frame out, a frame back, nothing beside it."""

    def __init__(self, endpoint: str, credential: bytes, role: str = "scheduler") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CALL_S)
        self._socket.connect(endpoint)
        hello = Hello(
            role=role,
            build=product_build(),
            wire_lowest=min(WIRE_VERSIONS),
            wire_highest=max(WIRE_VERSIONS),
            schema_lowest=min(SCHEMA_VERSIONS),
            schema_highest=max(SCHEMA_VERSIONS),
            credential=credential,
        )
        reply(self.exchange(frame_bytes(FRAME_ID, hello)), Welcome)

    def exchange(self, frame: bytes) -> bytes:
        """Send a frame, and return the reply's without its length."""
        self._socket.sendall(frame)
        received = self._socket.recv(65_536)
        while len(received) < HEADER.size or len(received) < HEADER.size + frame_length(received[: HEADER.size]):
            more = self._socket.recv(65_536)
            if not more:
                raise RuntimeError("the gateway hung up")
            received += more
        return received[HEADER.size :]

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def reply(payload: bytes, kind: type[R]) -> R:
    """The reply in a frame's payload; another kind of reply than expected breaks the run."""
    message = parse_frame(payload).message()
    if not isinstance(message, kind):
        raise TypeError(f"the gateway answered {message}")
    return message


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt as the prober asks for it. ``given``: whether it must be given it."""

    kind: str
    frame: bytes
    given: bool


Once = Callable[[BareSocket, Probe], dict[str, float]]
"""Probes once; seconds of each step."""


@dataclass(slots=True)
class Latencies:
    """Seconds by kind of prompt and step."""

    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, kind: str, steps: Mapping[str, float]) -> None:
        """One probe's steps."""
        of_kind = self.found.setdefault(kind, {name: [] for name in steps})
        for name, seconds in steps.items():
            of_kind[name].append(seconds)

    def auc(self, step: str, kind: str) -> Auc:
        """How well ``step`` tells prompts of ``kind`` from absent ones."""
        return auc(self.found[kind][step], self.found["absent"][step])


@dataclass(frozen=True, slots=True)
class Tenants:
    """One who stores and one who probes: their engines and credentials."""

    endpoint: str
    other: EngineSessions
    prober: EngineSessions
    others_credential: bytes = field(repr=False)
    probers_credential: bytes = field(repr=False)


@contextmanager
def tenants(env: Env, *, storage: str, salted: bool) -> Iterator[Tenants]:
    """Two tenants of one gateway. ``salted``: they share an isolation domain, and only their salts differ. ``storage``: memory, or fs
    (LMCache with a folder as L2)."""
    if storage == "fs":
        storage_of("lmcache")
    credentials = [secrets.token_bytes(16) for _ in range(2)]
    file = env.folder / f"credentials-{secrets.token_hex(4)}.json"
    file.write_text(
        json.dumps({hashlib.sha256(one).hexdigest(): f"tenant {at * (not salted)}" for at, one in enumerate(credentials)})
    )
    more = {"--credentials-file": str(file), "--determined-transforms": DETERMINED}
    if storage == "fs":
        more["--l2"] = json.dumps([{"type": "fs", "base_path": str(l2_folder(env, salted=salted))}])
    with ExitStack() as stack:
        backend = "memory" if storage == "memory" else "lmcache"
        running = stack.enter_context(daemon(env.folder, backend, POOL_BYTES, more=more))
        env.versions["storage"] = running.backend
        made = [stack.enter_context(engine(running, _GEOMETRY, credential=one)) for one in credentials]
        yield Tenants(running.endpoint, made[0], made[1], credentials[0], credentials[1])


def l2_folder(env: Env, *, salted: bool) -> Path:
    """Where the L2 of one pair of tenants lies."""
    return env.folder / f"l2-{'salt' if salted else 'domain'}"


def bind_of(sessions: EngineSessions, number: int, salt: bytes | None) -> Bind:
    """The bind of prompt ``number`` as this tenant sends it."""
    tokens = prompt(CHUNKS * CHUNK_TOKENS, number)
    digests = token_digests(sessions.opened.token_key, tokens, CHUNK_TOKENS)
    return Bind(
        handle=sessions.handle,
        adapter=None,
        salt=salt,
        scope="prefix",
        scope_key=None,
        manifest=None,
        tokens=b"".join(digests),
    )


def store(sessions: EngineSessions, numbers: Sequence[int], salt: bytes | None) -> bytes:
    """Commit every chunk of these prompts; their addresses."""
    addresses = b""
    for number in numbers:
        bound = ask(sessions.scheduler, bind_of(sessions, number, salt), Bound)
        sessions.fill(bound, CHUNKS)
        sessions.release(bound)
        addresses += bound.addresses
    return addresses


def wait_stored(folder: Path, objects: int) -> None:
    """Wait until LMCache has written so many objects to its folder: then what is asked for there is really there."""
    until = time.monotonic() + STORE_S
    while sum(path.is_file() and path.suffix != ".tmp" for path in folder.rglob("*")) < objects:
        if time.monotonic() > until:
            raise RuntimeError("LMCache did not write all objects to its folder in time")
        time.sleep(0.1)


@contextmanager
def probed(env: Env, *, storage: str, salted: bool) -> Iterator[Latencies]:
    """The latencies of one pair of tenants, measured once for all of its cases."""
    salts = [secrets.token_bytes(32) for _ in range(2)] if salted else [None, None]
    order = random.Random(SEED)
    of_kind = numbers_of(order, env)
    with tenants(env, storage=storage, salted=salted) as both:
        theirs = store(both.other, of_kind["foreign"], salts[0])
        store(both.prober, of_kind["own"], salts[1])
        if storage == "fs":
            stored = len(of_kind["foreign"]) + len(of_kind["own"])
            wait_stored(l2_folder(env, salted=salted), stored * CHUNKS)
        probes = [
            Probe(kind, frame_bytes(FRAME_ID, bind_of(both.prober, number, salts[1])), kind == "own")
            for kind, found in of_kind.items()
            for number in found
        ]
        wire = BareSocket(both.endpoint, both.probers_credential)
        try:
            reply(wire.exchange(frame_bytes(FRAME_ID, OpenEngine(handle=both.prober.handle))), Opened)
            _apart(wire, probes, theirs)
            yield measure(wire, probes, probe_once, order, env)
        finally:
            wire.close()


def numbers_of(order: random.Random, env: Env) -> dict[str, list[int]]:
    """Numbers of the prompts of each kind, by chance."""
    prompts = QUICK_PROMPTS if env.quick else PROMPTS
    numbers = order.sample(range(10 * prompts), 2 * prompts + OWN_PROMPTS)
    return {
        "foreign": numbers[:prompts],
        "absent": numbers[prompts : 2 * prompts],
        "own": numbers[2 * prompts :],
    }


def measure(wire: BareSocket, probes: list[Probe], once: Once, order: random.Random, env: Env) -> Latencies:
    """Probe everything once a round, each round in another random order. The first round does not count."""
    rounds = QUICK_ROUNDS if env.quick else ROUNDS
    step, found = env.stepper(rounds + 1), Latencies()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            order.shuffle(probes)
            for probe in probes:
                seconds = once(wire, probe)
                if number:
                    found.add(probe.kind, seconds)
            step()
    finally:
        gc.enable()
    return found


def probe_once(wire: BareSocket, probe: Probe) -> dict[str, float]:
    """Bind, acquire, release."""
    bind_s, payload = timed_exchange(wire, probe.frame)
    lease = reply(payload, Bound).lease
    acquire = Acquire(lease=lease, first=0, last=CHUNKS, deadline_ms=DEADLINE_MS)
    acquire_s, payload = timed_exchange(wire, frame_bytes(FRAME_ID, acquire))
    release_s, _ = timed_exchange(wire, frame_bytes(FRAME_ID, Release(lease=lease)))
    require_given(probe, reply(payload, Acquired).end == CHUNKS)
    return {"bind": bind_s, "acquire": bind_s + acquire_s, "release": release_s}


def timed_exchange(wire: BareSocket, frame: bytes) -> tuple[float, bytes]:
    """Seconds from the frame's first byte out to the reply's last byte in, and the reply."""
    begin = time.perf_counter()
    payload = wire.exchange(frame)
    return time.perf_counter() - begin, payload


def require_given(probe: Probe, given: bool) -> None:
    """A benchmark of wrong answers is worth nothing."""
    if given != probe.given:
        raise RuntimeError("a prompt was given to a tenant who did not store it, or not to the one who did")


def _apart(wire: BareSocket, probes: list[Probe], theirs: bytes) -> None:
    """The same prompts have other addresses under the prober's identity: what it asks storage for is not there at all."""
    stored = {theirs[at : at + 32] for at in range(0, len(theirs), 32)}
    for probe in probes:
        bound = reply(wire.exchange(probe.frame), Bound)
        wire.exchange(frame_bytes(FRAME_ID, Release(lease=bound.lease)))
        asked = {bound.addresses[at : at + 32] for at in range(0, len(bound.addresses), 32)}
        if len(asked) != CHUNKS or asked & stored:
            raise RuntimeError("two tenants have a chunk address in common")


def oracle(env: Env, *, storage: str, salted: bool, step: str, error: bool) -> Samples:
    """The AUC of one step's latency, or its standard error."""
    make = partial(probed, storage=storage, salted=salted)
    return samples_of(env.shared(f"{storage} {salted}", make), step, error=error)


def samples_of(found: Latencies, step: str, *, error: bool) -> Samples:
    """What a case gives: the AUC beside the one that is meant to be there, or the standard error."""
    foreign, own = found.auc(step, "foreign"), found.auc(step, "own")
    if error:
        return Samples(ours=[foreign.error], smaller_is_better=True)
    return Samples(
        ours=[foreign.value],
        smaller_is_better=True,
        peer="the prober's own against absent ones: a difference that is meant to be there",
        peers=[own.value],
        note=f"{foreign.samples:,} samples, standard error {foreign.error:.4f}",
    )


def cases_of(name: str, what: Mapping[str, str], run: Callable[..., Samples]) -> Iterator[Case]:
    """For each step a case of its AUC and one of the standard error; ``run`` takes ``step`` and ``error``."""
    for step, words in what.items():
        case = partial(Case, family=name, unit="AUC", what=words)
        yield case(name=f"{name}.{step}", run=partial(run, step=step, error=False), budgets=BUDGETS)
        yield case(name=f"{name}.{step}.error", run=partial(run, step=step, error=True))


BUDGETS: Final = (Budget("value", ">=", 0.49), Budget("value", "<=", 0.51))


def _cases() -> Iterator[Case]:
    steps = {"bind": "bind", "acquire": "bind and acquire together", "release": "the release after them"}
    for name, who, salted in (("foreign", "another domain", False), ("salt", "another salt of one domain", True)):
        what = {step: f"{words}: prompts {who} stored against absent ones" for step, words in steps.items()}
        for storage in ("memory", "fs"):
            yield from cases_of(f"oracle.{name}.{storage}", what, partial(oracle, storage=storage, salted=salted))


CASES: Final = tuple(_cases())
