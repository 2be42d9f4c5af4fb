"""Watches what LMCache does with L2 on its own: which stores are pending, which failed, which loads found damage.

LMCache answers a commit before the object is in L2 and tells a failure only as an event on a bus that drops events when it
is full. So this stands in the two calls by which its store controller hands objects to an adapter and hears back, and
in the two of its prefetch controller: exact, per object, and a dictionary operation each.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from lmcache.v1.distributed.internal_api import L1ManagerListener

from .clock import Deadline
from .internals import register_first

_MAX_DAMAGED = 4096  # as many failed loads, too

Judge = Callable[[Any], bool]
"""Whether an adapter's object of that key, which it did not load, is damaged for certain."""
_LOG_EVERY_S = 10.0

_log = structlog.get_logger(__name__)


class L2Watch(L1ManagerListener):
    """Counters and pending sets of L2 traffic. Thread-safe; callbacks of LMCache only count and never call back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: Counter[Any] = Counter()  # committed, not yet handed to an adapter
        self._storing: Counter[Any] = Counter()  # handed to an adapter, no answer yet
        self._stores: dict[Any, dict[int, list[Any]]] = {}
        self._damaged: deque[tuple[Any, Any]] = deque(maxlen=_MAX_DAMAGED)
        self._not_loaded: deque[tuple[Any, Any, Judge]] = deque(maxlen=_MAX_DAMAGED)
        self._next_log = Deadline(0.0)
        self.expected = True  # whether objects are meant to reach an L2
        self.stored_objects = 0
        self.failed_objects = 0
        self.lost_objects = 0
        self.load_failed_objects = 0
        self.on_change: Callable[[], None] = lambda: None

    def attach(self, l1: Any, store_controller: Any) -> None:
        """Start watching commits. Before the first one, or pending stores are missed."""
        # First: LMCache's own listener wakes the store controller, which can be done with a key before we have noted it.
        register_first(l1, self)
        process = store_controller._process_new_keys

        def process_and_tell(keys: list[Any]) -> None:
            try:
                process(keys)
            finally:
                self._taken(keys)

        store_controller._process_new_keys = process_and_tell

    def attach_adapter(self, adapter: Any, judge: Judge) -> None:
        """Watch one more adapter. A load that fails says nothing of the object: ``judge`` does, later and on another thread."""
        self._stores[adapter] = {}
        self._watch_stores(adapter, self._stores[adapter])
        self._watch_loads(adapter, judge)

    def forget_adapter(self, adapter: Any) -> None:
        """The adapter was taken out: what it was still given to store has failed."""
        with self._changed:
            tasks = self._stores.pop(adapter, {})
            keys = [key for task in tasks.values() for key in task]
            tasks.clear()  # a late answer changes nothing
            _subtract(self._storing, keys)
            self.failed_objects += len(keys)
            self._changed.notify_all()
        self._tell("l2_store_failed", len(keys))
        self.on_change()

    def pending(self, key: Any) -> bool:
        """Whether a committed object is still on its way to L2."""
        with self._changed:
            return key in self._queued or key in self._storing

    def pending_count(self) -> int:
        """How many objects are on their way to L2."""
        with self._changed:
            return len(self._queued.keys() | self._storing.keys())

    def wait_idle(self, keys: Iterable[Any] | None, deadline: Deadline) -> bool:
        """Wait until none of ``keys`` (None: nothing at all) is on its way to L2; False if the deadline came first."""
        wanted = None if keys is None else set(keys)

        def idle() -> bool:
            if wanted is None:
                return not self._queued and not self._storing
            return not any(key in self._queued or key in self._storing for key in wanted)

        with self._changed:
            return self._changed.wait_for(idle, timeout=deadline.left_s())

    def damaged(self, adapter: Any, key: Any) -> None:
        """Note that ``adapter`` has an object that is not whole."""
        with self._changed:
            self.load_failed_objects += 1
            self._damaged.append((adapter, key))
        self._tell("l2_load_failed", 1)
        self.on_change()

    def has_damaged(self) -> bool:
        """Whether ``take_damaged`` would return something."""
        return bool(self._damaged or self._not_loaded)

    def take_damaged(self) -> list[tuple[Any, Any]]:
        """(adapter, key) of objects found damaged since the last call. Looks at what could not be loaded: may block."""
        with self._changed:
            taken, not_loaded = list(self._damaged), list(self._not_loaded)
            self._damaged.clear()
            self._not_loaded.clear()
        return taken + [(adapter, key) for adapter, key, judge in not_loaded if judge(key)]

    # LMCache's listener interface; called under the L1 manager's lock.

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        """A commit: the store controller will hear of these keys too."""
        with self._changed:
            self._queued.update(keys)

    def on_l1_keys_reserved_read(self, keys: list[Any]) -> None:
        """Not watched."""

    def on_l1_keys_read_finished(self, keys: list[Any]) -> None:
        """Not watched."""

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        """Not watched."""

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        """Not watched: a fetched object is not stored again."""

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        """Not watched."""

    def on_l1_keys_accessed(self, keys: list[Any]) -> None:
        """Not watched."""

    def _taken(self, keys: list[Any]) -> None:
        with self._changed:
            _subtract(self._queued, keys)
            # Evicted before the controller could read them, or no adapter was there: committed, and never in L2.
            lost = sum(key not in self._storing for key in keys) if self.expected else 0
            self.lost_objects += lost
            self._changed.notify_all()
        self._tell("l2_store_lost", lost)
        self.on_change()

    def _watch_stores(self, adapter: Any, stores: dict[int, list[Any]]) -> None:
        submit, pop = adapter.submit_store_task, adapter.pop_completed_store_tasks

        def submit_and_note(keys: list[Any], objects: list[Any]) -> int:
            task: int = submit(keys, objects)
            with self._changed:
                stores[task] = list(keys)
                self._storing.update(keys)
            return task

        def pop_and_note() -> dict[int, Any]:
            completed: dict[int, Any] = pop()
            failed = 0
            with self._changed:
                for task, result in completed.items():
                    keys = stores.pop(task, [])
                    _subtract(self._storing, keys)
                    if result.is_successful():
                        self.stored_objects += len(keys)
                    else:
                        failed += len(keys)  # LMCache knows only that some object of the task failed
                self.failed_objects += failed
                self._changed.notify_all()
            self._tell("l2_store_failed", failed)
            self.on_change()
            return completed

        adapter.submit_store_task = submit_and_note
        adapter.pop_completed_store_tasks = pop_and_note

    def _watch_loads(self, adapter: Any, judge: Judge) -> None:
        submit, query = adapter.submit_load_task, adapter.query_load_result
        loads: dict[int, list[Any]] = {}

        def submit_and_note(keys: list[Any], objects: list[Any]) -> int:
            task: int = submit(keys, objects)
            with self._changed:
                loads[task] = list(keys)
            return task

        def query_and_note(task: int) -> Any:
            result = query(task)
            if result is None:
                return None
            with self._changed:
                keys = loads.pop(task, [])
                failed = [key for index, key in enumerate(keys) if not result.test(index)]
                self.load_failed_objects += len(failed)
                self._not_loaded.extend((adapter, key, judge) for key in failed)
            self._tell("l2_load_failed", len(failed))
            if failed:
                self.on_change()
            return result

        adapter.submit_load_task = submit_and_note
        adapter.query_load_result = query_and_note

    def _tell(self, event: str, objects: int) -> None:
        """Log a failure, at most one line in ten seconds: a dead L2 fails every object."""
        if objects and self._next_log.passed():
            self._next_log = Deadline(_LOG_EVERY_S)
            _log.warning(
                event,
                objects=objects,
                failed_total=self.failed_objects,
                lost_total=self.lost_objects,
                load_failed_total=self.load_failed_objects,
            )


def _subtract(counter: Counter[Any], keys: Iterable[Any]) -> None:
    for key in keys:
        if counter[key] <= 1:
            del counter[key]
        else:
            counter[key] -= 1
