"""A real gateway for tests: ``kvgate serve`` in a process of its own, in folders of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

START_S = 30.0
STOP_S = 30.0
KVGATE = Path(sys.executable).parent / "kvgate"


class GatewayProcess:
    """One gateway. ``restart`` keeps its folders: deployment secret, and what a persistent backend stored."""

    program = KVGATE

    def __init__(self, root: Path, **settings: str) -> None:
        self.root = root
        self.state_dir = root / "s"
        self._settings = {"backend": "memory", "pool-bytes": "256MiB", "log-level": "warning"} | settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The control socket."""
        return str(self.state_dir / "gateway.sock")

    @property
    def pid(self) -> int:
        """Process id of the daemon."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything the gateway has printed."""
        path = self.root / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def start(self) -> None:
        """Start and wait until it is ready."""
        flags = [f"--{name}={value}" for name, value in self._settings.items()]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.program), "serve", f"--state-dir={self.state_dir}", f"--data-dir={self.root / 'd'}", *flags],
                stdout=log,
                stderr=log,
                env={key: value for key, value in os.environ.items() if not key.startswith("KVGATE_")},
            )
        wait_until(self._ready, START_S, "the gateway did not become ready")

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """Stop its process: it answers nothing, and its connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def ensure(self) -> None:
        """Start it if it does not run."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        else:
            self.resume()

    def stop(self) -> None:
        """Stop it as an operator does."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            self._signal(signal.SIGTERM)

    def restart(self, **settings: str) -> None:
        """Stop and start, with other ``settings`` where given."""
        self.stop()
        self._settings |= {name.replace("_", "-"): value for name, value in settings.items()}
        self.start()

    def status(self) -> dict[str, Any]:
        """What ``kvgate status --json`` prints."""
        done = subprocess.run(
            [str(KVGATE), "status", "--json", f"--state-dir={self.state_dir}"],
            capture_output=True,
            timeout=START_S,
            check=False,
        )
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the gateway ended: {self.log}"
        return "kvgate is ready" in self.log and Path(self.endpoint).exists()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(STOP_S)
        (self.root / "log").write_bytes(b"")


_Gateway = TypeVar("_Gateway", bound=GatewayProcess)


def wait_until(holds: Callable[[], bool], within_s: float, otherwise: str) -> None:
    """Poll until ``holds``; fails with ``otherwise``."""
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, otherwise
        time.sleep(0.02)


def gateway(**settings: str) -> AbstractContextManager[GatewayProcess]:
    """A started gateway for the length of a ``with`` block; ``settings`` are flags of ``kvgate serve``."""
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    return started(lambda root: GatewayProcess(root, **flags))


@contextmanager
def started(make: Callable[[Path], _Gateway]) -> Iterator[_Gateway]:
    """What ``make`` makes in a folder of its own, started; both are gone after the ``with`` block."""
    # Not pytest's tmp_path: a unix socket's name has to be short.
    root = Path(tempfile.mkdtemp(prefix="kvg-"))
    process = make(root)
    try:
        process.start()
        yield process
    finally:
        process.stop()
        shutil.rmtree(root, ignore_errors=True)
