"""Which chunks are believed to be stored: per chunk a bitmap of the plan's rectangles. A hint, never a promise.

Entries appear at commit, at a successful acquire and when a probe of L2 found something; they go when an acquire finds the
object missing. The oldest are forgotten first: forgetting costs a probe, nothing else.

While nothing was forgotten since the pool came up, what is not listed was never committed to it: without L2 that is a certain miss.
"""

from __future__ import annotations


class PresenceIndex:
    """Chunk address → bitmap of rectangles, bounded to ``max_chunks``. About 200 bytes a chunk."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._complete = True
        self._bitmaps: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._bitmaps)

    @property
    def complete(self) -> bool:
        """Whether everything in the pool is listed; more may be, as always."""
        return self._complete

    def doubt(self) -> None:
        """Something may be in the pool that is not listed: storage did not say what became of it."""
        self._complete = False

    def add(self, chunk: bytes, rectangle: int) -> None:
        """Note that one rectangle of ``chunk`` is stored."""
        bitmaps = self._bitmaps
        known = bitmaps.get(chunk)
        if known is None and len(bitmaps) >= self._max_chunks:
            del bitmaps[next(iter(bitmaps))]
            self._complete = False
        bitmaps[chunk] = (known or 0) | 1 << rectangle

    def discard(self, chunk: bytes, rectangle: int) -> None:
        """Note that one rectangle of ``chunk`` is not there."""
        left = self._bitmaps.get(chunk, 0) & ~(1 << rectangle)
        if left:
            self._bitmaps[chunk] = left
        else:
            self._bitmaps.pop(chunk, None)

    def whole(self, chunk: bytes, rectangles: int) -> bool:
        """Whether all of the plan's ``rectangles`` are believed present."""
        return self._bitmaps.get(chunk, 0) == (1 << rectangles) - 1

    def contiguous(self, chunks: list[bytes], rectangles: int) -> int:
        """How many chunks from the first are believed whole."""
        full = (1 << rectangles) - 1
        get = self._bitmaps.get
        for index, chunk in enumerate(chunks):
            if get(chunk, 0) != full:
                return index
        return len(chunks)

    def clear(self) -> None:
        """The pool is gone, and everything in it."""
        self._bitmaps.clear()
        self._complete = True
