"""What the daemon's connections to its child processes have in common: no request is left over, whatever the other end says."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvgate.storage.backend import StorageUnavailable
from kvgate.storage.child_connection import ChildConnection
from kvgate.storage.lmcache_client import StorageConnection
from kvgate.storage.lmcache_wire import MAX_FRAME_BYTES, frame
from kvgate.storage.lmcache_wire import Op as StorageOp
from kvgate.transfer.connection import Connection, ConnectionBroken
from kvgate.transfer.wire import Op, WireError

SOON_S = 20.0
PLACES = 2


@dataclass
class Kind:
    """One kind of connection, its other end, and how a request is made on it; ``lost``, ``too_large``: what requests raise then."""

    connection: ChildConnection
    peer: socket.socket
    ask: Callable[[object], Awaitable[Any]]
    lost: type[Exception]
    too_large: type[Exception]


@pytest.fixture(params=["storage", "transfer"])
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[Kind]:
    """Both."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    if request.param == "storage":
        _, storage = await loop.create_unix_connection(lambda: StorageConnection(PLACES), sock=ours)
        made = Kind(
            storage, theirs, lambda b: storage.call(StorageOp.STATUS, b, SOON_S), StorageUnavailable, StorageUnavailable
        )
    else:
        _, transfer = await loop.create_unix_connection(Connection, sock=ours)

        async def ask(body: object) -> Any:
            return await asyncio.wait_for(transfer.request(Op.STATUS, body, SOON_S)[1], SOON_S)

        made = Kind(transfer, theirs, ask, ConnectionBroken, WireError)
    yield made
    made.connection.close()
    theirs.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff\xff",
        struct.pack("<I", 3) + b"abc",
        frame([77, 0, None]),
        frame([1, 0]),
        frame([1, 0, None, None]),
        frame([[1], 0, None]),
        frame(["1", 0, None]),
        frame([None, 0, None]),
    ],
    ids=[
        "too long",
        "no CBOR",
        "an answer to nothing",
        "short",
        "long",
        "an array for a number",
        "a text for one",
        "null for one",
    ],
)
async def test_nonsense_ends_the_connection_and_all_requests(kind: Kind, answer: bytes) -> None:
    """The request that was answered so, those that were not answered, and those to come: none of them waits."""
    calls = [asyncio.ensure_future(kind.ask(None)) for _ in range(PLACES)]
    await asyncio.sleep(0)
    kind.peer.sendall(answer)
    for call in calls:
        with pytest.raises(kind.lost):
            await call
    assert kind.connection.lost.is_set()
    with pytest.raises(kind.lost):
        await kind.ask(None)


async def test_an_answer_of_an_unknown_kind_fails_its_own_request_too(kind: Kind) -> None:
    """It must not be taken for a success, nor leave its caller waiting for what will never come."""
    call = asyncio.ensure_future(kind.ask(None))
    await asyncio.sleep(0)
    kind.peer.sendall(frame([1, 99, "?"]))
    with pytest.raises(kind.lost):
        await call


async def test_a_request_that_is_too_large_is_not_sent_and_costs_no_place(kind: Kind) -> None:
    """However often it is tried; the connection goes on, and the next request has the next number."""
    for _ in range(2 * PLACES):
        with pytest.raises(kind.too_large):
            await kind.ask(b"x" * MAX_FRAME_BYTES)
    call = asyncio.ensure_future(kind.ask("small"))
    await asyncio.sleep(0)
    kind.peer.sendall(frame([1, 0, "answer"]))
    assert await call == "answer"


async def test_what_needs_no_answer_is_dropped_where_nobody_is_left(kind: Kind) -> None:
    """Posting after the other end has gone is nothing."""
    kind.peer.close()
    await asyncio.wait_for(kind.connection.lost.wait(), SOON_S)
    kind.connection.post(1, None)
