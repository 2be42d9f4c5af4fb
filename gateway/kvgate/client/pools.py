"""The gateway's pool as this process maps it: by name, once, again when the gateway names another pool."""

from __future__ import annotations

import threading
from typing import Final

from kvgate.storage.backend import PoolInfo, Slot
from kvgate.storage.pool import ALIGN_BYTES, PoolMapping

MAX_MAPPINGS: Final = 2
"""The pool in use, and one that a transfer may still be reading while the gateway has moved on."""


class PoolMappings:
    """Views of payload slots. Thread-safe. A view keeps its mapping alive, so forgetting an old pool never pulls memory away."""

    def __init__(self) -> None:
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
                while len(self._mappings) > MAX_MAPPINGS:
                    self._mappings.pop(next(iter(self._mappings))).close()
            return mapping
