"""A call must be cut into groups that fit the stages, and a lane must rest its share for others: plain arithmetic, no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate_kernels import gpu_lanes
from kvgate_kernels.gpu_lanes import Pacer, groups, runs

GROUP_BYTES = 256 << 20


@settings(deadline=None)
@given(count=st.integers(1, 300), most=st.integers(1, 40), pack=st.booleans(), few=st.booleans())
def test_groups_cover_a_call_once_in_order(count: int, most: int, pack: bool, few: bool) -> None:
    """Every payload is in one group, groups follow each other, none is larger than its stage or empty."""
    found = groups(count, most, pack=pack, few=few)
    assert [first for first, _ in found] == [sum(n for _, n in found[:at]) for at in range(len(found))]
    assert sum(n for _, n in found) == count
    assert all(1 <= n <= most for _, n in found)


@settings(deadline=None)
@given(count=st.integers(1, 300), most=st.integers(1, 40))
def test_small_groups_are_where_nothing_else_is_under_way(count: int, most: int) -> None:
    """A pack begins with one payload, so that copies begin; an unpack ends with one, so that kernels end soon after the copies."""
    assert groups(count, most, pack=True)[0][1] == 1
    assert groups(count, most, pack=False)[-1][1] == 1


@settings(deadline=None)
@given(count=st.integers(1, 300), most=st.integers(1, 40), pack=st.booleans())
def test_few_groups_are_as_few_as_can_be(count: int, most: int, pack: bool) -> None:
    """Beside others every launch counts, so that none is small but one."""
    assert len(groups(count, most, pack=pack, few=True)) == -(-count // most)


class Clock:
    """Time that passes when a test says so, and what was slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slept = 0.0
        monkeypatch.setattr(gpu_lanes, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def group(
        self, pacer: Pacer, took_s: float, nbytes: int = GROUP_BYTES, *, digest: bool = True, wanted: bool = False
    ) -> float:
        """One group whose kernels take that long; how long the lane rested before it."""
        before = self.slept
        pacer.begin(lambda: wanted)
        rested_s = self.slept - before
        self.now += took_s
        pacer.end(nbytes, digest)
        return rested_s


def test_lane_does_not_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that run at once are not held back."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    for took_s in (0.0006, 0.0003, 0.0004, 0.0003):
        assert clock.group(pacer, took_s) == 0.0


def test_lane_rests_beside_a_busy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels had to wait the next ones are launched later, so that they take no more than their share; for a while."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    for took_s in (0.0003, 0.002, 0.002):
        clock.group(pacer, took_s)
    for _ in range(3):
        assert 0.0003 / (clock.group(pacer, 0.0003) + 0.0003) < 0.02


def test_call_that_comes_alone_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single group beside a busy engine is neither held back nor held up."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    for took_s in (0.0003, 0.002, 0.002):
        clock.group(pacer, took_s)
    clock.now += 0.3
    assert pacer.busy
    assert clock.group(pacer, 0.002) == 0.0


def test_hashing_does_not_look_like_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with digests take longer than the same without, also where both were seen."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    for digest, took_s in [(False, 0.00014), (True, 0.00038)] * 6:
        assert clock.group(pacer, took_s, digest=digest) == 0.0


def test_lane_that_is_wanted_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the next call does not wait for the rests of this one, nor does a call in a hurry rest itself."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    for took_s in (0.0003, 0.002, 0.002):
        clock.group(pacer, took_s)
    assert clock.group(pacer, 0.002, wanted=True) == 0.0
    pacer.begin(None)
    assert clock.slept == 0.0
    assert clock.group(pacer, 0.002) > 0.0


def test_one_late_group_is_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that the host's scheduler held up once does not slow a lane down."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    for took_s in (0.0003, 0.004, 0.0003, 0.0003, 0.0003, 0.0003, 0.004, 0.0003):
        assert clock.group(pacer, took_s) == 0.0


def test_lane_hurries_again_when_the_engine_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that nobody else wants is not busy for long."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    clock.group(pacer, 0.0003)
    for _ in range(3):
        clock.group(pacer, 0.002)
    clock.now += 1.0
    assert clock.group(pacer, 0.0003) == 0.0


def test_lane_that_waited_long_does_not_rest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the wait alone has kept the share, nothing is added to it."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    clock.group(pacer, 0.0003)
    assert [clock.group(pacer, 0.5) for _ in range(4)] == [0.0] * 4


def test_small_groups_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed that busy is told by comes from groups that take long enough to measure."""
    clock, pacer = Clock(monkeypatch), Pacer(0.02, GROUP_BYTES)
    clock.group(pacer, 0.0, nbytes=4096)
    assert [clock.group(pacer, 0.0005) for _ in range(4)] == [0.0] * 4
    assert [clock.group(pacer, 0.001, nbytes=GROUP_BYTES // 2) for _ in range(4)] == [0.0] * 4


def side_by_side(count: int, size: int) -> list[int]:
    """Places in one stage."""
    return [size * at for at in range(count)]


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    size=st.integers(1, 1000),
)
def test_runs_name_every_address_once(steps: list[int], size: int) -> None:
    """Rows of the copies are the payloads, in their order; rows of one copy never overlap."""
    addresses = [sum(steps[:at]) for at in range(1, len(steps) + 1)]
    named = []
    for start, rows, pitch in runs(addresses, [1] * len(addresses), side_by_side(len(addresses), size), size, size):
        assert rows == 1 or pitch >= size
        named += [addresses[start] + row * pitch for row in range(rows)]
    assert named == addresses


def test_equal_distances_are_one_run() -> None:
    """Slots side by side, as a new pool gives them, take one copy a group."""
    assert runs([4096 + 5000 * at for at in range(8)], [1] * 8, side_by_side(8, 1024), 900, 1024) == [(0, 8, 5000)]


def test_two_stages_take_two_copies() -> None:
    """A group in the room of both stages is not one piece there."""
    assert runs([0, 200, 400, 600], [1] * 4, [0, 100, 7000, 7100], 100, 100) == [(0, 2, 200), (2, 2, 200)]


def test_two_buffers_take_two_copies() -> None:
    """What lies between two buffers is nobody's, and no copy may count on it."""
    assert runs([0, 200, 400, 600], [1, 1, 2, 2], side_by_side(4, 100), 100, 100) == [(0, 2, 200), (2, 2, 200)]


def test_distances_too_far_for_one_copy_are_several() -> None:
    """The driver bounds the distance of rows."""
    assert runs([0, 1 << 31, 1 << 32], [1] * 3, side_by_side(3, 4096), 4096, 4096) == [(0, 1, 4096), (1, 1, 4096), (2, 1, 4096)]
