"""A thread with a bounded queue, from which waiting jobs can be taken back, and in which none waits for another one's engine."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

_CRASHED = 70
_POLL_S = 2e-4
_POLL_SHARE = 0.02
_MAX_POLL_S = 5e-3
"""Jobs that wait for their engines are looked at so often: first soon, then at a share of what they have waited."""

_log = structlog.get_logger(__name__)


def _at_once() -> bool:
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request's work. ``run`` answers it itself. urgent: somebody waits for it. ready: whether it may begin; never waits."""

    request_id: int
    run: Callable[[], None]
    urgent: bool = False
    ready: Callable[[], bool] = _at_once


class Lane:
    """Runs jobs one after the other, always the first that is ready: an engine that hangs holds up nobody else.

    A job that raises ends the process (``on_crash``): what it has touched is not known.
    """

    def __init__(self, name: str, bound: int, enter: Callable[[], None], on_crash: Callable[[BaseException], None]) -> None:
        self._bound = bound
        self._enter = enter
        self._on_crash = on_crash
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=f"kvgate-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> bool:
        """Queue a job; False where too many wait."""
        with self._changed:
            if len(self._jobs) >= self._bound or self._stopping:
                return False
            self._jobs.append(job)
            self._changed.notify()
            return True

    def urgent(self) -> bool:
        """Whether an urgent job waits for nothing but this lane. Call it on the lane's own thread."""
        with self._changed:
            waiting = [job for job in self._jobs if job.urgent]
        return any(job.ready() for job in waiting)

    def take_back(self, request_id: int) -> bool:
        """Remove a job that has not begun; False where there is none of that number."""
        with self._changed:
            for job in self._jobs:
                if job.request_id == request_id:
                    self._jobs.remove(job)
                    return True
        return False

    def stop(self) -> list[Job]:
        """Run no further job; returns those that wait, after the one under way."""
        with self._changed:
            self._stopping = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        return waiting

    def _work(self) -> None:
        try:
            self._enter()
            while (job := self._next()) is not None:
                job.run()
        except BaseException as error:  # noqa: BLE001
            self._on_crash(error)

    def _next(self) -> Job | None:
        """The first job that is ready, taken out of the queue; None when there is none any more."""
        since = time.monotonic()
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()  # for as long as nothing is asked
                    since = time.monotonic()
                if self._stopping:
                    return None
                waiting = list(self._jobs)
            # Asked without the lock: it takes calls of the driver.
            for job in waiting:
                if job.ready() and self._take(job):
                    return job
            with self._changed:
                if not self._stopping:
                    self._changed.wait(min(_MAX_POLL_S, max(_POLL_S, _POLL_SHARE * (time.monotonic() - since))))

    def _take(self, job: Job) -> bool:
        """False where it was taken back meanwhile."""
        with self._changed:
            if self._stopping or job not in self._jobs:
                return False
            self._jobs.remove(job)
        return True


def crash(error: BaseException) -> None:
    """A job failed in a way that was not foreseen: what it has touched is not known, so nothing is served any more."""
    _log.critical("transfer.crashed", exc_info=error)
    os._exit(_CRASHED)
