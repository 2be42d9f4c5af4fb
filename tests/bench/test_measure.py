"""Samples and budgets: sides take turns, and a ratio above one is always the better side."""

from __future__ import annotations

import pytest

from bench.cases import Budget, all_cases, chosen
from bench.measure import Samples, interleave, spread
from bench.report import Outcome, bar, table, verdict
from tests.bench.test_records import record


def test_sides_take_turns() -> None:
    """Every run calls all sides equally often, and not always the same one first."""
    called: list[str] = []

    def side(name: str, seconds: float) -> float:
        called.append(name)
        return seconds

    sides = {"ours": lambda: side("ours", 1.0), "peer": lambda: side("peer", 2.0)}
    steps: list[int] = []
    taken = interleave(sides, runs=3, repeats=2, warmup=1, step=lambda: steps.append(1))
    assert taken == {"ours": [1.0] * 3, "peer": [2.0] * 3}
    assert len(steps) == 3
    ours, theirs = ["ours"] * 3, ["peer"] * 3  # one call to warm up and two that count
    assert called == [*ours, *theirs, *theirs, *ours, *ours, *theirs]


@pytest.mark.parametrize(("smaller", "expected"), [(True, 4.0), (False, 0.25)])
def test_ratio_above_one_is_better(smaller: bool, expected: float) -> None:
    """Four times fewer microseconds is 4; four times fewer GB/s is a quarter."""
    assert Samples(ours=[1.0, 2.0], smaller_is_better=smaller).ratio([4.0, 8.0]) == expected


def test_ratio_pairs_the_runs() -> None:
    """A slow minute that hits both sides of one run does not move the ratio."""
    assert Samples(ours=[1.0, 1.0, 10.0], smaller_is_better=True).ratio([2.0, 2.0, 20.0]) == 2.0


def test_ratio_without_the_other_side_is_none() -> None:
    """No peer, no ratio."""
    assert Samples(ours=[1.0], smaller_is_better=True).ratio(()) is None


def test_ratio_refuses_unequal_runs() -> None:
    """Sides that were not measured together are not compared."""
    with pytest.raises(ValueError):
        Samples(ours=[1.0], smaller_is_better=True).ratio([1.0, 2.0])


@pytest.mark.parametrize(("values", "expected"), [([5.0], 0.0), ([0.0, 0.0], 0.0), ([8.0, 9.0, 10.0, 11.0, 12.0], 0.2)])
def test_spread_is_the_interquartile_range_over_the_median(values: list[float], expected: float) -> None:
    """One number says how steady the runs were."""
    assert spread(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("budget", "met"),
    [
        (Budget("ratio", ">=", 3.0), True),
        (Budget("ratio", ">", 3.0), False),
        (Budget("limit_ratio", ">=", 0.85), False),
        (Budget("value", "<=", 7.5), True),
    ],
)
def test_budget_is_compared_with_its_own_field(budget: Budget, met: bool) -> None:
    """Met and missed are decided by the field the budget names."""
    assert budget.met(record()) is met


def test_budget_without_its_number_is_neither_met_nor_missed() -> None:
    """Without a peer a budget against the peer is not measured."""
    alone = record(peer="", peer_value=None, ratio=None)
    assert Budget("ratio", ">=", 1.0).met(alone) is None


def test_case_names_are_unique_and_fit_the_record() -> None:
    """Every case can be written and told apart."""
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    for name in names:
        record(case=name)


def test_choosing_a_case_takes_those_below_it() -> None:
    """A name stands for itself and what is under it, not for what merely begins alike."""
    assert {case.name for case in chosen(["store.raw"])} == {
        "store.raw",
        "store.raw.pages",
        "store.raw.1mib",
        "store.raw.32mib",
    }
    assert len(list(chosen([]))) == len(all_cases())


@pytest.mark.parametrize("name", ["nothing", "store.ra", ""])
def test_choosing_refuses_an_unknown_name(name: str) -> None:
    """A misspelt case is an error, not an empty run."""
    with pytest.raises(KeyError):
        list(chosen([name]))


def test_table_names_every_outcome() -> None:
    """Missed budgets, skipped and broken cases are all visible."""
    case = next(case for case in all_cases() if case.name == "store.raw")
    shown = table([Outcome(case, record()), Outcome(case, note="no peer here"), Outcome(case, note="boom", broken=True)])
    for text in ("MISSED", "met", "skipped", "no peer here", "BROKEN", "boom", "1 of 2 budgets met, 1 missed"):
        assert text in shown
    assert verdict(case, record(limit=None, limit_ratio=None)).startswith(">= 0.85 × limit: not measured")


@pytest.mark.parametrize("ratio", [None, 0.0, 0.01, 0.999, 1.0, 1.5, 2.0, 40.0])
def test_bar_has_a_fixed_width(ratio: float | None) -> None:
    """A bar never breaks the columns beside it."""
    assert len(bar(ratio)) == (0 if ratio is None else 12)
