"""A connection lost while publishing: its slots are given back by the next one, once their writer is done."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from kvgate.client.artifacts import Prefix
from kvgate.client.errors import GatewayRefused
from kvgate.client.leftovers import MAX_GROUPS, Leftovers
from kvgate.client.pools import PoolMappings
from kvgate.client.sdk import Gateway, GatewayUnavailable
from kvgate.contract.record import Record
from kvgate.protocol.messages import Commit, Done, Failure, Welcome
from tests.client.sdk_engine import WAIT_S, GatewayThread, SdkEngine, config
from tests.client.sdk_kit import keep, same


class Passage:
    """A socket that passes everything on to a gateway, until it is cut."""

    def __init__(self, path: Path, target: str) -> None:
        self.path = str(path)
        self._target = target
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Every connection is lost; new ones are taken."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut, and take none any more."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # cut


@pytest.fixture
def passage(gateway: GatewayThread) -> Iterator[Passage]:
    """A way to the gateway that can be cut."""
    made = Passage(Path(gateway.socket).with_name("cut.sock"), gateway.socket)
    yield made
    made.close()
    Path(made.path).unlink()


@pytest.fixture
def cut_at_write(passage: Passage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The connection is cut before the first slot is written to; the list says that it was."""
    whole = PoolMappings.view
    times: list[int] = []

    def view(self: PoolMappings, *place: object) -> memoryview:
        if not times:
            times.append(1)
            passage.cut()
        return whole(self, *place)  # type: ignore[arg-type]

    monkeypatch.setattr(PoolMappings, "view", view)
    return times


def until_none_open(gateway: GatewayThread) -> None:
    """Wait until no write is open, in the daemon and in storage."""
    until = time.monotonic() + WAIT_S
    while (status := gateway.status())["open_writes"] or status["storage"]["reservations"]:
        assert time.monotonic() < until, "a slot is still kept from everybody"
        time.sleep(0.02)


def test_the_next_connection_gives_them_back(
    gateway: GatewayThread, engine: SdkEngine, prefix: Prefix, passage: Passage, cut_at_write: list[int]
) -> None:
    """Publishing fails, the client connects again by itself, and the slots are free while it lives; publishing again works."""
    with Gateway(passage.path, model=engine.model.digest().hex()) as sdk:
        artifact = keep(prefix, scope="query", query=[1])
        with pytest.raises(GatewayUnavailable):
            sdk.publish(artifact)
        assert cut_at_write
        until_none_open(gateway)
        assert same(sdk.restore(sdk.publish(artifact)), artifact)


def test_another_client_of_the_process_gives_them_back(
    gateway: GatewayThread, engine: SdkEngine, prefix: Prefix, passage: Passage, cut_at_write: list[int]
) -> None:
    """Also where the client that lost its connection was closed at once."""
    sdk = Gateway(passage.path, model=engine.model.digest().hex())
    try:
        with pytest.raises(GatewayUnavailable):
            sdk.publish(keep(prefix))
    finally:
        sdk.close()
    assert cut_at_write
    with Gateway(gateway.socket, model=engine.model.digest().hex()) as other:
        other.opened()
        until_none_open(gateway)


def test_nothing_is_ended_at_a_later_start(
    gateway: GatewayThread, prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was started again while slots were written to hears nothing of them: its own may have the same numbers."""
    secret = str(gateway.gateway.config.secret_path)
    first, second = (GatewayThread(config(tmp_path, secret_file=secret)) for _ in range(2))
    first.start()
    engine = SdkEngine(first.socket)
    with Gateway(first.socket, model=engine.model.digest().hex()) as sdk, monkeypatch.context() as patched:
        sdk.opened()

        def view(_self: PoolMappings, *place: int) -> memoryview:
            if sdk._client.connection == 1:
                first.stop()
                second.start()
            until = time.monotonic() + WAIT_S
            while sdk._client.connection == 1 or not sdk._client.connected:
                assert time.monotonic() < until
                time.sleep(0.01)
            return memoryview(bytearray(place[-1]))

        patched.setattr(PoolMappings, "view", view)
        with pytest.raises(GatewayUnavailable):
            sdk.publish(keep(prefix))
    asked = second.gateway._metrics.text().decode()
    assert 'message="Hello"' in asked
    assert 'message="Commit"' not in asked
    engine.close()
    second.stop()


def welcome(boot: bytes) -> Welcome:
    """A gateway's greeting."""
    return Welcome(build="test", wire=2, schema=1, boot=boot, chunk_tokens=4, codec="raw")


class Sent:
    """Stands at the other end of ``call``: what was sent, and a refusal of whatever names one of ``unknown``."""

    def __init__(self, *unknown: int) -> None:
        self.messages: list[tuple[int, ...]] = []
        self._unknown = set(unknown)

    def __call__(self, message: Record, deadline_s: float) -> Awaitable[Record]:
        """One request."""
        assert isinstance(message, Commit)
        assert message.written == ()
        self.messages.append(message.aborted)
        return self._answer(message)

    async def _answer(self, message: Commit) -> Record:
        if self._unknown & set(message.aborted):
            raise GatewayRefused(Failure(code="denied", field="reservation", problem="not open", remedy="-"))
        return Done()


def test_numbers_of_another_start_are_not_sent() -> None:
    """After a restart the same number may be a slot that this process is just writing to."""
    left, sent = Leftovers(), Sent()
    left.note(b"a" * 16, (1, 2))
    asyncio.run(left.give_back(sent, welcome(b"b" * 16)))
    assert sent.messages == []
    asyncio.run(left.give_back(sent, welcome(b"a" * 16)))
    asyncio.run(left.give_back(sent, welcome(b"a" * 16)))
    assert sent.messages == [(1, 2)]
    assert len(left) == 0


def test_what_was_committed_after_all_keeps_none_of_the_others() -> None:
    """The gateway takes all of a message or nothing: then each is sent alone, and a refusal ends nothing."""
    left, sent = Leftovers(), Sent(2)
    left.note(b"a" * 16, (1, 2, 3))
    asyncio.run(left.give_back(sent, welcome(b"a" * 16)))
    assert sent.messages == [(1, 2, 3), (1,), (2,), (3,)]
    assert len(left) == 0


def test_what_was_not_sent_stays() -> None:
    """A connection lost meanwhile loses no slot: the next one gives it back."""

    class Lost(Sent):
        async def _answer(self, message: Commit) -> Record:
            raise GatewayUnavailable("lost")

    left, sent = Leftovers(), Sent()
    left.note(b"a" * 16, (1, 2))
    with pytest.raises(GatewayUnavailable):
        asyncio.run(left.give_back(Lost(), welcome(b"a" * 16)))
    assert len(left) == 2
    asyncio.run(left.give_back(sent, welcome(b"a" * 16)))
    assert sent.messages == [(1, 2)]


def test_they_are_bounded() -> None:
    """The oldest are forgotten first."""
    left, sent = Leftovers(), Sent()
    for number in range(MAX_GROUPS + 1):
        left.note(b"a" * 16, (number,))
    assert len(left) == MAX_GROUPS
    asyncio.run(left.give_back(sent, welcome(b"a" * 16)))
    assert sent.messages[0] == (1,)
