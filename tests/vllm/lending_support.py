"""A lending worker's transfers at a scripted gateway, and what that heard of them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvgate.client import GatewayClient
from kvgate.contract.record import Record
from kvgate.protocol.messages import Failure
from kvgate.protocol.page_messages import (
    AttachPages,
    CommitPages,
    PagesAttached,
    PagesPacked,
    PagesStored,
    StorePages,
)
from kvgate_kernels import PageGeometry, PageLayout
from kvgate_kernels.export import export_pages
from kvgate_vllm.metadata import LoadOp, StoreOp
from kvgate_vllm.page_export import Lending
from kvgate_vllm.page_transfers import PIECE_BYTES, GatewayTransfers
from kvgate_vllm.transfer import Deadlines
from tests.client.server import WELCOME, ScriptedGateway

GEOMETRY = PageGeometry(PageLayout.CPU_VEC, layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="bfloat16")

LEASE = b"secret lease".ljust(32, b".")

ATTACHED = PagesAttached(worker=os.getpid(), mover=os.getpid())

LOST = Failure(code="unavailable", field="pages", problem="scripted", remedy="none")

REFUSED = Failure(code="denied", field="-", problem="scripted", remedy="none")

WAIT_S = 10.0

Script = Callable[[Record], "Record | None"]


class Lender:
    """One worker's transfers, and what its gateway heard of them."""

    def __init__(self, gateway: ScriptedGateway, transfers: GatewayTransfers) -> None:
        self.gateway = gateway
        self.transfers = transfers

    def heard(self, kind: type[Record]) -> list[Any]:
        """All messages of that kind."""
        return [message for message in self.gateway.received if type(message) is kind]

    def wait_for(self, kind: type[Record], count: int) -> list[Any]:
        """Wait until so many have come."""
        until = time.monotonic() + WAIT_S
        while len(self.heard(kind)) < count:
            assert time.monotonic() < until, f"{kind.__name__} never came"
            time.sleep(0.005)
        return self.heard(kind)


def pages() -> list[torch.Tensor]:
    """One layer's."""
    return [torch.zeros(64, 1, 16, 16, dtype=torch.bfloat16)]


@contextmanager
def lending(
    path: Path, script: Script, *, payload_bytes: int = PIECE_BYTES, load_s: float = WAIT_S, store_s: float = WAIT_S
) -> Iterator[Lender]:
    """Transfers whose gateway answers as ``script`` says; by default a message moves one chunk."""

    def answer(message: Record) -> Record | None:
        replied = script(message)
        return ATTACHED if replied is None and isinstance(message, AttachPages) else replied

    export = export_pages(GEOMETRY, pages())
    welcome = dataclasses.replace(WELCOME, wire=2)
    with ScriptedGateway(path / "g.sock", answer, welcome) as gateway:
        client = GatewayClient(str(path / "g.sock"), "worker")
        client.start()
        assert client.wait_connected(WAIT_S)
        lending = Lending(client, export)
        client.spawn(lending.attach(client.request, WAIT_S)).result(WAIT_S)
        yield Lender(gateway, GatewayTransfers(client, lending, payload_bytes, Deadlines(load_s, store_s), attach_s=WAIT_S))
        client.close()


def load_op(chunks: int = 2, skip_tokens: int = 32) -> LoadOp:
    """A load from chunk 1 on, 16 blocks a chunk."""
    return LoadOp(7, "r", LEASE, 1, 1 + chunks, tuple(range(16 * chunks)), None, skip_tokens, asynchronous=True)


def store_op(chunks: int = 2) -> StoreOp:
    """A store from chunk 0 on."""
    return StoreOp(8, "r", LEASE, 0, chunks, tuple(range(16 * chunks)), None)


def store_script(message: Record) -> Record | None:
    """Pack and keep everything."""
    if isinstance(message, StorePages):
        return PagesPacked(ticket=message.chunks[0] + 1, chunks=message.chunks)
    return PagesStored(visible=1) if isinstance(message, CommitPages) else None
