"""What ``bench.ttft_lmcache`` takes for a restored prompt. No GPU: the answers are written here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.ttft_h200 import PAIRS, RUNS, steps
from bench.ttft_lmcache import WARMING, WHOLE, Times, first_on_path


def answers(tokens: list[int], cached: int, gap: float = 1.5, ttft_ms: float = 100.0) -> list[dict[str, Any]]:
    """Those of an engine whose long prompts gave ``tokens``; the first one was computed."""
    found: list[dict[str, Any]] = []
    longs = iter(tokens)
    for number, step in enumerate(steps([1] * 9)):
        if "forget" in step:
            found.append({"done": True})
        elif "wait_s" in step:
            found.append({})
        elif number >= WARMING + 2 * (RUNS + 1):
            found.append(
                {"tokens": [0], "gaps": [0.0], "cached": 0, "restored": 0, "ttft_ms": 19.0 if step["skip_lookup"] else 20.0}
            )
        elif number < WARMING:
            found.append({"tokens": [0], "gaps": [0.0], "cached": 0, "restored": 0, "ttft_ms": 5000.0})
        else:
            first = number == 3
            found.append(
                {
                    "tokens": [next(longs)],
                    "gaps": [gap],
                    "cached": 0 if first else cached,
                    "restored": 0,
                    "ttft_ms": 1200.0 if first else ttft_ms,
                }
            )
    return found


COMPUTED = Times.of(answers([7] * 6, 0, ttft_ms=1200.0))


def test_times_are_those_of_the_long_prompt() -> None:
    """Neither the warming requests nor the first, computed one is among the later times."""
    found = Times.of(answers([7] * 6, WHOLE))
    assert (found.first_ms, found.later_ms) == (1200.0, [100.0] * 5)
    assert found.shorts == [(20.0, 19.0)] * PAIRS
    assert found.restored()
    assert found.same(COMPUTED)


def test_a_chunk_that_is_missing_is_no_restored_prompt() -> None:
    """All whole chunks must have come from somewhere."""
    assert not Times.of(answers([7] * 6, WHOLE - 256)).restored()


@pytest.mark.parametrize("gap", [0.0, 0.1, 3.0])
def test_another_token_is_something_else(gap: float) -> None:
    """Once is enough; and a tie among wrong logits excuses nothing, since the computed one was none."""
    assert not Times.of(answers([7, 7, 7, 9, 7, 7], WHOLE, gap)).same(COMPUTED)


def test_a_computed_tie_may_fall_the_other_way() -> None:
    """The two best logits were as good as equal in both."""
    assert Times.of(answers([7, 9, 9, 9, 9, 9], WHOLE, 0.1)).same(Times.of(answers([7] * 6, 0, 0.1)))


def test_the_peer_is_on_the_path_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started later finds what is installed."""
    monkeypatch.setenv("PYTHONPATH", "installed")
    with first_on_path(Path("peer")):
        assert os.environ["PYTHONPATH"].split(os.pathsep) == ["peer", "installed"]
    assert os.environ["PYTHONPATH"] == "installed"
