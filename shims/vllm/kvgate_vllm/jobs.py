"""One background thread that works off transfers in order, bounded, so that steps never wait for them."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

LOGGER: Final = logging.getLogger("vllm.kvgate")
JOIN_S: Final = 10.0


class Job:
    """One transfer of one request. ``cancelled`` is looked at by the transfer before each piece it reads from pages."""

    def __init__(self, request_id: str, work: Callable[[Job], None]) -> None:
        self.request_id = request_id
        self.work = work
        self._lock = threading.Lock()
        self._reading = False
        self._quiet = threading.Condition(self._lock)
        self.cancelled = False

    def begin_reading(self) -> bool:
        """Claim the pages for one piece; False: cancelled, they must not be read any more."""
        with self._lock:
            self._reading = not self.cancelled
            return self._reading

    def end_reading(self) -> None:
        """The piece is through."""
        with self._lock:
            self._reading = False
            self._quiet.notify_all()

    def cancel(self) -> None:
        """No further piece is read; returns once the piece under way, a memory copy of bounded length, is through."""
        with self._lock:
            self.cancelled = True
            while self._reading:
                self._quiet.wait()


class JobThread:
    """A bounded queue and its thread."""

    def __init__(self, name: str, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[Job] = deque()
        self._open: Counter[str] = Counter()
        self._running: Job | None = None
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue ``job``; False: the queue is full or closed and the job was not taken."""
        with self._wake:
            if self._stopping or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs.append(job)
            self._open[job.request_id] += 1
            self._wake.notify_all()
            return True

    def busy(self, request_id: str) -> bool:
        """Whether a job of that request waits or runs."""
        with self._wake:
            return request_id in self._open

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel all jobs of these requests; when it returns none of them touches pages any more."""
        wanted = set(request_ids)
        with self._wake:
            jobs = [job for job in (*self._jobs, self._running) if job is not None and job.request_id in wanted]
        for job in jobs:
            job.cancel()

    def drain(self, wait_s: float) -> bool:
        """Let all jobs end; after ``wait_s`` cancel the rest and return once they read no more. False: something still runs."""
        with self._wake:
            self._wake.wait_for(lambda: not self._open, wait_s)
            jobs = [job for job in (*self._jobs, self._running) if job is not None]
        for job in jobs:
            job.cancel()
        with self._wake:
            return self._wake.wait_for(lambda: not self._open, wait_s)

    def close(self, drain_s: float) -> None:
        """Work off what waits for up to ``drain_s``, cancel the rest, end the thread. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._open, drain_s)
            jobs = [job for job in (*self._jobs, self._running) if job is not None]
        for job in jobs:
            job.cancel()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                job = self._running = self._jobs.popleft()
            try:
                job.work(job)
            except Exception:
                # The thread must go on: a dead queue would hold the blocks of every later request.
                LOGGER.exception("kvgate: a background transfer failed")
            with self._wake:
                self._running = None
                self._open[job.request_id] -= 1
                if not self._open[job.request_id]:
                    del self._open[job.request_id]
                self._wake.notify_all()
