"""Each reference transform must be given the class that its definition demands, from end to end."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import pytest
import torch

from kvgate.screen.captures import Capture
from kvgate.screen.classes import CONNECTOR, DANGEROUS, EXTENDED, PREFIX, ROUTING
from kvgate.screen.results import ScreenError, Subject
from kvgate.screen.screening import screen
from kvgate.screen.subjects import query_aware, references
from kvgate.transforms.base import PrefixKv

HALF = Fraction(1, 2)
EXPECTED = {
    "full": PREFIX,
    "recency": EXTENDED,
    "anchors-recency": EXTENDED,
    "random": DANGEROUS,
    "snapkv": EXTENDED,
    "query-aware": ROUTING,
    "k16v8": PREFIX,
    "k8v8": CONNECTOR,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_reference_has_its_class(capture: Capture, name: str) -> None:
    """The classes of the known transforms are known."""
    found = screen(references(HALF)[name], [capture], block_tokens=16)
    assert found.judgement.name == EXPECTED[name]
    assert len(found.answers) == 12


def test_all_references_are_listed() -> None:
    """Nothing is screened by `all` that is not expected here, and the command lists the same names."""
    from kvgate.cli.screen import REFERENCES

    assert list(references(HALF)) == list(EXPECTED) == list(REFERENCES)


def test_the_best_pages_are_those_with_the_highest_bound(capture: Capture) -> None:
    """Query-aware selection is what its definition says, written with loops."""
    assert capture.window is not None
    made = query_aware(capture.source, capture.window, Fraction(1, 4))
    assert made.positions is not None
    for layer in range(2):
        bounds = []
        for page in range(8):
            total = 0.0
            for head in range(2):
                keys = capture.source.kv[layer, 0, head, 16 * page : 16 * page + 16].float()
                queries = capture.window.queries[layer, 2 * head : 2 * head + 2].float().flatten(0, 1)
                best = torch.maximum(queries * keys.amax(0), queries * keys.amin(0)).sum(-1)
                total += float(best.max())
            bounds.append(total)
        wanted = sorted(sorted(range(8), key=lambda page: -bounds[page])[:2])
        assert list(made.positions[layer][0]) == [token for page in wanted for token in range(16 * page, 16 * page + 16)]


def test_a_screening_shows_no_token_and_no_key(capture: Capture) -> None:
    """The JSON holds figures and names, and nothing of the prompt or the query."""
    tokens = tuple(range(700_001, 700_001 + 128))
    assert capture.window is not None
    assert capture.other is not None
    told = dataclasses.replace(
        capture,
        source=PrefixKv(capture.source.kv, tokens, 32),
        window=dataclasses.replace(capture.window, prompt=(*tokens, *range(800_000, 800_032))),
        other=dataclasses.replace(capture.other, prompt=(*tokens, *range(900_000, 900_032))),
    )
    text = json.dumps(screen(references(HALF)["snapkv"], [told], block_tokens=16).to_json())
    assert not any(str(token) in text for token in (*tokens, 800_000, 900_000, 800_031))
    assert json.loads(text)["manifest"] == {
        "algorithm": "snapkv",
        "algorithm_version": "1",
        "parameters": {"kernel": "7", "pooling": "average", "ratio": "1/2", "window": "32"},
        "query": True,
    }


def test_nothing_to_screen_on_is_an_error() -> None:
    """No captures, no answers."""
    with pytest.raises(ScreenError, match="nothing to screen"):
        screen(references(HALF)["full"], [], block_tokens=16)


def test_a_refusal_names_transform_and_capture(capture: Capture) -> None:
    """What a transform refuses is told in its own words, with both names."""
    lone = dataclasses.replace(capture, window=None, other=None)
    with pytest.raises(ScreenError, match=r"snapkv refuses small: .*queries"):
        screen(references(HALF)["snapkv"], [lone], block_tokens=16)


def test_progress_is_told(capture: Capture) -> None:
    """Each capture is announced."""
    seen: list[str] = []
    screen(Subject("x", references(HALF)["full"].run), [capture, capture], block_tokens=16, step=seen.append)
    assert seen == ["x: small", "x: small"]
