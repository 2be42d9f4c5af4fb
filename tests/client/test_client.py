"""The client against a scripted gateway: every request is settled once, in time, whatever the other end does."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from kvgate.client import Call, GatewayClient, GatewayRefused, GatewayUnavailable
from kvgate.contract.record import Record
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    Bind,
    Bound,
    Commit,
    Done,
    Extend,
    Extended,
    Failure,
    FinishLoad,
    Load,
    LoadPlan,
    OpenEngine,
    Release,
    Reserve,
    Reserved,
    ReservedSlot,
    Welcome,
)
from tests.client.server import Hangup, ScriptedGateway, failure

LEASE = b"l" * 32
RELEASE = Release(lease=LEASE)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """Where the scripted gateway listens."""
    return tmp_path / "g.sock"


@pytest.fixture
def client(socket: Path) -> Iterator[GatewayClient]:
    """A started client in the scheduler's role."""
    made = GatewayClient(str(socket), "scheduler")
    made.start()
    yield made
    made.close()


def answer_done(_message: Record) -> Record:
    """Acknowledge everything."""
    return Done()


def test_call_returns_the_typed_reply(client: GatewayClient, socket: Path) -> None:
    """A request is answered with the reply class of its kind."""
    with ScriptedGateway(socket, lambda _m: Acquired(end=7)):
        assert client.wait_connected(5)
        reply = client.call(Acquire(lease=LEASE, first=0, last=9, deadline_ms=10), 5)
    assert reply == Acquired(end=7)


def test_call_without_gateway_fails_at_once(client: GatewayClient) -> None:
    """With no gateway a request fails, and nothing waits for a connection."""
    with pytest.raises(GatewayUnavailable):
        client.call(RELEASE, 30)
    assert not client.connected
    assert client.welcome is None


def test_client_connects_when_the_gateway_comes_later(client: GatewayClient, socket: Path) -> None:
    """A client started before its gateway connects once it is there."""
    assert not client.wait_connected(0.1)
    with ScriptedGateway(socket, answer_done):
        assert client.wait_connected(10)
        assert client.call(RELEASE, 5) == Done()


def test_refusal_carries_the_failure(client: GatewayClient, socket: Path) -> None:
    """A Failure reply raises GatewayRefused with its code, and the connection stays."""
    with ScriptedGateway(socket, lambda _m: failure("denied")):
        assert client.wait_connected(5)
        with pytest.raises(GatewayRefused) as refused:
            client.call(RELEASE, 5)
        assert refused.value.code == "denied"
        assert client.connected


def test_an_older_gateways_refusal_says_which_side_to_restart(client: GatewayClient, socket: Path) -> None:
    """It answers without a remedy: the client knows it. Other refusals are passed on as they are."""
    old = Failure(code="malformed", field="type", problem="is not a message of this wire version", remedy="-")
    answers = iter([old, dataclasses.replace(old, problem="Hello was sent already")])
    with ScriptedGateway(socket, lambda _message: next(answers)):
        assert client.wait_connected(5)
        with pytest.raises(GatewayRefused, match=r"different builds .*upgrade kvgate there and restart it"):
            client.call(RELEASE, 5)
        with pytest.raises(GatewayRefused, match=r"already; -$"):
            client.call(RELEASE, 5)


def test_silence_ends_at_the_deadline(client: GatewayClient, socket: Path) -> None:
    """A request that is never answered fails at its deadline; a later one still works."""
    answers: list[Record | None] = [None, Done()]
    with ScriptedGateway(socket, lambda _m: answers.pop(0)):
        assert client.wait_connected(5)
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 0.05)
        assert client.call(RELEASE, 5) == Done()


def test_a_late_reply_is_dropped(client: GatewayClient, socket: Path) -> None:
    """A reply after its deadline is not taken for another request's reply."""
    gate = threading.Event()

    def slow_first(message: Record) -> Record:
        if isinstance(message, Release):
            assert gate.wait(5)
            return Done()
        return Acquired(end=3)

    with ScriptedGateway(socket, slow_first):
        assert client.wait_connected(5)
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 0.05)
        gate.set()
        assert client.call(Acquire(lease=LEASE, first=0, last=9, deadline_ms=10), 5) == Acquired(end=3)


def slot(chunk: int, status: str, reservation: int) -> ReservedSlot:
    """One answer to a reservation."""
    return ReservedSlot(chunk=chunk, status=status, reservation=reservation, offset=0, length=0)


HANDED_OUT: list[tuple[Record, Record, Record]] = [
    (
        Bind(handle=LEASE, adapter=None, salt=None, scope="prefix", scope_key=None, manifest=None, tokens=b""),
        Bound(lease=LEASE, present=0, probing=False, reference="0" * 16, addresses=b""),
        Release(lease=LEASE),
    ),
    (
        Load(lease=LEASE, chunks=(0,)),
        LoadPlan(ticket=7, pool="p", pool_bytes=4096, slots=()),
        FinishLoad(ticket=7, mismatched=()),
    ),
    (
        Reserve(lease=LEASE, chunks=(0, 1, 2)),
        Reserved(pool="p", pool_bytes=4096, slots=(slot(0, "slot", 5), slot(1, "busy", 0), slot(2, "slot", 6))),
        Commit(written=(), aborted=(5, 6)),
    ),
]


@pytest.mark.parametrize(("request_", "reply", "remedy"), HANDED_OUT, ids=["lease", "load", "slots"])
def test_what_a_late_reply_hands_out_is_given_back(
    client: GatewayClient, socket: Path, request_: Record, reply: Record, remedy: Record
) -> None:
    """A lease, a load or slots that come after the deadline must not stay open for as long as the connection lives."""
    gate, given_back = threading.Event(), threading.Event()

    def slow(message: Record) -> Record:
        if message == request_:
            assert gate.wait(5)
            return reply
        if message == remedy:
            given_back.set()
        return Done()

    with ScriptedGateway(socket, slow):
        assert client.wait_connected(5)
        with pytest.raises(GatewayUnavailable):
            client.call(request_, 0.05)
        gate.set()
        assert given_back.wait(5)
        assert client.connected


def test_a_late_reservation_of_nothing_needs_no_answer(client: GatewayClient, socket: Path) -> None:
    """Where a late reply hands out nothing, nothing is sent."""
    gate = threading.Event()
    seen: list[Record] = []

    def slow(message: Record) -> Record:
        seen.append(message)
        if isinstance(message, Reserve):
            assert gate.wait(5)
            return Reserved(pool="p", pool_bytes=4096, slots=(slot(0, "full", 0),))
        return Done()

    with ScriptedGateway(socket, slow):
        assert client.wait_connected(5)
        with pytest.raises(GatewayUnavailable):
            client.call(Reserve(lease=LEASE, chunks=(0,)), 0.05)
        gate.set()
        assert client.call(RELEASE, 5) == Done()
        assert [type(message) for message in seen] == [Reserve, Release]


def test_lost_connection_fails_open_requests_and_reconnects(client: GatewayClient, socket: Path) -> None:
    """When the gateway hangs up, open requests fail before their deadline, and the client comes back by itself."""
    hung_up = threading.Event()

    def hang_up_once(_message: Record) -> Record:
        if not hung_up.is_set():
            hung_up.set()
            raise Hangup
        return Done()

    with ScriptedGateway(socket, hang_up_once):
        assert client.wait_connected(5)
        first = client.connection
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 60)
        assert client.wait_connected(10)
        assert client.connection > first
        assert client.call(RELEASE, 5) == Done()


@pytest.mark.parametrize(
    "junk",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x03\x00\x00\x00abc", b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    ids=["oversize", "empty", "not-cbor", "http"],
)
def test_junk_drops_the_connection(client: GatewayClient, socket: Path, junk: bytes) -> None:
    """Bytes that are no frame end the connection; the open request fails, it is never answered by junk."""
    with ScriptedGateway(socket, lambda _m: junk):
        assert client.wait_connected(5)
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 30)


def test_reply_of_another_type_is_no_answer(client: GatewayClient, socket: Path) -> None:
    """A well-formed reply of the wrong class is not handed to the caller."""
    with ScriptedGateway(socket, lambda _m: Acquired(end=1)):
        assert client.wait_connected(5)
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 5)


def test_a_refused_hello_is_not_a_connection(socket: Path) -> None:
    """A gateway that refuses our versions leaves the client unconnected and callable."""
    client = GatewayClient(str(socket), "worker")
    with ScriptedGateway(socket, answer_done, welcome=failure("version")) as gateway:
        client.start()
        assert not client.wait_connected(0.3)
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 5)
        assert not any(isinstance(message, Release) for message in gateway.received)
    client.close()


def test_on_connect_runs_first_on_every_connection(socket: Path) -> None:
    """Registration is sent before any other request, and again after a reconnect."""

    async def open_engine(call: Call, welcome: Welcome) -> None:
        assert welcome.chunk_tokens == 256
        await call(OpenEngine(handle=bytes(32)), 5)

    client = GatewayClient(str(socket), "scheduler", on_connect=open_engine)

    def script(message: Record) -> Record:
        return failure("unsealed") if isinstance(message, OpenEngine) else Done()

    client.start()
    with ScriptedGateway(socket, script) as gateway:
        assert client.wait_connected(5)
        client.call(RELEASE, 5)
        gateway.drop_connections()
        while client.connection < 2:
            assert client.wait_connected(10)
            threading.Event().wait(0.01)
        assert client.wait_connected(10)
        client.call(RELEASE, 5)
        kinds = [type(message).__name__ for message in gateway.received]
    assert kinds == ["Hello", "OpenEngine", "Release"] * 2
    client.close()


def test_on_connect_that_fails_is_retried(socket: Path) -> None:
    """A callback that raises does not end the client's thread: the next attempt succeeds."""
    attempts: list[int] = []

    async def fail_once(_call: Call, _welcome: Welcome) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("first time")

    client = GatewayClient(str(socket), "worker", on_connect=fail_once)
    client.start()
    with ScriptedGateway(socket, answer_done):
        assert client.wait_connected(10)
    assert len(attempts) == 2
    client.close()


def test_requests_in_flight_are_bounded(socket: Path) -> None:
    """Beyond the limit a request fails at once instead of queueing; answered ones make room."""
    client = GatewayClient(str(socket), "worker", max_in_flight=2)
    client.start()
    gate = threading.Event()

    def wait_for_gate(_message: Record) -> Record:
        gate.wait(5)
        return Done()

    with ScriptedGateway(socket, wait_for_gate):
        assert client.wait_connected(5)
        open_requests = [client.submit(RELEASE, 10) for _ in range(2)]
        with pytest.raises(GatewayUnavailable):
            client.call(RELEASE, 10)
        gate.set()
        wait(open_requests, 5)
        assert client.call(RELEASE, 5) == Done()
    client.close()


def test_close_settles_open_requests(client: GatewayClient, socket: Path) -> None:
    """Closing fails what is in flight; later requests fail too, and closing again does nothing."""
    with ScriptedGateway(socket, lambda _m: None):
        assert client.wait_connected(5)
        open_request = client.submit(RELEASE, 60)
        client.close()
        with pytest.raises(GatewayUnavailable):
            open_request.result(5)
        with pytest.raises(GatewayUnavailable):
            client.submit(RELEASE, 60).result(5)
        client.close()


def test_coroutines_run_on_the_clients_loop(client: GatewayClient, socket: Path) -> None:
    """A spawned coroutine may chain requests; its result comes back as a future."""

    async def twice() -> list[Record]:
        return [await client.request(RELEASE, 5), await client.request(RELEASE, 5)]

    with ScriptedGateway(socket, answer_done):
        assert client.wait_connected(5)
        assert client.spawn(twice()).result(5) == [Done(), Done()]


def test_many_requests_at_once_get_their_own_replies(client: GatewayClient, socket: Path) -> None:
    """Replies are matched by id, from many threads."""
    with ScriptedGateway(socket, lambda m: Acquired(end=m.first) if isinstance(m, Acquire) else Done()):
        assert client.wait_connected(5)
        futures = {n: client.submit(Acquire(lease=LEASE, first=n, last=n, deadline_ms=1), 10) for n in range(200)}
        assert all(future.result(10) == Acquired(end=n) for n, future in futures.items())


def test_frames_of_many_threads_stay_whole_and_in_order(client: GatewayClient, socket: Path) -> None:
    """However large the messages and slow the gateway's reading: each arrives as sent, a thread's in the order of its calls."""
    threads, rounds = 6, 40

    def slow_at_first(message: Record) -> Record:
        if isinstance(message, Extend) and message.first == 0:
            time.sleep(0.01)  # what follows does not fit the socket
        return Extended(chunks=0)

    def send(number: int) -> None:
        lease = bytes([number]) * 32
        for at in range(rounds):
            # Short ones in between: they must not slip past a long one that is half written.
            tokens = bytes([at]) * (32 * (4000 if at % 3 == 0 else 1))
            replies.append(client.submit(Extend(lease=lease, first=at, tokens=tokens), 20))

    replies: list[Future[Record]] = []
    with ScriptedGateway(socket, slow_at_first) as gateway:
        assert client.wait_connected(5)
        senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(20)
        assert all(isinstance(reply.result(20), Extended) for reply in replies)
        extends = [message for message in gateway.received if isinstance(message, Extend)]
    assert len(extends) == threads * rounds
    for number in range(threads):
        mine = [message for message in extends if message.lease == bytes([number]) * 32]
        assert [message.first for message in mine] == list(range(rounds))
        assert all(set(message.tokens) == {message.first} for message in mine)


def test_a_request_of_a_callback_is_sent(client: GatewayClient, socket: Path) -> None:
    """What is asked on the client's own thread, as soon as an answer is here, is asked at once and answered as any other."""
    with ScriptedGateway(socket, answer_done):
        assert client.wait_connected(5)
        asked: Future[Future[Record]] = Future()
        client.submit(RELEASE, 5).add_done_callback(lambda _reply: asked.set_result(client.submit(RELEASE, 5)))
        assert asked.result(5).result(5) == Done()


@pytest.mark.parametrize(("role", "said"), [("scheduler", 1), ("worker", 0), ("client", 1)])
def test_a_gateway_that_is_not_there_is_told_once(socket: Path, caplog: pytest.LogCaptureFixture, role: str, said: int) -> None:
    """One warning in plain words, however often it is tried; an engine's workers leave it to their scheduler."""
    made = GatewayClient(str(socket), role)
    with caplog.at_level("WARNING"):
        made.start()
        until = time.monotonic() + 5
        while not made.trouble and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # some more tries
        made.close()
    assert "no gateway answers (there is no such socket)" in made.trouble
    assert sum("no gateway answers" in record.getMessage() for record in caplog.records) == said
