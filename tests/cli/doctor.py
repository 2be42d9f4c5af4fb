"""Runs `kvgate doctor` as its tests need it: on a folder of the test's own, with gateways and distributions planted there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgate import __version__
from kvgate.cli import main
from kvgate.doctor.checks import NAMES

START_S = 60.0
# What needs another Python process is left out where a test is not about it.
QUICK = tuple(name for name in NAMES if name not in ("vllm", "lmcache", "kernels"))


@dataclass
class Doctor:
    """Runs the command with settings of the test's own folder."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def state_dir(self) -> Path:
        """The gateway's state directory."""
        return self.folder / "state"

    @property
    def data_dir(self) -> Path:
        """Its data directory."""
        return self.folder / "data"

    def run(self, *checks: str, code: int | None = None, **settings: Any) -> list[dict[str, str]]:
        """The findings of ``checks``; ``code`` is the exit code it must give."""
        values = {"state_dir": self.state_dir, "data_dir": self.data_dir} | settings
        flags = [part for name, value in values.items() for part in ("--" + name.replace("_", "-"), str(value))]
        found = main(["doctor", "--json", *(part for name in checks for part in ("--only", name)), *flags])
        answer = json.loads(self.capsys.readouterr().out)
        assert answer["healthy"] is (found == 0)
        assert code in (None, found), answer
        return list(answer["checks"])

    def fault(self, check: str, level: str = "fail", **settings: Any) -> dict[str, str]:
        """The one finding of that level of a check that must find one."""
        (found,) = [one for one in self.run(check, code=int(level == "fail"), **settings) if one["level"] == level]
        assert found["remedy"]
        return found

    def mended(self, check: str, remedy: str, **settings: Any) -> None:
        """Run the remedy as an operator would paste it; the check then finds nothing."""
        subprocess.run(["sh", "-ec", remedy], check=True, timeout=START_S, stdout=subprocess.DEVNULL)
        assert [one["level"] for one in self.run(check, **settings)] == ["ok"] * len(self.run(check, **settings))


def serve(doctor: Doctor, build: str = __version__) -> tuple[str | Path, ...]:
    """The command of a gateway with a small pool; ``build`` is the version it says it has."""
    program = f"import kvgate; kvgate.__version__ = {build!r}; from kvgate.cli import main; main()"
    flags = ("--state-dir", doctor.state_dir, "--data-dir", doctor.data_dir, "--backend", "memory", "--pool-bytes", "8MiB")
    return (sys.executable, "-c", program, "serve", *flags)


def until_ready(doctor: Doctor) -> None:
    """Wait until the gateway of the folder listens."""
    ends_at = time.monotonic() + START_S
    while not (doctor.state_dir / "gateway.sock").exists():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def plant(folder: Path, name: str, version: str, plugin: str = "") -> None:
    """A distribution's metadata, as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if plugin:
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nkvgate = {plugin}\n")
