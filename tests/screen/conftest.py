"""Small made-up captures and one small real model for the screening tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgate.screen.captures import Capture, random_capture
from kvgate.screen.quality import Judge

MODEL = Path(__file__).resolve().parent.parent / "models" / "docs-llama-7m"
TEXT = MODEL / "held-out" / "python-docs-2.txt"


@pytest.fixture(scope="session")
def capture() -> Capture:
    """128 tokens in chunks of 32."""
    return random_capture("small")


@pytest.fixture(scope="session")
def judge() -> Judge:
    """The small model of the repository."""
    return Judge(MODEL)


@pytest.fixture(scope="session")
def real(judge: Judge) -> Capture:
    """64 tokens of text in chunks of 32, a window of 8 and 24 scored tokens behind it."""
    ids = judge.encode(TEXT.read_text())
    return judge.capture("real", ids[:96], ids[500:508], prefix_tokens=64, chunk_tokens=32)
