"""A pool that is full, in a process of its own: what the storage operations evict for a reservation. Prints one JSON line.

LMCache's own eviction is off here (watermark 1), so that every eviction is one of ours.
"""

from __future__ import annotations

import json
import os
import secrets
import sys

from kvgate.storage.backend import ObjectRef
from kvgate.storage.lmcache_settings import ProcessSettings
from kvgate.storage.lmcache_wire import ReserveCode, TierCode
from kvgate_lmcache.build import build_manager, own_pool
from kvgate_lmcache.clock import Deadline
from kvgate_lmcache.internals import Internals
from kvgate_lmcache.ops import StorageOps
from kvgate_lmcache.quiet import quiet_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, new_ref

OBJECTS = 16
OBJECT_BYTES = POOL_BYTES // OBJECTS


def store(ops: StorageOps, refs: list[ObjectRef]) -> None:
    """Reserve and commit ``refs`` in one call each."""
    grants = ops.reserve(refs)
    assert all(code == ReserveCode.GRANTED for _, _, code in grants), "there is room, or it can be made"
    ops.commit([reservation for reservation, _, _ in grants])
    ops.watch.wait_idle(None, Deadline(SOON_S))  # what LMCache has not looked at yet can't be evicted


def evicted(ops: StorageOps) -> int:
    """How many objects we evicted so far."""
    return int(ops.status()["evicted_objects"])


def main() -> None:
    """Run all of it."""
    quiet_lmcache()
    settings = ProcessSettings(
        start_id=secrets.token_hex(16),
        parent_pid=os.getpid(),
        socket_path="",
        pool_bytes=POOL_BYTES,
        l2_adapters=(),
        evict_watermark=1.0,
        evict_ratio=0.01,
        fetches_in_flight=1,
        orphan_drain_s=0.0,
        attach_url="",
    )
    manager = build_manager(settings)
    internals = Internals(manager)
    descriptor = own_pool(settings, internals)
    try:
        ops = StorageOps(manager, internals, POOL_BYTES, [])
        found: dict[str, int] = {}
        refs = [new_ref(OBJECT_BYTES) for _ in range(OBJECTS)]
        for ref in refs:
            store(ops, [ref])
        found["fill"] = evicted(ops)
        assert all(code == ReserveCode.RESIDENT for _, _, code in ops.reserve(refs)), "nothing was evicted yet"
        found["resident"] = evicted(ops)
        store(ops, [new_ref(OBJECT_BYTES), new_ref(OBJECT_BYTES)])
        found["two"] = evicted(ops)
        held = sum(code != TierCode.ABSENT for _, _, code in ops.acquire_l1(refs))
        wanted = [new_ref(OBJECT_BYTES) for _ in range(OBJECTS)]
        found["held"] = sum(code == ReserveCode.GRANTED for _, _, code in ops.reserve(wanted)) - (OBJECTS - held)
        print(json.dumps(found))
    finally:
        os.unlink(f"/dev/shm/{internals.pool_name}")  # noqa: PTH108  # at the very end, past all that could fail
        os.close(descriptor)
    sys.stdout.flush()
    os._exit(0)  # LMCache's threads wait without a time limit


if __name__ == "__main__":
    main()
