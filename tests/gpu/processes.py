"""The processes of the GPU tests: engines, one at a time, and the gateway. Every wait has an end, and logs stay."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
IMPORT_S: Final = 120.0
STOP_S: Final = 30.0
GATEWAY_S: Final = 60.0
POLL_S: Final = 0.02

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the tests can look at pages
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_PLUGINS": "kvgate",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "TRITON_CACHE_AUTOTUNING": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looks for a GPU without touching it: the import comes before a fork
    "LMCACHE_TRACK_USAGE": "false",
}


def environment(work: Path) -> dict[str, str]:
    """The environment of engines and gateway."""
    found = {**os.environ, **ENVIRONMENT}
    # Not relative: some of these processes run elsewhere. What is installed comes after the checkout.
    folders = [str(ROOT / name) for name in ("", "gateway", "bindings", "shims/vllm", "shims/lmcache")]
    found["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    found.setdefault("VLLM_CACHE_ROOT", str(work / "vllm-cache"))
    found.setdefault("TRITON_CACHE_DIR", str(work / "triton-cache"))
    return found


class ProcessError(Exception):
    """A process did not do what it was started for; the message has the end of its log."""


class Lines:
    """JSON lines of a process's standard output, each waited for with an end. Other lines are dropped."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._found: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b'{"'):
                with contextlib.suppress(ValueError):
                    self._found.put(json.loads(line))
        self._found.put(None)

    def next(self, within_s: float) -> dict[str, Any] | None:
        """The next line; None where the process ended. Raises ``TimeoutError``."""
        try:
            return self._found.get(timeout=max(0.0, within_s))
        except queue.Empty:
            raise TimeoutError from None


class Engines:
    """Runs jobs of ``tests.gpu.step``, one engine at a time, each in a process of its own."""

    def __init__(self, work: Path, logs: Path) -> None:
        self._work = work
        self._logs = logs
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: Lines | None = None
        self._imported = False
        self.forking = True

    def begin(self, job: dict[str, Any], label: str, env: dict[str, str] | None = None) -> Engine:
        """Start an engine on ``job`` and return at once."""
        self._count += 1
        base = self._work / f"job-{self._count}"
        job = {"options": {}, "connector": None, **job, "result": str(base.with_suffix(".result"))}
        base.with_suffix(".json").write_text(json.dumps(job))
        log = self._logs / "engines.log"
        with log.open("a") as sink:
            sink.write(f"\n===== {self._count} {label}\n")
        order = {"job": str(base.with_suffix(".json")), "log": str(log), "env": env or {}}
        if self.forking:
            return self._fork(order, Path(job["result"]), log, label)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.zygote", json.dumps(order)],
            cwd=ROOT,
            env=environment(self._work) | (env or {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return Engine(process.pid, Path(job["result"]), log, label, process=process)

    def run(self, job: dict[str, Any], label: str, *, within_s: float = 120.0, env: dict[str, str] | None = None) -> list[Any]:
        """Run ``job`` to its end; returns what its steps gave. Raises ``ProcessError``."""
        engine = self.begin(job, label, env)
        told = engine.wait(within_s)
        if not told.get("ready") and self.forking and "forked subprocess" in engine.tail():
            self.forking = False  # something touched the GPU before the fork: start each engine from nothing
            self.close()
            engine = self.begin(job, label, env)
            told = engine.wait(within_s + IMPORT_S)
        if len(told["steps"]) != len(job["steps"]):
            raise ProcessError(f"{label}: {len(told['steps'])} of {len(job['steps'])} steps\n{engine.tail()}")
        steps: list[Any] = told["steps"]
        return steps

    def warm(self) -> None:
        """Import vLLM, if that has not been done: the first engine need not wait for it then. Raises ``ProcessError``."""
        self.warm_later()
        assert self._lines is not None
        if not self._imported and self._lines.next(IMPORT_S) is None:
            raise ProcessError(f"vLLM does not import:\n{_end_of(self._logs / 'zygote.log')}")
        self._imported = True

    def warm_later(self) -> None:
        """Begin to import vLLM, and wait for nothing."""
        if self._process is not None and self._process.poll() is None:
            return
        self._imported = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.zygote"],
            cwd=ROOT,
            env=environment(self._work),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._logs / "zygote.log").open("ab"),
        )
        self._lines = Lines(self._process)

    def _fork(self, order: dict[str, Any], result: Path, log: Path, label: str) -> Engine:
        self.warm()
        assert self._process is not None
        assert self._lines is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        told = self._lines.next(STOP_S)
        if told is None:
            raise ProcessError("the process that forks engines is gone")
        return Engine(int(told["pid"]), result, log, label, lines=self._lines)

    def close(self) -> None:
        """End the process that forks."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)
            self._process = None


class Engine:
    """One engine under way."""

    def __init__(
        self,
        pid: int,
        result: Path,
        log: Path,
        label: str,
        *,
        lines: Lines | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self._result = result
        self._log = log
        self._label = label
        self._lines = lines
        self._process = process

    def wait(self, within_s: float) -> dict[str, Any]:
        """Wait for its end, kill it after ``within_s``; returns what it wrote: ``ready``, ``steps``, and ``status`` (None: killed)."""
        status = self._status(within_s)
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # where is it? The log will say
            time.sleep(1.0)
            self.kill()
            self._status(STOP_S)
        return self.told() | {"status": status}

    def _status(self, within_s: float) -> int | None:
        try:
            if self._process is not None:
                return self._process.wait(within_s)
            assert self._lines is not None
            line = self._lines.next(within_s)
            return -1 if line is None else int(line["status"])
        except (TimeoutError, subprocess.TimeoutExpired):
            return None

    def told(self) -> dict[str, Any]:
        """What it has written so far."""
        try:
            told: dict[str, Any] = json.loads(self._result.read_text())
        except FileNotFoundError:
            return {"ready": False, "steps": []}
        return told

    def kill(self) -> None:
        """SIGKILL to it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def ready(self, within_s: float) -> bool:
        """Whether the engine inside starts within that time."""
        until = time.monotonic() + within_s
        while not self.told()["ready"]:
            if time.monotonic() > until or not Path(f"/proc/{self.pid}").exists():
                return bool(self.told()["ready"])
            time.sleep(POLL_S)
        return True

    def tail(self) -> str:
        """The end of the log since this engine began."""
        return _end_of(self._log)


def _end_of(path: Path, characters: int = 2500) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""


def wait_for(path: Path, within_s: float) -> bool:
    """Whether ``path`` appears."""
    until = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


class Gateway:
    """``kvgate serve`` in a process of its own."""

    def __init__(self, folder: Path, logs: Path, **flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state_dir = folder / "s"
        self._data_dir = folder / "d"
        self._flags = flags
        self._log = logs / "gateway.log"
        self._work = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The control socket."""
        return str(self.state_dir / "gateway.sock")

    @property
    def pid(self) -> int:
        """The daemon's process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Start it and wait until it answers; returns the seconds that took. Raises ``ProcessError``."""
        began = time.monotonic()
        Path(self.endpoint).unlink(missing_ok=True)  # one of before says nothing
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._kvgate("serve"), f"--data-dir={self._data_dir}"]
                + [f"--{name.replace('_', '-')}={value}" for name, value in self._flags.items()],
                env=environment(self._work),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() - began > GATEWAY_S:
                self.kill()
                raise ProcessError(f"the gateway did not start:\n{_end_of(self._log)}")
            time.sleep(0.1)
        return round(time.monotonic() - began, 1)

    def _answers(self) -> bool:
        return Path(self.endpoint).exists()

    def _kvgate(self, command: str) -> list[str]:
        code = "import sys; from kvgate.cli import main; sys.exit(main())"
        return [sys.executable, "-c", code, command, f"--state-dir={self.state_dir}"]

    def ask(self, command: str, *arguments: str) -> Any:
        """What ``kvgate COMMAND --json`` prints."""
        done = subprocess.run(
            [*self._kvgate(command), "--json", *arguments],
            env=environment(self._work),
            stdout=subprocess.PIPE,
            timeout=STOP_S,
            check=False,
        )
        return json.loads(done.stdout or b"null")

    def status(self) -> dict[str, Any]:
        """What ``kvgate status --json`` prints, without the seconds a process takes to start."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(STOP_S)
            connection.connect(str(self.state_dir / "admin.sock"))
            connection.sendall(b"GET /status HTTP/1.0\r\nHost: kvgate\r\n\r\n")
            reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        found: dict[str, Any] = json.loads(reply.partition(b"\r\n\r\n")[2])
        return found

    def child(self, word: str) -> int | None:
        """A process that the daemon started whose command line has ``word``."""
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it may end while we look
                ours = f"PPid:\t{self.pid}\n" in (folder / "status").read_text()
                if ours and word in (folder / "cmdline").read_text():
                    return int(folder.name)
        return None

    def held(self) -> dict[str, int]:
        """What the gateway holds for anyone, by name: only what is not nought."""
        status = self.status()
        found = {name: status[name] for name in ("leases", "held_chunks", "open_loads", "open_writes")}
        found |= {name: status["storage"][name] for name in ("holds", "reservations")}
        return {name: count for name, count in found.items() if count}

    def let_go(self, within_s: float = STOP_S) -> dict[str, int]:
        """What is still held after that time at most; empty: nothing."""
        until = time.monotonic() + within_s
        while (held := self.held()) and time.monotonic() < until:
            time.sleep(0.2)
        return held

    def reasons(self, answer: dict[str, Any]) -> list[str]:
        """Why a request missed, as the operator sees it."""
        reference = answer["report"].get("reference", "")
        misses = self.ask("explain", reference) if reference else None
        return sorted({str(reason) for miss in misses or [] for reason in miss["reasons"]})

    def stop(self) -> None:
        """Stop it as Ctrl-C would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """SIGKILL to it and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
            self._process = None
