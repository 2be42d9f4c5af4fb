"""A capture must come back from its file as it was, and what is no capture must be refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgate.screen.captures import FETCHED, MADE_UP, Capture, load, of_prefix, save
from kvgate.screen.results import ScreenError
from kvgate.screen.sdk_prefix import prefix_of


def test_a_capture_comes_back_as_it_was(capture: Capture, tmp_path: Path) -> None:
    """Every byte, position and token of a file is what was written, and nobody else may read it."""
    path = tmp_path / "one.kv"
    save(path, capture)
    assert path.stat().st_mode & 0o777 == 0o600
    back = load(path)
    assert torch.equal(back.source.kv, capture.source.kv)
    assert (back.origin, capture.origin) == (MADE_UP, MADE_UP)
    assert (back.name, back.source.token_ids, back.source.chunk_tokens) == ("small", capture.source.token_ids, 32)
    assert torch.equal(back.rotary.frequencies, capture.rotary.frequencies)
    for one, other in ((back.window, capture.window), (back.other, capture.other)):
        assert one is not None
        assert other is not None
        assert torch.equal(one.queries, other.queries)
        assert (one.positions, one.prompt) == (other.positions, other.prompt)


def test_what_the_sdk_fetched_is_a_capture(capture: Capture) -> None:
    """A prefix of the SDK has everything that a screening needs, in the cache's own type."""
    prefix = prefix_of(capture.source, capture.rotary)
    made = of_prefix("fetched", prefix, window=capture.window, other=capture.other)
    assert made.origin == FETCHED
    assert torch.equal(made.source.kv, capture.source.kv)
    assert (made.source.token_ids, made.source.chunk_tokens) == (capture.source.token_ids, 32)
    assert torch.allclose(made.rotary.frequencies, capture.rotary.frequencies, rtol=0, atol=1e-12)


class Bomb:
    """Pickles as a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_file_executes_nothing(tmp_path: Path) -> None:
    """A file that pickles code is refused, and the code does not run."""
    mark = tmp_path / "mark"
    torch.save({"format": "kvgate-capture-1", "kv": Bomb(mark)}, tmp_path / "bomb.kv")
    (tmp_path / "plain.kv").write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("bomb.kv", "plain.kv"):
        with pytest.raises(ScreenError, match="is no capture"):
            load(tmp_path / name)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ([1], "no capture"),
        ({"format": "kvgate-capture-2"}, "no capture of format"),
        ({"format": "kvgate-capture-1"}, "broken"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, value: Any, word: str) -> None:
    """Another format, or a capture with something missing, is told so."""
    torch.save(value, tmp_path / "x.kv")
    with pytest.raises(ScreenError, match=word):
        load(tmp_path / "x.kv")


def test_a_capture_with_wrong_shapes_is_refused(capture: Capture, tmp_path: Path) -> None:
    """What a file claims is checked as any input is."""
    path = tmp_path / "x.kv"
    save(path, capture)
    value = torch.load(path, weights_only=True)
    for change in ({"token_ids": [1]}, {"kv": torch.zeros(3)}, {"window": {"queries": torch.zeros(1)}}, {"chunk_tokens": 0}):
        torch.save(value | change, path)
        with pytest.raises(ScreenError, match="broken"):
            load(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """The message has the file's name."""
    with pytest.raises(ScreenError, match=r"none\.kv"):
        load(tmp_path / "none.kv")
