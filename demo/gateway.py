"""What every demonstration needs: a real gateway, vLLM in a process of its own, and a folder to run in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KVGATE = ROOT / ".venv" / "gateway" / "bin" / "kvgate"
MODEL = ROOT / "tests" / "models" / "docs-llama-7m"
START_S = 60.0
STOP_S = 30.0


class DemoError(Exception):
    """The demonstration can't go on; the message says what to do."""


class Gateway:
    """`kvgate serve` with the LMCache backend, its state in one folder and its data in another; ``flags`` go to it as well."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._flags = flags
        self.state_dir = folder / "state"
        self.data_dir = folder / "data"
        self.log = folder / "gateway.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The control socket."""
        return str(self.state_dir / "gateway.sock")

    def start(self) -> float:
        """Start it and wait until it is ready; returns the seconds that took."""
        if not KVGATE.exists():
            raise DemoError("the gateway's environment is not set up: run `make demo`, not this file")
        started = time.monotonic()
        flags = ["--backend", "lmcache", "--pool-bytes", "256MiB", *self._flags]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [KVGATE, "serve", "--state-dir", self.state_dir, "--data-dir", self.data_dir, *flags],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not Path(self.endpoint).exists():
            if self._process.poll() is not None or time.monotonic() - started > START_S:
                raise DemoError(f"the gateway did not start; its log:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - started

    def reasons(self, reference: str) -> list[str]:
        """Why the request of this reference missed, as the operator sees it; empty where nothing is known of it."""
        if not reference:
            return []
        done = subprocess.run(
            [KVGATE, "explain", reference, "--json", "--state-dir", self.state_dir],
            stdout=subprocess.PIPE,
            timeout=STOP_S,
            check=False,
        )
        return [str(reason) for miss in json.loads(done.stdout or "[]") for reason in miss["reasons"]]

    def stop(self) -> None:
        """Stop it as Ctrl-C would, and wait until it is gone."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise DemoError(f"the gateway did not stop in {STOP_S:.0f} s; see {self.log}") from None
        self._process = None


def vllm_environment() -> dict[str, str]:
    """The environment for vLLM on a CPU without a network."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def run_engine(folder: Path, script: str, description: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """Run one vLLM engine in a process of its own, by a script of this folder that reads a job and writes a list; returns the list.

    Raises ``DemoError`` where it fails, ``subprocess.TimeoutExpired`` after ``limit_s``.
    """
    job, result, log = folder / "job.json", folder / "result.json", folder / "vllm.log"
    result.unlink(missing_ok=True)
    job.write_text(json.dumps(description))
    with log.open("ab") as sink:
        done = subprocess.run(
            [sys.executable, ROOT / "demo" / script, job, result],
            env=vllm_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdout=sink,
            stderr=sink,
            timeout=limit_s,
            check=False,
        )
    if done.returncode or not result.exists():
        raise DemoError(f"the engine failed; the end of its log:\n{log.read_text(errors='replace')[-3000:]}")
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def in_folder(run: Callable[[Path], bool]) -> int:
    """Run a demonstration in a temporary folder; keep it where something went wrong. Returns the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="kvgate-demo-"))
    try:
        good = run(folder)
    except (DemoError, subprocess.SubprocessError) as error:
        print(f"kvgate demo: {error}\nLogs are in {folder}", file=sys.stderr)
        return 1
    if good:
        shutil.rmtree(folder)
        print("\nAll as it must be.")
        return 0
    print(f"\nSomething is wrong; logs are in {folder}", file=sys.stderr)
    return 1
