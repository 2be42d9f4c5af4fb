"""The daemon's end of the connection to its storage process: pipelined calls with deadlines, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from .backend import StorageUnavailable
from .lmcache_wire import Code, FrameReader, Op, WireError, frame

# What a call keeps back of its deadline for the way there and back, so that a partial answer still arrives in time.
_MARGIN_SHARE = 0.2
_MAX_MARGIN_S = 0.02
_NO_REPLY = 0

_log = structlog.get_logger(__name__)


class DeadlinePassed(StorageUnavailable):
    """No answer by the deadline."""


@dataclass(slots=True)
class _Call:
    """A request under way. ``late`` gets the answer if the caller has gone, so that nothing granted is left behind."""

    future: asyncio.Future[Any]
    late: Callable[[Any], None] | None
    places: asyncio.Semaphore | None

    def ended(self) -> None:
        """Its place is free."""
        if self.places is not None:
            self.places.release()


class StorageConnection(asyncio.Protocol):
    """One connection. When it is lost every call under way fails at once, and ``lost`` is set."""

    def __init__(self, max_calls: int) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._calls: dict[int, _Call] = {}
        self._places = asyncio.Semaphore(max_calls)
        self._next_id = _NO_REPLY
        self.lost = asyncio.Event()
        self.deadlines_passed = 0

    @property
    def in_flight(self) -> int:
        """Calls without an answer, also those whose caller has gone."""
        return len(self._calls)

    async def call(
        self,
        op: Op,
        body: object,
        deadline_s: float,
        late: Callable[[Any], None] | None = None,
        *,
        bounded: bool = True,
    ) -> Any:
        """The answer to one request. Raises ``StorageUnavailable``: connection lost, call failed, deadline passed.

        ``bounded``: waits for one of the places for calls in flight. Not so the calls that look after the process itself.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        places = self._places if bounded else None
        if places is not None:
            try:
                async with asyncio.timeout_at(ends_at):
                    await places.acquire()
            except TimeoutError:
                self.deadlines_passed += 1
                raise DeadlinePassed("too many storage calls are under way") from None
        if self.lost.is_set():
            if places is not None:
                places.release()
            raise StorageUnavailable("the storage process is gone")
        self._next_id += 1
        request_id = self._next_id
        call = _Call(loop.create_future(), late, places)
        left_s = ends_at - loop.time()
        budget_s = max(0.0, left_s - min(_MAX_MARGIN_S, _MARGIN_SHARE * left_s))
        self._send(request_id, op, budget_s, body)
        self._calls[request_id] = call
        try:
            async with asyncio.timeout_at(ends_at):
                return await call.future
        except TimeoutError:
            self._caller_gone(call)
            self.deadlines_passed += 1
            raise DeadlinePassed("the storage process did not answer in time") from None
        except asyncio.CancelledError:
            self._caller_gone(call)
            raise

    def post(self, op: Op, body: object) -> None:
        """Send a request that is not answered."""
        if not self.lost.is_set():
            self._send(_NO_REPLY, op, 0.0, body)

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
            _log.error("storage_process_spoke_nonsense", reason=str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the connection is gone."""
        del exc
        self.lost.set()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.ended()
            if not call.future.done():
                call.future.set_exception(StorageUnavailable("the storage process is gone"))
                call.future.exception()  # read once, so that nobody is told of it who no longer waits

    def _send(self, request_id: int, op: Op, budget_s: float, body: object) -> None:
        assert self._transport is not None
        self._transport.write(frame([request_id, int(op), int(budget_s * 1000), body]))

    def _answer(self, message: list[Any]) -> None:
        if len(message) != 3:
            raise WireError("a message that is not an answer")
        request_id, code, body = message
        call = self._calls.pop(request_id, None)
        if call is None:
            raise WireError("an answer to nothing that was asked")
        call.ended()
        if call.future.done():
            if code == Code.OK and call.late is not None:
                call.late(body)
        elif code == Code.OK:
            call.future.set_result(body)
        else:
            call.future.set_exception(StorageUnavailable(str(body)))

    @staticmethod
    def _caller_gone(call: _Call) -> None:
        """The caller waits no longer. An answer that is there already is handled as a late one."""
        if not call.future.done():
            call.future.cancel()
        elif not call.future.cancelled() and call.future.exception() is None and call.late is not None:
            call.late(call.future.result())
