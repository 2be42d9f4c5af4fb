"""Open writes, and the processes that may still be writing.

A slot whose reservation is open must go to nobody before its writer can no longer touch it. A closed connection does not prove
that, the end of the process does: so writes belong to the process behind the connection, watched through a pidfd.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvgate.daemon.errors import Refused
from kvgate.daemon.registry import Registration
from kvgate.storage.backend import Slot
from kvgate.storage.envelope import Components

MAX_OPEN_WRITES: Final = 16_384


@dataclass(frozen=True, slots=True)
class OpenWrite:
    """A reservation handed to a writer: everything its envelope will say but the payload digest."""

    reservation: int
    slot: Slot
    registration: Registration
    chunk: bytes
    rectangle: int
    address: bytes
    payload_bytes: int
    components: Components
    link: bytes
    session: int = 0  # that reserved it; 0: one that does not come back for it


@dataclass(eq=False)
class Writer:
    """One process with sessions here; or, with ``pid`` 0, the gateway itself, whose transfer process writes for one session."""

    pid: int
    pidfd: int
    sessions: int = 0
    exited: bool = False
    reserving: int = 0  # asked of storage, not answered yet
    writes: dict[int, OpenWrite] = field(default_factory=dict)


class Writers:
    """All processes that may write to the pool. ``on_exit`` gets the open writes of one that is gone."""

    def __init__(self, on_exit: Callable[[list[OpenWrite]], None]) -> None:
        self._on_exit = on_exit
        self._by_pid: dict[int, Writer] = {}
        self._inside: set[Writer] = set()

    @property
    def open_writes(self) -> int:
        """How many reservations are open."""
        return sum(len(writer.writes) for writer in (*self._by_pid.values(), *self._inside))

    def inside(self) -> Writer:
        """A writer inside the gateway: nobody's end closes its writes, its owner does, and then lets go of it by ``drop``."""
        writer = Writer(0, -1)
        self._inside.add(writer)
        return writer

    def drop(self, writer: Writer) -> None:
        """The inside writer reserves nothing more; it is forgotten with its last open write."""
        writer.sessions = -1
        if not writer.writes:
            self._inside.discard(writer)

    def join(self, pid: int) -> Writer:
        """A connection of process ``pid`` opened; raises ``Refused`` where the process can't be watched."""
        writer = self._by_pid.get(pid)
        if writer is None:
            try:
                pidfd = os.pidfd_open(pid)
            except (OSError, ValueError) as error:
                raise Refused(
                    "denied",
                    "the worker's process can't be watched from here",
                    remedy="run gateway and workers in one PID namespace (containers: share it)",
                ) from error
            writer = self._by_pid[pid] = Writer(pid, pidfd)
            asyncio.get_running_loop().add_reader(pidfd, self._exited, writer)
        writer.sessions += 1
        return writer

    def leave(self, writer: Writer) -> None:
        """A connection of the process closed. Its open writes stay until it commits them, aborts them, or ends."""
        writer.sessions -= 1
        if writer.sessions == 0 and not writer.writes:
            self._forget(writer)

    def add(self, writer: Writer, write: OpenWrite) -> None:
        """Note a reservation handed to ``writer``."""
        if writer.pidfd < 0:
            self._inside.add(writer)  # it may have been dropped while storage was asked
        writer.writes[write.reservation] = write

    @contextmanager
    def room(self, writer: Writer, count: int) -> Iterator[None]:
        """Keep room for ``count`` more writes while storage is asked; raises ``Refused`` where one process has too many."""
        if len(writer.writes) + writer.reserving + count > MAX_OPEN_WRITES:
            raise Refused("busy", "too many open writes", remedy="commit or abort some first")
        writer.reserving += count
        try:
            yield
        finally:
            writer.reserving -= count

    def require_open(self, writer: Writer, reservations: list[int]) -> None:
        """Raise ``Refused`` unless all are open writes of this process, each named once. Nothing is changed before."""
        if len(set(reservations)) != len(reservations) or not writer.writes.keys() >= set(reservations):
            raise Refused("denied", "not an open reservation of this process", field="reservation")

    def take(self, writer: Writer, reservation: int) -> OpenWrite:
        """Remove and return one of the writer's own open writes."""
        write = writer.writes.pop(reservation)
        if writer.sessions < 0 and not writer.writes:
            self._inside.discard(writer)
        return write

    def void(self) -> None:
        """The pool is gone, and all reservations in it."""
        for writer in list(self._inside):
            writer.writes.clear()
            if writer.sessions < 0:
                self._inside.discard(writer)
        for writer in list(self._by_pid.values()):
            writer.writes.clear()
            if writer.sessions == 0:
                self._forget(writer)

    def close(self) -> None:
        """Stop watching everybody."""
        for writer in list(self._by_pid.values()):
            self._forget(writer)

    def _exited(self, writer: Writer) -> None:
        writer.exited = True
        writes = list(writer.writes.values())
        writer.writes.clear()
        self._forget(writer)
        if writes:
            self._on_exit(writes)

    def _forget(self, writer: Writer) -> None:
        if self._by_pid.get(writer.pid) is writer:
            del self._by_pid[writer.pid]
            asyncio.get_running_loop().remove_reader(writer.pidfd)
            os.close(writer.pidfd)
