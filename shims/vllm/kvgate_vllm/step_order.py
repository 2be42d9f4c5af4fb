"""Order between the engine's steps and copies: what a step has queued on its device comes first.

A step thread queues work on a GPU and goes on. ``StepOrder.mark`` remembers, there, how far it has come; a copy, on another thread or
in another process, begins behind that mark. On a CPU a step is through when it returns, and there is nothing to mark.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

RING_EVENTS: Final = 8
"""Events in use at a time. One that is recorded again while a copy still waits for it only makes that copy wait a little longer."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the step thread's stream. ``handle``: by which another process finds the event; empty where it is not shared."""

    event: Any
    handle: bytes


class StepOrder:
    """One worker's marks."""

    def __init__(self, device: torch.device, *, shared: bool) -> None:
        """``shared``: the marks are for another process too."""
        self._device = device
        self._shared = shared
        self._ring: list[Mark] = []
        self._next = 0
        self._streams = threading.local()

    def mark(self) -> Mark | None:
        """Behind everything that this thread has queued so far; None on a CPU. On the step thread."""
        if self._device.type != "cuda":
            return None
        import torch

        with torch.cuda.device(self._device):
            if len(self._ring) < RING_EVENTS:
                event: Any = torch.cuda.Event(interprocess=self._shared)  # type: ignore[no-untyped-call]
                self._ring.append(Mark(event, bytes(event.ipc_handle()) if self._shared else b""))
            mark = self._ring[self._next % len(self._ring)]
            self._next = (self._next + 1) % RING_EVENTS
            mark.event.record(torch.cuda.current_stream(self._device))
        return mark

    @contextmanager
    def behind(self, mark: Mark | None) -> Iterator[None]:
        """What the block queues on the device, on a stream of this thread's own, runs behind ``mark``."""
        if mark is None:
            yield
            return
        import torch

        stream = getattr(self._streams, "own", None)
        if stream is None:
            stream = self._streams.own = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(mark.event)
            yield
