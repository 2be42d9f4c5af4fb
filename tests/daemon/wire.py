"""A raw client of the control socket: speaks the framing, and can break every rule of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvgate.contract.encoding import encode
from kvgate.contract.record import Record
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import Failure, Hello, Welcome

WAIT_S = 20.0
"""Longest wait of a test for anything that must happen; reached only where something is broken."""

R = TypeVar("R", bound=Record)


class Denied(Exception):
    """The gateway answered with a ``Failure``."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.code} ({failure.field}): {failure.problem}")
        self.failure = failure


def hello(role: str = "scheduler", credential: bytes | None = None, **changes: Any) -> Hello:
    """A valid hello, with changes."""
    values: dict[str, Any] = {
        "role": role,
        "build": "test",
        "wire_lowest": 1,
        "wire_highest": 1,
        "schema_lowest": 1,
        "schema_highest": 1,
        "credential": credential,
    }
    return Hello(**(values | changes))


class Wire:
    """One connection. Replies are matched by id; ``ask`` returns a ``Failure`` as a value, ``call`` raises it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.closed = asyncio.Event()
        self.strays = 0
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Record]] = {}
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, path: Path, *, listen: bool = True) -> Wire:
        """Connect without a hello. ``listen`` False: nothing is read unless the test reads."""
        async with asyncio.timeout(WAIT_S):
            wire = cls(*await asyncio.open_unix_connection(str(path)))
        if listen:
            wire._listener = asyncio.create_task(wire._listen())
        return wire

    @classmethod
    async def open(cls, path: Path, role: str = "scheduler", credential: bytes | None = None, **changes: Any) -> Wire:
        """Connect and say hello."""
        wire = await cls.connect(path)
        await wire.call(hello(role, credential, **changes), Welcome)
        return wire

    def post(self, message: Record) -> asyncio.Future[Record]:
        """Send without waiting; the future gets the reply."""
        number = next(self._ids)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.writer.write(frame_bytes(number, message))
        return reply

    async def ask_raw(self, kind: str, body: Any) -> Record:
        """Send a well-formed frame with any type and body; the reply."""
        number = next(self._ids)
        reply: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        data = encode({"id": number, "type": kind, "body": body})
        await self.raw(HEADER.pack(len(data)) + data)
        async with asyncio.timeout(WAIT_S):
            return await reply

    async def ask(self, message: Record) -> Record:
        """Send and wait for the reply, whatever it is. ``ConnectionError`` where the gateway hangs up instead."""
        reply = self.post(message)
        async with asyncio.timeout(WAIT_S):
            return await reply

    async def call(self, message: Record, kind: type[R]) -> R:
        """Send, and return the reply of the expected class; raises ``Denied``."""
        reply = await self.ask(message)
        if isinstance(reply, Failure):
            raise Denied(reply)
        assert type(reply) is kind
        return reply

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        async with asyncio.timeout(WAIT_S):
            await self.writer.drain()

    async def hung_up(self) -> None:
        """Wait until the gateway has closed the connection."""
        async with asyncio.timeout(WAIT_S):
            await self.closed.wait()

    async def close(self) -> None:
        """Drop the connection."""
        if self._listener is not None:
            self._listener.cancel()
        self.writer.transport.abort()
        self._fail()
        await asyncio.sleep(0)

    async def _listen(self) -> None:
        try:
            while True:
                length = frame_length(await self.reader.readexactly(HEADER.size))
                frame = parse_frame(await self.reader.readexactly(length))
                waiting = self._waiting.pop(frame.id, None)
                if waiting is None:
                    self.strays += 1
                elif not waiting.done():
                    waiting.set_result(frame.message())
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail()

    def _fail(self) -> None:
        self.closed.set()
        waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            if not reply.done():
                reply.set_exception(ConnectionError("the gateway closed the connection"))
                reply.exception()  # retrieved: not every test waits for every reply


@asynccontextmanager
async def denied(code: str, field: str | None = None) -> AsyncIterator[None]:
    """The block must be refused with ``code`` (and ``field``)."""
    with pytest.raises(Denied) as caught:
        yield
    failure = caught.value.failure
    assert failure.code == code, failure
    if field is not None:
        assert failure.field == field, failure
