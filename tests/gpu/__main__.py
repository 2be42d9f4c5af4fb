"""The GPU tests: ``make test-gpu``. One engine at a time, whole runs within ten minutes, no network.

    python -m tests.gpu [--out FOLDER] [--budget-s N] [CASE ...]

Prints each finding when it is made and all of them last. Writes records in the form of ``bench/results`` and the facts beside them.
Without a GPU, or without vLLM, it says so and ends well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench import records
from tests.gpu import cases, kills, two_gpus
from tests.gpu.processes import Engines
from tests.gpu.suite import TRANSFER, Finding, Suite

CASES: Final = {
    "restore": (cases.restore, 150),
    "two_gpus": (two_gpus.two_gpus, 110),
    "two_gpus_killed": (two_gpus.two_gpus_killed, 120),
    "engine_killed": (kills.engine_killed, 80),
    "transfer_killed": (kills.transfer_killed, 55),
    "graphs": (cases.graphs, 55),
    "runners": (cases.runners, 40),
    "wide": (cases.wide, 50),
    "codec": (cases.codec, 20),
    "processes": (cases.processes, 45),
    "adapters": (cases.adapters, 60),
}
"""Name → what runs, and the seconds it needs at least. Most important first: what has no time is left out, and said."""
TWO_GPUS: Final = ("two_gpus", "two_gpus_killed")


def gpus() -> list[str]:
    """Name, memory and driver of each GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def main() -> int:
    """Run the cases asked for, or all that this machine has the GPUs for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, default=records.LOCAL, help="folder for results and logs (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=570.0, help="start nothing that would end later (%(default)s)")
    parser.add_argument("--transfer", choices=("auto", "worker", "gateway"), default="auto", help="who copies (%(default)s)")
    parser.add_argument("--commit", default="", help="the commit that is tested, where this is no checkout")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    found = gpus()
    if not found:
        print("skipped: this machine has no NVIDIA GPU")
        return 0
    if importlib.util.find_spec("vllm") is None:
        print("skipped: vLLM is not installed in this environment")
        return 0
    wanted = [name for name in options.cases or CASES if len(found) > 1 or name not in TWO_GPUS]
    if set(options.cases) - set(wanted):
        print(f"skipped, with one GPU: {', '.join(TWO_GPUS)}")
    return run(wanted, found, options)


def run(wanted: list[str], found: list[str], options: argparse.Namespace) -> int:
    """Run cases and write what was found."""
    options.out.mkdir(parents=True, exist_ok=True)
    TRANSFER[0] = options.transfer
    work = Path(tempfile.mkdtemp(prefix="kvg-gpu-"))
    engines = Engines(work, options.out)
    suite = Suite(work, options.out, time.monotonic() + options.budget_s, engines)
    suite.facts["gpus"] = found
    print(f"{len(found)} × {found[0]}", flush=True)
    try:
        engines.warm_later()
        for name in wanted:
            case, need_s = CASES[name]
            suite.run(name, case, need_s)
            (options.out / "gpu-facts.json").write_text(json.dumps(suite.facts, indent=1))
    finally:
        engines.close()
        shutil.rmtree(work, ignore_errors=True)
    write(suite.findings, found, options)
    return summary(suite.findings)


def write(findings: list[Finding], found: list[str], options: argparse.Namespace) -> None:
    """One record a finding: 1 for what holds, 0 for what does not."""
    name, memory, driver = (part.strip() for part in found[0].split(","))
    machine = records.machine() | {"gpu": name, "gpus": len(found), "gpu_memory": memory, "driver": driver}
    try:
        from importlib.metadata import version

        versions = records.versions(vllm=version("vllm"))
    except ImportError:
        versions = records.versions()
    made = [
        records.Record(
            case=f"gpu.{finding.name}",
            value=float(finding.ok),
            unit="holds",
            peer="",
            peer_value=None,
            ratio=None,
            limit=None,
            limit_ratio=None,
            runs=1,
            spread=0.0,
            machine=machine,
            versions=versions,
            command="python -m tests.gpu",
            commit=options.commit or records.commit(),
            date=records.now(),
        )
        for finding in findings
        if finding.ok is not None
    ]
    if made:
        print(records.write(made, options.out, "gputests").name)


def summary(findings: list[Finding]) -> int:
    """Print what was found; returns the exit status."""
    print("=" * 20)
    for finding in findings:
        if finding.ok is not True:
            print({False: "BAD ", None: "skip"}[finding.ok], finding.name, "|", finding.note[-600:])
    bad = sum(finding.ok is False for finding in findings)
    print(
        f"GPU TESTS: {sum(f.ok is True for f in findings)} hold, {bad} do not, {sum(f.ok is None for f in findings)} not tested"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
