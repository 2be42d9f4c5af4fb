"""Deleting an object from every tier so that it stays deleted.

From the first step the object is hidden: lookups do not see it, nobody may write or fetch it. Then its L2 copies go, but only
after every store of it that LMCache has under way (such a store would bring it back) and every fetch. Its L1 copy goes when the
last hold is released. If a deadline passes before that, the object stays hidden and the sweep goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import structlog
from lmcache.v1.distributed.error import L1Error

from kvgate.storage.backend import ObjectRef

from .adapters import L2Adapters
from .clock import Deadline
from .fetch import Fetcher
from .keys import object_key
from .lookup import L2Lookup
from .watch import L2Watch

_MAX_HIDDEN = 65_536
_RETRY_S = 1.0
_RETRY_BUDGET_S = 2.0
_AGAIN_S = 0.005

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Hidden:
    """One object being removed. ``in_l2``: some L2 may still have it. ``busy``: a call is at work on that."""

    ref: ObjectRef
    in_l2: bool = True
    busy: int = 0


class Deletions:
    """Objects being removed, and the steps that remove them. ``lock`` is the one the operations share."""

    def __init__(
        self,
        l1: Any,
        adapters: L2Adapters,
        lookup: L2Lookup,
        watch: L2Watch,
        fetcher: Fetcher,
        lock: threading.RLock,
    ) -> None:
        self._l1 = l1
        self._adapters = adapters
        self._lookup = lookup
        self._watch = watch
        self._fetcher = fetcher
        self._lock = lock
        self._hidden: dict[Any, _Hidden] = {}
        self._next_retry = Deadline(0.0)
        self.kicked = threading.Event()

    @property
    def count(self) -> int:
        """Objects hidden and not yet gone."""
        return len(self._hidden)

    def kick(self) -> None:
        """Something changed that a removal may have waited for: wake the sweep."""
        if self._hidden or self._watch.has_damaged():
            self.kicked.set()

    def hides(self, key: Any) -> bool:
        """Whether the object is being removed. Call with the lock held."""
        return key in self._hidden

    def delete(self, refs: Sequence[ObjectRef], writing: Set[bytes], deadline: Deadline) -> str:
        """Remove ``refs``; '' or what could not be confirmed.

        ``writing``: addresses with an open reservation. What that writer commits later is a new object and stays; for them
        only L2 can have an older one.
        """
        with self._lock:
            hide = [ref for ref in refs if ref.address not in writing]
            if len(self._hidden) + len(hide) > _MAX_HIDDEN:
                return "too many removals are waiting for L2"
            entries = {object_key(ref): _Hidden(ref) for ref in hide}
            for key, entry in entries.items():
                self._hidden.setdefault(key, entry).busy += 1
        try:
            trouble = self._remove_from_l2(refs, deadline)
        finally:
            with self._lock:
                for key in entries:
                    if (hidden := self._hidden.get(key)) is not None:
                        hidden.busy -= 1
        if not trouble:
            self._mark_gone_from_l2(list(entries))
        self._settle()
        self.kicked.set()
        return trouble

    def sweep(self) -> bool:
        """Go on with removals and throw out damaged L2 objects; whether removals wait for something that must be polled."""
        self._remove_damaged()
        self._settle()
        with self._lock:
            waiting = {key: hidden.ref for key, hidden in self._hidden.items() if hidden.in_l2 and not hidden.busy}
            polling = any(not hidden.in_l2 for hidden in self._hidden.values())
        if waiting and self._next_retry.passed():
            if not self._remove_from_l2(list(waiting.values()), Deadline(_RETRY_BUDGET_S)):
                self._mark_gone_from_l2(list(waiting))
                self._settle()
            self._next_retry = Deadline(_RETRY_S)
        return bool(waiting) or polling

    def _remove_from_l2(self, refs: Sequence[ObjectRef], deadline: Deadline) -> str:
        if not self._adapters.configured:
            return ""
        keys = [object_key(ref) for ref in refs]
        if not self._watch.wait_idle(keys, deadline):
            return "an L2 write of the object is still under way"
        if not self._fetcher.wait_none(keys, deadline):
            return "an L2 read of the object is still under way"
        while True:
            errors = self._adapters.errors
            for live in self._adapters.live:
                live.adapter.delete(keys)
            # An adapter that failed, or cannot delete, says nothing: look.
            left = self._lookup.exists(refs, deadline)
            if not any(left) or deadline.passed():
                break
            # `valkey` passes over what a lookup under way has locked, without a word.
            time.sleep(min(_AGAIN_S, deadline.left_s()))
        if any(left):
            return "L2 still has the object"
        if None in left or self._adapters.errors != errors or self._adapters.away:
            return "L2 did not confirm the removal"
        return ""

    def _mark_gone_from_l2(self, keys: Sequence[Any]) -> None:
        with self._lock:
            for key in keys:
                if (hidden := self._hidden.get(key)) is not None:
                    hidden.in_l2 = False

    def _settle(self) -> None:
        """Drop from L1 what is gone from L2 and no longer held, and forget it."""
        with self._lock:
            ready = [key for key, hidden in self._hidden.items() if not hidden.in_l2]
            if not ready:
                return
            for key, error in self._l1.delete(ready).items():
                if error in (L1Error.SUCCESS, L1Error.KEY_NOT_EXIST):
                    del self._hidden[key]

    def _remove_damaged(self) -> None:
        """An object an adapter has but cannot load whole would never be stored anew: `fs` skips what exists.

        Only what is known to be damaged goes. What could not be read, for whatever passing reason, may be whole.
        """
        damaged = self._watch.take_damaged()
        for adapter, key in damaged:
            adapter.delete([key])
        if damaged:
            _log.warning("l2_damaged_removed", objects=len(damaged))
