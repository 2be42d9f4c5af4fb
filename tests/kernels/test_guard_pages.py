"""Kernels never touch a byte outside the buffers they were given, not even to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("guarded_child.py")


@pytest.mark.parametrize("seed", range(3))
def test_nothing_outside_the_buffers_is_touched(backend: str, seed: int) -> None:
    """Pages and payloads end at unmapped memory and the source is read-only: any stray access would kill the process."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(CHILD), backend, str(seed)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "whole"
