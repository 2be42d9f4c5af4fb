"""What the person sees: a progress line while it runs, a table when it is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from bench.cases import Case
from bench.records import Record

BAR_CELLS: Final = 12
_MARKS: Final = {True: "met", False: "MISSED", None: "not measured"}


class Progress:
    """One line on a terminal, rewritten; elsewhere one line a case."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._title = ""

    def case(self, number: int, total: int, name: str) -> None:
        """A case begins."""
        self._title = f"[{number}/{total}] {name}"
        if self._live:
            self._line(self._title)
        else:
            print(self._title, file=self._stream, flush=True)

    def step(self, done: int, total: int) -> None:
        """Part of the case is done."""
        if self._live:
            filled = round(20 * done / total)
            self._line(f"{self._title} {'█' * filled}{'·' * (20 - filled)} {done}/{total}")

    def end(self) -> None:
        """Leave the line free for other output."""
        if self._live:
            self._line("")

    def _line(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case after its run: its record, or why there is none. ``broken``: it should have run."""

    case: Case
    record: Record | None = None
    note: str = ""
    broken: bool = False


def number(value: float | None) -> str:
    """Four significant digits, without an exponent."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def bar(ratio: float | None) -> str:
    """A bar of ``ratio``: half full at 1, full at 2 and above."""
    if ratio is None:
        return ""
    cells = min(ratio, 2.0) / 2 * BAR_CELLS
    whole = int(cells)
    part = "" if whole >= BAR_CELLS else " ▏▎▍▌▋▊▉"[int((cells - whole) * 8)].strip()
    text = ("█" * whole + part).ljust(BAR_CELLS)
    middle = BAR_CELLS // 2
    return text if text[middle] != " " else f"{text[:middle]}│{text[middle + 1 :]}"


def verdict(case: Case, record: Record) -> str:
    """Each budget of the case, and whether this record keeps it."""
    if not case.budgets:
        return "no budget"
    return "; ".join(f"{budget}: {_MARKS[budget.met(record)]}" for budget in case.budgets)


def table(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as text columns. The bar is the ratio against the peer, or else against the limit."""
    rows: list[tuple[str, ...]] = [
        ("case", "value", "unit", "±%", "peer", "× peer", "limit", "× limit", "0    1    2×".ljust(BAR_CELLS), "budget")
    ]
    notes = []
    for outcome in outcomes:
        record = outcome.record
        if record is None:
            rows.append((outcome.case.name, "–", outcome.case.unit, *[""] * 6, "BROKEN" if outcome.broken else "skipped"))
        else:
            shown = record.ratio if record.ratio is not None else record.limit_ratio
            rows.append(
                (
                    record.case,
                    number(record.value),
                    record.unit,
                    f"{record.spread * 100:.0f}",
                    number(record.peer_value),
                    number(record.ratio),
                    number(record.limit),
                    number(record.limit_ratio),
                    bar(shown),
                    verdict(outcome.case, record),
                )
            )
        beside = []
        if record is not None and record.peer:
            beside.append(f"peer: {record.peer}")
        if record is not None and record.limit is not None and outcome.case.limit:
            beside.append(f"limit: {outcome.case.limit}")
        if outcome.note:
            beside.append(outcome.note)
        if beside:
            notes.append(f"  {outcome.case.name}: {'; '.join(beside)}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {1, 3, 4, 5, 6, 7}
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "─" * max(map(len, lines)))
    met = [budget.met(o.record) for o in outcomes if o.record for budget in o.case.budgets]
    total = f"{met.count(True)} of {len(met)} budgets met, {met.count(False)} missed, {met.count(None)} not measured"
    return "\n".join([*lines, "", *notes, *([""] if notes else []), total])
