"""The storage process where a gateway attaches to a running `lmcache server`: it carries frames, and keeps no object.

Frames from the daemon's private socket go to our module in that server through LMCache's own transport, and answers back. The
bridge ends when the server is gone or does not know its session any more; the daemon then starts the next one, with a new
generation: the server's pool is another one after its restart.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import structlog

from kvgate.storage.attach_wire import ATTACH_WIRE, CLOSE, EXCHANGE, OPEN, AttachError, pack, unpack
from kvgate.storage.lmcache_settings import ProcessSettings, Ready
from kvgate.storage.lmcache_wire import MAX_FRAME_BYTES, WIRE
from kvgate.storage.run_folder import process_started

from .internals import HostingError

_OPEN_S: Final = 10.0
_CALL_S: Final = 30.0
_IDLE_S: Final = 2.0
# One thread of a plain server is all it has for calls: it is never kept longer than this.
_WAIT_MS: Final = 20
_FIRST_WAIT_MS: Final = 2
_MAX_FRAMES_PER_CALL: Final = 256
_LENGTH: Final = struct.Struct("<I")

_log = structlog.get_logger(__name__)


class LostServer(Exception):
    """The server is gone, or has another session."""


class Remote:
    """Our module in the server, called through LMCache's client. One instance a thread."""

    def __init__(self, url: str) -> None:
        from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._request = ServerModuleCallRequest
        try:
            self._client = RequestClientFactory.create(url)
        except (ImportError, ValueError) as error:
            raise HostingError(f"attach_url: {error}") from error

    def call(self, method: str, timeout_s: float, **values: object) -> dict[str, Any]:
        """One call; raises ``LostServer`` with the reason."""
        try:
            reply = self._client.server_module_call(self._request(method, pack(**values))).result(timeout=timeout_s)
        except TimeoutError as error:
            raise LostServer(
                "no answer: that is no LMCache server, it hangs, or it was started without kvgate's module"
            ) from error
        if not reply.success:
            unknown = reply.error.startswith("unknown server module method")  # of another module: it has one, and not ours
            raise LostServer("that LMCache server was started without kvgate's module" if unknown else "kvgate's module failed")
        answer = unpack(reply.payload)
        if problem := answer.get("problem"):
            raise LostServer(str(problem))
        return answer


class Bridge:
    """One session. ``open``, then ``run`` with the daemon's connection."""

    def __init__(self, settings: ProcessSettings, stop: threading.Event) -> None:
        self._stop = stop
        self._sender = Remote(settings.attach_url)
        self._poller = Remote(settings.attach_url)
        self._url = settings.attach_url
        self._start_id = settings.start_id
        self._session = b""
        self._changed = threading.Condition()
        self._requests: list[bytes] = []
        self._open_calls = 0
        self._write_lock = threading.Lock()
        self._server = (0, 0)

    def open(self) -> Ready:
        """Begin the session; what the daemon must know. Raises ``HostingError``."""
        _check_listens(self._url)
        pid = os.getpid()
        try:
            found = self._sender.call(
                OPEN, _OPEN_S, wire=ATTACH_WIRE, start_id=self._start_id, pid=pid, started=process_started(pid)
            )
            self._session = found["session"]
            self._server = (int(found["pid"]), int(found["started"]))
            return Ready(WIRE, int(found["pool_bytes"]), int(found["align_bytes"]), "", str(found["pool_name"]))
        except (LostServer, AttachError, KeyError, ValueError) as error:
            raise HostingError(f"cannot attach: {error}") from error

    def run(self, connection: socket.socket) -> None:
        """Carry frames until ``stop``, the daemon's end, or the server's."""
        self._connection = connection
        for work in (self._read, self._send, self._poll, self._watch):
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__, daemon=True).start()
        self._stop.wait()
        with contextlib.suppress(LostServer, AttachError):  # it is gone: nothing to close
            Remote.call(self._sender, CLOSE, _IDLE_S, session=self._session)

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except (LostServer, AttachError) as error:
            _log.error("attached_server_lost", reason=str(error))
        except Exception as error:  # noqa: BLE001  # whatever it is, the daemon must get a new bridge; logged
            _log.error("bridge_failed", error=type(error).__name__)
        finally:
            self._stop.set()
            with self._changed:
                self._changed.notify_all()

    def _read(self) -> None:
        """Cut the daemon's stream into frames."""
        with self._connection.makefile("rb") as stream:
            while header := stream.read(_LENGTH.size):
                length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else MAX_FRAME_BYTES + 1
                if length > MAX_FRAME_BYTES:
                    raise AttachError("the daemon spoke nonsense")
                body = stream.read(length)
                with self._changed:
                    self._requests.append(header + body)
                    self._open_calls += _wants_answer(body)
                    self._changed.notify_all()

    def _send(self) -> None:
        """Hand requests over in order: the next call begins when the one before is answered. Says something when idle, too."""
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._stop.is_set(), _IDLE_S)
                taken, self._requests = self._requests[:_MAX_FRAMES_PER_CALL], self._requests[_MAX_FRAMES_PER_CALL:]
            self._exchange(self._sender, taken, _FIRST_WAIT_MS if taken else 0)

    def _poll(self) -> None:
        """Fetch the answers that took longer."""
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._open_calls > 0 or self._stop.is_set())
            if not self._stop.wait(_FIRST_WAIT_MS / 1000):
                self._exchange(self._poller, [], _WAIT_MS)

    def _watch(self) -> None:
        """Notice at once when the server's process ends, where it can be seen."""
        pid, started = self._server
        if not started or process_started(pid) != started:
            self._stop.wait()
            return
        process = os.pidfd_open(pid)
        try:
            while not self._stop.is_set():
                if select.select([process], [], [], _IDLE_S)[0]:
                    raise LostServer("its process has ended")
        finally:
            os.close(process)

    def _exchange(self, remote: Remote, frames: Sequence[bytes], wait_ms: int) -> None:
        answer = remote.call(EXCHANGE, _CALL_S, session=self._session, frames=list(frames), wait_ms=wait_ms)
        if answer.get("ended"):
            self._stop.set()  # the daemon asked for it
        answers = answer["frames"]
        if not answers:
            return
        with self._changed:
            self._open_calls -= len(answers)
        with self._write_lock:
            self._connection.sendall(b"".join(answers))


def _check_listens(url: str) -> None:
    """LMCache's client waits silently for a server that is not there: ask the kernel first."""
    found = re.fullmatch(r"(?:tcp|grpc)://\[?([^/]+?)\]?:(\d{1,5})", url)
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), _OPEN_S).close()
    except OSError as error:
        raise HostingError(
            f"cannot attach: no LMCache server listens there ({error.strerror or type(error).__name__})"
        ) from error


def _wants_answer(body: bytes) -> bool:
    """A request is an array whose first item is its id; id 0, one byte, asks for no answer."""
    return body[1:2] != b"\0"
