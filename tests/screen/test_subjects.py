"""Users' transforms by `module:name`: every accepted kind is run, everything else is refused with its name."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvgate.screen.captures import Capture
from kvgate.screen.classes import DANGEROUS, EXTENDED, PREFIX
from kvgate.screen.results import ScreenError
from kvgate.screen.screening import screen
from kvgate.screen.subjects import own

HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("name", "expected", "rule", "algorithm"),
    [
        ("EverySecond", EXTENDED, "E1", "every-second"),
        ("EVERY_SECOND", EXTENDED, "E1", "every-second"),
        ("legacy", DANGEROUS, "D3", None),
        ("compacted", DANGEROUS, "D3", None),
        ("untouched", PREFIX, "P1", None),
        ("first_chunk", EXTENDED, "E1", "first-chunk"),
        ("by_query", EXTENDED, "E1", "by-query"),
        ("bare", DANGEROUS, "D3", None),
        ("ByRatio", EXTENDED, "E1", "every-second"),
        ("prefix_only", EXTENDED, "E1", "first-chunk"),
    ],
)
def test_each_kind_of_transform_is_screened(
    capture: Capture, name: str, expected: str, rule: str, algorithm: str | None
) -> None:
    """An object, a class, a plain function and a function for the SDK are all run, and what they say of themselves is read."""
    found = screen(own(f"tests.screen.made:{name}", HALF), [capture], block_tokens=16)
    assert (found.judgement.name, found.judgement.reasons[0].rule) == (expected, rule)
    assert (found.named.algorithm if found.named else None) == algorithm


def test_a_query_named_by_the_sdks_manifest_counts(capture: Capture) -> None:
    """The manifest that the SDK writes changes with the query, and that is seen."""
    found = screen(own("tests.screen.made:by_query", HALF), [capture], block_tokens=16)
    assert (found.measured[0].query_dependent, found.measured[0].query_in_key) == (True, True)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tests.screen.absent:name", "absent"),
        ("tests.screen.made:absent", "absent"),
        ("tests.screen.made:", "made"),
        (":name", "name"),
        ("tests.screen.made:A_NUMBER", "neither"),
        ("tests.screen.made:NeedsSettings", "without arguments"),
    ],
)
def test_what_is_no_transform_is_refused(text: str, word: str) -> None:
    """The message says which name is wrong and why."""
    with pytest.raises(ScreenError, match=word):
        own(text, HALF)


@pytest.mark.parametrize("name", ["nonsense", "nothing"])
def test_what_gives_no_result_is_refused(capture: Capture, name: str) -> None:
    """A function that gives something else is named, and what it gave."""
    with pytest.raises(ScreenError, match=f"{name}: gave (str|NoneType)"):
        screen(own(f"tests.screen.made:{name}", HALF), [capture], block_tokens=16)
