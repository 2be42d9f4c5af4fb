"""The timing benches run, and see what they are meant to see. No time is asserted here: a quick run has too few samples for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.records import ROOT, read


@pytest.mark.slow
def test_quick_runs_leave_values_and_errors(tmp_path: Path) -> None:
    """Prompts, artifacts and capabilities: each step's AUC and its standard error is recorded, beside the tenant's own."""
    cases = ("oracle.salt.memory", "oracle.variant", "oracle.capability")
    flags = [word for case in cases for word in ("--case", case)]
    command = [sys.executable, "-m", "bench", "--quick", *flags, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    records = {record.case: record for record in read(path)}
    assert len(records) == 2 * (3 + 3 + 1)
    assert all(0 < record.value < 1 for record in records.values())
    assert all(records[f"{name}.error"].value < 0.1 for name in records if not name.endswith(".error"))
    assert all((record.peer_value is None) == name.endswith(".error") for name, record in records.items())
