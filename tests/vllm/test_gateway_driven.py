"""An engine whose pages the gateway moves: the worker never sees the pool, and whatever dies or hangs, the text is right."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.connector_support import (
    Reply,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    connected,
    forget_local,
    reconnect,
)
from tests.vllm.engine import Engine, EnginePool, prompt_tokens
from tests.vllm.gateway import GatewayProcess, gateway, wait_until

pytestmark = pytest.mark.timeout(600)

PROMPT = prompt_tokens(800, skip=300)
RESTORABLE = 768
EXTRA: dict[str, Any] = {
    "transfer": "gateway",
    "bind_ms": 1000,
    "acquire_ms": 2000,
    "load_ms": 2000,
    "store_ms": 2000,
    "register_ms": 60_000,
    "drain_ms": 500,
}
BLOCKS = 256


@pytest.fixture(scope="module")
def gateway_process(engines: EnginePool) -> Iterator[GatewayProcess]:
    """A gateway whose pool is its own."""
    engines.close()  # vLLM has one worker connector a process, so one engine at a time
    with gateway(transfer="gateway") as process:
        yield process


@pytest.fixture(scope="module")
def stored(gateway_process: GatewayProcess) -> Reply:
    """What a first engine answered and stored, before it ended."""
    with engine_at(gateway_process) as first:
        return ask(first, "kept")


@pytest.fixture(scope="module")
def engine(gateway_process: GatewayProcess, stored: Reply) -> Iterator[Engine]:
    """A second engine, started after the first had gone."""
    with engine_at(gateway_process) as made:
        yield made


@pytest.fixture
def truth(engine: Engine) -> Reply:
    """What the engine itself computes."""
    return ask_all(engine, [PROMPT], salt="truth", skip_reading_prefix_cache=True)[0]


@contextmanager
def engine_at(process: GatewayProcess) -> Iterator[Engine]:
    """An engine that lends its pages."""
    with connected(process, extra=EXTRA, num_gpu_blocks_override=BLOCKS) as made:
        yield made


def ask(engine: Engine, salt: str) -> Reply:
    """Ask with vLLM's own prefix cache empty."""
    forget_local(engine)
    return ask_all(engine, [PROMPT], salt=salt)[0]


def mover(process: GatewayProcess) -> int:
    """The transfer process's id; 0 while none serves."""
    return int(process.status()["transfer"].get("cpu", {}).get("pid", 0))


@contextmanager
def when_loading(process: GatewayProcess, pid: int, action: Callable[[], None]) -> Iterator[list[bool]]:
    """Stop process ``pid``; once a load waits for it, do ``action``. Gives a list that says whether that came to pass."""
    os.kill(pid, signal.SIGSTOP)
    done: list[bool] = []

    def act() -> None:
        wait_until(lambda: process.status()["open_loads"] > 0, 30, "no load began")
        action()
        done.append(True)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield done
    finally:
        thread.join(60)


def restores(engine: Engine, salt: str) -> None:
    """Ask until it is stored and restored: a lost transfer process has to start again first."""
    wait_until(lambda: ask(engine, salt).restored == RESTORABLE, 60, "nothing is restored")


def test_what_one_engine_stored_the_next_restores(engine: Engine, gateway_process: GatewayProcess, stored: Reply) -> None:
    """Stored through one engine's pages, restored into those of another, with the same text; the worker maps no pool."""
    assert stored.restored == 0
    again = ask(engine, "kept")
    assert again.restored == RESTORABLE
    assert_same_or_tie(again, stored, "restored by the gateway")
    moved = gateway_process.status()["transfer"]["cpu"]
    assert moved["packs"] > 0
    assert moved["unpacks"] > 0
    assert "kvgate_pool" not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert_nothing_held(gateway_process)


def test_killed_during_a_load(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """kill -9 of the transfer process in the middle of a load: the tokens are computed, and the next one serves again."""
    restores(engine, "killed in load")
    pid = mover(gateway_process)
    with when_loading(gateway_process, pid, lambda: os.kill(pid, signal.SIGKILL)) as done:
        reply = ask(engine, "killed in load")
    assert done
    assert reply.kvgate.items() >= {"restored_tokens": 0, "outcome": "load error"}.items()
    assert_same_or_tie(reply, truth, "killed during a load")
    restores(engine, "killed in load")
    assert_nothing_held(gateway_process)


@pytest.mark.slow
def test_killed_during_a_store(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """kill -9 in the middle of a store: nothing half-written is there, and no slot stays taken."""
    pid = mover(gateway_process)
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    timer.start()
    reply = ask(engine, "killed in store")
    timer.join()
    assert_same_or_tie(reply, truth, "killed during a store")
    assert_nothing_held(gateway_process)
    restores(engine, "killed in store")


def test_a_load_that_was_given_up_writes_nothing_later(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """A transfer process that hangs costs the load's deadline; when it goes on, pages that were computed meanwhile stay as they are."""
    restores(engine, "late")
    pid = mover(gateway_process)
    os.kill(pid, signal.SIGSTOP)
    reply = ask(engine, "late")
    assert reply.kvgate.items() >= {"restored_tokens": 0, "outcome": "load error"}.items()
    assert_same_or_tie(reply, truth, "while it hung")
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: gateway_process.status()["open_loads"] == 0, 30, "the load did not end")
    local = ask_all(engine, [PROMPT], salt="late")[0]
    assert local.cached >= RESTORABLE
    assert_same_or_tie(local, reply, "from vLLM's own cache, after the late load")
    assert_nothing_held(gateway_process)


@pytest.mark.slow
def test_a_gateway_that_hangs_in_a_load(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """The daemon stops in the middle of a load while the process goes on: the load is given up, and nothing is written later."""
    restores(engine, "daemon hangs")
    pid = mover(gateway_process)
    with when_loading(gateway_process, pid, lambda: gateway_process.pause()) as done:
        reply = ask(engine, "daemon hangs")
    assert done
    os.kill(pid, signal.SIGCONT)  # it goes on with the load that nobody waits for
    gateway_process.resume()
    assert reply.restored == 0
    assert_same_or_tie(reply, truth, "while the daemon hung")
    local = ask_all(engine, [PROMPT], salt="daemon hangs")[0]
    assert_same_or_tie(local, reply, "from vLLM's own cache, after the daemon went on")
    restores(engine, "daemon hangs")
    assert_nothing_held(gateway_process)


def test_a_new_gateway_gets_the_pages(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """After a kill -9 of the gateway the worker registers, lends its pages again, and chunks are stored and restored again."""
    gateway_process.kill()
    alone = ask(engine, "new gateway")
    assert alone.restored == 0
    assert_same_or_tie(alone, truth, "without a gateway")
    gateway_process.start()
    reconnect(engine)
    restores(engine, "new gateway")
    assert_same_or_tie(ask(engine, "new gateway"), truth, "through the new gateway")
    assert_nothing_held(gateway_process)
