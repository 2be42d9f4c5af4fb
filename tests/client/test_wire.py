"""Frames of several threads on one connection: each goes out whole, whatever waits before it."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvgate.client.client import GatewayClient
from kvgate.client.errors import GatewayUnavailable
from kvgate.client.wire import Reply, Wire
from kvgate.contract.record import Record
from kvgate.protocol.framing import HEADER, frame_length, parse_frame
from kvgate.protocol.messages import Bind, Release
from tests.client.server import ScriptedGateway
from tests.client.test_client import answer_done

LARGE = Bind(
    handle=bytes(32), adapter=None, salt=None, scope="prefix", scope_key=None, manifest=None, tokens=bytes(32 * 16_384)
)
SMALL = Release(lease=bytes(32))


def awaited() -> Reply:
    """Where an answer would come."""
    reply: Reply = Future()
    reply.set_running_or_notify_cancel()
    return reply


async def test_a_thread_writes_into_no_frame_that_is_half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sees an empty buffer while the transport moves what is left of a frame writes nothing in between."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    far.setblocking(False)
    transport, wire = await loop.create_connection(lambda: Wire(lambda: None), sock=near)
    wire.send(LARGE, 5, awaited())
    received = await loop.sock_recv(far, 1 << 20)
    # As in asyncio of Python 3.12, between taking the one waiting chunk and putting back its rest.
    monkeypatch.setattr(transport, "get_write_buffer_size", lambda: 0)
    wire.send_from_thread(SMALL, 5, awaited())
    monkeypatch.undo()
    frames: list[Record] = []
    while len(frames) < 2:
        while len(received) >= HEADER.size and len(received) >= (end := HEADER.size + frame_length(received[: HEADER.size])):
            frames.append(parse_frame(received[HEADER.size : end]).message())
            received = received[end:]
        if len(frames) < 2:
            async with asyncio.timeout(5):
                received += await loop.sock_recv(far, 1 << 20)
    assert frames == [LARGE, SMALL]
    transport.abort()
    far.close()


class OtherLoops(asyncio.DefaultEventLoopPolicy):
    """A policy that makes loops of its own kind, as uvloop's does."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """None of these can be had here."""
        raise AssertionError("the client took a loop of the process's policy")


def test_a_client_asks_the_process_for_no_loop(tmp_path: Path) -> None:
    """A client works in a process whose event loop policy makes other loops."""
    path = tmp_path / "g.sock"
    with ScriptedGateway(path, answer_done):
        before = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(OtherLoops())
        try:
            client = GatewayClient(str(path), "scheduler")
        finally:
            asyncio.set_event_loop_policy(before)
        client.start()
        assert client.wait_connected(5)
        client.call(SMALL, 5)
        client.close()


def test_what_is_for_one_connection_goes_on_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a connection was named for is refused on the next one, also where that came between the look and the sending."""
    path = tmp_path / "g.sock"
    with ScriptedGateway(path, answer_done) as gateway:
        client = GatewayClient(str(path), "scheduler")
        client.start()
        assert client.wait_connected(5)
        client.submit(SMALL, 5, connection=1).result(5)
        whole = Wire.send_from_thread

        def late(self: Wire, message: Record, deadline_s: float, reply: Reply) -> None:
            gateway.drop_connections()
            until = time.monotonic() + 5
            while client.connection == 1 or not client.connected:
                assert time.monotonic() < until
                time.sleep(0.01)
            whole(self, message, deadline_s, reply)

        with monkeypatch.context() as patched:
            patched.setattr(Wire, "send_from_thread", late)
            with pytest.raises(GatewayUnavailable):
                client.submit(LARGE, 5, connection=1).result(5)
        with pytest.raises(GatewayUnavailable):
            client.submit(LARGE, 5, connection=1).result(5)
        client.submit(SMALL, 5, connection=2).result(5)
        client.close()
        assert LARGE not in gateway.received
