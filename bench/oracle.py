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
from collections.abc import Iterator, Sequence
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
STEPS: Final = ("bind", "acquire", "release")
_FRAME_ID: Final = 1
# Small objects: what is probed for is never read.
_GEOMETRY: Final = Geometry(layers=1, kv_heads=1, head_dim=8)


R = TypeVar("R", bound=Record)


class BareSocket:
    """One session over a blocking socket: a frame out, a frame back, nothing beside it."""

    def __init__(self, endpoint: str, credential: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(CALL_S)
        self._socket.connect(endpoint)
        hello = Hello(
            role="scheduler",
            build=product_build(),
            wire_lowest=min(WIRE_VERSIONS),
            wire_highest=max(WIRE_VERSIONS),
            schema_lowest=min(SCHEMA_VERSIONS),
            schema_highest=max(SCHEMA_VERSIONS),
            credential=credential,
        )
        reply(self.exchange(frame_bytes(_FRAME_ID, hello)), Welcome)

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
    """One prompt as the prober asks for it. ``chunks``: how many of its chunks it must be given."""

    kind: str
    bind: bytes
    chunks: int


@dataclass(slots=True)
class Latencies:
    """Seconds by kind of prompt: each step alone, and ``total``: bind and acquire together."""

    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, kind: str, steps: Sequence[float]) -> None:
        """One probe's steps in order."""
        of_kind = self.found.setdefault(kind, {name: [] for name in (*STEPS, "total")})
        for name, seconds in zip(STEPS, steps, strict=True):
            of_kind[name].append(seconds)
        of_kind["total"].append(steps[0] + steps[1])

    def auc(self, step: str, kind: str) -> Auc:
        """How well ``step`` tells prompts of ``kind`` from absent ones."""
        return auc(self.found[kind][step], self.found["absent"][step])


@contextmanager
def tenants(env: Env, *, storage: str, salted: bool) -> Iterator[tuple[EngineSessions, EngineSessions, str, bytes]]:
    """Two tenants of one gateway: the one who stores, the one who probes, its endpoint and the prober's credential.

    ``salted``: they share an isolation domain, and only their salts differ. ``storage``: memory, or fs (LMCache with a folder as L2).
    """
    if storage == "fs":
        storage_of("lmcache")
    credentials = [secrets.token_bytes(16) for _ in range(2)]
    file = env.folder / f"credentials-{secrets.token_hex(4)}.json"
    file.write_text(
        json.dumps({hashlib.sha256(one).hexdigest(): f"tenant {at * (not salted)}" for at, one in enumerate(credentials)})
    )
    more = {"--credentials-file": str(file)}
    if storage == "fs":
        more["--l2"] = json.dumps([{"type": "fs", "base_path": str(l2_folder(env, salted=salted))}])
    with ExitStack() as stack:
        backend = "memory" if storage == "memory" else "lmcache"
        running = stack.enter_context(daemon(env.folder, backend, POOL_BYTES, more=more))
        env.versions["storage"] = running.backend
        made = [stack.enter_context(engine(running, _GEOMETRY, credential=one)) for one in credentials]
        yield made[0], made[1], running.endpoint, credentials[1]


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
    prompts, rounds = (QUICK_PROMPTS, QUICK_ROUNDS) if env.quick else (PROMPTS, ROUNDS)
    salts = [secrets.token_bytes(32) for _ in range(2)] if salted else [None, None]
    order = random.Random(SEED)
    numbers = order.sample(range(10 * prompts), 2 * prompts + OWN_PROMPTS)
    of_kind = {
        "foreign": numbers[:prompts],
        "absent": numbers[prompts : 2 * prompts],
        "own": numbers[2 * prompts :],
    }
    with tenants(env, storage=storage, salted=salted) as (other, prober, endpoint, credential):
        theirs = store(other, of_kind["foreign"], salts[0])
        store(prober, of_kind["own"], salts[1])
        if storage == "fs":
            wait_stored(l2_folder(env, salted=salted), (prompts + OWN_PROMPTS) * CHUNKS)
        probes = [
            Probe(kind, frame_bytes(_FRAME_ID, bind_of(prober, number, salts[1])), CHUNKS if kind == "own" else 0)
            for kind, found in of_kind.items()
            for number in found
        ]
        wire = BareSocket(endpoint, credential)
        try:
            reply(wire.exchange(frame_bytes(_FRAME_ID, OpenEngine(handle=prober.handle))), Opened)
            _apart(wire, probes, theirs)
            yield measure(wire, probes, rounds, order, env)
        finally:
            wire.close()


def measure(wire: BareSocket, probes: list[Probe], rounds: int, order: random.Random, env: Env) -> Latencies:
    """Probe everything once a round, each round in another random order. The first round does not count."""
    step, found = env.stepper(rounds + 1), Latencies()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            order.shuffle(probes)
            for probe in probes:
                seconds = probe_once(wire, probe)
                if number:
                    found.add(probe.kind, seconds)
            step()
    finally:
        gc.enable()
    return found


def probe_once(wire: BareSocket, probe: Probe) -> tuple[float, float, float]:
    """Seconds of bind, acquire and release: from the frame's first byte out to the reply's last byte in."""
    clock = time.perf_counter
    begin = clock()
    payload = wire.exchange(probe.bind)
    bind_s = clock() - begin
    lease = reply(payload, Bound).lease
    acquire = frame_bytes(_FRAME_ID, Acquire(lease=lease, first=0, last=CHUNKS, deadline_ms=DEADLINE_MS))
    release = frame_bytes(_FRAME_ID, Release(lease=lease))
    begin = clock()
    payload = wire.exchange(acquire)
    acquire_s = clock() - begin
    begin = clock()
    wire.exchange(release)
    release_s = clock() - begin
    if reply(payload, Acquired).end != probe.chunks:
        raise RuntimeError("a prompt was given to a tenant who did not store it, or not to the one who did")
    return bind_s, acquire_s, release_s


def _apart(wire: BareSocket, probes: list[Probe], theirs: bytes) -> None:
    """The same prompts have other addresses under the prober's identity: what it asks storage for is not there at all."""
    stored = {theirs[at : at + 32] for at in range(0, len(theirs), 32)}
    for probe in probes:
        bound = reply(wire.exchange(probe.bind), Bound)
        wire.exchange(frame_bytes(_FRAME_ID, Release(lease=bound.lease)))
        asked = {bound.addresses[at : at + 32] for at in range(0, len(bound.addresses), 32)}
        if len(asked) != CHUNKS or asked & stored:
            raise RuntimeError("two tenants have a chunk address in common")


def oracle(env: Env, *, storage: str, salted: bool, step: str, error: bool) -> Samples:
    """The AUC of one step's latency, or its standard error."""
    make = partial(probed, storage=storage, salted=salted)
    found = env.shared(f"{storage} {salted}", make)
    foreign, own = found.auc(step, "foreign"), found.auc(step, "own")
    if error:
        return Samples(ours=[foreign.error], smaller_is_better=True)
    return Samples(
        ours=[foreign.value],
        smaller_is_better=True,
        peer="the prober's own stored prompts against absent ones: a difference that is meant to be there",
        peers=[own.value],
        note=f"{foreign.samples:,} samples, standard error {foreign.error:.4f}",
    )


def _cases(name: str, who: str, *, salted: bool) -> Iterator[Case]:
    what = {"bind": "bind", "total": "bind and acquire together", "release": "the release after them"}
    label = {"bind": "bind", "total": "acquire", "release": "release"}
    for storage in ("memory", "fs"):
        for step in what:
            case = partial(
                Case, family=f"{name}.{storage}", unit="AUC", what=f"{what[step]}: prompts {who} stored against absent ones"
            )
            run = partial(oracle, storage=storage, salted=salted, step=step)
            full = f"{name}.{storage}.{label[step]}"
            yield case(name=full, run=partial(run, error=False), budgets=_BUDGETS)
            yield case(name=f"{full}.error", run=partial(run, error=True))


_BUDGETS: Final = (Budget("value", ">=", 0.49), Budget("value", "<=", 0.51))

CASES: Final = (
    *_cases("oracle.foreign", "another domain", salted=False),
    *_cases("oracle.salt", "another salt of one domain", salted=True),
)
