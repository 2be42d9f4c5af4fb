"""The daemon's end of the socket pair: requests by number, answered in any order; when it breaks all of them fail at once."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from kvgate.transfer.wire import Code, FrameReader, Op, WireError, frame

_NO_REPLY = 0

_log = structlog.get_logger(__name__)


class ConnectionBroken(Exception):
    """The process is gone, or has been told to go."""


class Answer(Exception):
    """The process declined; ``code`` says how and the text why."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Connection(asyncio.Protocol):
    """One process's connection. ``first`` is its first frame's code and body, or fails where it breaks before that."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_id = _NO_REPLY
        self.lost = asyncio.Event()
        self.first: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._calls)

    def request(self, op: Op, body: object, budget_s: float) -> tuple[int, asyncio.Future[Any]]:
        """Send a request; its number, and its answer to come. Raises ``ConnectionBroken``, ``WireError`` (too large)."""
        if self.lost.is_set() or self._transport is None:
            raise ConnectionBroken("the transfer process is gone")
        data = frame([self._last_id + 1, int(op), int(budget_s * 1000), body])
        self._last_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[self._last_id] = future
        self._transport.write(data)
        return self._last_id, future

    def post(self, op: Op, body: object) -> None:
        """Send what is not answered."""
        if not self.lost.is_set() and self._transport is not None:
            self._transport.write(frame([_NO_REPLY, int(op), 0, body]))

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: the connection is up."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes came."""
        try:
            for message in self._reader.feed(data):
                self._answer(message)
        except WireError as error:
            _log.error("transfer.nonsense", reason=str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the connection is gone."""
        del exc
        self.lost.set()
        calls, self._calls = self._calls, {}
        for future in (self.first, *calls.values()):
            if not future.done():
                future.set_exception(ConnectionBroken("the transfer process is gone"))
                future.exception()  # read once, so that nobody is told of it who no longer waits

    def _answer(self, message: list[Any]) -> None:
        if len(message) != 3:
            raise WireError("a message that is not an answer")
        request_id, code, body = message
        if request_id == _NO_REPLY:
            if self.first.done():
                raise WireError("a second first frame")
            self.first.set_result((code, body))
            return
        future = self._calls.pop(request_id, None)
        if future is None:
            raise WireError("an answer to nothing that was asked")
        if future.done():
            return
        if code == Code.OK:
            future.set_result(body)
        else:
            try:
                future.set_exception(Answer(Code(code), str(body)))
            except ValueError as error:
                raise WireError("an answer of an unknown kind") from error
            future.exception()
