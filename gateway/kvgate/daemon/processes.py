"""Telling one process from a later one with the same number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its number and its start, in the kernel's clock ticks; ``started`` is 0 where it can't be seen."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has the number ``pid`` now."""
        return cls(pid, _start_of(pid))

    def lives(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return self.started != 0 and _start_of(self.pid) == self.started

    def ended(self) -> bool:
        """Whether it is known not to run any more; False too for one whose start could not be seen."""
        return self.started != 0 and _start_of(self.pid) != self.started


def _start_of(pid: int) -> int:
    try:
        # The name in the second field may hold anything, also blanks and brackets: count fields from its end.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    state, started = fields[0], fields[19]
    return 0 if state in (b"Z", b"X") else int(started)
