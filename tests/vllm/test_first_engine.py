"""The first engine of a fresh gateway must be cached from its first request: its start waits while its pages are being attached."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvgate.contract.record import Record
from kvgate.protocol.messages import HANDLE_BYTES, Done, Registered, RegisterWorker
from kvgate.protocol.page_messages import AttachPages, KeepWrites, PagesAttached
from kvgate_kernels import PageGeometry, PageLayout, PayloadGeometry
from kvgate_vllm import worker_side
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import EngineState
from kvgate_vllm.worker_side import WorkerSide
from tests.client.server import WELCOME, ScriptedGateway
from tests.daemon import makers

GEOMETRY = PageGeometry(PageLayout.CPU_VEC, layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="bfloat16")
LAYER = "layers.0"
HANDLE = bytes(HANDLE_BYTES)
REGISTER_S = 1.0
WAIT_S = 20.0


class Form:
    """What a worker knows of itself, without an engine that it would be read from."""

    pages = GEOMETRY
    geometry = SimpleNamespace(groups=[SimpleNamespace(layer_names=[LAYER])])

    def report(self, *_: object) -> RegisterWorker:
        """Some engine."""
        return makers.report()

    def payload(self, *_: object) -> PayloadGeometry:
        """That of its pages."""
        return PayloadGeometry.of(GEOMETRY, 256)


@contextmanager
def worker(path: Path, answer: Callable[[], Record | None], monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerSide]:
    """A worker whose gateway registers it at once, and attaches its pages as ``answer`` says."""

    def script(message: Record) -> Record | None:
        if isinstance(message, RegisterWorker):
            return Registered(handle=HANDLE, sealed=True, missing_ranks=0)
        return answer() if isinstance(message, AttachPages) else Done() if isinstance(message, KeepWrites) else None

    with answered(path, script, monkeypatch) as (made, _):
        yield made


@contextmanager
def answered(
    path: Path, script: Callable[[Record], Record | None], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Iterator[tuple[WorkerSide, ScriptedGateway]]:
    """A worker, and the gateway that answers it as ``script`` says."""
    monkeypatch.setattr(worker_side, "describe_engine", lambda *_: None)
    monkeypatch.setattr(worker_side, "worker_form", lambda *_: Form())
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="engine"))
    values: dict[str, Any] = {"transfer": "gateway", "register_ms": 1000 * REGISTER_S}
    settings = ConnectorSettings(endpoint=str(path / "g.sock"), **(values | changes))
    with ScriptedGateway(path / "g.sock", script, dataclasses.replace(WELCOME, wire=2)) as gateway:
        made = WorkerSide(config, None, EngineState(), settings)
        assert made._client.wait_connected(WAIT_S)
        yield made, gateway
        made._client.close()


def pages() -> dict[str, torch.Tensor]:
    """The engine's."""
    return {LAYER: torch.zeros(64, 1, 16, 16, dtype=torch.bfloat16)}


def test_the_start_waits_for_a_transfer_process_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for a gateway as such: when the engine is up, it has its registration, and its scheduler is told so."""
    asked, serves = threading.Event(), threading.Event()

    def answer() -> Record | None:
        asked.set()
        assert serves.wait(WAIT_S)
        return PagesAttached(worker=os.getpid(), mover=os.getpid())

    with worker(tmp_path, answer, monkeypatch) as made:
        handles: list[bytes | None] = []

        def begin() -> None:
            made.register_kv_caches(pages())
            handles.append(made.handshake())

        start = threading.Thread(target=begin)
        start.start()
        assert asked.wait(WAIT_S)
        time.sleep(REGISTER_S + 0.2)  # the gateway's own time is over
        assert start.is_alive()
        serves.set()
        start.join(WAIT_S)
        assert handles == [HANDLE]


def test_a_gateway_that_attaches_nothing_does_not_hold_the_engine_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has an end: the engine starts, computes, and is cached once its pages are attached."""
    monkeypatch.setattr(worker_side, "ATTACH_START_S", 0.1)
    with worker(tmp_path, lambda: None, monkeypatch) as made:
        made.register_kv_caches(pages())
        assert made.handshake() is None


def test_an_engine_does_not_wait_longer_for_a_gateway_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only pages that are being attached are worth more than ``register_ms``."""
    waits: list[float | None] = []

    def wait(timeout_s: float | None = None) -> bool:
        waits.append(timeout_s)
        return False

    with worker(tmp_path, lambda: None, monkeypatch) as made:
        made._client.close()
        monkeypatch.setattr(made._registered, "wait", wait)
        made.register_kv_caches(pages())
    assert waits == [REGISTER_S]


@pytest.mark.parametrize(("transfer", "who"), [("gateway", "the gateway copies"), ("worker", "this worker copies, by ")])
def test_the_log_tells_once_that_it_works_and_who_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: str, who: str
) -> None:
    """One line when a worker is registered and its pages attached, and one when a gateway that was lost is back."""

    def script(message: Record) -> Record:
        if isinstance(message, RegisterWorker):
            return Registered(handle=HANDLE, sealed=True, missing_ranks=0)
        return PagesAttached(worker=os.getpid(), mover=os.getpid()) if isinstance(message, AttachPages) else Done()

    said: list[str] = []

    def lines(count: int) -> list[str]:
        until = time.monotonic() + WAIT_S
        while True:
            found = [text for text in said if "registered; " in text]
            if len(found) >= count or time.monotonic() > until:
                return found
            time.sleep(0.02)

    # Not caplog: once an engine has started in this process, vLLM's logger has its own level, handlers and say.
    monkeypatch.setattr(worker_side.LOGGER, "info", lambda text, *values: said.append(text % values))
    with answered(tmp_path, script, monkeypatch, transfer=transfer) as (made, gateway):
        made.register_kv_caches(pages())
        (first,) = lines(1)
        assert first.startswith(f"kvgate: registered; {who}")
        gateway.drop_connections()
        again = lines(2)[1:]
        assert [line.startswith(f"kvgate: the gateway is back: registered; {who}") for line in again] == [True]
