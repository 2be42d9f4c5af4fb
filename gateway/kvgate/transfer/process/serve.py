"""The process's loop: frames in, jobs to the lanes, answers out as they come."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kvgate.storage.backend import PoolInfo
from kvgate.transfer.process.engine import Engine, NoRoom, Refused, Shut
from kvgate.transfer.process.lanes import Job, Lane, crash
from kvgate.transfer.records import WorkerProcess
from kvgate.transfer.wire import Code, FrameReader, MoveBody, Op, frame

_READ_BYTES = 1 << 18
_MAX_WAITING = 1024


class _Late(Exception):
    """The engine was not done with its pages before the deadline. Nothing was done."""


class _Turn:
    """When one move may begin: its engine has come to its event; or it never will, because it can't or because it is too late."""

    def __init__(self, engine: Engine, body: MoveBody, until: float) -> None:
        """until: the move's deadline, by ``time.monotonic()``."""
        self._engine = engine
        self._body = body
        self._until = until
        self._over = False
        self._error: Exception | None = None

    def over(self) -> bool:
        """Whether it is known how this ends. Never waits."""
        if not self._over:
            try:
                self._over = self._engine.ready(self._body)
            except Refused as error:
                self._error, self._over = error, True
            if not self._over and time.monotonic() > self._until:
                self._error, self._over = _Late("the engine was not done with these pages in time"), True
        return self._over

    def begin(self) -> None:
        """Raises where there is nothing to begin with."""
        if self._error is not None:
            raise self._error


class Server:
    """Serves one connection until it closes or STOP is asked. Loads, stores and the rest have a thread each."""

    def __init__(self, connection: socket.socket, engine: Engine, enter: Callable[[], None]) -> None:
        self._connection = connection
        self._engine = engine
        self._sending = threading.Lock()
        self._lanes = {name: Lane(name, _MAX_WAITING, enter, crash) for name in ("store", "load", "rest")}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Returns when the daemon has gone, or after STOP."""
        reader = FrameReader()
        while not self._stopped.is_set():
            data = self._connection.recv(_READ_BYTES)
            if not data:
                # The daemon is gone, and nobody looks after us: whatever is under way is void.
                os._exit(0)
            for request_id, op, budget_ms, body in reader.feed(data):
                self._take(request_id, Op(op), time.monotonic() + budget_ms / 1000, body)

    def answer(self, request_id: int, code: Code, body: object) -> None:
        """Send one answer. From any thread."""
        data = frame([request_id, int(code), body])
        with self._sending:
            self._connection.sendall(data)

    def _take(self, request_id: int, op: Op, until: float, body: Any) -> None:
        if op is Op.CANCEL:
            if any(self._lanes[name].take_back(body) for name in ("store", "load")):
                self.answer(body, Code.EXPIRED, "the deadline passed while others were served")
            return
        if op is Op.STOP:
            self._stop(request_id)
            return
        lane = {Op.PACK: "store", Op.UNPACK: "load"}.get(op, "rest")
        if lane == "rest":
            job = Job(request_id, lambda: self._do(request_id, op, body))
        else:
            body = MoveBody.from_value(body)
            turn = _Turn(self._engine, body, until)
            job = Job(request_id, lambda: self._do(request_id, op, body, turn), not body.paced, turn.over)
        if not self._lanes[lane].put(job):
            self.answer(request_id, Code.UNAVAILABLE, "too many requests wait")

    def _do(self, request_id: int, op: Op, body: Any, turn: _Turn | None = None) -> None:
        try:
            if turn is not None:
                turn.begin()
            result = self._call(op, body)
        except Shut as error:
            self.answer(request_id, Code.SHUT, str(error))
        except Refused as error:
            self.answer(request_id, Code.REFUSED, str(error))
        except _Late as error:
            self.answer(request_id, Code.EXPIRED, str(error))
        except NoRoom as error:
            self.answer(request_id, Code.UNAVAILABLE, str(error))
        else:
            self.answer(request_id, Code.OK, result)

    def _call(self, op: Op, body: Any) -> object:
        engine = self._engine
        if op is Op.PACK:
            return engine.pack(body, self._lanes["store"].urgent)
        if op is Op.UNPACK:
            return engine.unpack(body, self._lanes["load"].urgent)
        if op is Op.ATTACH:
            export, payload, pid, uid, gate = body
            return engine.attach(export, payload, WorkerProcess(pid, uid), gate)
        if op is Op.DETACH:
            engine.detach(body)
        elif op is Op.POOL:
            engine.use_pool(None if body is None else PoolInfo(*body))
        else:
            return engine.status()
        return None

    def _stop(self, request_id: int) -> None:
        for lane in self._lanes.values():
            for job in lane.stop():
                self.answer(job.request_id, Code.EXPIRED, "the gateway is stopping")
        self._engine.close()
        self.answer(request_id, Code.OK, None)
        self._stopped.set()
