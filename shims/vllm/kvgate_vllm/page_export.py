"""Lending a worker's pages to the gateway: whether, how they are shared, and the attachment that comes of it."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kvgate.client import Call, GatewayClient, GatewayUnavailable
from kvgate.protocol.page_messages import AttachPages, PagesAttached
from kvgate.transfer.gate import Gate
from kvgate_kernels.export import ExportError, export_pages
from kvgate_vllm.registration import Uncacheable
from kvgate_vllm.state import LOGGER

if TYPE_CHECKING:
    import torch

    from kvgate.transfer.records import PageExport
    from kvgate_kernels import PageGeometry

T = TypeVar("T")

SAY_S: Final = 10.0
"""How often a wait that has no end of its own says so in the log."""


def lend(transfer: str, pages: PageGeometry, tensors: Sequence[torch.Tensor]) -> PageExport | None:
    """The pages as the gateway can map them; None where this worker copies itself. ``transfer`` is the setting of that name.

    Before the engine's first step: on a CPU this moves the pages. Raises ``Uncacheable`` where they have to be lent and can't be.
    """
    if transfer == "worker" or (transfer == "auto" and tensors[0].device.type != "cuda"):
        return None
    try:
        return export_pages(pages, tensors)
    except ExportError as error:
        if transfer == "gateway":
            raise Uncacheable(f'{error}; set "transfer" to "worker" or "auto"') from error
        LOGGER.warning("kvgate: %s; this worker copies by itself", error)
        return None


class Attachment:
    """Pages that the gateway has mapped, on one connection: their gate, and the process that writes through it."""

    def __init__(self, gate: Gate, mover: int) -> None:
        """``mover``: the process's id."""
        self.gate = gate
        # With the last load that still holds it: only then nobody asks about a place any more.
        weakref.finalize(self, gate.close)
        try:
            self._mover = os.pidfd_open(mover)
        except ProcessLookupError:
            self._mover = -1  # gone already
        else:
            weakref.finalize(self, os.close, self._mover)

    @classmethod
    async def make(cls, call: Call, export: PageExport, deadline_s: float) -> Attachment:
        """Have the gateway map the pages. Raises what ``call`` raises; ``GatewayUnavailable`` also for other process ids over there."""
        gate = Gate()
        try:
            reply = cast(PagesAttached, await call(AttachPages(export=export, gate=gate.descriptor), deadline_s))
            if reply.worker != os.getpid():
                raise GatewayUnavailable("the gateway is in another PID namespace: it can't move this worker's pages")
        except BaseException:
            gate.close()
            raise
        return cls(gate, reply.mover)

    def take_back(self, place: int) -> None:
        """Return once nothing is written through ``place`` any more, and nothing ever will.

        A copy under way ends with its move or with its process, both of which the gateway bounds; while even that does not come,
        the blocks stay with the load that they were lent to.
        """
        while not self.gate.close_place(place, SAY_S):
            LOGGER.error("kvgate: a load was given up, and its copy into the pages has not ended yet")
        if self.gate.cut_off(place):
            self._wait_gone()

    def _wait_gone(self) -> None:
        """The process died in a copy; what it had queued on a device ends with its last bit."""
        if self._mover < 0:
            return
        poll = select.poll()
        poll.register(self._mover, select.POLLIN)
        started = time.monotonic()
        while not poll.poll(SAY_S * 1000):
            LOGGER.error("kvgate: a transfer process is dying for %.0f s", time.monotonic() - started)


class Lending:
    """One worker's pages at its gateway: attached once on each connection, whoever asks for it.

    A second attachment beside one that is in use would leave the gateway with another gate than that of the loads under way.
    Thread-safe.
    """

    def __init__(self, client: GatewayClient, export: PageExport) -> None:
        self._client = client
        self._export = export
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._connection = 0
        self.closed = False
        """Whether other pages have taken the place of these, on the same connection."""
        self._making = asyncio.Lock()

    @property
    def attachment(self) -> Attachment | None:
        """The one that the gateway has on the present connection, as far as is known."""
        with self._lock:
            return self._attachment if self._connection == self._client.connection else None

    async def attach(self, call: Call, deadline_s: float) -> Attachment:
        """The present connection's attachment, made where there is none. On the client's loop. Raises as ``Attachment.make``."""
        async with self._making:
            if self.closed:
                raise GatewayUnavailable("other pages have taken the place of these")
            found, connection = self.attachment, self._client.connection
            if found is not None:
                return found
            with self._lock:
                # Before the gateway hears of another gate: nothing is sent any more for a place of the one before.
                self._attachment = None
            made = await Attachment.make(call, self._export, deadline_s)
            with self._lock:
                if not self.closed:
                    self._attachment, self._connection = made, connection
            return made

    def send(self, attachment: Attachment, send: Callable[[], T]) -> T | None:
        """``send()``, which must not wait, if the gateway still has this attachment; None, and nothing was sent, if not."""
        with self._lock:
            if attachment is not self._attachment or self._connection != self._client.connection:
                return None
            return send()

    def close(self) -> None:
        """Nothing is asked for these pages any more: others are attached in their place."""
        with self._lock:
            self.closed, self._attachment = True, None

    def lost(self, attachment: Attachment) -> bool:
        """The gateway has it no longer, or is to have it no longer. False where that was known."""
        with self._lock:
            if self._attachment is not attachment:
                return False
            self._attachment = None
            return True
