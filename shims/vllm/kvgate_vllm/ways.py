"""How one worker's pages move: lent to the gateway where that is wanted and possible, else copied by the worker itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvgate.client import Call, GatewayClient, GatewayRefused, GatewayUnavailable, PoolMappings
from kvgate.protocol.messages import Welcome
from kvgate_kernels import Packer
from kvgate_vllm.page_export import Lending, lend
from kvgate_vllm.page_transfers import GatewayTransfers
from kvgate_vllm.registration import WorkerForm
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import LOGGER
from kvgate_vllm.step_order import Mark, StepOrder
from kvgate_vllm.transfer import Deadlines, HeldWrites, Packers, Transfers

if TYPE_CHECKING:
    import torch

ATTACH_PAUSE_S: Final = 0.5
TRANSIENT: Final = ("unavailable", "busy", "deadline")
"""Codes of refusals that may be gone at the next attempt."""

AnyTransfers = Transfers | GatewayTransfers


class Ways:
    """Made with the worker; ``take`` gives it the pages before the first step."""

    def __init__(self, client: GatewayClient, settings: ConnectorSettings) -> None:
        self._client = client
        self._settings = settings
        self._pools = PoolMappings(prepare=True)
        self._held = HeldWrites()
        self._packers: dict[tuple[int, str], Packers] = {}
        self._tensors: Sequence[torch.Tensor] = ()
        self._order: StepOrder | None = None
        self._lending: Lending | None = None
        self.attaching = False
        """Whether the gateway is being asked to map the pages right now."""
        self.who_copies = ""
        """In words for the log, of the latest ``transfers``."""

    @property
    def must_lend(self) -> bool:
        """Whether this worker may not copy by itself."""
        return self._settings.transfer == "gateway"

    def take(self, form: WorkerForm, tensors: Sequence[torch.Tensor]) -> None:
        """The pages exist. Raises ``Uncacheable`` where they have to be lent and can't be."""
        export = lend(self._settings.transfer, form.pages, tensors)
        if self._lending is not None:
            self._lending.close()
        self._lending = None if export is None else Lending(self._client, export)
        self._tensors = tensors
        self._order = StepOrder(tensors[0].device, shared=export is not None)

    def check(self, form: WorkerForm, welcome: Welcome) -> None:
        """Before a gateway hears of pages that this worker copies: raises ``GeometryError`` where nothing can move them."""
        if self._lending is None:
            self._packers_for(form, welcome)

    def held_writes(self) -> tuple[int, ...]:
        """Reservations that this worker may still write to."""
        return self._held.all()

    async def transfers(self, call: Call, form: WorkerForm, welcome: Welcome) -> AnyTransfers:
        """How pages move on the present connection. Raises ``GeometryError``, and where it must lend what ``call`` raises."""
        settings, order = self._settings, self._order
        assert order is not None, "the pages were taken"
        deadlines = Deadlines(settings.load_ms / 1000, settings.store_ms / 1000)
        if self._lending is not None:
            self.attaching = True
            try:
                await self._attach(call, self._lending)
            except (GatewayRefused, GatewayUnavailable) as error:
                if self.must_lend:
                    raise
                LOGGER.warning("kvgate: the gateway does not move our pages (%s); this worker copies by itself", error)
            else:
                self.who_copies = "the gateway copies"
                payload_bytes, attach_s = form.payload(welcome).payload_bytes, settings.attach_ms / 1000
                return GatewayTransfers(self._client, self._lending, payload_bytes, deadlines, attach_s)
            finally:
                self.attaching = False
        packers = self._packers_for(form, welcome)
        info = packers.any.describe()
        self.who_copies = f"this worker copies, by {info.name} ({info.reason}), {info.threads} threads"
        return Transfers(self._client, self._pools, packers, order, deadlines, self._held)

    def mark(self) -> Mark | None:
        """Behind what the step has queued so far. On the step thread."""
        return self._order.mark() if self._order is not None else None

    def close(self) -> None:
        """Forget the pools and end the kernels' threads, after the copies under way."""
        self._pools.close()
        for packers in self._packers.values():
            packers.close()

    async def _attach(self, call: Call, lending: Lending) -> None:
        """Within the time for it: a transfer process may have to start first. One attempt where there is another way."""
        until = time.monotonic() + self._settings.attach_ms / 1000
        while True:
            left_s = max(0.001, until - time.monotonic())
            try:
                await lending.attach(call, left_s)
                return
            except GatewayRefused as error:
                last = not self.must_lend or left_s <= ATTACH_PAUSE_S
                if last or error.code not in TRANSIENT:
                    raise
            await asyncio.sleep(ATTACH_PAUSE_S)

    def _packers_for(self, form: WorkerForm, welcome: Welcome) -> Packers:
        key = (welcome.chunk_tokens, welcome.codec)
        packers = self._packers.get(key)
        if packers is None:
            payload, tensors = form.payload(welcome), self._tensors
            packers = self._packers[key] = Packers(
                lambda pool: Packer(form.pages, payload, tensors, pool=pool), locks_pool=tensors[0].device.type == "cuda"
            )
        return packers
