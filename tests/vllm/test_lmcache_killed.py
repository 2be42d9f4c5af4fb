"""LMCache killed during a store and during a load: vLLM's request completes with the right text, and nothing half-written is served."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.connector_support import (
    Reply,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    before_moves,
    connected,
    forget_local,
    reconnect,
)
from tests.vllm.engine import ROOT, Engine, EnginePool, prompt_tokens
from tests.vllm.gateway import START_S, GatewayProcess, wait_until

pytestmark = pytest.mark.timeout(600)

PROMPT = prompt_tokens(800, skip=300)
RESTORABLE = 768


class LMCacheGateway(GatewayProcess):
    """A gateway with LMCache, which is installed beside the gateway, not beside vLLM."""

    program = ROOT / ".venv" / "gateway" / "bin" / "kvgate"

    def storage_pid(self) -> int:
        """The storage process: the gateway's child that embeds LMCache."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        named = [int(pid) for pid in children if "kvgate_lmcache.storage_process" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(named) == 1, "one storage process a gateway"
        return named[0]

    def kill_storage(self) -> None:
        """kill -9 of LMCache alone."""
        os.kill(self.storage_pid(), signal.SIGKILL)

    def serves(self) -> bool:
        """Whether storage answers."""
        storage: dict[str, Any] = self.status()["storage"]
        return storage.get("state") == "serving"


@pytest.fixture(scope="module")
def process(engines: EnginePool) -> Iterator[LMCacheGateway]:
    """One gateway with the folder as L2."""
    engines.close()  # vLLM has one worker connector a process, so one engine at a time
    root = Path(tempfile.mkdtemp(prefix="kvg-"))  # not tmp_path: a unix socket's name has to be short
    made = LMCacheGateway(root, backend="lmcache")
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def engine(process: LMCacheGateway) -> Iterator[Engine]:
    """An engine that loads and stores within its steps, so that the kill falls into the middle of a move."""
    with connected(process, extra={"async_load": False, "async_save": False, "register_ms": 10_000}) as made:
        yield made


def ask(engine: Engine, salt: str) -> Reply:
    """Ask with vLLM's own prefix cache empty."""
    forget_local(engine)
    return ask_all(engine, [PROMPT], salt=salt)[0]


def settled(process: LMCacheGateway, engine: Engine) -> None:
    """Storage is back, the engine can bind, and nothing is held."""
    wait_until(process.serves, START_S, "LMCache did not come back")
    reconnect(engine)
    assert_nothing_held(process)


def test_lmcache_killed_during_a_load(engine: Engine, process: LMCacheGateway) -> None:
    """kill -9 of LMCache between the plan of a load and its end: the text is right, whether or not the copy still counted.

    The worker's own mapping outlives LMCache and its bytes are checked, so a copy that ends before the gateway has noticed is good.
    """
    truth = ask(engine, "load")
    with before_moves("unpack", lambda _moves: process.kill_storage()) as calls:
        reply = ask(engine, "load")
    assert calls
    assert reply.kvgate["restored_tokens"] in (0, RESTORABLE), "all of it or nothing"
    assert_same_or_tie(reply, truth, "LMCache killed during a load")
    settled(process, engine)
    after = ask(engine, "load")
    assert after.restored in (0, 256, 512, RESTORABLE), "whole chunks that had reached the folder, or none"
    assert_same_or_tie(after, truth, "after LMCache came back")


def test_lmcache_killed_during_a_store(engine: Engine, process: LMCacheGateway) -> None:
    """kill -9 of LMCache between reserve and commit: the text is right, and nothing half-written is there afterwards."""
    truth = ask(engine, "truth of the store")
    with before_moves("pack", lambda _moves: process.kill_storage()) as calls:
        reply = ask(engine, "store")
    assert calls
    assert_same_or_tie(reply, truth, "LMCache killed during a store")
    settled(process, engine)
    again = ask(engine, "store")
    assert again.restored == 0
    assert_same_or_tie(again, truth, "after LMCache came back")
    assert ask(engine, "store").restored == RESTORABLE
