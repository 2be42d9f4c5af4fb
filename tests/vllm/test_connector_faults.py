"""Whatever happens to the gateway, at any moment: the request completes with the right text, and nothing stays held."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.vllm.connector_support import (
    CHUNK,
    Reply,
    add_requests,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    before_moves,
    connected,
    finish_requests,
    forget_local,
    free_blocks,
    reconnect,
    scheduled_asynchronously,
    settle,
)
from tests.vllm.engine import Engine, prompt_tokens
from tests.vllm.gateway import GatewayProcess, wait_until

pytestmark = pytest.mark.timeout(600)

PROMPT = prompt_tokens(800, skip=300)
RESTORABLE = 768
QUICK: dict[str, Any] = {
    "bind_ms": 100,
    "acquire_ms": 300,
    "load_ms": 400,
    "store_ms": 400,
    "register_ms": 5000,
    "drain_ms": 500,
}
WAYS = (
    pytest.param("background", marks=pytest.mark.slow),
    pytest.param("in step"),
    pytest.param("background, scheduled ahead"),
)


@pytest.fixture(scope="module", params=WAYS)
def engine(gateway_process: GatewayProcess, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine for each way to load and store, with short deadlines."""
    way = request.param
    background = way != "in step"
    with (
        scheduled_asynchronously(way.endswith("ahead")),
        connected(gateway_process, extra={**QUICK, "async_load": background, "async_save": background}) as made,
    ):
        yield made


@pytest.fixture
def truth(engine: Engine) -> Reply:
    """What the engine itself computes."""
    return ask_all(engine, [PROMPT], salt="truth", skip_reading_prefix_cache=True)[0]


@pytest.fixture(autouse=True)
def whole_again(gateway_process: GatewayProcess, engine: Engine) -> Iterator[None]:
    """Each test begins and ends with a gateway that answers, an engine registered there, and nothing held."""
    reconnect(engine)
    yield
    gateway_process.ensure()
    reconnect(engine)
    assert_nothing_held(gateway_process)


def ask(engine: Engine, salt: str) -> Reply:
    """Ask with vLLM's own prefix cache empty."""
    forget_local(engine)
    return ask_all(engine, [PROMPT], salt=salt)[0]


def test_killed_before_the_request(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """Without a gateway a request is computed; once it is back, chunks are stored and restored again."""
    gateway_process.kill()
    alone = ask(engine, "killed before")
    assert alone.restored == 0
    assert_same_or_tie(alone, truth, "without a gateway")
    gateway_process.start()
    reconnect(engine)
    assert ask(engine, "killed before").restored == 0
    assert ask(engine, "killed before").restored == RESTORABLE


def test_killed_during_a_load(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """kill -9 between the gateway's plan and the end of the copy: the tokens are computed."""
    assert ask(engine, "killed in load").restored == 0
    with before_moves("unpack", lambda _moves: gateway_process.kill()) as calls:
        reply = ask(engine, "killed in load")
    assert calls
    assert reply.kvgate.items() >= {"restored_tokens": 0, "outcome": "load error"}.items()
    assert_same_or_tie(reply, truth, "killed during a load")
    gateway_process.start()


def test_killed_during_a_store(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """kill -9 between reserve and commit: the text is right, and after the restart nothing half-written is there."""
    with before_moves("pack", lambda _moves: gateway_process.kill()) as calls:
        reply = ask(engine, "killed in store")
    assert calls
    assert_same_or_tie(reply, truth, "killed during a store")
    gateway_process.start()
    reconnect(engine)
    again = ask(engine, "killed in store")
    assert again.restored == 0
    assert_same_or_tie(again, truth, "after the restart")
    assert ask(engine, "killed in store").restored == RESTORABLE


def test_killed_between_bind_and_the_end(engine: Engine, gateway_process: GatewayProcess) -> None:
    """The lease dies with the gateway in the middle of a long request: it is bound again at the new gateway and stored there."""
    forget_local(engine)
    requests = add_requests(engine, {"midway": PROMPT}, salt="midway", max_tokens=40)
    for _ in range(10):
        engine.llm.llm_engine.step()
    gateway_process.kill()
    gateway_process.start()
    finish_requests(engine, requests)
    reconnect(engine)
    assert ask(engine, "midway").restored in (0, RESTORABLE)


def test_a_gateway_that_hangs_costs_the_deadlines(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """A gateway that stopped answering: lookups end at their deadline, the text is right, and late answers are undone."""
    gateway_process.pause()
    replies = [ask(engine, "hangs") for _ in range(3)]
    gateway_process.resume()
    for reply in replies:
        assert reply.restored == 0
        assert_same_or_tie(reply, truth, "hanging gateway")
    assert replies[0].kvgate["outcome"] == "deadline"


def test_a_gateway_that_hangs_during_a_load(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """Bytes that nobody confirmed in time are not used."""
    assert ask(engine, "hangs in load").restored == 0
    with before_moves("unpack", lambda _moves: gateway_process.pause()):
        reply = ask(engine, "hangs in load")
    gateway_process.resume()
    assert reply.kvgate.items() >= {"restored_tokens": 0, "outcome": "load error"}.items()
    assert_same_or_tie(reply, truth, "hanging during a load")


def test_a_gateway_that_hangs_during_a_store(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """A store that is not confirmed in time is given up; the request does not wait for it."""
    with before_moves("pack", lambda _moves: gateway_process.pause()):
        reply = ask(engine, "hangs in store")
    gateway_process.resume()
    assert_same_or_tie(reply, truth, "hanging during a store")


@pytest.mark.parametrize("damaged", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_damaged_payloads_are_computed_instead(engine: Engine, truth: Reply, damaged: tuple[int, ...]) -> None:
    """One flipped bit in a stored chunk: what lies before it is restored, the rest computed, and the damaged chunk is gone."""
    salt = f"damaged {damaged}"
    assert ask(engine, salt).restored == 0

    def damage(moves: Sequence[Any]) -> None:
        for index in damaged:
            moves[index].payload[12345] ^= 4

    with before_moves("unpack", damage):
        reply = ask(engine, salt)
    assert reply.kvgate.items() >= {"restored_tokens": damaged[0] * CHUNK, "outcome": "load error"}.items()
    assert_same_or_tie(reply, truth, "damaged chunk")
    # Quarantined and stored anew: the next one is whole again, at the latest the one after it.
    later = [ask(engine, salt) for _ in range(2)]
    assert later[-1].restored == RESTORABLE
    for one in later:
        assert_same_or_tie(one, truth, "after the quarantine")


def test_requests_that_share_a_damaged_prefix(engine: Engine) -> None:
    """Two requests with one damaged prefix in one batch: both get their right text."""
    prompts = [PROMPT + prompt_tokens(60, file=index) for index in (1, 0)]
    truths = ask_all(engine, prompts, salt="truth shared", skip_reading_prefix_cache=True)
    assert ask(engine, "shared").restored == 0

    def damage(moves: Sequence[Any]) -> None:
        moves[1].payload[999] ^= 1

    forget_local(engine)
    with before_moves("unpack", damage):
        replies = ask_all(engine, prompts, salt="shared")
    for reply, wanted in zip(replies, truths, strict=True):
        assert_same_or_tie(reply, wanted, "shared damaged prefix")


def test_aborts_give_everything_back(engine: Engine, gateway_process: GatewayProcess, truth: Reply) -> None:
    """Requests aborted right after arrival, during prefill and during decoding leave no lease and no block behind."""
    ask(engine, "aborted")
    free = free_blocks(engine)
    for steps in (0, 1, 2, 3, 8):
        forget_local(engine)
        names = add_requests(engine, {"gone": PROMPT, "other": prompt_tokens(300, file=3)}, salt="aborted", max_tokens=50)
        for _ in range(steps):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request(names, internal=True)
        settle(engine)
        assert free_blocks(engine) == free
    assert_nothing_held(gateway_process)
    assert_same_or_tie(ask(engine, "aborted"), truth, "after aborts")


def test_abort_during_a_load(engine: Engine, gateway_process: GatewayProcess) -> None:
    """A request aborted while its chunks are being copied: its blocks come back once the copy has ended, not before."""
    ask(engine, "aborted in load")
    free = free_blocks(engine)
    forget_local(engine)
    copying, go_on = threading.Event(), threading.Event()

    def hold(_moves: Sequence[Any]) -> None:
        copying.set()
        # A load inside a step blocks the step itself: nobody could abort meanwhile.
        go_on.wait(0.0 if threading.current_thread() is threading.main_thread() else 20.0)

    with before_moves("unpack", hold):
        names = add_requests(engine, {"gone": PROMPT}, salt="aborted in load", max_tokens=50)
        wait_until(lambda: engine.llm.llm_engine.step() is not None and copying.is_set(), 20, "no load began")
        engine.llm.llm_engine.abort_request(names, internal=True)
        go_on.set()
        settle(engine)
    assert free_blocks(engine) == free
    assert_nothing_held(gateway_process)
