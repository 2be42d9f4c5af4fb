"""Imports vLLM once and forks a process for each engine: importing takes longer than starting one.

One line of JSON in for each engine (``job``: its file, ``log``: where its output goes, ``env``), two lines out: ``{"pid": …}`` when it
runs, ``{"status": …}`` when it has ended. Nothing here may touch the GPU before the fork.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def serve() -> None:
    """Until standard input ends."""
    import vllm.v1.engine.core

    from vllm import LLM, SamplingParams

    assert LLM
    assert SamplingParams
    print(json.dumps({"ready": vllm.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _leave(run_child(order))
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _leave(status: int) -> None:
    """End with C's exit handlers, so that CUDA takes what it put into shared memory, and without Python's: its threads are not ours."""
    signal.alarm(3)
    ctypes.CDLL(None).exit(status)


def run_child(order: dict[str, Any]) -> int:
    """The engine's process; returns its exit status."""
    os.setsid()
    with Path(order["log"]).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent before the end, where one takes too long
    try:
        from tests.gpu.step import run_job

        run_job(json.loads(Path(order["job"]).read_text()))
    except BaseException:  # noqa: BLE001 - goes to the log, and the status says so
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run_child(json.loads(sys.argv[1])))
    serve()
