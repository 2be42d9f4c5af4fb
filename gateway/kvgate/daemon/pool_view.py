"""The daemon's own mapping of the L1 pool, of which it touches envelopes only."""

from __future__ import annotations

from kvgate.storage.backend import PoolInfo, Slot, StorageUnavailable
from kvgate.storage.envelope import ENVELOPE_BYTES
from kvgate.storage.pool import PoolError, PoolMapping


class PoolView:
    """Follows the backend's pool across restarts of the storage process."""

    def __init__(self) -> None:
        self._mapping: PoolMapping | None = None

    @property
    def info(self) -> PoolInfo:
        """The live pool; raises ``StorageUnavailable`` while there is none."""
        if self._mapping is None:
            raise StorageUnavailable("the storage process is restarting")
        return self._mapping.info

    @property
    def generation(self) -> int:
        """Generation of the live pool, -1 while there is none."""
        return self._mapping.info.generation if self._mapping else -1

    def switch(self, info: PoolInfo | None) -> None:
        """Map the new pool, or none."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if info is not None:
            try:
                self._mapping = PoolMapping.open(info)
            except PoolError as error:
                raise StorageUnavailable(str(error)) from error

    def read_header(self, slot: Slot) -> bytes:
        """The envelope bytes of a held slot."""
        return bytes(self._part(slot))

    def write_header(self, slot: Slot, header: bytes) -> None:
        """Put an envelope in front of a payload that its writer has finished."""
        self._part(slot)[:] = header

    def _part(self, slot: Slot) -> memoryview:
        if self._mapping is None:
            raise StorageUnavailable("the storage process is restarting")
        return self._mapping.part(slot, 0, ENVELOPE_BYTES)
