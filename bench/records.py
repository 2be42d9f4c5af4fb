"""The result record: one JSON object a case, all fields always there, and one file of them a run."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
LOCAL: Final = RESULTS / "local"
"""Partial and quick runs go here; git ignores it."""

_NAME: Final = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_-]+)*")
_SUITE: Final = re.compile(r"[a-z0-9]+")
_NUMBERS: Final = ("value", "peer_value", "ratio", "limit", "limit_ratio", "spread")
_OPTIONAL: Final = ("peer_value", "ratio", "limit", "limit_ratio")
_PACKAGES: Final = ("kvgate", "lmcache", "torch", "blake3", "cbor2", "numpy", "max-core")


class RecordError(ValueError):
    """A record that breaks the format; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One case of one run.

    ``value``, ``peer_value`` and ``limit`` are medians in ``unit``. ``ratio`` (against the peer) and ``limit_ratio`` (against the
    physical limit) are medians over the paired runs, so that they need not be the exact quotient of the medians; above 1 is always
    better than the peer, or than the limit. ``spread`` is the interquartile range of ``value`` over its median. ``peer`` is empty and
    the numbers null where nothing was measured beside it.
    """

    case: str
    value: float
    unit: str
    peer: str
    peer_value: float | None
    ratio: float | None
    limit: float | None
    limit_ratio: float | None
    runs: int
    spread: float
    machine: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    command: str
    commit: str
    date: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.case):
            raise RecordError("case: lower-case words joined by dots")
        for name in _NUMBERS:
            number = getattr(self, name)
            if number is None and name in _OPTIONAL:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
                raise RecordError(f"{name}: a finite number, not negative")
        for name in ("unit", "peer", "command", "commit", "date"):
            text = getattr(self, name)
            if not isinstance(text, str) or (not text and name != "peer"):
                raise RecordError(f"{name}: text, not empty")
        if type(self.runs) is not int or self.runs < 1:
            raise RecordError("runs: at least 1")
        if (self.peer_value is None) != (self.ratio is None):
            raise RecordError("ratio: goes with peer_value")
        if bool(self.peer) != (self.peer_value is not None):
            raise RecordError("peer: its name goes with its value")
        if (self.limit is None) != (self.limit_ratio is None):
            raise RecordError("limit_ratio: goes with limit")
        for name in ("machine", "versions"):
            if not isinstance(getattr(self, name), Mapping) or not getattr(self, name):
                raise RecordError(f"{name}: a map, not empty")

    def to_json(self) -> dict[str, Any]:
        """The record with numbers cut to five significant digits."""
        value = asdict(self)
        for name in _NUMBERS:
            if isinstance(value[name], float):
                value[name] = float(f"{value[name]:.5g}")
        return value

    @classmethod
    def from_json(cls, value: Any) -> Record:
        """Read one back; ``RecordError`` for a missing or unknown field."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            found = set(value) if isinstance(value, dict) else set()
            raise RecordError(f"{', '.join(sorted(names ^ found)) or 'record'}: missing or unknown")
        return cls(**value)


def machine() -> dict[str, str | int | float]:
    """What the run ran on. No host name: results are published."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30)),
        "arch": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def busy_cores(during_s: float) -> float:
    """How many cores were busy, on average, over the next ``during_s``: before a run, with other work than ours."""
    before = _processor_ticks()
    time.sleep(during_s)
    spent = [late - early for early, late in zip(before, _processor_ticks(), strict=True)]
    idle = spent[3] + spent[4]
    return round(len(os.sched_getaffinity(0)) * (1 - idle / max(1, sum(spent))), 1)


def _processor_ticks() -> list[int]:
    first = Path("/proc/stat").read_text().splitlines()[0]
    return [int(word) for word in first.split()[1:9]]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def machine_slug(described: Mapping[str, str | int | float]) -> str:
    """A short file name for a machine; the kernel's version is not part of it."""
    words = f"{described['cpu']} {described['cores']}c {described['memory_gib']}g"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def versions(**more: str) -> dict[str, str]:
    """Versions of everything that decides a figure, plus what the caller adds."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | more


def commit() -> str:
    """The commit measured; ``+changes`` where tracked files differ from it, "unknown" outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def now() -> str:
    """The time of a record: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write(records: Sequence[Record], folder: Path, suite: str) -> Path:
    """Write one run's records as ``<suite>-<machine>-<time>.json`` and remove that suite's older file of the same machine.

    ``suite`` keeps runs of different programs apart. Raises ``RecordError`` where there is nothing to write.
    """
    if not records:
        raise RecordError("records: none")
    if not _SUITE.fullmatch(suite):
        raise RecordError("suite: one lower-case word")
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{suite}-{machine_slug(records[0].machine)}"
    path = folder / f"{prefix}-{re.sub(r'[^0-9]', '', records[-1].date)}.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps([record.to_json() for record in records], indent=1) + "\n")
    partial.replace(path)
    for older in folder.glob(f"{prefix}-*.json"):
        if older != path and re.fullmatch(r"[0-9]{14}", older.stem.removeprefix(f"{prefix}-")):
            older.unlink()
    return path


def read(path: Path) -> list[Record]:
    """The records of one file; ``RecordError`` where it is not such a file."""
    try:
        items = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"file: not JSON: {error}") from error
    if not isinstance(items, list):
        raise RecordError("file: not a list of records")
    return [Record.from_json(item) for item in items]
