"""What differs between a GPU and a CPU: threads' contexts, page-locking, and engines' events."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from kvgate_kernels import driver

_MAX_EVENTS = 32
"""Of one worker, which records a few again and again."""


class EventRefused(Exception):
    """The engine's event cannot be opened."""


class Event(Protocol):
    """A place in an engine's stream."""

    def query(self) -> bool:
        """Whether everything before it is done. Never waits."""


class EngineEvents:
    """One worker's events by their handles, opened once and kept. They go with its pages: the next process of its number may make the
    same handles, and those name events of its own.
    """

    def __init__(self, open_event: Callable[[bytes], Event]) -> None:
        self._open = open_event
        self._lock = threading.Lock()
        self._events: OrderedDict[bytes, Event] = OrderedDict()

    def passed(self, handle: bytes) -> bool:
        """Whether the engine has come to this event, as it was recorded last. Raises ``EventRefused``."""
        with self._lock:
            event = self._events.pop(handle, None) or self._open(handle)
            while len(self._events) >= _MAX_EVENTS:
                self._events.popitem(last=False)
            self._events[handle] = event
        try:
            return event.query()
        except RuntimeError as error:
            raise EventRefused("the engine's event cannot be waited for") from error

    def close(self) -> None:
        """Let all of them go."""
        with self._lock:
            self._events.clear()


class DeviceKind(Protocol):
    """One device, as the engine of this process sees it."""

    torch_device: torch.device
    populate: bool

    def enter(self) -> None:
        """Make the device current on this thread, once."""

    def open_event(self, handle: bytes) -> Event:
        """Another process's event. Raises ``EventRefused``."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """What is queued inside goes on this thread's own stream."""

    def lock_memory(self, memory: memoryview) -> Callable[[], None]:
        """Page-lock host memory; returns what undoes it."""


class CpuDevice:
    """Host memory: nothing to lock, and the engine says when it is done before it asks."""

    torch_device = torch.device("cpu")
    populate = True

    def enter(self) -> None:
        """See ``DeviceKind``."""

    def open_event(self, handle: bytes) -> Event:
        """See ``DeviceKind``."""
        del handle
        raise EventRefused("pages on a CPU have no events")

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See ``DeviceKind``."""
        yield

    def lock_memory(self, memory: memoryview) -> Callable[[], None]:
        """See ``DeviceKind``."""
        del memory
        return lambda: None


class CudaDevice:
    """The one GPU that this process sees."""

    populate = False

    def __init__(self) -> None:
        if torch.cuda.device_count() != 1:
            raise RuntimeError(f"the GPU is not to be seen from here ({torch.cuda.device_count()} devices)")
        self.torch_device = torch.device("cuda", 0)
        self._local = threading.local()
        torch.zeros(1, device=self.torch_device)
        self._context = driver.current_context()
        self.enter()

    def enter(self) -> None:
        """See ``DeviceKind``. Each thread gets a stream of its own."""
        torch.cuda.set_device(self.torch_device)
        driver.enter(self._context)
        self._local.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def open_event(self, handle: bytes) -> Event:
        """See ``DeviceKind``."""
        try:
            event: Event = torch.cuda.Event.from_ipc_handle(self.torch_device, handle)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise EventRefused("the engine's event cannot be opened") from error
        return event

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See ``DeviceKind``."""
        with torch.cuda.stream(self._local.stream):
            yield

    def lock_memory(self, memory: memoryview) -> Callable[[], None]:
        """See ``DeviceKind``."""
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        driver.lock_pages(address, memory.nbytes)
        return lambda: driver.unlock_pages(address)
