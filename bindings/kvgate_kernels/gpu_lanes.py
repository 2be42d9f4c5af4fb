"""The way between pages and host memory: groups of payloads in device memory, one at work while the other is copied.

Each launch costs more than its own time where other processes use the device: it changes from their work to ours and back. So as
many payloads as have room go in one launch, and copy engines do all that takes long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

STAGE_BYTES = 512 << 20
"""Device memory for payloads on their way, in each direction: half of it for either group."""

_FIRST, _SECOND = 1, 4
"""Payloads of the groups at the end of a call where the copies can't begin, or aren't awaited, any earlier: a pack's first ones, an
unpack's last ones."""


@dataclass
class Stage:
    """Device room for one group on its way to or from host memory."""

    buffer: torch.Tensor
    ready: torch.cuda.Event
    done: torch.cuda.Event


class Lane:
    """One direction's streams and stages. Used by one call at a time: the bus is the limit, not the number of calls."""

    def __init__(self, device: torch.device, payload_bytes: int, stage_bytes: int) -> None:
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
        ready, done = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        return Stage(torch.empty(payloads * self._bytes, dtype=torch.uint8, device=self._device), ready, done)


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
