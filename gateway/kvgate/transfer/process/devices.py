"""What differs between a GPU and a CPU: threads' contexts, page-locking, and waiting for the engine."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from kvgate_kernels import driver

_MAX_EVENTS = 64
_POLL_S = 2e-4


class EventRefused(Exception):
    """The engine's event cannot be opened."""


class EngineLate(Exception):
    """The engine's event has not come in time. Nothing was queued."""


class DeviceKind(Protocol):
    """One device, as the engine of this process sees it."""

    torch_device: torch.device
    populate: bool

    def enter(self) -> None:
        """Make the device current on this thread, once."""

    @contextmanager
    def ordered(self, ready: bytes | None, until: float) -> Iterator[None]:
        """What is done inside comes after the engine's event, which may come ``until`` (``time.monotonic()``).

        Raises ``EventRefused``, ``EngineLate``.
        """

    def lock_memory(self, memory: memoryview) -> Callable[[], None]:
        """Page-lock host memory; returns what undoes it."""


class CpuDevice:
    """Host memory: nothing to lock, and the engine says when it is done before it asks."""

    torch_device = torch.device("cpu")
    populate = True

    def enter(self) -> None:
        """See ``DeviceKind``."""

    @contextmanager
    def ordered(self, ready: bytes | None, until: float) -> Iterator[None]:
        """See ``DeviceKind``."""
        del until
        if ready is not None:
            raise EventRefused("pages on a CPU have no events")
        yield

    def lock_memory(self, memory: memoryview) -> Callable[[], None]:
        """See ``DeviceKind``."""
        del memory
        return lambda: None


class CudaDevice:
    """The one GPU that this process sees. Engines' events are opened once and kept: they record them again and again."""

    populate = False

    def __init__(self) -> None:
        if torch.cuda.device_count() != 1:
            raise RuntimeError(f"the GPU is not to be seen from here ({torch.cuda.device_count()} devices)")
        self.torch_device = torch.device("cuda", 0)
        self._local = threading.local()
        self._events: OrderedDict[bytes, torch.cuda.Event] = OrderedDict()
        self._events_lock = threading.Lock()
        torch.zeros(1, device=self.torch_device)
        self._context = driver.current_context()
        self.enter()

    def enter(self) -> None:
        """See ``DeviceKind``. Each thread gets a stream of its own."""
        torch.cuda.set_device(self.torch_device)
        driver.enter(self._context)
        self._local.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @contextmanager
    def ordered(self, ready: bytes | None, until: float) -> Iterator[None]:
        """See ``DeviceKind``."""
        stream = self._local.stream
        if ready is not None:
            try:
                event = self._event(ready)
                # Not in the stream alone: an engine that hangs must not hang us, and a thread that waits there takes a core.
                while not event.query():  # type: ignore[no-untyped-call]
                    if time.monotonic() > until:
                        raise EngineLate("the engine was not done with these pages in time")
                    time.sleep(_POLL_S)
                event.wait(stream)
            except RuntimeError as error:
                raise EventRefused("the engine's event cannot be waited for") from error
        with torch.cuda.stream(stream):
            yield

    def lock_memory(self, memory: memoryview) -> Callable[[], None]:
        """See ``DeviceKind``."""
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        driver.lock_pages(address, memory.nbytes)
        return lambda: driver.unlock_pages(address)

    def _event(self, handle: bytes) -> torch.cuda.Event:
        with self._events_lock:
            event = self._events.pop(handle, None)
            if event is None:
                event = torch.cuda.Event.from_ipc_handle(self.torch_device, handle)  # type: ignore[no-untyped-call]
                while len(self._events) >= _MAX_EVENTS:
                    self._events.popitem(last=False)
            self._events[handle] = event
        return event
