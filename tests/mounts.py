"""Small file systems for tests of disks that are full or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """``folder``, made as a file system of ``size`` (as ``mount`` writes it) in memory; skips where this user may not mount."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this user may not mount")
    try:
        yield folder
    finally:
        # Lazily: what a test left open must not make its own failure unreadable.
        subprocess.run(["umount", "-l", folder], check=True)
