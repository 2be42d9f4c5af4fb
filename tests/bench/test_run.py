"""`python -m bench` must start, measure and stop a real gateway, leave one record, and say where to look for a misspelt case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.records import ROOT, read


def test_quick_run_of_one_case_writes_its_record(tmp_path: Path) -> None:
    """A real gateway is started, measured and stopped, and one record is left."""
    command = [
        sys.executable,
        "-m",
        "bench",
        "--quick",
        "--backend",
        "memory",
        "--case",
        "ttft.miss",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    records = read(path)
    assert [record.case for record in records] == ["ttft.miss.short", "ttft.miss"]
    assert all(record.value > 0 and record.runs == 3 and record.versions["storage"] == "memory" for record in records)
    assert "budgets met" in done.stdout


def test_list_shows_the_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """Listing runs nothing and names every budget."""
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "lookup.8k" in shown
    assert ">= 4 × peer" in shown


def test_unknown_case_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt case says where to look."""
    assert main(["--case", "nothing"]) == 2
    assert "--list" in capsys.readouterr().err
