"""Settings that only engines of several workers have: identity, and to explain a miss a part of the plan."""

from __future__ import annotations

import dataclasses

from kvgate.contract.model import Numerics, Parameter
from tests.contract.sample import records_of, sample


def numerics(*other: tuple[str, str], tensor_parallel: int = 2) -> Numerics:
    """Numerics with these other settings."""
    made = records_of(sample())["model"].numerics  # type: ignore[attr-defined]
    assert isinstance(made, Numerics)
    parameters = tuple(Parameter(name=name, value=value) for name, value in other)
    return dataclasses.replace(made, other=parameters, tensor_parallel=tensor_parallel)


def test_a_setting_of_the_split_is_identity() -> None:
    """With, without and with another value of it, numerics differ."""
    ways = [numerics(), numerics(("split.all_reduce", "a")), numerics(("split.all_reduce", "b"))]
    assert len({one.digest() for one in ways}) == 3
    assert len({one.without_engine() for one in ways}) == 3


def test_a_setting_of_the_split_goes_with_the_split_when_a_miss_is_explained() -> None:
    """Left out together with the widths: one worker and two then differ in nothing but the plan."""
    alone = numerics(("device", "x"), tensor_parallel=1).without_engine(split=False)
    assert numerics(("device", "x"), ("split.all_reduce", "a")).without_engine(split=False) == alone
    assert numerics(("device", "y"), ("split.all_reduce", "a")).without_engine(split=False) != alone
    assert numerics(("device", "x"), ("splitting", "a")).without_engine(split=False) != alone
