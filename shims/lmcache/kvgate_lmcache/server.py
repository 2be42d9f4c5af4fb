"""Serves the storage operations to the one daemon that started this process.

One thread reads requests and answers at once whatever L1 alone can answer, in the order asked. What may wait for L2 goes to a
pool of threads and is answered when it is done, so answers can overtake each other; the request id says which is which.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from kvgate.storage.backend import ObjectRef
from kvgate.storage.lmcache_wire import (
    Code,
    FrameReader,
    Op,
    ProbeCode,
    TierCode,
    WireError,
    decode_refs,
    frame,
    pack_grants,
    unpack_ids,
)

from .clock import Deadline
from .ops import StorageOps

_L2_THREADS = 16
_DELETE_THREADS = 2
# An L2 that hangs holds this many calls at most; L1 goes on being served. Below the daemon's bound on calls in flight.
_MAX_WAITING_L2 = 160
_MAX_WAITING_DELETES = 32
_RECEIVE_BYTES = 1 << 18
_SWEEP_BUSY_S = 0.05
_SWEEP_IDLE_S = 1.0

_log = structlog.get_logger(__name__)


class Server:
    """Requests of one connection. Sets ``ended`` when the daemon has gone or asked to stop; ``drained`` says it asked."""

    def __init__(self, connection: socket.socket, ops: StorageOps, ended: threading.Event) -> None:
        self._connection = connection
        self._ops = ops
        self.ended = ended
        self._send_lock = threading.Lock()
        self._l2_threads = ThreadPoolExecutor(_L2_THREADS, thread_name_prefix="l2")
        self._delete_threads = ThreadPoolExecutor(_DELETE_THREADS, thread_name_prefix="delete")
        self._waiting: Counter[ThreadPoolExecutor] = Counter()
        self._waiting_lock = threading.Lock()
        self.drained = False

    def start(self) -> None:
        """Begin to serve, in threads of their own."""
        threading.Thread(target=self._serve, name="requests", daemon=True).start()
        late, removals = self._ops.late, self._ops.deletions
        threading.Thread(target=self._repeat, args=(self._ops.sweep, late), name="late-answers", daemon=True).start()
        threading.Thread(target=self._repeat, args=(removals.sweep, removals.kicked), name="removals", daemon=True).start()

    def _serve(self) -> None:
        reader = FrameReader()
        try:
            while data := self._connection.recv(_RECEIVE_BYTES):
                for message in reader.feed(data):
                    self._handle(message)
        except WireError as error:
            _log.error("daemon_spoke_nonsense", reason=str(error))
        except OSError as error:
            _log.info("daemon_connection_lost", errno=error.errno)
        finally:
            self.ended.set()

    def _repeat(self, sweep: Callable[[], bool], wake: threading.Event) -> None:
        """Call ``sweep`` when woken, and often while it says that something is open."""
        busy = False
        while not self.ended.is_set():
            wake.wait(_SWEEP_BUSY_S if busy else _SWEEP_IDLE_S)
            wake.clear()
            try:
                busy = sweep()
            except Exception as error:  # noqa: BLE001  # it must go on; the cause is logged
                _log.error("sweep_failed", error=type(error).__name__)
                busy = False

    def _handle(self, message: list[Any]) -> None:
        try:
            request_id, code, budget_ms, body = message
            op = Op(code)
            deadline = Deadline(budget_ms / 1000)
        except (TypeError, ValueError) as error:
            raise WireError("a message that is not a request") from error
        try:
            self._dispatch(request_id, op, deadline, body)
        except WireError:
            raise
        except Exception as error:  # noqa: BLE001  # one failed call must not end the process; it is answered and logged
            self._failed(request_id, op, error)

    def _dispatch(self, request_id: int, op: Op, deadline: Deadline, body: Any) -> None:
        match op:
            case Op.ACQUIRE:
                self._acquire(request_id, deadline, body)
            case Op.RELEASE:
                self._ops.release(unpack_ids(body))
            case Op.RESERVE:
                self._reply(request_id, pack_grants(self._ops.reserve(decode_refs(body))))
            case Op.COMMIT:
                self._reply(request_id, self._ops.commit(unpack_ids(body)))
            case Op.ABORT:
                self._ops.abort(unpack_ids(body))
                self._reply(request_id, None)
            case Op.PROBE:
                self._probe(request_id, deadline, body)
            case Op.DELETE:
                self._delete(request_id, deadline, decode_refs(body))
            case Op.TIERS:
                self._reply(request_id, self._ops.tiers.names())
            case Op.LEAVE_ONLY:
                self._leave_only(request_id, deadline, body)
            case Op.STATUS:
                self._reply(request_id, self._ops.status())
            case Op.STOP:
                drain = Deadline(body / 1000)
                threading.Thread(target=self._stop, args=(request_id, drain), name="stop", daemon=True).start()

    def _acquire(self, request_id: int, deadline: Deadline, body: Any) -> None:
        refs = decode_refs(body)
        grants = self._ops.acquire_l1(refs)
        missing = [place for place, grant in enumerate(grants) if grant[2] == TierCode.ABSENT]
        if not missing or not self._ops.has_l2:
            self._reply(request_id, pack_grants(grants))
            return

        def fetch() -> None:
            for place, grant in zip(missing, self._ops.fetch([refs[place] for place in missing], deadline), strict=True):
                grants[place] = grant
            self._reply(request_id, pack_grants(grants))

        if not self._later(self._l2_threads, _MAX_WAITING_L2, request_id, Op.ACQUIRE, fetch):
            self._reply(request_id, pack_grants(grants))

    def _probe(self, request_id: int, deadline: Deadline, body: Any) -> None:
        refs = decode_refs(body)
        answers = self._ops.probe_l1(refs)
        unknown = [place for place, answer in enumerate(answers) if answer == ProbeCode.UNKNOWN]
        if not unknown:
            self._reply(request_id, bytes(answers))
            return

        def look() -> None:
            for place, answer in zip(unknown, self._ops.probe_l2([refs[place] for place in unknown], deadline), strict=True):
                answers[place] = answer
            self._reply(request_id, bytes(answers))

        if not self._later(self._l2_threads, _MAX_WAITING_L2, request_id, Op.PROBE, look):
            self._reply(request_id, bytes(answers))

    def _delete(self, request_id: int, deadline: Deadline, refs: list[ObjectRef]) -> None:
        def delete() -> None:
            trouble = self._ops.delete(refs, deadline)
            self._reply(request_id, trouble or None, Code.UNAVAILABLE if trouble else Code.OK)

        if not self._later(self._delete_threads, _MAX_WAITING_DELETES, request_id, Op.DELETE, delete):
            self._reply(request_id, "too many removals are waiting for L2", Code.UNAVAILABLE)

    def _leave_only(self, request_id: int, deadline: Deadline, body: Any) -> None:
        refs, name = decode_refs(body[0]), str(body[1])

        def leave() -> None:
            try:
                answers = self._ops.tiers.leave_only(refs, name, deadline)
            except KeyError:
                self._reply(request_id, "there is no such L2 adapter now", Code.UNAVAILABLE)
            else:
                self._reply(request_id, answers)

        if not self._later(self._delete_threads, _MAX_WAITING_DELETES, request_id, Op.LEAVE_ONLY, leave):
            self._reply(request_id, "too many removals are waiting for L2", Code.UNAVAILABLE)

    def _stop(self, request_id: int, drain: Deadline) -> None:
        self.drained = True
        if not self._ops.drain(drain):
            _log.warning("stopped_before_l2_was_drained", objects=self._ops.watch.pending_count())
        self._reply(request_id, None)
        self.ended.set()

    def _later(self, threads: ThreadPoolExecutor, limit: int, request_id: int, op: Op, work: Callable[[], None]) -> bool:
        """Do ``work`` on one of ``threads``; False if ``limit`` calls wait for them already."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # as in _handle
                self._failed(request_id, op, error)
            finally:
                with self._waiting_lock:
                    self._waiting[threads] -= 1

        with self._waiting_lock:
            if self._waiting[threads] >= limit:
                return False
            self._waiting[threads] += 1
        threads.submit(run)
        return True

    def _failed(self, request_id: int, op: Op, error: Exception) -> None:
        _log.error("call_failed", op=op.name, error=type(error).__name__)
        self._reply(request_id, f"the storage process failed in {op.name.lower()}", Code.UNAVAILABLE)

    def _reply(self, request_id: int, body: object, code: Code = Code.OK) -> None:
        if request_id == 0:
            return  # the daemon wants no answer
        data = frame([request_id, int(code), body])
        try:
            with self._send_lock:
                self._connection.sendall(data)
        except OSError as error:
            _log.info("daemon_connection_lost", errno=error.errno)
            self.ended.set()
