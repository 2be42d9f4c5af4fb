"""The way between pages and host memory: groups of payloads in device memory, one at work while the other is copied.

Two processes on one device take turns with its processors (copy engines go on beside them). So a launch costs the engine not only
its own time, but the change from the engine's work to ours and back: as many payloads as have room go in one launch. And where the
engine is busy (our kernels wait for their turn), a lane rests after each, so that it takes no more than a share of the device's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvgate_kernels import driver

STAGE_BYTES = 512 << 20
"""Device memory for payloads on their way, in each direction: half of it for either group."""

_GUESS_S_PER_BYTE = 1 / 0.6e12
"""Of kernels alone on the device, before it is measured: packing and hashing on a fast one."""
_TELLING_BYTES = 64 << 20
"""Smaller groups tell nothing of it: their launch takes as long."""
_SLACK_S = 3e-4
_SWITCH_S = 1.5e-4
"""What the change to our work and back costs others, about."""

_FIRST, _SECOND = 1, 4
"""Payloads of the groups at the end of a call where the copies can't begin, or aren't awaited, any earlier: a pack's first ones, an
unpack's last ones."""


@dataclass
class Stage:
    """Device room for one group on its way to or from host memory."""

    buffer: torch.Tensor
    ready: torch.cuda.Event
    done: torch.cuda.Event


class Pacer:
    """Lets kernels rest between groups while others wait for the device, so that ours take at most ``share`` of its time; 0: never."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._best_s_per_byte = _GUESS_S_PER_BYTE
        self._began_at = 0.0

    def begin(self) -> None:
        """The group's kernels are launched, and nothing of ours keeps them waiting."""
        self._began_at = time.monotonic()

    def end(self, nbytes: int) -> None:
        """They are through. Sleeps where they had to wait for others."""
        took_s = time.monotonic() - self._began_at
        if nbytes >= _TELLING_BYTES:
            self._best_s_per_byte = min(self._best_s_per_byte, took_s / nbytes)
        if not self._share:
            return
        alone_s = nbytes * self._best_s_per_byte
        if took_s > 2 * alone_s + _SLACK_S:
            time.sleep(max(0.0, (alone_s + _SWITCH_S) / self._share - took_s))


class Lane:
    """One direction's streams and stages. Used by one call at a time: the bus is the limit, not the number of calls."""

    def __init__(self, device: torch.device, payload_bytes: int, stage_bytes: int, share: float) -> None:
        self.pacer = Pacer(share)
        self.lock = threading.Lock()
        self.work = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stages: list[Stage] = []
        self._device = device
        self._bytes = payload_bytes
        self._most = max(1, stage_bytes // 2 // payload_bytes)

    def prepare(self, count: int) -> int:
        """Make room for a call of ``count`` payloads; how many a group may have. Nothing is under way.

        Takes less where the device has no more. Raises ``torch.OutOfMemoryError`` where there is none for one payload.
        """
        want = min(count, self._most)
        have = self.stages[0].buffer.numel() // self._bytes if self.stages else 0
        while want > have:
            self.stages, have = [], 0
            try:
                self.stages = [self._stage(want) for _ in range(2 if count > 1 else 1)]
                have = want
            except torch.OutOfMemoryError:
                if want == 1:
                    raise
                want = self._most = want // 2
        if count > 1 and len(self.stages) == 1:
            self.stages.append(self._stage(have))
        return have

    def _stage(self, payloads: int) -> Stage:
        # A thread sleeps while it waits for ``done``: copies take long.
        ready, done = (torch.cuda.Event(blocking=long) for long in (False, True))  # type: ignore[no-untyped-call]
        return Stage(torch.empty(payloads * self._bytes, dtype=torch.uint8, device=self._device), ready, done)


@dataclass(frozen=True)
class Batch:
    """One call's payloads: where they are in host memory, where in the stages, and how their kernels are queued on ``lane.work``.

    move, hash: given the first payload and the number of payloads. Hashing is nothing where no digests are asked for.
    """

    payload_bytes: int
    hosts: Sequence[int]
    places: Sequence[int]
    move: Callable[[int, int], None]
    hash: Callable[[int, int], None]


def pack_groups(lane: Lane, batch: Batch, plan: Sequence[tuple[int, int]]) -> None:
    """Queues everything from pages to host memory. The last copies may be under way when it returns."""
    for turn, (first, n) in enumerate(plan):
        stage = lane.stages[turn % 2]
        if turn >= 2:
            stage.done.synchronize()
        lane.pacer.begin()
        batch.move(first, n)
        stage.ready.record(lane.work)
        lane.copy.wait_event(stage.ready)
        for host, place in zip(batch.hosts[first : first + n], batch.places[first : first + n], strict=True):
            driver.copy(host, place, batch.payload_bytes, lane.copy.cuda_stream)
        stage.done.record(lane.copy)
        batch.hash(first, n)  # beside the copies
        lane.work.synchronize()
        lane.pacer.end(n * batch.payload_bytes)


def unpack_groups(lane: Lane, batch: Batch, plan: Sequence[tuple[int, int]]) -> None:
    """Everything from host memory to pages; it is done when this returns."""

    def copy_in(turn: int) -> None:
        stage, (first, n) = lane.stages[turn % 2], plan[turn]
        for host, place in zip(batch.hosts[first : first + n], batch.places[first : first + n], strict=True):
            driver.copy(place, host, batch.payload_bytes, lane.copy.cuda_stream)
        stage.done.record(lane.copy)

    copy_in(0)
    for turn, (first, n) in enumerate(plan):
        if turn + 1 < len(plan):
            copy_in(turn + 1)  # the kernels that read that stage are through
        lane.stages[turn % 2].done.synchronize()
        lane.pacer.begin()
        batch.hash(first, n)
        batch.move(first, n)
        lane.work.synchronize()
        lane.pacer.end(n * batch.payload_bytes)


def groups(count: int, most: int, *, pack: bool) -> list[tuple[int, int]]:
    """First payload and number of payloads of each group: small ones where nothing else is under way meanwhile."""
    sizes = list(_sizes(count, most))
    if not pack:
        sizes.reverse()
    found, first = [], 0
    for size in sizes:
        found.append((first, size))
        first += size
    return found


def _sizes(count: int, most: int) -> Iterator[int]:
    for limit in (_FIRST, _SECOND):
        if count:
            size = min(count, limit, most)
            yield size
            count -= size
    while count:
        size = min(count, most)
        yield size
        count -= size
