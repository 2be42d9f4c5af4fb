"""The report as a table for reading."""

from __future__ import annotations

import textwrap
from typing import Final

from kvgate.verify.results import Cell, Outcome, Report, Row

WIDTH: Final = 120
_MARKS: Final = {Outcome.PASS: "pass", Outcome.FAIL: "FAIL", Outcome.UNCHECKED: "?"}


def lines(report: Report, *, every_row: bool = True) -> list[str]:
    """The table, what failed and why, what was not checked."""
    rows = report.rows if every_row else report.failed
    wide = max((len(row.name) for row in rows), default=0) + 2
    columns = [max(len(tier), 4) + 2 for tier in report.tiers]
    text = [f"{report.build}, storage {report.backend}"]
    for group in dict.fromkeys(row.group for row in rows):
        heads = "".join(tier.ljust(width) for tier, width in zip(report.tiers, columns, strict=True))
        text += ["", f"  {group.ljust(wide)}{heads}reason"]
        text += [_line(row, report.tiers, wide, columns) for row in rows if row.group == group]
    text += _details("FAILED", Outcome.FAIL, report) + _details("COULD NOT BE CHECKED", Outcome.UNCHECKED, report)
    for note in report.notes:
        text += ["", *textwrap.wrap(note, WIDTH)]
    unchecked = len(report.rows) - len(report.passed) - len(report.failed)
    text += ["", f"{len(report.passed)} rows passed, {len(report.failed)} failed, {unchecked} could not be checked"]
    return text


def _line(row: Row, tiers: list[str], wide: int, columns: list[int]) -> str:
    cells = "".join(_mark(row.cells.get(tier)).ljust(width) for tier, width in zip(tiers, columns, strict=True))
    return f"  {row.name.ljust(wide)}{cells}{row.reason}".rstrip()


def _mark(cell: Cell | None) -> str:
    return "-" if cell is None else _MARKS[cell.outcome]


def _details(title: str, outcome: Outcome, report: Report) -> list[str]:
    found = [
        f"  {row.name} ({row.group}) in {tier}: {cell.why}"
        for row in report.rows
        for tier, cell in row.cells.items()
        if cell.outcome is outcome
    ]
    return ["", title, *found] if found else []
