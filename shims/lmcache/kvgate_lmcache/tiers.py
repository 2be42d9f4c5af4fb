"""Leaves objects in one L2 alone: dropped from L1 and from every other adapter. Asked for by `kvgate verify`, of its own objects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lmcache.v1.distributed.error import L1Error

from kvgate.storage.backend import ObjectRef
from kvgate.storage.lmcache_wire import ProbeCode

from .adapters import L2Adapter, L2Adapters
from .clock import Deadline
from .fetch import Fetcher
from .keys import object_key
from .lookup import L2Lookup
from .watch import L2Watch

_AGAIN_S = 0.005


class Tiers:
    """The L2 adapters by name, and moving objects into one of them. Thread-safe; ``leave_only`` blocks until its deadline."""

    def __init__(self, l1: Any, adapters: L2Adapters, lookup: L2Lookup, watch: L2Watch, fetcher: Fetcher) -> None:
        self._l1 = l1
        self._adapters = adapters
        self._lookup = lookup
        self._watch = watch
        self._fetcher = fetcher

    def names(self) -> list[str]:
        """Names of the adapters that are there now."""
        return list(self._adapters.named)

    def leave_only(self, refs: Sequence[ObjectRef], name: str, deadline: Deadline) -> bytes:
        """One ``ProbeCode`` a ref; PRESENT: the adapter ``name`` has it, and nothing else any more. ``KeyError``: no such adapter."""
        only = self._adapters.named[name]
        codes = bytearray([ProbeCode.UNKNOWN] * len(refs))
        keys = [object_key(ref) for ref in refs]
        # A store still under way would bring an object back where it was just removed.
        if not self._watch.wait_idle(keys, deadline) or not self._fetcher.wait_none(keys, deadline):
            return bytes(codes)
        there = []
        for place, has in enumerate(self._lookup.exists_in([only], refs, deadline)):
            if has:
                there.append(place)
            elif has is False:
                codes[place] = ProbeCode.ABSENT
        if there:
            gone = self._gone_from_others(only, [refs[place] for place in there], deadline)
            dropped = self._l1.delete([keys[place] for place in there])
            for place, elsewhere in zip(there, gone, strict=True):
                if elsewhere and dropped[keys[place]] in (L1Error.SUCCESS, L1Error.KEY_NOT_EXIST):
                    codes[place] = ProbeCode.PRESENT
        return bytes(codes)

    def _gone_from_others(self, only: L2Adapter, refs: Sequence[ObjectRef], deadline: Deadline) -> list[bool]:
        others = [live for live in self._adapters.live if live is not only]
        if not others:
            return [self._adapters.away == 0] * len(refs)
        keys = [object_key(ref) for ref in refs]
        while True:
            for live in others:
                live.adapter.delete(keys)
            left = self._lookup.exists_in(others, refs, deadline)
            if not any(left) or deadline.passed():
                return [has is False and self._adapters.away == 0 for has in left]
            # `valkey` passes over what a lookup under way has locked, without a word.
            time.sleep(min(_AGAIN_S, deadline.left_s()))
