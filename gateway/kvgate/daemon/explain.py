"""Explaining misses, off the request path: notes what is stored, keeps the latest misses, and says which component each one is due to.

Nothing here waits for the index: notes and questions go to its thread through a bounded queue, and what does not fit is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvgate.config import Config
from kvgate.contract.digests import Kind, digest
from kvgate.daemon.errors import Refused
from kvgate.daemon.explain_thread import MAX_QUEUE, Ask, Drop, ExplainThread, Note
from kvgate.daemon.leases import LEASE_NAME_BYTES, Lease
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.reasons import UNEXPLAINED, Make, Question, Verdict
from kvgate.protocol.messages import REFERENCE_DIGITS, Explained
from kvgate.storage.envelope import Components

MAX_REFUSED: Final = 4096
ANSWER_S: Final = 2.0
CLOSE_S: Final = 5.0
FILE_NAME: Final = "explain.sqlite"


def reference(token: bytes) -> str:
    """The public name of the request behind a lease: 16 hexadecimal digits. It opens nothing, and the lease can't be told from it."""
    return digest(Kind.REFERENCE, token[:LEASE_NAME_BYTES]).hex()[:REFERENCE_DIGITS]


@dataclass(eq=False)
class Miss:
    """One request that missed, from ``chunk`` of its ``chunks`` on. ``told``: for the requester; ``seen``: for the operator."""

    session: int
    chunk: int
    chunks: int
    make: Make
    told: asyncio.Future[Verdict]
    seen: asyncio.Future[Verdict]
    at_s: float = field(default_factory=time.monotonic)


class Explainer:
    """All that is known about misses. Used on the event loop; ``start`` and ``close`` frame its thread."""

    def __init__(self, config: Config, metrics: Metrics, *, max_queue: int = MAX_QUEUE) -> None:
        self._max_misses = config.explain_misses
        self._metrics = metrics
        self._misses: OrderedDict[str, Miss] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # chunk address → why it was quarantined
        path = Path(config.data_dir) / FILE_NAME
        self._thread = ExplainThread(path, config.explain_chunks, self._lost, max_queue=max_queue)

    @property
    def entries(self) -> int:
        """Entries in the index."""
        return self._thread.entries

    def start(self) -> None:
        """Begin; nothing is waited for."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Write down what is noted, and end the thread."""
        await asyncio.to_thread(self._thread.close, CLOSE_S)
        for miss in self._misses.values():
            _settle(miss.told, UNEXPLAINED)
            _settle(miss.seen, UNEXPLAINED)

    def stored(self, chunks: Iterable[tuple[bytes, bytes, Components]]) -> None:
        """Chunks that are whole and visible now: address, link and components of each."""
        links: dict[Make, list[bytes]] = {}
        for address, link, components in chunks:
            self._refused.pop(address, None)
            links.setdefault(Make.of(components), []).append(link)
        for make, found in links.items():
            self._thread.take(Note(tuple(found), make))

    def forgotten(self, links: Iterable[bytes]) -> None:
        """Nothing is known of what was stored under ``links`` any more."""
        self._thread.take(Drop(tuple(links)))

    def refused(self, chunk: bytes, why: str) -> None:
        """An object of ``chunk`` was quarantined."""
        self._refused[chunk] = why
        self._refused.move_to_end(chunk)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def missed(self, lease: Lease, chunk: int) -> Miss:
        """A lookup of ``lease`` ended before ``chunk``. Noted once for each chunk it ends at, counted once for each request."""
        name = reference(lease.token)
        known = self._misses.get(name)
        if known is not None and known.chunk == chunk:
            return known
        make = Make.of(lease.components)
        miss = Miss(lease.session, chunk, len(lease.chunks), make, self._loop.create_future(), self._loop.create_future())
        self._misses[name] = miss
        if len(self._misses) > self._max_misses:
            _, oldest = self._misses.popitem(last=False)
            _settle(oldest.told, UNEXPLAINED)
            _settle(oldest.seen, UNEXPLAINED)
        question = Question(
            lease.links.copy(),
            chunk,
            make,
            refused=self._refused.get(lease.chunks[chunk], "") if chunk < len(lease.chunks) else "",
            answered=not lease.unanswered,
        )
        told = partial(self._from_thread, miss.told, False)
        seen = partial(self._from_thread, miss.seen, known is None)
        if not self._thread.take(Ask(question, told, seen)):
            _settle(miss.told, UNEXPLAINED)
            self._seen(miss.seen, known is None, UNEXPLAINED)
        return miss

    async def answer(self, session: int, token: bytes, lease: Lease | None, missing: int) -> Explained:
        """What the requester may know of its own request. ``missing``: its first missing chunk, where no lookup found out."""
        miss = self._misses.get(reference(token))
        if lease is not None and not lease.released and lease.session == session:
            if miss is None and 0 < len(lease.chunks) <= missing:
                return Explained(reasons=(), chunk=missing)
            miss = miss or self.missed(lease, missing)
        if miss is None or miss.session != session:
            raise Refused(
                "denied", "no miss of this connection is known by this lease", field="lease", remedy="ask before the release"
            )
        verdict = await _wait(miss.told)
        return Explained(reasons=verdict.reasons, chunk=miss.chunk)

    async def page(self, name: str | None, last: int) -> list[dict[str, Any]]:
        """For the operator: the miss of one reference, or the ``last`` ones, the newest first."""
        names = [name] if name is not None else list(reversed(self._misses))[:last]
        found = [(one, self._misses[one]) for one in names if one in self._misses]
        return [_description(one, miss, await _wait(miss.seen), await _wait(miss.told)) for one, miss in found]

    def _from_thread(self, future: asyncio.Future[Verdict], counted: bool, verdict: Verdict) -> None:
        try:
            self._loop.call_soon_threadsafe(self._seen, future, counted, verdict)
        except RuntimeError:
            # The loop is closed: the gateway gave up waiting for this thread, and nobody is there to be told.
            self._lost("answer", 1)

    def _seen(self, future: asyncio.Future[Verdict], counted: bool, verdict: Verdict) -> None:
        _settle(future, verdict)
        if counted:
            for reason in verdict.reasons:
                self._metrics.misses.labels(reason).inc()

    def _lost(self, what: str, count: int) -> None:
        self._metrics.explain_lost.labels(what).inc(count)


def _settle(future: asyncio.Future[Verdict], verdict: Verdict) -> None:
    if not future.done():
        future.set_result(verdict)


async def _wait(future: asyncio.Future[Verdict]) -> Verdict:
    """The verdict; "unexplained" where the thread is too far behind. The future stays: it is still to be answered."""
    done, _ = await asyncio.wait({future}, timeout=ANSWER_S)
    return future.result() if done else UNEXPLAINED


def _description(name: str, miss: Miss, seen: Verdict, told: Verdict) -> dict[str, Any]:
    return {
        "reference": name,
        "age_s": round(time.monotonic() - miss.at_s, 1),
        "chunks": miss.chunks,
        "missing": miss.chunk,
        "reasons": list(seen.reasons),
        "told": list(told.reasons),
        "stored_chunks": seen.known,
        "asked": miss.make.short(),
        "nearest": seen.nearest.short() if seen.nearest else None,
    }
