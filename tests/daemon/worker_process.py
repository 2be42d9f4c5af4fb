"""An engine's only worker in a process of its own: reports once, prints what it is told, then waits for the end of its standard input.

Usage: python -m tests.daemon.worker_process SOCKET same|newer|other|first|second|share
The report is that of the tests' engine, of its next generation, of other weights, or of the first or second rank of an engine of
two, of its next generation. "share": as "same", and a child process has a copy of the connection, so that it stays open when this
process is killed; its id is printed too.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.daemon import makers
from tests.daemon.engine import Engine
from tests.daemon.wire import Denied

CHANGES: dict[str, dict[str, Any]] = {
    "newer": {"generation": 1},
    "other": {"model": makers.model("other weights")},
    "first": {"plan": makers.plan(2), "generation": 1},
    "second": {"plan": makers.plan(2), "generation": 1, "tp_rank": 1},
}


async def main(socket: str, what: str) -> None:
    """See the module."""
    engine = Engine(Path(socket), makers.report(), None)
    try:
        await engine.join(0, **CHANGES.get(what, {}))
    except Denied as denied:
        failure = denied.failure
        print(f"{failure.code} {failure.field} {failure.problem}; {failure.remedy}", flush=True)
        return
    child = _share(engine.workers[0].writer.get_extra_info("socket").fileno()) if what == "share" else 0
    print(f"registered {child}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _share(number: int) -> int:
    os.set_inheritable(number, True)
    return subprocess.Popen(["/bin/sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False).pid


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
