"""What a case is: a name, a budget, and a function that takes the samples."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from bench.measure import Samples
from bench.records import Record

T = TypeVar("T")

_COMPARE: Final = {">=": operator.ge, "<=": operator.le, ">": operator.gt}


class Skipped(Exception):
    """The case cannot run here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Budget:
    """``field`` of the record (``value``, ``ratio`` or ``limit_ratio``) compared with a bound."""

    field: str
    sign: str
    bound: float

    def met(self, record: Record) -> bool | None:
        """None where the record lacks the number."""
        number = getattr(record, self.field)
        return None if number is None else bool(_COMPARE[self.sign](number, self.bound))

    def __str__(self) -> str:
        what = {"value": "value", "ratio": "× peer", "limit_ratio": "× limit"}[self.field]
        return f"{self.sign} {self.bound:.3g}" if self.field == "value" else f"{self.sign} {self.bound:.3g} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``family`` cases run one after another and share fixtures. ``limit`` names the physical limit, where there is one."""

    name: str
    family: str
    what: str
    unit: str
    run: Callable[[Env], Samples]
    budgets: tuple[Budget, ...] = ()
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: runs that become one figure each, and calls per run."""

    runs: int
    repeats: int
    warmup: int


@dataclass(slots=True)
class Env:
    """What a case is given: how much to do, where to put things, and fixtures shared within its family."""

    quick: bool
    backend: str
    folder: Path
    progress: Callable[[int, int], None]
    versions: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _shared: dict[str, Any] = field(default_factory=dict)

    def plan(self, runs: int, repeats: int, warmup: int) -> Plan:
        """The full amounts, or a fraction of them in a quick run."""
        if self.quick:
            return Plan(min(runs, 3), min(repeats, 5), min(warmup, 1))
        return Plan(runs, repeats, warmup)

    def stepper(self, total: int) -> Callable[[], None]:
        """A progress step function for ``total`` steps."""
        done = iter(range(1, total + 1))
        return lambda: self.progress(next(done), total)

    def shared(self, name: str, make: Callable[[Env], AbstractContextManager[T]]) -> T:
        """A fixture made once and kept until the family ends."""
        if name not in self._shared:
            self._shared[name] = self._stack.enter_context(make(self))
        return cast(T, self._shared[name])

    def end_family(self) -> None:
        """Close the fixtures."""
        self._shared.clear()
        self._stack.close()


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order they run."""
    from bench import footprint, issue, lookup, miss, oracle, oracle_variants, register, transfer

    return (
        *issue.CASES,
        *lookup.CASES,
        *transfer.CASES,
        *miss.CASES,
        *footprint.CASES,
        *register.CASES,
        *oracle.CASES,
        *oracle_variants.CASES,
    )


def chosen(names: list[str]) -> Iterator[Case]:
    """The cases whose name is one of ``names`` or begins with one and a dot; all for none. ``KeyError`` for a name without a case."""
    cases = all_cases()
    for name in names:
        if not any(case.name == name or case.name.startswith(f"{name}.") for case in cases):
            raise KeyError(name)
    for case in cases:
        if not names or any(case.name == name or case.name.startswith(f"{name}.") for name in names):
            yield case
