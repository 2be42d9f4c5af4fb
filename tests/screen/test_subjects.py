"""Users' transforms by `module:name`: every accepted kind is run, everything else is refused with its name."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kvgate.screen.captures import Capture
from kvgate.screen.classes import CONNECTOR, DANGEROUS, EXTENDED, PREFIX
from kvgate.screen.results import ScreenError
from kvgate.screen.screening import screen
from kvgate.screen.subjects import own
from tests.screen import made

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


def test_what_publishing_refuses_is_not_called_safe(capture: Capture) -> None:
    """Numbers that are not finite, and a type that is not taken, are found here already."""
    found = screen(own("tests.screen.made:infinite"), [capture], block_tokens=16)
    assert found.judgement.name == CONNECTOR
    assert "an infinity, which publishing refuses" in found.measured[0].reload
    with pytest.raises(ScreenError, match="made:doubles: values of float64"):
        screen(own("tests.screen.made:doubles"), [capture], block_tokens=16)


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


@pytest.mark.parametrize("name", ["Kept", "share_of_sdk"])
@pytest.mark.parametrize(("keep", "used"), [(None, "3/4"), (Fraction(1, 4), "1/4")])
def test_a_share_is_passed_where_one_is_given(capture: Capture, name: str, keep: Fraction | None, used: str) -> None:
    """An argument `ratio` gets it, its default stays without one, and nothing has to be said about it."""
    subject = own(f"tests.screen.made:{name}", keep)
    found = screen(subject, [capture], block_tokens=16)
    assert found.named is not None
    assert (found.named.parameters, subject.note) == ((("kept", used),), "")


@pytest.mark.parametrize("name", ["EverySecond", "EVERY_SECOND", "legacy", "prefix_only"])
def test_a_share_that_is_not_used_is_said(name: str) -> None:
    """Where nothing takes it, whoever gave one is told."""
    assert "--keep is not used" in own(f"tests.screen.made:{name}", HALF).note
    assert own(f"tests.screen.made:{name}").note == ""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Raises", "raised an error at {here}: RuntimeError: The size of tensor a"),
        ("raises", "raised an error at {here}: KeyError: 'missing"),
        ("BreaksWhenMade", "can't be made at {here}: RuntimeError: no settings"),
        ("unmeasurable", "gave a result that can't be measured: "),
    ],
)
def test_what_raises_is_said_in_one_line_with_its_place(capture: Capture, name: str, what: str) -> None:
    """The transform, the exception's type, and the line of its own code, not of what it called; the traceback is kept for --debug."""
    lines = Path(made.__file__).read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith((f"class {name}", f"def {name}(")))
    here = next((at for at in range(start, len(lines)) if lines[at].endswith("# here")), 0) + 1
    with pytest.raises(ScreenError) as caught:
        screen(own(f"tests.screen.made:{name}"), [capture], block_tokens=16)
    said = str(caught.value)
    assert said.startswith(f"tests.screen.made:{name} " + what.format(here=f"{made.__file__}:{here}"))
    assert "\n" not in said
    assert caught.value.__cause__ is not None


def test_a_module_that_breaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises when it is imported."""
    (tmp_path / "breaks_at_import.py").write_text("x = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ScreenError, match=r"can't be imported at .*breaks_at_import.py:1: ZeroDivisionError"):
        own("breaks_at_import:x")


@pytest.mark.parametrize("name", ["nonsense", "nothing"])
def test_what_gives_no_result_is_refused(capture: Capture, name: str) -> None:
    """A function that gives something else is named, and what it gave."""
    with pytest.raises(ScreenError, match=f"{name}: gave (str|NoneType)"):
        screen(own(f"tests.screen.made:{name}", HALF), [capture], block_tokens=16)
