"""The gateway's pool as this process maps it: by name, once, again when the gateway names another pool."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Final

from kvgate.storage.backend import PoolInfo, Slot
from kvgate.storage.pool import ALIGN_BYTES, PoolMapping

LOGGER: Final = logging.getLogger("kvgate.client")

MAX_MAPPINGS: Final = 2
"""The pool in use, and one that a transfer may still be reading while the gateway has moved on."""
STEP_BYTES: Final = 16 << 20
"""Prepared at once: a few milliseconds, in which the process's other mappings may have to wait."""
NICENESS: Final = 10


class PoolMappings:
    """Views of payload slots. Thread-safe. A view keeps its mapping alive, so forgetting an old pool never pulls memory away.

    ``prepare``: a thread takes the page faults of each new mapping, from its begin to its end. The first copy through a page is
    several times slower otherwise, and every store to a large pool is such a first copy for a long time. It costs the process
    page tables of 1/512 of the pool.
    """

    def __init__(self, *, prepare: bool = False) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._mappings: dict[tuple[str, int], PoolMapping] = {}

    def view(self, pool: str, pool_bytes: int, offset: int, length_bytes: int) -> memoryview:
        """Bytes ``[offset, offset + length_bytes)`` of the pool, writable. Raises ``PoolError``."""
        return self._mapping(pool, pool_bytes).slice(Slot(offset, length_bytes))

    def close(self) -> None:
        """Forget all mappings; memory is unmapped when the last view is gone."""
        with self._lock:
            mappings, self._mappings = list(self._mappings.values()), {}
        for mapping in mappings:
            mapping.close()

    def _mapping(self, pool: str, pool_bytes: int) -> PoolMapping:
        key = (pool, pool_bytes)
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                info = PoolInfo(name=pool, pool_bytes=pool_bytes, align_bytes=ALIGN_BYTES, generation=0)
                mapping = self._mappings[key] = PoolMapping.open(info)
                if self._prepare:
                    threading.Thread(target=_take_faults, args=(mapping,), name="kvgate-pool", daemon=True).start()
                while len(self._mappings) > MAX_MAPPINGS:
                    self._mappings.pop(next(iter(self._mappings))).close()
            return mapping


def _take_faults(mapping: PoolMapping) -> None:
    """Prepares a mapping step by step, behind all other work, until it is closed."""
    with contextlib.suppress(PermissionError):  # a sandbox may not allow it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone, on Linux
    begin = time.monotonic()
    for start in range(0, mapping.info.pool_bytes, STEP_BYTES):
        if not mapping.prepare(start, STEP_BYTES):
            if not mapping.closed:
                LOGGER.info("kvgate: pages of the pool are mapped as they are used: this kernel can't map them ahead")
            return
    LOGGER.debug("kvgate: mapped the pool in %.2f s", time.monotonic() - begin)
