"""Speculative decoding: drafts must never reach the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("speculation_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_speculative_engines_store_only_accepted_tokens() -> None:
    """All cases of speculation_cases.py hold, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
