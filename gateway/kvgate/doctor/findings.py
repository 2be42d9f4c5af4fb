"""What a check finds, and how checks are run: each with a deadline, none able to stop another."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvgate.config import Config


class Level(Enum):
    """How bad a finding is. ``FAIL``: the gateway or an engine will not work as configured, or keeps no secret."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found, and the command that mends it ("" where nothing has to be mended)."""

    check: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: the settings `kvgate serve` would use, and the Python of the engine's environment ("": this one)."""

    config: Config
    vllm_python: str = ""


class Report:
    """Collects what one check finds."""

    def __init__(self, check: str) -> None:
        self._check = check
        self.findings: list[Finding] = []

    def ok(self, found: str) -> None:
        """Nothing to mend."""
        self.findings.append(Finding(self._check, Level.OK, found))

    def warn(self, found: str, remedy: str) -> None:
        """It works, and not as well or as safely as it should."""
        self.findings.append(Finding(self._check, Level.WARN, found, remedy))

    def fail(self, found: str, remedy: str) -> None:
        """It does not work."""
        self.findings.append(Finding(self._check, Level.FAIL, found, remedy))


@dataclass(frozen=True, slots=True)
class Check:
    """One check by name. ``look`` may block: it runs in a thread of its own and is given up after ``deadline_s``."""

    name: str
    look: Callable[[Subject, Report], None]
    deadline_s: float
    hangs: str = "a disk or server it asked does not answer; mend that first"


def run_checks(checks: Sequence[Check], subject: Subject) -> list[Finding]:
    """Run all checks at once; their findings in the order of ``checks``."""
    started = time.monotonic()
    runs = [_Run(check, subject) for check in checks]
    return [finding for run in runs for finding in run.result(started)]


class _Run:
    def __init__(self, check: Check, subject: Subject) -> None:
        self._check = check
        self._report = Report(check.name)
        self._trouble = ""
        # A daemon thread: a check that hangs in the kernel must not keep the command from ending.
        self._thread = threading.Thread(target=self._look, args=(subject,), name=f"check-{check.name}", daemon=True)
        self._thread.start()

    def _look(self, subject: Subject) -> None:
        try:
            self._check.look(subject, self._report)
        except Exception as error:  # noqa: BLE001  # one broken check must not hide the others; it is reported as a finding
            self._trouble = (
                f"{type(error).__name__}: {error.strerror or ''}" if isinstance(error, OSError) else type(error).__name__
            )

    def result(self, started: float) -> Iterable[Finding]:
        check = self._check
        self._thread.join(max(0.0, started + check.deadline_s - time.monotonic()))
        if self._thread.is_alive():
            return [Finding(check.name, Level.FAIL, f"no answer within {check.deadline_s:g} s", check.hangs)]
        if self._trouble:
            problem = f"the check itself failed ({self._trouble})"
            return [
                *self._report.findings,
                Finding(check.name, Level.FAIL, problem, f"kvgate doctor --only {check.name} --json"),
            ]
        return self._report.findings


def command(*words: object) -> str:
    """A shell command line, quoted so that it can be pasted."""
    return shlex.join(str(word) for word in words)


def size(number_bytes: int) -> str:
    """Bytes for a reader."""
    for unit, one in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number_bytes >= one:
            return f"{number_bytes / one:.4g} {unit}"
    return f"{number_bytes} bytes"
