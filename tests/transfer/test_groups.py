"""How a call is cut into groups, and when a lane rests for others: plain arithmetic, no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate_kernels import gpu_lanes
from kvgate_kernels.gpu_lanes import Pacer, groups

GROUP_BYTES = 256 << 20


@given(count=st.integers(1, 300), most=st.integers(1, 40), pack=st.booleans())
def test_groups_cover_a_call_once_in_order(count: int, most: int, pack: bool) -> None:
    """Every payload is in one group, groups follow each other, none is larger than its stage or empty."""
    found = groups(count, most, pack=pack)
    assert [first for first, _ in found] == [sum(n for _, n in found[:at]) for at in range(len(found))]
    assert sum(n for _, n in found) == count
    assert all(1 <= n <= most for _, n in found)


@given(count=st.integers(1, 300), most=st.integers(1, 40))
def test_small_groups_are_where_nothing_else_is_under_way(count: int, most: int) -> None:
    """A pack begins with one payload, so that copies begin; an unpack ends with one, so that kernels end soon after the copies."""
    assert groups(count, most, pack=True)[0][1] == 1
    assert groups(count, most, pack=False)[-1][1] == 1


class Clock:
    """Time that passes when a test says so, and what was slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slept = 0.0
        monkeypatch.setattr(gpu_lanes, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def group(self, pacer: Pacer, took_s: float, nbytes: int = GROUP_BYTES) -> float:
        """One group whose kernels take that long; how long the lane rested after it."""
        before = self.slept
        pacer.begin()
        self.now += took_s
        pacer.end(nbytes)
        return self.slept - before


def test_lane_does_not_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that run at once, fast device or slow, are not held back."""
    clock = Clock(monkeypatch)
    for took_s in (0.0003, 0.0007):
        assert clock.group(Pacer(0.02), took_s) == 0.0


def test_lane_rests_beside_a_busy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that had to wait are followed by a rest in which they took no more than their share."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02)
    clock.group(pacer, 0.0003)
    rested_s = clock.group(pacer, 0.002)
    assert 0.0003 / (rested_s + 0.002) < 0.02


def test_lane_that_waited_long_does_not_rest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the wait alone has kept the share, nothing is added to it."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02)
    clock.group(pacer, 0.0003)
    assert clock.group(pacer, 0.5) == 0.0


def test_lane_without_a_share_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is no bound."""
    clock, pacer = Clock(monkeypatch), Pacer(0.0)
    clock.group(pacer, 0.0003)
    assert clock.group(pacer, 0.02) == 0.0


def test_small_groups_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed that busy is told by comes from groups that take long enough to measure."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02)
    clock.group(pacer, 0.0, nbytes=4096)
    assert clock.group(pacer, 0.0007) == 0.0
