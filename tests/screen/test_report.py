"""The report: readable, complete, and needing nothing but itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvgate.screen import report
from kvgate.screen.captures import MADE_UP, Capture
from kvgate.screen.quality import Drift
from kvgate.screen.screening import Screening, screen
from kvgate.screen.subjects import references

DRIFT = Drift(kl=0.01, kl_95=0.05, top1_changed=0.02, perplexity_change=0.1, curve=(0.01, 0.02, 0.0))


@pytest.fixture(scope="module")
def screenings(capture: Capture) -> list[Screening]:
    """All references, two of them with drift."""
    found = [screen(one, [capture, capture], block_tokens=16) for one in references(Fraction(1, 2)).values()]
    return [dataclasses.replace(one, drifts=(DRIFT, None)) if at in (1, 4) else one for at, one in enumerate(found)]


class Elements(HTMLParser):
    """Collects tags and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See ``HTMLParser``."""
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_page_needs_nothing_else(screenings: list[Screening]) -> None:
    """No script, no font, no picture from elsewhere; every plot is well-formed SVG."""
    page = report.page(screenings)
    found = Elements()
    found.feed(page)
    assert not {"script", "img", "link", "iframe"} & set(found.tags)
    assert all(link.startswith("#") for link in found.links)
    assert "url(" not in page
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) >= len(screenings)
    for plot in plots:
        ElementTree.fromstring(plot.replace("role=img", "role='img'"))


def test_every_screening_is_in_text_and_page(screenings: list[Screening]) -> None:
    """Name, class, each reason, each question and answer."""
    page = report.page(screenings)
    for one in screenings:
        text = report.text(one)
        for answer in one.answers:
            assert answer.question in text
            assert answer.answer in text
        assert text.startswith(f"{one.name}: {one.judgement.name}")
        assert f"id='{one.name}'" in page
    lines = report.summary(screenings).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [one.name for one in screenings]


def test_names_are_escaped(screenings: list[Screening]) -> None:
    """A transform's name is text, whatever it holds."""
    page = report.page([dataclasses.replace(screenings[0], name="<script>'\"&")])
    assert "<script" not in page
    assert "&lt;script&gt;&#x27;&quot;&amp;" in page


def test_plots_stand_zero_drift_and_no_positions(screenings: list[Screening]) -> None:
    """A curve of zeros and a result without positions are drawn or left out, not broken."""
    flat = dataclasses.replace(DRIFT, kl=0.0, curve=(0.0,))
    bare = [dataclasses.replace(one, kept_where=(), read_chunks=None) for one in screenings[0].measured]
    one = dataclasses.replace(screenings[0], drifts=(flat, flat), measured=tuple(bare))
    assert "nan" not in report.page([one, one])


def test_the_command_writes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text to the terminal, JSON and the page to files; each says where the KV came from."""
    from kvgate.cli import main

    words = ["screen", "full", "random", "--chunk-tokens", "32"]
    assert main([*words, "--json", str(tmp_path / "x.json"), "--report", str(tmp_path / "x.html")]) == 0
    shown = capsys.readouterr().out
    assert "random: dangerous for sharing" in shown
    assert "transform" in shown
    assert '"class": "safe for prefix reuse"' in (tmp_path / "x.json").read_text()
    assert "</html>" in (tmp_path / "x.html").read_text()
    assert f'"kv": "{MADE_UP}"' in (tmp_path / "x.json").read_text()
    assert f"KV: {MADE_UP}" in (tmp_path / "x.html").read_text()
    assert shown.count(f"  KV  {MADE_UP}\n") == 2


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["absent"], "no reference transform"),
        (["full", "--text", "/nowhere/x.txt"], "--text needs --model"),
        (["full", "--text", "/nowhere/x.txt", "--capture", "/nowhere/x.kv"], "--text needs --model"),
        (["full", "--model", "nowhere"], "nowhere: no such folder"),
        (["full", "--model", __file__, "--text", __file__], "no such folder"),
        (["tests.screen.made:raises"], "raised an error"),
        (["full", "--capture", "/nowhere/x.kv"], "/nowhere/x.kv"),
        (["full", "--report", "/nowhere/x.html", "--chunk-tokens", "32"], "/nowhere/x.html"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the reason, and status 1."""
    from kvgate.cli import main

    assert main(["screen", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvgate screen: ")
    assert word in error
    assert error.count("\n") == 1


def test_the_traceback_is_for_those_who_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """With --debug it is printed before the line."""
    from kvgate.cli import main

    assert main(["screen", "tests.screen.made:raises", "--debug"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "kvgate screen: tests.screen.made:raises raised an error" in error


@pytest.mark.parametrize("share", ["2", "0", "-1/2", "1/0", "half"])
def test_a_share_that_is_none_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As wrong use, by name."""
    from kvgate.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["screen", "full", f"--keep={share}"])
    assert caught.value.code == 2
    assert "--keep: must be above 0 and at most 1" in capsys.readouterr().err


def test_without_torch_the_command_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base install has the command, and says what it lacks."""
    from kvgate.cli import main

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    assert main(["screen", "full"]) == 1
    assert "needs torch: install" in capsys.readouterr().err


def test_captures_are_kept_for_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one screening captured another can be made on, with the same result."""
    from kvgate.cli import main

    words = ["screen", "snapkv", "--chunk-tokens", "32", "--json", "-"]
    assert main([*words, "--save-captures", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert main([*words, *(word for file in files for word in ("--capture", str(file)))]) == 0
    assert capsys.readouterr().out == first
