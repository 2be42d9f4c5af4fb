"""The area under the ROC curve must be what its definition says: the share of pairs in the right order."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.auc import auc

SAMPLES = st.lists(st.integers(0, 5), min_size=2, max_size=12)


@given(SAMPLES, SAMPLES)
def test_it_is_the_chance_of_the_larger_one(ones: list[int], others: list[int]) -> None:
    """The value is the share of pairs in which the first is larger, ties counting half."""
    pairs = list(itertools.product(ones, others))
    expected = sum((one > other) + 0.5 * (one == other) for one, other in pairs) / len(pairs)
    assert auc(ones, others).value == pytest.approx(expected)


@given(SAMPLES, SAMPLES)
def test_swapping_mirrors_it(ones: list[int], others: list[int]) -> None:
    """Asked the other way round it is one minus the value, as exactly known."""
    there, back = auc(ones, others), auc(others, ones)
    assert there.value + back.value == pytest.approx(1)
    assert there.error == pytest.approx(back.error)


def test_the_standard_error_is_the_spread_of_repeated_measurements() -> None:
    """Over many repetitions the values scatter as the error says, and around 0.5 where there is no difference."""
    chance = random.Random(1)
    found = [auc(*([chance.random() for _ in range(200)] for _ in range(2))) for _ in range(300)]
    scatter = statistics.stdev(one.value for one in found)
    assert scatter == pytest.approx(statistics.mean(one.error for one in found), rel=0.15)
    assert statistics.mean(one.value for one in found) == pytest.approx(0.5, abs=0.005)


def test_one_sample_is_refused() -> None:
    """Nothing is claimed from a single sample."""
    with pytest.raises(ValueError, match="two samples"):
        auc([1.0], [1.0, 2.0])
