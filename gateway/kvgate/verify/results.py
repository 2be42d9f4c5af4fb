"""Rows and cells of the matrix, and the outcome of a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

L1: Final = "l1"
MEMORY: Final = "shared memory"
VLLM: Final = "vllm"
HITS: Final = "must hit"
"""The group of rows that must hit, what is planted for them included."""


class Outcome(Enum):
    """How one row ended in one tier."""

    PASS = "pass"
    FAIL = "FAIL"
    UNCHECKED = "not checked"


@dataclass(slots=True)
class Cell:
    """One row in one tier; ``why`` says what was wrong, or why it was not checked."""

    outcome: Outcome
    why: str = ""


@dataclass(slots=True)
class Row:
    """One line of the matrix. ``must``: "hit" or "miss", or what else has to hold. ``reason``: what the gateway said of the miss."""

    name: str
    group: str
    must: str
    cells: dict[str, Cell] = field(default_factory=dict)
    reason: str = ""

    @property
    def outcome(self) -> Outcome:
        """FAIL if any cell failed, PASS if all passed."""
        found = {cell.outcome for cell in self.cells.values()}
        return next((one for one in (Outcome.FAIL, Outcome.UNCHECKED, Outcome.PASS) if one in found), Outcome.UNCHECKED)

    def passes(self, tier: str) -> None:
        """Note a pass, unless something failed there, or could not be checked, already."""
        self.cells.setdefault(tier, Cell(Outcome.PASS))

    def fails(self, tier: str, why: str) -> None:
        """Note a failure; the first one's text stays."""
        known = self.cells.get(tier)
        if known is None or known.outcome is not Outcome.FAIL:
            self.cells[tier] = Cell(Outcome.FAIL, why)

    def unchecked(self, tier: str, why: str) -> None:
        """Note that it, or a part of it, could not be checked there."""
        known = self.cells.get(tier)
        if known is None or known.outcome is Outcome.PASS:
            self.cells[tier] = Cell(Outcome.UNCHECKED, why)

    def check(self, tier: str, problem: str) -> None:
        """Pass where ``problem`` is empty."""
        if problem:
            self.fails(tier, problem)
        else:
            self.passes(tier)

    def to_json(self) -> dict[str, Any]:
        """The row for a program."""
        return {
            "row": self.name,
            "group": self.group,
            "must": self.must,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "tiers": {tier: {"outcome": cell.outcome.value, "why": cell.why} for tier, cell in self.cells.items()},
        }


@dataclass(slots=True)
class Report:
    """Everything a run found out. ``tiers``: columns, in order. ``notes``: what was not checked, and what else a reader must know."""

    build: str = ""
    backend: str = ""
    tiers: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, name: str, group: str, must: str) -> Row:
        """The row of that name, made where there is none."""
        for row in self.rows:
            if (row.name, row.group) == (name, group):
                return row
        self.rows.append(Row(name, group, must))
        return self.rows[-1]

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def failed(self) -> list[Row]:
        """Rows that failed somewhere."""
        return [row for row in self.rows if row.outcome is Outcome.FAIL]

    @property
    def passed(self) -> list[Row]:
        """Rows that passed in every tier that has them."""
        return [row for row in self.rows if row.outcome is Outcome.PASS]

    def to_json(self) -> dict[str, Any]:
        """The report for a program."""
        return {
            "build": self.build,
            "backend": self.backend,
            "tiers": self.tiers,
            "passed": len(self.passed),
            "failed": len(self.failed),
            "not_checked": len(self.rows) - len(self.passed) - len(self.failed),
            "rows": [row.to_json() for row in self.rows],
            "notes": self.notes,
        }


class Progress:
    """Told of each step; the command shows it on a terminal. This one says nothing."""

    def begin(self, what: str, steps: int) -> None:
        """A part of that many steps begins."""

    def step(self, what: str) -> None:
        """One step begins."""

    def end(self) -> None:
        """The part is over."""


@contextmanager
def part(progress: Progress, what: str, steps: int) -> Iterator[None]:
    """A part of a run."""
    progress.begin(what, steps)
    try:
        yield
    finally:
        progress.end()
