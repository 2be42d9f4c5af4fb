"""A thread with a bounded queue, from which waiting jobs can be taken back."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

_CRASHED = 70

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One request's work. ``run`` answers it itself. urgent: somebody waits for it."""

    request_id: int
    run: Callable[[], None]
    urgent: bool = False


class Lane:
    """Runs jobs one after the other. A job that raises ends the process (``on_crash``): what it has touched is not known."""

    def __init__(self, name: str, bound: int, enter: Callable[[], None], on_crash: Callable[[BaseException], None]) -> None:
        self._bound = bound
        self._enter = enter
        self._on_crash = on_crash
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = False
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
        """Whether an urgent job waits."""
        with self._changed:
            return any(job.urgent for job in self._jobs)

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
            while True:
                with self._changed:
                    while not self._jobs and not self._stopping:
                        self._changed.wait()  # for as long as nothing is asked
                    if self._stopping:
                        return
                    job = self._jobs.popleft()
                job.run()
        except BaseException as error:  # noqa: BLE001
            self._on_crash(error)


def crash(error: BaseException) -> None:
    """A job failed in a way that was not foreseen: what it has touched is not known, so nothing is served any more."""
    _log.critical("transfer.crashed", exc_info=error)
    os._exit(_CRASHED)
