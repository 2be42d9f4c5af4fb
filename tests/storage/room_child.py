"""A pool that is full, in a process of its own: what the storage operations evict ahead of need. Prints one JSON line.

LMCache's own eviction is off here (watermark 1), so that every eviction is one of ours.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from kvgate.storage.backend import ObjectRef
from kvgate.storage.lmcache_settings import ProcessSettings
from kvgate.storage.lmcache_wire import FrameReader, Op, ReserveCode, encode_refs, frame, pack_ids, unpack_grants
from kvgate_lmcache.build import build_manager, own_pool
from kvgate_lmcache.clock import Deadline
from kvgate_lmcache.internals import Internals
from kvgate_lmcache.ops import StorageOps
from kvgate_lmcache.quiet import quiet_lmcache
from kvgate_lmcache.server import Server
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


def made_ahead(ops: StorageOps) -> int:
    """How many objects ``make_room_ahead`` evicts now."""
    before = evicted(ops)
    ops.make_room_ahead()
    return evicted(ops) - before


def through_the_server(ops: StorageOps, refs: list[ObjectRef]) -> int:
    """Store ``refs`` as the daemon does and ask nothing more: how many objects are evicted after the commit was answered."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    Server(theirs, ops, ended).start()
    reader = FrameReader()

    def ask(op: Op, body: object) -> Any:
        ours.sendall(frame([1, int(op), 1000, body]))
        while not (answers := list(reader.feed(ours.recv(1 << 16)))):
            pass
        return answers[0][2]

    grants = unpack_grants(ask(Op.RESERVE, encode_refs(refs)), len(refs))
    before = evicted(ops)
    ask(Op.COMMIT, pack_ids([reservation for reservation, _, _ in grants]))
    until = time.monotonic() + SOON_S
    while evicted(ops) == before and time.monotonic() < until:
        time.sleep(0.001)
    ours.close()
    ended.wait(SOON_S)
    return evicted(ops) - before


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
        ops = StorageOps(manager, internals, POOL_BYTES, [], most_ahead_bytes=2 * OBJECT_BYTES)
        found: dict[str, int] = {}
        refs = [new_ref(OBJECT_BYTES) for _ in range(OBJECTS)]
        for ref in refs:
            store(ops, [ref])
        found["fill"] = evicted(ops)
        assert all(code == ReserveCode.RESIDENT for _, _, code in ops.reserve(refs[:2])), "nothing was evicted yet"
        found["resident"] = evicted(ops) + made_ahead(ops)
        store(ops, [new_ref(OBJECT_BYTES)])
        found["one"] = made_ahead(ops)
        found["again"] = made_ahead(ops)
        store(ops, [new_ref(OBJECT_BYTES) for _ in range(3)])
        found["too_much"] = made_ahead(ops)
        found["server"] = through_the_server(ops, [new_ref(OBJECT_BYTES), new_ref(OBJECT_BYTES)])
        held = [refs[-1], *(new_ref(OBJECT_BYTES) for _ in range(OBJECTS))]
        for ref in held[1:]:
            store(ops, [ref])
        ops.acquire_l1(held)
        found["held"] = made_ahead(ops)
        print(json.dumps(found))
    finally:
        os.unlink(f"/dev/shm/{internals.pool_name}")  # noqa: PTH108  # at the very end, past all that could fail
        os.close(descriptor)
    sys.stdout.flush()
    os._exit(0)  # LMCache's threads wait without a time limit


if __name__ == "__main__":
    main()
