"""Brings objects from L2 into L1, each under a read lock, within a deadline and once for all who ask at the same time."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

from kvgate.storage.backend import ObjectRef

from .clock import Deadline
from .keys import layout

# LMCache reserves L1 room for a whole prefetch or for none of it: small ones lose less when the pool is nearly full.
_MAX_BATCH_OBJECTS = 32
_MAX_BATCH_SHARE = 16  # of the pool, as 1/n
_MAX_ABANDONED = 256

Item = tuple[ObjectRef, Any]


@dataclass(slots=True)
class _Job:
    """One prefetch under way. ``locked``: keys it read-locked for whoever started it."""

    handle: Any
    keys: list[Any]
    done: threading.Event = field(default_factory=threading.Event)


class Fetcher:
    """L2 to L1. ``may_fetch`` is asked under the lock that also guards reservations, so that the two exclude each other."""

    def __init__(self, manager: Any, l1: Any, lock: threading.RLock, pool_bytes: int) -> None:
        self._manager = manager
        self._l1 = l1
        self._lock = lock
        self._pool_bytes = pool_bytes
        self._jobs: dict[Any, _Job] = {}
        self._abandoned: list[_Job] = []

    def fetching(self, key: Any) -> bool:
        """Whether a fetch of ``key`` is under way. Call with the lock held."""
        return key in self._jobs

    @property
    def abandoned(self) -> int:
        """Fetches still under way whose caller has gone."""
        return len(self._abandoned)

    def wait_none(self, keys: Sequence[Any], deadline: Deadline) -> bool:
        """Wait until none of ``keys`` is being fetched; False if the deadline came first."""
        with self._lock:
            jobs = {id(job): job for key in keys if (job := self._jobs.get(key)) is not None}
        return all(job.done.wait(deadline.left_s()) for job in jobs.values())

    def fetch(
        self,
        items: Sequence[Item],
        may_fetch: Callable[[ObjectRef, Any], bool],
        make_room: Callable[[int], None],
        deadline: Deadline,
    ) -> set[Any]:
        """Bring the objects of ``items`` (distinct keys) to L1; the keys that are there now, each read-locked once."""
        mine, others = self._start(items, may_fetch, make_room)
        locked: set[Any] = set()
        for job in mine:
            if self._manager.wait_prefetch_status(job.handle, deadline.left_s()):
                locked |= self._finish(job)
            else:
                with self._lock:
                    self._abandoned.append(job)
        for key, job in others.items():
            if job.done.wait(deadline.left_s()) and self._l1.reserve_read([key])[key][1] is not None:
                locked.add(key)
        return locked

    def sweep(self) -> bool:
        """Give back what late fetches locked; whether some are still under way. The objects stay in L1."""
        with self._lock:
            jobs, self._abandoned = self._abandoned, []
        late = []
        for job in jobs:
            if self._manager.wait_prefetch_status(job.handle, 0.0):
                locked = self._finish(job)
                if locked:
                    self._l1.finish_read(list(locked))
            else:
                late.append(job)
        with self._lock:
            self._abandoned.extend(late)
            return bool(self._abandoned)

    def _start(
        self, items: Sequence[Item], may_fetch: Callable[[ObjectRef, Any], bool], make_room: Callable[[int], None]
    ) -> tuple[list[_Job], dict[Any, _Job]]:
        by_size: dict[int, list[Any]] = defaultdict(list)
        others: dict[Any, _Job] = {}
        jobs: list[_Job] = []
        with self._lock:
            full = len(self._abandoned) > _MAX_ABANDONED
            for ref, key in items:
                job = self._jobs.get(key)
                if job is not None:
                    others[key] = job
                elif not full and may_fetch(ref, key):
                    by_size[ref.object_bytes].append(key)
            try:
                for object_bytes, keys in by_size.items():
                    make_room(object_bytes * len(keys))
                    step = max(1, min(_MAX_BATCH_OBJECTS, self._pool_bytes // _MAX_BATCH_SHARE // object_bytes))
                    for first in range(0, len(keys), step):
                        jobs.append(self._submit(keys[first : first + step], object_bytes))
            except BaseException:
                self._abandoned += jobs  # what they lock is given back by the sweep
                raise
        return jobs, others

    def _submit(self, keys: list[Any], object_bytes: int) -> _Job:
        group = GroupedObjectKeys(keys, 0, layout(object_bytes))
        job = _Job(self._manager.submit_prefetch_task(PrefetchTaskSpec([group], fetching_policy="full")), keys)
        self._jobs.update(dict.fromkeys(keys, job))
        return job

    def _finish(self, job: _Job) -> set[Any]:
        result = self._manager.query_prefetch_status(job.handle)
        hits = set(result.hit_cells[0].gather(job.keys)) if result is not None and result.hit_cells else set()
        with self._lock:
            for key in job.keys:
                self._jobs.pop(key, None)
        job.done.set()
        return hits
