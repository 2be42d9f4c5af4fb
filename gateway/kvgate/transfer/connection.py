"""The daemon's end of the socket pair: requests by number, answered in any order; when it breaks all of them fail at once."""

from __future__ import annotations

import asyncio
from typing import Any

from kvgate.storage.child_connection import NO_REPLY, ChildConnection, fail
from kvgate.transfer.wire import Code, Op, WireError


class ConnectionBroken(Exception):
    """The process is gone, or has been told to go."""


class Answer(Exception):
    """The process declined; ``code`` says how and the text why."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class Connection(ChildConnection):
    """One process's connection. ``first`` is its first frame's code and body, or fails where it breaks before that."""

    nonsense = "transfer.nonsense"

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.first: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._calls)

    def request(self, op: Op, body: object, budget_s: float) -> tuple[int, asyncio.Future[Any]]:
        """Send a request; its number, and its answer to come. Raises ``ConnectionBroken``, ``WireError`` (too large)."""
        if self.lost.is_set() or self._transport is None:
            raise ConnectionBroken("the transfer process is gone")
        number = self._send(op, budget_s, body)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        return number, future

    def _fail_all(self) -> None:
        calls, self._calls = self._calls, {}
        for future in (self.first, *calls.values()):
            fail(future, ConnectionBroken("the transfer process is gone"))

    def _answer(self, request_id: int, code: Any, body: Any) -> None:
        if request_id == NO_REPLY:
            if self.first.done():
                raise WireError("a second first frame")
            self.first.set_result((code, body))
            return
        future = self._calls.pop(request_id, None)
        if future is None:
            raise WireError("an answer to nothing that was asked")
        if future.done():
            return
        try:
            kind = Code(code)
        except ValueError:
            fail(future, ConnectionBroken("the transfer process gave an answer of an unknown kind"))
            raise WireError("an answer of an unknown kind") from None
        if kind is Code.OK:
            future.set_result(body)
        else:
            fail(future, Answer(kind, str(body)))
