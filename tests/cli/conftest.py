"""A doctor, and what it may find: a running gateway, planted distributions, a small disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import mounts
from tests.children import child
from tests.cli.doctor import Doctor, serve, until_ready


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """A doctor for a folder without a gateway; nothing of the environment's settings."""
    for name in list(os.environ):
        if name.startswith(("KVGATE_", "VLLM_", "LMCACHE_RESP")):
            monkeypatch.delenv(name)
    return Doctor(tmp_path, capsys)


@pytest.fixture
def gateway(doctor: Doctor) -> Iterator[subprocess.Popen[bytes]]:
    """A running gateway of this build."""
    with child(serve(doctor), log=doctor.folder / "log") as process:
        until_ready(doctor)
        yield process


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module path of the Pythons that are asked, for planted distributions and modules."""
    folder = tmp_path / "planted"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of the test's own."""
    with mounts.small_disk(tmp_path / "mounted", "1m") as folder:
        yield folder
