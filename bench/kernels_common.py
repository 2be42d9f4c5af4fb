"""What the kernel benches of both machines share: figures as records, a table with bars, a plot."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import records
from bench.measure import spread
from bench.records import Record

BAR_CELLS = 20


@dataclass(frozen=True, slots=True)
class Beside:
    """A peer or limit measured in the same run: its name, the bytes it moved, its seconds run by run."""

    name: str
    nbytes: float
    seconds: Sequence[float]

    def rates(self) -> list[float]:
        """GB/s run by run."""
        return [self.nbytes / one / 1e9 for one in self.seconds]


@dataclass(slots=True)
class Report:
    """Collects one run's records."""

    command: str
    machine: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    commit: str
    records: list[Record] = field(default_factory=list)

    def rate(
        self, case: str, nbytes: float, seconds: Sequence[float], *, limit: Beside | None = None, peer: Beside | None = None
    ) -> None:
        """One figure in GB/s; ratios are medians over the paired runs."""
        ours = [nbytes / one / 1e9 for one in seconds]

        def ratio(other: Beside | None) -> float | None:
            if other is None:
                return None
            return statistics.median(mine / theirs for mine, theirs in zip(ours, other.rates(), strict=False))

        self._add(
            case,
            statistics.median(ours),
            "GB/s",
            peer.name if peer else "",
            statistics.median(peer.rates()) if peer else None,
            ratio(peer),
            statistics.median(limit.rates()) if limit else None,
            ratio(limit),
            len(ours),
            spread(ours),
        )

    def number(self, case: str, unit: str, values: Sequence[float], *, limit: float | None = None) -> None:
        """One figure where less is better, such as a cost in µs; with a limit, how far it stays below it."""
        value = statistics.median(values)
        ratio = limit / value if limit is not None and value > 0 else None
        self._add(case, value, unit, "", None, None, limit if ratio is not None else None, ratio, len(values), spread(values))

    def _add(
        self,
        case: str,
        value: float,
        unit: str,
        peer: str,
        peer_value: float | None,
        ratio: float | None,
        limit: float | None,
        limit_ratio: float | None,
        runs: int,
        spread_: float,
    ) -> None:
        record = Record(
            case=case,
            value=value,
            unit=unit,
            peer=peer,
            peer_value=peer_value,
            ratio=ratio,
            limit=limit,
            limit_ratio=limit_ratio,
            runs=runs,
            spread=spread_,
            machine=self.machine,
            versions=self.versions,
            command=self.command,
            commit=self.commit,
            date=records.now(),
        )
        self.records.append(record)
        print(line(record), flush=True)


def line(record: Record) -> str:
    """One row: the figure, a bar for the fraction of its limit, the peer."""
    filled = min(BAR_CELLS, round((record.limit_ratio or 0) * BAR_CELLS))
    bar = f"{'█' * filled}{'·' * (BAR_CELLS - filled)} {record.limit_ratio:5.3f}" if record.limit_ratio else " " * 26
    peer = f"{record.ratio:8.2f}× {record.peer}" if record.ratio is not None else ""
    return f"{record.case:52s} {record.value:10.2f} {record.unit:5s} {bar} {peer}"


def plot(found: Sequence[Record], path: Path) -> None:
    """Bars of the fraction of each case's limit, as a picture without dependencies."""
    rows = [record for record in found if record.limit_ratio is not None]
    height = 22 * len(rows) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20">fraction of the limit (memcpy of the same bytes in the same run)</text>',
    ]
    for index, record in enumerate(rows):
        top = 36 + 22 * index
        width = 400 * min(record.limit_ratio or 0.0, 1.25)
        parts.append(f'<text x="10" y="{top + 13}">{record.case}</text>')
        parts.append(f'<rect x="360" y="{top}" width="{width:.1f}" height="16" fill="#4878a8"/>')
        parts.append(f'<text x="{365 + width:.1f}" y="{top + 13}">{record.limit_ratio:.3f}</text>')
    parts.append(f'<line x1="760" y1="30" x2="760" y2="{height - 10}" stroke="black" stroke-dasharray="4 3"/></svg>')
    path.write_text("\n".join(parts) + "\n")


def finish(report: Report, folder: Path, suite: str) -> None:
    """Writes the records and the plot."""
    path = records.write(report.records, folder, suite)
    plot(report.records, path.with_suffix(".svg"))
    for older in folder.glob(f"{suite}-{records.machine_slug(report.machine)}-*.svg"):
        if older.stem != path.stem:
            older.unlink()
    print(path.name, file=sys.stderr)
