"""Version negotiation: the highest common version, or a refusal that names both ranges (reported failure 27)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.digests import SCHEMA, SCHEMAS
from kvgate.protocol.versions import SCHEMA_VERSIONS, WIRE_VERSIONS, Range, VersionMismatch, negotiate

ranges = st.builds(Range, st.integers(0, 12), st.integers(0, 12))


def versions(span: Range) -> set[int]:
    """The versions of a range, one by one."""
    return set(range(span.lowest, span.highest + 1))


@given(ranges, ranges)
def test_the_highest_common_version_is_chosen_or_none(ours: Range, theirs: Range) -> None:
    """What sets say: the largest member of both, and a refusal exactly where they share none, empty ranges included."""
    common = versions(ours) & versions(theirs)
    if common:
        assert negotiate("wire", ours, theirs) == max(common)
        return
    with pytest.raises(VersionMismatch):
        negotiate("wire", ours, theirs)


@given(ranges, ranges)
def test_both_sides_choose_alike(ours: Range, theirs: Range) -> None:
    """Who asks whom makes no difference."""
    outcomes = []
    for one, other in ((ours, theirs), (theirs, ours)):
        try:
            outcomes.append(negotiate("wire", one, other))
        except VersionMismatch:
            outcomes.append(-1)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 9), 3),
        ((1, 9), (2, 2), 2),
    ],
)
def test_neighbouring_versions_work_together(ours: tuple[int, int], theirs: tuple[int, int], chosen: int) -> None:
    """Gateway and workers can be upgraded one by one, in either order."""
    assert negotiate("wire", Range(*ours), Range(*theirs)) == chosen


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ((1, 1), (2, 2), ("speaks 1,", "speaks 2;")),
        ((1, 2), (9, 9), ("speaks 1 to 2,", "speaks 9;")),
        ((8, 9), (1, 2), ("speaks 8 to 9,", "speaks 1 to 2;")),
        ((1, 2), (2, 1), ("speaks 1 to 2,", "speaks 2 to 1;")),
        ((1, 0), (1, 1), ("speaks 1 to 0,", "speaks 1;")),
        ((1, 1), (2**64 - 1, 2**64 - 1), ("speaks 1,", f"speaks {2**64 - 1};")),
    ],
)
@pytest.mark.parametrize("what", ["wire", "schema"])
def test_a_refusal_names_what_and_both_ranges(
    what: str, ours: tuple[int, int], theirs: tuple[int, int], told: tuple[str, str]
) -> None:
    """Whoever reads it knows which side to upgrade."""
    with pytest.raises(VersionMismatch) as caught:
        negotiate(what, Range(*ours), Range(*theirs))
    assert f"common {what} version" in str(caught.value)
    assert all(part in str(caught.value) for part in told)
    assert "upgrade" in str(caught.value)


def test_a_range_is_written_with_both_ends_included() -> None:
    """``range(1, 3)`` is 1 to 2; an empty one stays empty."""
    assert Range.of(range(1, 3)) == Range(1, 2)
    assert Range.of(range(1, 2)) == Range(1, 1)
    assert not versions(Range.of(range(1, 1)))


def test_this_build_speaks_what_it_writes() -> None:
    """The schema it writes is one it reads, and is the newest of these."""
    assert SCHEMA in SCHEMAS
    assert max(SCHEMAS) == SCHEMA
    assert SCHEMA_VERSIONS == SCHEMAS
    assert negotiate("wire", Range.of(WIRE_VERSIONS), Range.of(WIRE_VERSIONS)) == max(WIRE_VERSIONS)
