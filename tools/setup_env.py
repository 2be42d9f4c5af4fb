"""Build one of the two environments under .venv/ from the pinned lists in requirements/.

    setup_env.py gateway | vllm     build it, or bring it up to date
    setup_env.py lock gateway|vllm  write requirements/NAME.txt anew from requirements/NAME.in

Standard library only: this runs before anything is installed. A step prints one line when it starts. The stamp is
written after the last step alone, so a run that was cut short is simply run again; what pip has already
installed is not fetched twice.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements"
TORCH_INDEX = os.environ.get("KVGATE_TORCH_INDEX", "")
LOCK_TIMEOUT_S = 45 * 60
PIP_TIMEOUT_S = 40 * 60
LOG_TAIL_LINES = 25

# Imported at the end, in the environment just built: what is broken should show here, not in a test.
SMOKE_IMPORTS = {
    "gateway": "import torch, kvgate; from lmcache.v1.distributed.storage_manager import StorageManager",
    "vllm": "import torch, kvgate, vllm",
}
SMOKE_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# What a CUDA build of torch brings along; a lock made beside one must not pin it for CPU machines.
NEVER_LOCKED = re.compile(r"^(torch|pip|wheel|triton|kvgate|nvidia-.*|cuda-.*)==", re.IGNORECASE)


class SetupError(Exception):
    """A step failed; the message tells the person at the terminal what to do."""


def say(environment: str, text: str) -> None:
    """Print one line of progress."""
    print(f"[{environment}] {text}", flush=True)


def clean_environment() -> dict[str, str]:
    """The process environment without what would make pip install somewhere else or ask questions."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "VIRTUAL_ENV"}}
    return env | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}


def run_logged(command: Sequence[str | Path], log: TextIO, env: dict[str, str] | None = None) -> None:
    """Run a command with its output in the log; on failure raise SetupError with the log's end."""
    log.write(f"\n$ {' '.join(str(part) for part in command)}\n")
    log.flush()
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env or clean_environment(),
            cwd=ROOT,
            timeout=PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"gave up after {PIP_TIMEOUT_S} s: see {log.name}") from None
    if done.returncode != 0:
        tail = "\n".join(Path(log.name).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise SetupError(f"{tail}\n\nThis step failed; the whole log is {log.name}. Run make again to go on from here.")


@contextlib.contextmanager
def locked(environment: str) -> Iterator[None]:
    """Hold this environment's lock, so that two makes do not write into it at once."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f".{environment}.lock").open("w") as handle:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(f"another set-up held the lock for {LOCK_TIMEOUT_S} s") from None
                if not told:
                    say(environment, "another make is setting this environment up; waiting for it")
                    told = True
                time.sleep(0.5)
        yield


def fingerprint(environment: str) -> str:
    """Digest of everything that decides what the environment holds."""
    digest = hashlib.sha256()
    lists = ["torch.txt", f"{environment}.txt", f"{environment}.in"]
    for name in lists:
        digest.update((REQUIREMENTS / name).read_bytes() + b"\0")
    # Of pyproject.toml only what an install depends on: a changed lint rule is no reason to set up again.
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = [pyproject["build-system"], pyproject["project"], pyproject["tool"]["hatch"]]
    digest.update(json.dumps(installed, sort_keys=True).encode())
    digest.update(f"{sys.version_info[:2]}|{TORCH_INDEX}|{ROOT}".encode())
    return digest.hexdigest()


def python_version(python: Path) -> str | None:
    """`3.11` for an interpreter that runs and has pip, else None."""
    probe = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    if not python.exists():
        return None
    done = subprocess.run([str(python), "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def check_machine() -> None:
    """Refuse early, with the name of what is missing."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise SetupError("kvgate supports Linux on x86-64 only")
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        raise SetupError("no C compiler found (Mojo links with it). On Debian: apt-get install gcc")


def make_venv(environment: str, log: TextIO) -> Path:
    """Create the virtual environment, or keep one that runs and is of this Python; return its interpreter."""
    folder = ENVIRONMENTS / environment
    python = folder / "bin" / "python"
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = python_version(python)
    if found == wanted:
        return python
    if folder.exists():
        say(environment, f"the present one is {'Python ' + found if found else 'incomplete'}: starting anew")
        shutil.rmtree(folder)
    run_logged([sys.executable, "-m", "venv", folder], log)
    return python


def torch_command(pip: Sequence[str | Path], *options: str) -> list[str | Path]:
    """The command that installs torch, from KVGATE_TORCH_INDEX if that is set."""
    index = ["--index-url", TORCH_INDEX] if TORCH_INDEX else []
    return [*pip, "install", *options, *index, "-r", REQUIREMENTS / "torch.txt"]


def directives(environment: str, name: str) -> list[str]:
    """The words after `#: NAME` in requirements/ENVIRONMENT.in."""
    lines = (REQUIREMENTS / f"{environment}.in").read_text().splitlines()
    prefix = f"#: {name} "
    return [word for line in lines if line.startswith(prefix) for word in line[len(prefix) :].split()]


def build(environment: str) -> None:
    """Bring .venv/ENVIRONMENT to the state that the pinned lists describe."""
    stamp = ENVIRONMENTS / f".{environment}.stamp"
    wanted = fingerprint(environment)
    python = ENVIRONMENTS / environment / "bin" / "python"
    if stamp.exists() and stamp.read_text().strip() == wanted and python_version(python):
        stamp.touch()
        return
    check_machine()
    stamp.unlink(missing_ok=True)
    started = time.monotonic()
    with (ENVIRONMENTS / f"{environment}.log").open("w") as log:
        say(environment, f"1/5 virtual environment with {sys.executable}")
        python = make_venv(environment, log)
        pip: list[str | Path] = [python, "-m", "pip"]
        # Python compiles what is imported by itself; compiling all of torch and vLLM now takes a minute an environment.
        install = [*pip, "install", "--no-compile"]
        pinned = REQUIREMENTS / f"{environment}.txt"
        count = sum("==" in line for line in pinned.read_text().splitlines() if not line.startswith("#"))
        say(environment, f"2/5 {count} pinned packages (a few minutes on a first run)")
        run_logged([*install, "--no-deps", "-r", pinned], log)
        say(environment, f"3/5 torch{' from KVGATE_TORCH_INDEX' if TORCH_INDEX else ''}")
        run_logged(torch_command(pip, "--no-compile"), log)
        for name in directives(environment, "drop"):
            if is_installed(python, name):
                run_logged([*pip, "uninstall", "-y", name], log)
        say(environment, "4/5 kvgate, editable")
        run_logged([*install, "--no-deps", "--no-build-isolation", "--force-reinstall", "-e", ROOT], log)
        say(environment, "5/5 checking that it imports")
        run_logged([python, "-c", SMOKE_IMPORTS[environment]], log, clean_environment() | SMOKE_VARIABLES)
    stamp.write_text(wanted + "\n")
    say(environment, f"ready after {time.monotonic() - started:.0f} s")


def is_installed(python: Path, name: str) -> bool:
    """Whether the environment of `python` has a distribution of that name."""
    probe = f"import importlib.metadata as m; m.distribution({name!r})"
    return subprocess.run([str(python), "-c", probe], capture_output=True, timeout=60, check=False).returncode == 0


def lock(environment: str) -> None:
    """Resolve requirements/ENVIRONMENT.in in a scratch environment and write the pinned list."""
    with tempfile.TemporaryDirectory(prefix="kvgate-lock-") as scratch:
        log_path = ENVIRONMENTS / f"{environment}-lock.log"
        with log_path.open("w") as log:
            say(environment, "resolving (this downloads everything once)")
            run_logged([sys.executable, "-m", "venv", scratch], log)
            pip: list[str | Path] = [Path(scratch) / "bin" / "python", "-m", "pip"]
            run_logged(torch_command(pip), log)
            torch = [line for line in (REQUIREMENTS / "torch.txt").read_text().split() if "==" in line]
            run_logged([*pip, "install", *torch, "-r", REQUIREMENTS / f"{environment}.in"], log)
            for requirement in directives(environment, "no-deps"):
                run_logged([*pip, "install", "--no-deps", requirement], log)
        frozen = subprocess.run(
            [str(part) for part in [*pip, "freeze", "--all"]], capture_output=True, text=True, timeout=300, check=True
        ).stdout
    dropped = {name.lower() for name in directives(environment, "drop")}
    kept = [
        line
        for line in frozen.splitlines()
        if "==" in line and not NEVER_LOCKED.match(line) and line.split("==")[0].lower() not in dropped
    ]
    header = (
        f"# Every package of the {environment} environment, pinned; installed with --no-deps.\n"
        f"# Written by `make lock` from requirements/{environment}.in. torch is in requirements/torch.txt.\n"
    )
    (REQUIREMENTS / f"{environment}.txt").write_text(header + "\n".join(sorted(kept, key=str.lower)) + "\n")
    say(environment, f"pinned {len(kept)} packages")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="+", choices=["lock", *SMOKE_IMPORTS], metavar="[lock] gateway|vllm")
    words: list[str] = parser.parse_args().what
    locking = words[0] == "lock"
    names = words[1:] if locking else words
    try:
        for environment in names:
            with locked(environment):
                lock(environment) if locking else build(environment)
    except SetupError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkvgate: interrupted; run make again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
