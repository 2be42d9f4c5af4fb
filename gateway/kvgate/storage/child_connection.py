"""The daemon's end of a private connection to one of its child processes: requests by number, answered in any order.

What a request is, who waits for it and what an answer's code means is each kind of process's own; it derives from this.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, ClassVar, Final

import structlog

from .lmcache_wire import FrameReader, WireError, frame

NO_REPLY: Final = 0
"""The number of what is sent without being answered."""

_log = structlog.get_logger(__name__)


class ChildConnection(asyncio.Protocol):
    """One connection. When it is lost ``lost`` is set, then ``_fail_all`` ends every request at once. Nonsense ends the connection."""

    nonsense: ClassVar[str]
    """What the log calls an answer that is none."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._last_id = NO_REPLY
        self.lost = asyncio.Event()

    def post(self, op: int, body: object) -> None:
        """Send a request that is not answered."""
        if not self.lost.is_set():
            self._write(NO_REPLY, op, 0.0, body)

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
                if len(message) != 3 or not isinstance(message[0], int):
                    raise WireError("a message that is not an answer")
                self._answer(*message)
        except WireError as error:
            _log.error(self.nonsense, reason=str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the connection is gone."""
        del exc
        self.lost.set()
        self._fail_all()

    @abstractmethod
    def _answer(self, request_id: int, code: Any, body: Any) -> None:
        """One answer. Raises ``WireError`` for one that is none."""

    @abstractmethod
    def _fail_all(self) -> None:
        """The connection is gone: end every request."""

    def _send(self, op: int, budget_s: float, body: object) -> int:
        """Send a request; its number. Raises ``WireError`` where it is too large, with nothing sent."""
        self._write(self._last_id + 1, op, budget_s, body)
        self._last_id += 1
        return self._last_id

    def _write(self, request_id: int, op: int, budget_s: float, body: object) -> None:
        assert self._transport is not None, "nobody has this connection before it is made"
        self._transport.write(frame([request_id, int(op), int(budget_s * 1000), body]))


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    """End a request with ``error``; where nobody waits for it any more, nobody is told."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # read once
