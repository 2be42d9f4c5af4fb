"""``kvgate verify``: the negative matrix against a running gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from kvgate.cli.options import add_config_flags, config_from
from kvgate.config import Config, ConfigError
from kvgate.verify import runs, table
from kvgate.verify.bar import Bar
from kvgate.verify.link import CannotRun
from kvgate.verify.results import Outcome, Progress, Report
from kvgate.verify.runs import Target

SHOWN: Final = ("state_dir", "data_dir", "numerics_classes")
"""Settings of which this command uses anything."""

_DESCRIPTION: Final = """\
Check, on a running gateway, that a stored object is given to nobody but a request of the very same identity.

The command acts as engines with contracts of its own. It stores a few prompts, then looks each up again: once as it was stored,
which must hit with the same bytes, and once for each field of the identity (docs/contract.md) with that field alone changed, which
must miss, and for the right reason. This is done in every tier: the pool, shared memory, and each L2 alone, with the objects removed
from the tiers before it. All of it happens in an isolation domain made for this run, in which no other client can be; other
clients' objects are not touched, and everything stored is removed at the end. A run takes seconds and stores a megabyte a tier."""

_EPILOG: Final = """\
what to run:
  kvgate verify                           plant, check, remove: after an upgrade, or in CI
  kvgate verify --write                   plant only, then restart what you like: gateway, LMCache, Redis, engines, host
  kvgate verify --check                   check what was planted, as often as you like
  kvgate verify --clean                   remove what was planted
  kvgate verify --only 'model.rope.*'     some rows only; --json for a program
  kvgate verify --vllm http://127.0.0.1:8000
                                          also through a vLLM server (started with --enable-prompt-tokens-details)

exit code: 0 every row passed; 1 a row failed; 2 it could not run, or a row could not be checked.
How to read a failure: docs/verify.md."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        help="check that nobody is served what is another's",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="plant, and remember the run")
    mode.add_argument("--check", action="store_true", help="check the planted run; it stays planted")
    mode.add_argument("--clean", action="store_true", help="remove the planted run")
    parser.add_argument(
        "--vllm", metavar="URL", help="a vLLM OpenAI server that uses this gateway: check its own cache as well"
    )
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="rows to check, as a shell pattern")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--run-file", metavar="FILE", help="where a planted run is remembered (default: in data_dir)")
    add_config_flags(parser, SHOWN)


def run(args: argparse.Namespace) -> int:
    """Run, and print the report."""
    try:
        config = config_from(args).config
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    report = Report()
    progress = Bar(sys.stderr) if sys.stderr.isatty() else Progress()
    target = Target(
        config.socket_path, config.admin_path, tuple(sorted(config.numerics_class_names())), tuple(args.only), args.vllm or ""
    )
    try:
        asyncio.run(_work(args)(target, _file(args, config), report, progress))
    except CannotRun as error:
        print(f"kvgate: verify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvgate: verify: interrupted", file=sys.stderr)
        return 2
    print(json.dumps(report.to_json(), indent=2) if args.json else "\n".join(table.lines(report)))
    return exit_code(report)


def exit_code(report: Report) -> int:
    """1: something is wrong; 2: something is not known; 0: all is well."""
    if report.failed:
        return 1
    return 2 if any(cell.outcome is Outcome.UNCHECKED for row in report.rows for cell in row.cells.values()) else 0


def _work(args: argparse.Namespace) -> Callable[[Target, Path, Report, Progress], Coroutine[Any, Any, None]]:
    if args.write:
        return runs.write
    if args.check:
        return runs.check
    return runs.clean if args.clean else runs.whole


def _file(args: argparse.Namespace, config: Config) -> Path:
    if args.run_file:
        return Path(args.run_file).absolute()
    # A whole run leaves a planted one alone.
    planted = args.write or args.check or args.clean
    return Path(config.data_dir) / ("verify-planted.json" if planted else "verify-running.json")
