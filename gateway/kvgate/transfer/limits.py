"""Bounds of one device's transfer process, and what an operator can do where one is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

POOL_REMEDY: Final = (
    "lower pool_bytes, or give the gateway more memory and locked memory (ulimit -l), and restart it; until then all is a miss"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one device.

    max_calls, max_calls_per_worker: moves under way, on the device and of one worker's pages: an engine that hangs keeps its own
    waiting, and must leave room for the others'.
    attach_s: for mapping pages, once the process serves. pool_s, pool_s_per_gib: for mapping and page-locking the pool.
    detach_s: for a detach, moves before it included. idle_s: a process without pages ends after so long; long, since an engine
    that starts meanwhile takes memory that others free while it looks how much there is for a fault.
    worker_exit_s: how long a worker that has gone may take to end, for its files to be removed.
    healthy_s: a process that served so long had no start problem.
    """

    max_calls: int = 64
    max_calls_per_worker: int = 16
    attach_s: float = 60.0
    detach_s: float = 60.0
    pool_s: float = 60.0
    pool_s_per_gib: float = 2.0
    stop_s: float = 10.0
    worker_exit_s: float = 30.0
    idle_s: float = 900.0
    healthy_s: float = 60.0
    restart_pause_s: float = 0.2
    max_restart_pause_s: float = 30.0
