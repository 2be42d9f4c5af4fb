"""Deadlines: a point in monotonic time, instead of time spans that every step would have to reduce."""

from __future__ import annotations

import time


class Deadline:
    """A moment ``seconds`` from now."""

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """Whether the moment has come."""
        return time.monotonic() >= self._at
