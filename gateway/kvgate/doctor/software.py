"""Checks of what is installed: Python, vLLM and the plugin in it, LMCache, kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from kvgate import __version__
from kvgate.doctor.findings import Report, Subject, command

PROBE_S: Final = 60.0
LMCACHE_VERSION: Final = "0.5.6"
VLLM_LOWEST, VLLM_BELOW = (0, 26), (0, 34)
PLUGIN: Final = "kvgate_vllm.plugin:register"

# Module and what pip calls it, for what LMCache's CPU path imports; `requirements/gateway.in` says the same.
_LMCACHE_NEEDS: Final = {
    "torch": "torch==2.13.0",
    "numpy": "numpy<=2.2.6",
    "numba": "numba",
    "msgspec": "msgspec",
    "zmq": "pyzmq>=25",
    "blake3": "blake3",
    "aiofiles": "aiofiles",
    "aiofile": "aiofile",
    "aiohttp": "aiohttp",
    "cachetools": "cachetools",
    "sortedcontainers": "sortedcontainers",
    "psutil": "psutil",
    "cpuinfo": "py-cpuinfo",
    "yaml": "pyyaml",
    "requests": "requests",
    "httpx": "httpx",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "cryptography": "cryptography",
    "prometheus_client": "prometheus_client<=0.24.1",
    "opentelemetry.sdk": "opentelemetry-sdk==1.40.0",
    "opentelemetry.exporter.prometheus": "opentelemetry-exporter-prometheus==0.61b0",
}


def check_python(subject: Subject, report: Report) -> None:
    """Linux x86-64, and a Python this build was tested with (an older one cannot even import it)."""
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        report.fail(f"{found}: kvgate runs on Linux x86-64", "run it on such a host")
    elif sys.version_info >= (3, 13):
        report.warn(f"{found}: tested with 3.11 and 3.12", "python3.12 -m venv kvgate-env && kvgate-env/bin/pip install kvgate")
    else:
        report.ok(found)


def check_vllm(subject: Subject, report: Report) -> None:
    """A vLLM of a supported version, with the kvgate of this build and its plugin visible to it."""
    python = subject.vllm_python or sys.executable
    try:
        found = ask(python, "engine")
    except ProbeError as error:
        report.fail(f"{python}: {error}", "kvgate doctor --vllm-python /path/to/the/engine's/bin/python")
        return
    text = found["vllm"]
    if text is None:
        if subject.vllm_python:
            report.fail(f"vLLM is not installed for {python}", command(python, "-m", "pip", "install", "vllm>=0.26,<0.34"))
        else:
            report.warn("vLLM is not in this environment", "kvgate doctor --vllm-python /path/to/the/engine's/bin/python")
        return
    numbers = re.match(r"(\d+)\.(\d+)", text)
    if numbers is None or not VLLM_LOWEST <= (int(numbers[1]), int(numbers[2])) < VLLM_BELOW:
        report.fail(f"vLLM {text}: kvgate works with 0.26 to 0.33", command(python, "-m", "pip", "install", "vllm>=0.26,<0.34"))
        return
    if tuple(found["python"]) < (3, 11):
        shown = ".".join(map(str, found["python"]))
        report.fail(f"vLLM runs on Python {shown}: kvgate beside it needs 3.11 or later", "python3.11 -m venv engine-env")
        return
    install = command(python, "-m", "pip", "install", f"kvgate=={__version__}")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found["connector"] or PLUGIN not in found["plugins"]:
        report.fail(f"vLLM {text} does not see kvgate's plugin: without it no file is hashed and nothing is cached", install)
    elif allowed is not None and "kvgate" not in allowed.split(","):
        report.fail(
            "VLLM_PLUGINS keeps kvgate's plugin from being loaded",
            command("export", "VLLM_PLUGINS=" + ",".join(name for name in (*allowed.split(","), "kvgate") if name)),
        )
    elif found["kvgate"] != __version__:
        report.fail(f"kvgate {found['kvgate']} beside vLLM {text}, kvgate {__version__} here: upgrade the older", install)
    else:
        report.ok(f"vLLM {text} with kvgate {found['kvgate']} and its plugin")


def check_lmcache(subject: Subject, report: Report) -> None:
    """The one LMCache release kvgate hosts, with everything its CPU path imports."""
    kind = subject.config.backend
    pip = (sys.executable, "-m", "pip", "install")
    if kind == "memory":
        report.ok("not needed: backend memory")
        return
    if importlib.util.find_spec("lmcache") is None:
        problem = "LMCache is not installed here"
        remedy = command(*pip, "--no-deps", f"lmcache=={LMCACHE_VERSION}")
        if kind == "auto":
            report.warn(problem + ": objects are kept in memory only, and lost at a restart", remedy)
        else:
            report.fail(problem, remedy)
        return
    try:
        found = ask(sys.executable, "lmcache", ",".join(_LMCACHE_NEEDS))
    except ProbeError as error:
        report.fail(f"LMCache: {error}", command(*pip, "--no-deps", "--force-reinstall", f"lmcache=={LMCACHE_VERSION}"))
        return
    text, (api, sdk) = found["lmcache"], found["otel"]
    if text is None or text.partition("+")[0] != LMCACHE_VERSION:
        problem = f"LMCache {text or 'of no version'}: kvgate hosts exactly {LMCACHE_VERSION}"
        report.fail(problem, command(*pip, "--no-deps", f"lmcache=={LMCACHE_VERSION}"))
    elif missing := [_LMCACHE_NEEDS[name] for name in found["needed"]]:
        named = ", ".join(f"{name} ({why})" for name, why in found["needed"].items())
        report.fail(f"LMCache {text} lacks what it needs: {named}", command(*pip, *missing))
    elif api != sdk:
        problem = f"opentelemetry-api {api} and -sdk {sdk} differ: LMCache then says it needs CUDA"
        report.fail(problem, command(*pip, f"opentelemetry-api=={sdk}"))
    elif found["core"]:
        name = found["core"].removeprefix("missing ")
        problem = f"LMCache {text} cannot be imported: {found['core']}"
        again = (*pip, "--no-deps", "--force-reinstall", f"lmcache=={LMCACHE_VERSION}")
        report.fail(problem, command(*(again if name == found["core"] or name.startswith("lmcache") else (*pip, name))))
    else:
        report.ok(f"LMCache {text}, importable")


def check_kernels(subject: Subject, report: Report) -> None:
    """Which kernels a worker uses, and why."""
    python = subject.vllm_python or sys.executable
    try:
        found = ask(python, "kernels")
    except ProbeError as error:
        where = "" if subject.vllm_python else " in this environment; engines have one of their own: --vllm-python"
        remedy = command(python, "-m", "pip", "install", "torch==2.13.0", f"kvgate[kernels]=={__version__}")
        (report.fail if subject.vllm_python else report.warn)(f"kernels cannot be tried{where}: {error}", remedy)
        return
    said = f"{found['backend']} ({found['reason']})"
    device = [(name, why) for name, why in found["survey"] if name.startswith("mojo-cuda")]
    usable = [name for name, why in device if not why.startswith("not usable")]
    if not found["backend"].startswith("mojo"):
        report.warn(f"{found['backend']}, several times slower, because of: {found['reason']}", "make kernels")
    elif found["gpu"] and not usable:
        why = "; ".join(f"{name}: {reason}" for name, reason in device)
        report.warn(f"{said}; GPU pages go by torch, several times slower ({why})", "make kernels")
    else:
        report.ok(f"{said}; GPU pages: " + (usable[0] if usable else "no GPU"))


class ProbeError(Exception):
    """The other Python did not answer; the text says why."""


def ask(python: str, what: str, *arguments: str) -> dict[str, Any]:
    """What ``probe.py`` finds in the environment of ``python``. Raises ``ProbeError``."""
    source = Path(__file__).with_name("probe.py").read_bytes()
    try:
        done = subprocess.run(
            [python, "-", what, *arguments],
            input=source,
            capture_output=True,
            timeout=PROBE_S,
            cwd="/",
            preexec_fn=_end_with_us,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {PROBE_S:g} s") from None
    except OSError as error:
        raise ProbeError(error.strerror or "it does not start") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ProbeError(f"it ended with code {done.returncode} and no answer") from None
    if not isinstance(answer, dict) or "error" in answer:
        raise ProbeError(str(answer["error"]) if isinstance(answer, dict) else "it gave no answer")
    return answer


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


def _end_with_us() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
