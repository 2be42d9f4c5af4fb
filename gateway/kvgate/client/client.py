"""The client: a daemon thread with its own event loop that keeps one connection to the gateway, for ever.

Callers are threads without a loop (a vLLM scheduler or worker step) and coroutines on the client's own loop. Nothing here blocks the
caller but ``call``, and every request is settled by its deadline, whatever happens to the gateway.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar, cast

from kvgate.client.errors import GatewayRefused, GatewayUnavailable, unreachable
from kvgate.client.wire import Reply, Wire, settled
from kvgate.contract.record import Record
from kvgate.protocol.messages import Hello, Welcome
from kvgate.protocol.versions import SCHEMA_VERSIONS, WIRE_VERSIONS, Range

LOGGER: Final = logging.getLogger("kvgate.client")

MAX_IN_FLIGHT: Final = 256
CONNECT_S: Final = 2.0
"""Longest wait for the socket, for the hello, and at ``close`` for the thread."""
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_LAST_S: Final = 2.0
_WAIT_MARGIN_S: Final = 1.0

T = TypeVar("T")
Call = Callable[[Record, float], Awaitable[Record]]
"""``await call(message, deadline_s)`` on the connection that is being set up."""
OnConnect = Callable[[Call, Welcome], Awaitable[None]]


def product_build() -> str:
    """Name and version that the hello carries."""
    try:
        return f"kvgate {version('kvgate')}"
    except PackageNotFoundError:
        return "kvgate (not installed)"


class GatewayClient:
    """One connection to the gateway at the unix socket ``endpoint``, in one role.

    ``on_connect(call, welcome)`` runs on the client's loop after each hello, before any other request: it registers or opens
    again. If it raises ``GatewayRefused`` the connection stays (the owner may try again by ``submit``); anything else drops it.
    ``credential`` names the isolation domain; None is the gateway's default domain. Not usable across ``fork``: make it in the
    process that uses it.
    """

    def __init__(
        self,
        endpoint: str,
        role: str,
        credential: bytes | None = None,
        on_connect: OnConnect | None = None,
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._endpoint = endpoint
        self._on_connect = on_connect
        wire, schema = Range.of(WIRE_VERSIONS), Range.of(SCHEMA_VERSIONS)
        self._hello = Hello(
            role=role,
            build=product_build(),
            wire_lowest=wire.lowest,
            wire_highest=wire.highest,
            schema_lowest=schema.lowest,
            schema_highest=schema.highest,
            credential=credential,
        )
        self._in_flight = threading.BoundedSemaphore(max_in_flight)
        # Not what the process's policy makes: the wire writes to the socket beside the transport, which another kind of loop owns.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=f"kvgate-{role}", daemon=True)
        self._pid = os.getpid()
        self._wire: Wire | None = None
        self._welcome: Welcome | None = None
        self._connections = 0
        self._said = ""
        self._ready = threading.Event()
        self._closing = False
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Begin connecting; returns at once."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether requests are sent now: hello and ``on_connect`` are done."""
        return self._ready.is_set()

    @property
    def welcome(self) -> Welcome | None:
        """The gateway's answer to the latest hello; it stays after a lost connection."""
        return self._welcome

    @property
    def connection(self) -> int:
        """Counts connections: leases and loads of an earlier one are gone. 0 before the first."""
        return self._connections

    @property
    def trouble(self) -> str:
        """Why it is not connected, as it was logged; "" where it is, or nothing was tried yet."""
        return self._said

    def wait_connected(self, timeout_s: float) -> bool:
        """Block until connected, at most ``timeout_s``."""
        return self._ready.wait(timeout_s)

    def submit(self, message: Record, deadline_s: float, *, connection: int | None = None) -> Future[Record]:
        """Send ``message`` and return at once. The future holds the reply, or raises ``GatewayRefused`` or ``GatewayUnavailable``.

        ``connection``: as ``connection`` counts; it is sent on that one or not at all.
        """
        reply: Reply = Future()
        reply.set_running_or_notify_cancel()  # from here on only an answer, the deadline or a lost connection settles it
        if not self._in_flight.acquire(blocking=False):
            reply.set_exception(GatewayUnavailable("too many requests in flight"))
            return reply
        reply.add_done_callback(self._one_less)
        wire, ready = self._wire, self._ready.is_set()
        if connection is not None and not (ready and connection == self._connections):
            # Looked at after the wire was: the count is raised before another takes its place.
            reply.set_exception(GatewayUnavailable("the connection to the gateway was lost"))
            return reply
        try:
            if threading.get_ident() == self._thread.ident:
                self._send(message, deadline_s, reply)
            elif wire is not None and ready:
                wire.send_from_thread(message, deadline_s, reply)
            else:
                self._loop.call_soon_threadsafe(self._send, message, deadline_s, reply)
        except RuntimeError:
            reply.set_exception(GatewayUnavailable("the client is closed"))
        return reply

    def call(self, message: Record, deadline_s: float, *, connection: int | None = None) -> Record:
        """``submit`` and wait for the reply; raises what its future would. Not on the client's own loop."""
        assert threading.current_thread() is not self._thread, "call() would block the loop that answers it"
        try:
            # The loop settles the reply at its deadline; the margin only matters if that thread is starved.
            return self.submit(message, deadline_s, connection=connection).result(deadline_s + _WAIT_MARGIN_S)
        except TimeoutError:
            raise GatewayUnavailable("the client's thread did not run") from None

    async def request(self, message: Record, deadline_s: float) -> Record:
        """``submit`` for coroutines on the client's loop."""
        return await settled(self.submit(message, deadline_s))

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of ``request`` calls on the client's loop."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            failed: Future[T] = Future()
            failed.set_exception(GatewayUnavailable("the client is closed"))
            return failed

    def close(self) -> None:
        """Drop the connection and end the thread. Idempotent; requests in flight fail."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        if not self._thread.is_alive():
            if not self._loop.is_running() and not self._loop.is_closed():
                self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CONNECT_S)

    def _one_less(self, _reply: Reply) -> None:
        self._in_flight.release()

    def _send(self, message: Record, deadline_s: float, reply: Reply) -> None:
        if self._wire is None or not self._ready.is_set():
            reply.set_exception(GatewayUnavailable("not connected to the gateway"))
            return
        self._wire.send(message, deadline_s, reply)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stay_connected())
        finally:
            self._ready.clear()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _stay_connected(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._stop.is_set():
            wire = await self._connect()
            if wire is not None:
                backoff_s = BACKOFF_FIRST_S
                await self._first_of(wire.lost.wait(), self._stop.wait())
                self._ready.clear()
                wire.close()
                await wire.lost.wait()
            if not self._stop.is_set():
                await self._first_of(asyncio.sleep(backoff_s), self._stop.wait())
                backoff_s = min(2 * backoff_s, BACKOFF_LAST_S)

    async def _first_of(self, *waits: Coroutine[Any, Any, Any]) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def _connect(self) -> Wire | None:
        """One attempt; None where there is no gateway, or it turned us away. Logs each kind of trouble once."""
        wire = Wire(self._ready.clear)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_unix_connection(lambda: wire, self._endpoint)
            welcome = cast(Welcome, await wire.call(self._hello, CONNECT_S))
        except (OSError, TimeoutError, GatewayUnavailable) as error:
            outcome = "" if self._hello.role == "client" else "; running without it"  # a client has nothing to do without it
            # Of an engine its scheduler says it, for all of its workers.
            level = logging.DEBUG if self._hello.role == "worker" else logging.WARNING
            self._say(f"no gateway answers ({unreachable(error)}){outcome}", level)
            wire.close()
            return None
        except GatewayRefused as error:
            self._say(f"the gateway refused the connection: {error}")
            wire.close()
            return None
        wire.version = welcome.wire
        # In this order: who reads the count and then the greeting has that of this connection or of a later one, and ``submit`` reads
        # the count after the wire.
        self._welcome = welcome
        self._connections += 1
        self._wire = wire
        if not await self._set_up(wire, welcome):
            wire.close()
            return None
        if not wire.lost.is_set():
            self._said = ""
            self._ready.set()
        return wire

    async def _set_up(self, wire: Wire, welcome: Welcome) -> bool:
        if self._on_connect is None:
            return True
        try:
            await self._on_connect(wire.call, welcome)
        except GatewayRefused as error:
            self._say(f"the gateway refused the registration: {error}")
        except GatewayUnavailable as error:
            self._say(f"the gateway did not answer the registration: {error}")
            return False
        except Exception:
            # A fault in the owner's callback must not end the thread: without it nothing would ever reconnect.
            LOGGER.exception("kvgate: setting up the connection failed")
            return False
        return True

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if text != self._said:
            self._said = text
            LOGGER.log(level, "kvgate: %s", text)
