"""``kvgate doctor``: what is wrong on this host, and the command that mends it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgate import __version__
from kvgate.cli.options import add_config_flags, config_from
from kvgate.config import Config, ConfigError
from kvgate.doctor.checks import CHECKS, NAMES
from kvgate.doctor.findings import Finding, Level, Subject, run_checks


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="find what is wrong on this host",
        description=(
            "Look at this host with the settings `kvgate serve` would use: one line a check, and below each fault the command "
            "that mends it. Changes nothing. Exit code 0: nothing fails (warnings may be there); 1: something does."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", default="", help="the Python of the engine's environment; default: this one"
    )
    parser.add_argument(
        "--only", metavar="CHECK", action="append", choices=NAMES, help=f"only this check, repeatable: {', '.join(NAMES)}"
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print what they found."""
    findings: list[Finding] = []
    try:
        config = config_from(args).config
    except ConfigError as error:
        # The rest of the host can be looked at all the same, with the defaults.
        findings.append(Finding("configuration", Level.FAIL, str(error), "kvgate config --help   # then correct that setting"))
        config = Config()
    wanted = args.only or NAMES
    findings += run_checks([check for check in CHECKS if check.name in wanted], Subject(config, _program(args.vllm_python)))
    failed = any(finding.level is Level.FAIL for finding in findings)
    print(_as_json(findings, failed) if args.json else _as_text(findings, failed))
    sys.stdout.flush()
    return int(failed)


def _program(name: str) -> str:
    """A path made absolute: it is run from another directory. A bare name is looked for in PATH."""
    return str(Path(name).absolute()) if "/" in name else name


def _as_json(findings: Sequence[Finding], failed: bool) -> str:
    checks = [{"check": one.check, "level": one.level.value, "found": one.found, "remedy": one.remedy} for one in findings]
    return json.dumps({"build": __version__, "healthy": not failed, "checks": checks}, indent=2)


def _as_text(findings: Sequence[Finding], failed: bool) -> str:
    lines = []
    for one in findings:
        lines.append(f"{one.level.value:<4}  {one.check:<13}  {_printable(one.found)}")
        if one.remedy:
            lines.append(f"{'':<21}run: {_printable(one.remedy)}")
    warned = sum(one.level is Level.WARN for one in findings)
    faults = sum(one.level is Level.FAIL for one in findings)
    lines.append(f"{faults} to mend, {warned} to look at" if failed or warned else "nothing to mend")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """Paths may hold anything; a terminal must not obey it."""
    return "".join(character if character.isprintable() else "?" for character in text)
