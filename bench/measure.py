"""Taking samples: ours, the peer and the limit in turns within the same run, so that a slow minute hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SETTLE_S: Final = 0.03
"""Before a side's turn: the other sides' processes finish what they put off."""

Timed = Callable[[], float]
"""Does the work once and returns the seconds that count."""


def timed(work: Callable[[], object]) -> Timed:
    """The whole call counts."""

    def one() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return one


def interleave(
    sides: Mapping[str, Timed], *, runs: int, repeats: int, warmup: int, step: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds per side: one median over ``repeats`` calls a run. In every run each side has its turn, and who begins changes.

    A turn is a pause, ``warmup`` calls that do not count, and ``repeats`` that do. Call by call in turns would measure mostly what the
    other side's threads still do after their answer. ``step`` is called after each run, for progress.
    """
    names = list(sides)
    found: dict[str, list[float]] = {name: [] for name in names}
    for run in range(runs):
        at = run % len(names)
        for name in names[at:] + names[:at]:
            time.sleep(SETTLE_S)
            for _ in range(warmup):
                sides[name]()
            found[name].append(statistics.median([sides[name]() for _ in range(repeats)]))
        step()
    return found


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for a single value."""
    middle = statistics.median(values)
    if len(values) < 2 or middle == 0:
        return 0.0
    quarters = statistics.quantiles(values, n=4, method="inclusive")
    return (quarters[2] - quarters[0]) / middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One case's figures in its unit, one a run; the sides of one run belong together. ``note`` says what to know in the table."""

    ours: Sequence[float]
    smaller_is_better: bool
    peer: str = ""
    peers: Sequence[float] = ()
    limits: Sequence[float] = ()
    note: str = ""

    def ratio(self, others: Sequence[float]) -> float | None:
        """Median over the runs of ours against ``others``, above 1 where ours is better; None where there are no others."""
        if not others:
            return None
        pairs = zip(self.ours, others, strict=True)
        return statistics.median(other / mine if self.smaller_is_better else mine / other for mine, other in pairs)


def micros(seconds: Sequence[float]) -> list[float]:
    """Seconds as µs."""
    return [one * 1e6 for one in seconds]


def gigabytes_per_second(payload_bytes: int, seconds: Sequence[float]) -> list[float]:
    """Seconds for ``payload_bytes`` as 10⁹ bytes a second."""
    return [payload_bytes / one / 1e9 for one in seconds]
