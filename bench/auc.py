"""How well a number tells two kinds of samples apart: the area under the ROC curve, and how exactly it is known."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Auc:
    """``value``: chance that a sample of the one kind is larger than one of the other, ties counting half; 0.5 tells nothing."""

    value: float
    error: float
    samples: int


def auc(ones: Sequence[float], others: Sequence[float]) -> Auc:
    """Chance that one of ``ones`` exceeds one of ``others``, with its standard error after DeLong. At least two of each."""
    if len(ones) < 2 or len(others) < 2:
        raise ValueError("two samples of each kind are the least")
    above = _placements(ones, sorted(others))
    below = _placements(others, sorted(ones))
    value = math.fsum(above) / len(above)
    error = math.sqrt(_variance(above) / len(above) + _variance(below) / len(below))
    return Auc(value, error, len(ones) + len(others))


def _placements(samples: Sequence[float], ordered: Sequence[float]) -> list[float]:
    """For each sample the share of ``ordered`` below it, ties counting half."""
    return [(bisect_left(ordered, one) + bisect_right(ordered, one)) / (2 * len(ordered)) for one in samples]


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
