"""Gateway-driven transfer: the gateway moves chunks between engines' pages and its pool itself, in one process per device.

This module is the interface that the daemon codes against. ``TransferProcesses`` (``kvgate.transfer.supervisor``) implements it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvgate.storage.backend import PoolInfo
from kvgate.transfer.records import (
    LayerPages,
    MoveSpec,
    Packed,
    PageExport,
    PageHandle,
    PayloadShape,
    StorageExport,
    WorkerProcess,
)

__all__ = [
    "GateShut",
    "LayerPages",
    "MoveRefused",
    "MoveSpec",
    "Packed",
    "PageExport",
    "PageHandle",
    "PageMover",
    "PagesRefused",
    "PayloadShape",
    "SlotsInDoubt",
    "StorageExport",
    "TransferBusy",
    "TransferUnavailable",
    "WorkerProcess",
]


class TransferUnavailable(Exception):
    """No transfer process can do this now: it is starting, was lost, or was killed because it did not answer. Try again later.

    Where a move raises it, its slots and pages are touched no more: the process that might have is gone.
    """


class SlotsInDoubt(TransferUnavailable):
    """The process was killed and is not gone yet. It may still write: keep slots reserved and reads held until ``gone`` is done."""

    def __init__(self, gone: asyncio.Future[None]) -> None:
        super().__init__("the transfer process was killed and has not ended yet")
        self.gone = gone


class TransferBusy(TransferUnavailable):
    """Too many calls are under way for this device. Nothing was begun."""


class PagesRefused(Exception):
    """These pages are not attached: the export is not what it says, or nothing moves such pages. The text says why, without names."""


class MoveRefused(Exception):
    """A move names memory outside the pages or the pool, or a pool or handle that is no more. Nothing of the call was moved."""


class GateShut(MoveRefused):
    """The worker's gate does not let the load through: it was given up, or the worker opened a place in another gate than this one."""


class PageMover(Protocol):
    """Moves chunks between attached pages and the pool. All methods run on the daemon's event loop and never block it.

    A call that is cancelled still runs to its end before the cancellation goes on: when ``pack`` or ``unpack`` returns or raises
    (``SlotsInDoubt`` apart) nobody touches its slots and pages any more. A device's process that does not answer by a deadline
    is killed and started anew.
    """

    async def start(self) -> None:
        """End what an earlier daemon left behind. Processes start with the first attach of their device."""

    async def stop(self) -> None:
        """End all processes, after the moves under way. Idempotent."""

    def use_pool(self, pool: PoolInfo | None) -> None:
        """The live pool, or none: call it from the backend's ``on_generation``. Moves under way keep the pool that they began in."""

    def on_lost(self, callback: Callable[[str, int], None]) -> None:
        """Call ``callback(device, incarnation)`` on the loop when a process is lost: its handles are void, workers attach again."""

    async def attach(
        self, export: PageExport, payload: PayloadShape, worker: WorkerProcess, deadline_s: float, *, gate: int | None = None
    ) -> PageHandle:
        """Map a worker's pages. Starts the device's process if none runs (tens of seconds with torch and CUDA).

        gate: the worker's descriptor of its ``Gate`` (``kvgate.transfer.gate``); then nothing is unpacked that it has given up.
        Raises ``PagesRefused``, ``TransferUnavailable``.
        """
        ...

    async def pack(
        self,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        *,
        ready: bytes | None = None,
        digest: bool = True,
        paced: bool = True,
    ) -> list[Packed]:
        """Pages → slots, in the order of ``moves``. generation: of the pool that the slots are in.

        ready: handle of an interprocess CUDA event that the engine recorded behind its last write of these pages; the copy waits
        for it, until the deadline. paced: nobody waits for this: leave a busy GPU to its engine, and take longer.
        Raises ``MoveRefused`` before anything is written, and ``TransferUnavailable``.
        """
        ...

    async def unpack(
        self,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        *,
        ready: bytes | None = None,
        digest: bool = True,
        gate: int | None = None,
        paced: bool = False,
    ) -> list[bytes]:
        """Slots → pages; the digest of each payload as it was copied, for the caller to compare. Returns after the last write.

        ready: as for ``pack``, recorded behind the engine's last read of the old contents. gate: this load's place in the worker's
        gate, required where one was attached. paced: as for ``pack``: for loads that hold up no step of the engine.
        Raises like ``pack``, and ``GateShut`` where the worker has given the load up.
        """
        ...

    async def detach(self, handle: PageHandle) -> None:
        """Unmap the pages after the moves under way. Never raises for a handle that is gone; bounded by a deadline of its own."""

    def status(self) -> Mapping[str, Mapping[str, int | str]]:
        """For each device: state, pid, incarnation, handles, restarts, calls under way, moves and bytes each way, kernels in use."""
        ...
