"""Whether storage has the chunks of a request: what is believed, and asking storage about the rest in the background."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from kvgate.daemon.explain import Explainer
from kvgate.daemon.leases import Lease, Place
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.shards import refs_in
from kvgate.storage.backend import StorageBackend, StorageUnavailable

log = structlog.get_logger(__name__)

PROBE_CHUNKS: Final = 64
"""Chunks asked for by one storage call, after the first one."""


class Probes:
    """What is believed to be stored of a lease's chunks, in its own place and in those of earlier secrets."""

    def __init__(
        self,
        backend: StorageBackend,
        presence: PresenceIndex,
        explainer: Explainer,
        envelope_keys: tuple[bytes, ...],
        metrics: Metrics,
        probe_s: float,
    ) -> None:
        self._backend = backend
        self._presence = presence
        self._explainer = explainer
        self._envelope_keys = envelope_keys
        self._metrics = metrics
        self._probe_s = probe_s

    def own(self, lease: Lease) -> Place:
        """Where the lease's chunks are stored, and looked for first."""
        return Place(lease.domain, lease.chunks, self._envelope_keys)

    def places(self, lease: Lease) -> list[Place]:
        """All of them, its own first."""
        return [self.own(lease), *lease.earlier.values()]

    def believed_in(self, lease: Lease, place: Place, index: int) -> bool:
        """Whether chunk ``index`` is believed whole there."""
        return index < len(place.chunks) and self._presence.whole(place.chunks[index], lease.rectangles)

    def present(self, lease: Lease) -> int:
        """How many chunks from the first are believed whole, each in one of the lease's places."""
        present = self._presence.contiguous(lease.chunks, lease.rectangles)
        if lease.earlier:
            places = self.places(lease)
            while any(self.believed_in(lease, place, present) for place in places):
                present += 1
        return present

    def start(self, lease: Lease, present: int) -> bool:
        """Ask storage in the background about chunks from ``present`` on; False where there is nothing to ask about."""
        if present >= len(lease.chunks) or self._backend.pool is None:
            return False
        if self._presence.complete and not self._backend.has_l2:
            return False
        lease.probe = asyncio.create_task(self._probe(lease, present, lease.probe))
        return True

    def running(self, lease: Lease) -> bool:
        """Whether storage is being asked about this lease's chunks."""
        return lease.probe is not None and not lease.probe.done()

    async def answer(self, lease: Lease, wait_s: float) -> tuple[int, bool]:
        """How many chunks from the first are believed present once the probe has ended or the wait is over, and whether it goes on."""
        probe = lease.probe
        if probe is not None:
            await asyncio.wait({probe}, timeout=wait_s)
            if probe.done() and not probe.cancelled():
                return max(probe.result(), self.present(lease)), False
        return self.present(lease), probe is not None

    async def _probe(self, lease: Lease, present: int, earlier: asyncio.Task[int] | None) -> int:
        """How many chunks from the first are present, each in one of the lease's places. ``earlier``: its last probe, waited for."""
        if earlier is not None:
            present = max(present, await earlier, self.present(lease))
        try:
            async with asyncio.timeout(self._probe_s):
                reached = -1
                while reached < present < len(lease.chunks):
                    reached = present
                    for place in self.places(lease):
                        present = await self._probe_place(lease, place, present)
        except (StorageUnavailable, TimeoutError) as error:
            lease.unanswered = True
            self._metrics.storage_faults.labels("probe").inc()
            log.warning("probe.failed", error=type(error).__name__)
        return present

    async def _probe_place(self, lease: Lease, place: Place, present: int) -> int:
        """The same in one place. One chunk is asked for first: most probes end there."""
        step = 1
        while present < len(place.chunks):
            asked = range(present, min(present + step, len(place.chunks)))
            refs = [ref for index in asked for ref in refs_in(lease, place, index)]
            found = await self._backend.probe(refs, self._probe_s)
            whole = self._note_found(lease, place, asked, found)
            present += whole
            if whole < len(asked):
                break
            step = PROBE_CHUNKS
        return present

    def _note_found(self, lease: Lease, place: Place, asked: range, found: list[bool | None]) -> int:
        wide = lease.rectangles
        news = []  # whole, and not known so: stored by another host, or before this start
        whole = len(asked)
        for at, index in enumerate(asked):
            cells = found[at * wide : (at + 1) * wide]
            if all(cells) and not self._presence.whole(place.chunks[index], wide):
                news.append(index)
            for rectangle, there in enumerate(cells):
                if there:
                    self._presence.add(place.chunks[index], rectangle)
            if not all(cells):
                lease.unanswered |= None in cells
                whole = at
                break
        if news and place.chunks is lease.chunks:
            links = lease.links.first(news[-1] + 1)
            self._explainer.stored((lease.chunks[index], links[index], lease.components) for index in news)
        return whole
