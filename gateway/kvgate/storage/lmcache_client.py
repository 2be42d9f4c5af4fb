"""The daemon's end of the connection to its storage process: pipelined calls with deadlines, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .backend import StorageUnavailable
from .child_connection import ChildConnection, fail
from .lmcache_wire import Code, Op, WireError

# What a call keeps back of its deadline for the way there and back, so that a partial answer still arrives in time.
_MARGIN_SHARE = 0.2
_MAX_MARGIN_S = 0.02


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


class StorageConnection(ChildConnection):
    """One connection. When it is lost every call under way fails at once, and ``lost`` is set."""

    nonsense = "storage_process_spoke_nonsense"

    def __init__(self, max_calls: int) -> None:
        super().__init__()
        self._calls: dict[int, _Call] = {}
        self._places = asyncio.Semaphore(max_calls)
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
        if places is not None and not places.locked():
            await places.acquire()  # at once
        elif places is not None:
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
        call = _Call(loop.create_future(), late, places)
        left_s = ends_at - loop.time()
        budget_s = max(0.0, left_s - min(_MAX_MARGIN_S, _MARGIN_SHARE * left_s))
        try:
            self._calls[self._send(op, budget_s, body)] = call
        except WireError as error:
            call.ended()
            raise StorageUnavailable(f"a storage call that is too large: {error}") from None
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

    def _fail_all(self) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.ended()
            fail(call.future, StorageUnavailable("the storage process is gone"))

    def _answer(self, request_id: int, code: Any, body: Any) -> None:
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
