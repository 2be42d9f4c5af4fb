"""First-fit allocation of aligned slots in a pool, for the memory backend."""

from __future__ import annotations

from bisect import bisect_left

from .pool import ALIGN_BYTES


def aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole slots' alignment."""
    return (size_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


class SlotAllocator:
    """Free runs of a pool, sorted by offset, neighbours always merged. Offsets and sizes are multiples of 4,096."""

    def __init__(self, pool_bytes: int) -> None:
        self._starts = [0]
        self._sizes = [pool_bytes]
        self._taken: dict[int, int] = {}
        self.pool_bytes = pool_bytes
        self.used_bytes = 0

    def allocate(self, object_bytes: int) -> int | None:
        """The offset of a slot of at least ``object_bytes``, or None if no free run is long enough."""
        need = aligned(object_bytes)
        for index, size in enumerate(self._sizes):
            if size < need:
                continue
            offset = self._starts[index]
            if size == need:
                del self._starts[index], self._sizes[index]
            else:
                self._starts[index] += need
                self._sizes[index] -= need
            self._taken[offset] = need
            self.used_bytes += need
            return offset
        return None

    def free(self, offset: int) -> None:
        """Give a slot back. Raises ``KeyError`` if none starts at ``offset``."""
        size = self._taken.pop(offset)
        self.used_bytes -= size
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and offset + size == self._starts[index]:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index > 0 and self._starts[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
            return
        self._starts.insert(index, offset)
        self._sizes.insert(index, size)

    def fits_without(self, object_bytes: int, evictable: set[int]) -> bool:
        """Whether ``object_bytes`` would fit if the slots at the ``evictable`` offsets were free."""
        runs = sorted(
            [*zip(self._starts, self._sizes, strict=True), *((at, self._taken[at]) for at in evictable)],
        )
        need = aligned(object_bytes)
        end = length = 0
        for start, size in runs:
            length = length + size if start == end else size
            end = start + size
            if length >= need:
                return True
        return False
