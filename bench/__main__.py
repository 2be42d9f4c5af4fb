"""``python -m bench``: measure, show a table, write the records."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import records
from bench.cases import Case, Env, Skipped, all_cases, chosen
from bench.measure import Samples, spread
from bench.report import Outcome, Progress, table

SUITE: Final = "gateway"
LOOK_S: Final = 1.0
BUSY_CORES: Final = 0.2
"""More than this busy before the run, and the table says so."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all records of one run share."""

    command: str
    commit: str
    machine: dict[str, str | int | float]


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the gateway beside its peers.")
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="only this case and those below it; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and their budgets, and stop")
    parser.add_argument("--quick", action="store_true", help="a few runs each: shows that it works, not how fast")
    parser.add_argument("--backend", choices=("auto", "lmcache", "memory"), default="auto", help="the gateway's storage")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for the record file (default: bench/results, or bench/results/local for a quick or partial run)",
    )
    return parser


def listing() -> str:
    """Every case with its budget."""
    lines = []
    for case in all_cases():
        budget = ", ".join(map(str, case.budgets)) or "no budget"
        lines.append(f"{case.name:<32} {case.unit:<10} {budget:<28} {case.what}")
    return "\n".join(lines)


def to_record(case: Case, samples: Samples, env: Env, run: Run) -> records.Record:
    """The record of one case's samples."""
    return records.Record(
        case=case.name,
        value=statistics.median(samples.ours),
        unit=case.unit,
        peer=samples.peer if samples.peers else "",
        peer_value=statistics.median(samples.peers) if samples.peers else None,
        ratio=samples.ratio(samples.peers),
        limit=statistics.median(samples.limits) if samples.limits else None,
        limit_ratio=samples.ratio(samples.limits),
        runs=len(samples.ours),
        spread=spread(samples.ours),
        machine=run.machine,
        versions=records.versions(**env.versions),
        command=run.command,
        commit=run.commit,
        date=records.now(),
    )


def measure(cases: list[Case], env: Env, progress: Progress, run: Run) -> list[Outcome]:
    """Run the cases in order. One that breaks is reported and does not stop the others."""
    outcomes = []
    for index, case in enumerate(cases):
        progress.case(index + 1, len(cases), case.name)
        try:
            samples = case.run(env)
            outcomes.append(Outcome(case, to_record(case, samples, env, run), samples.note))
        except Skipped as why:
            outcomes.append(Outcome(case, note=str(why)))
        except Exception as error:  # noqa: BLE001  # whatever broke one case is shown, and the exit status tells
            progress.end()
            traceback.print_exc()
            outcomes.append(Outcome(case, note=f"{type(error).__name__}: {error}".splitlines()[0], broken=True))
        if index + 1 == len(cases) or cases[index + 1].family != case.family:
            env.end_family()
    progress.end()
    return outcomes


def main(argv: list[str] | None = None) -> int:
    """0 unless something broke; a missed budget is shown, not an error."""
    given = sys.argv[1:] if argv is None else argv
    options = arguments().parse_args(given)
    if options.list:
        print(listing())
        return 0
    try:
        cases = list(chosen(options.case))
    except KeyError as error:
        print(f"bench: no case {error}; see --list", file=sys.stderr)
        return 2
    progress = Progress()
    busy = records.busy_cores(LOOK_S)
    run = Run(" ".join(["python -m bench", *given]), records.commit(), records.machine() | {"busy_cores": busy})
    # Short and in /tmp: a unix socket's path has to fit into 108 bytes.
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-", dir="/tmp") as folder:
        env = Env(options.quick, options.backend, Path(folder), progress.step)
        try:
            outcomes = measure(cases, env, progress, run)
        finally:
            env.end_family()
    print(table(outcomes))
    if busy > BUSY_CORES:
        print(
            f"before the run {busy} of {run.machine['cores']} cores were busy with other work: take the figures as indications"
        )
    taken = [outcome.record for outcome in outcomes if outcome.record is not None]
    broken = any(outcome.broken for outcome in outcomes)
    if taken:
        whole = not options.quick and not options.case and not broken
        path = records.write(taken, options.results or (records.RESULTS if whole else records.LOCAL), SUITE)
        print(f"records: {path}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
