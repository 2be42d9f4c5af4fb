"""Dependencies must point inwards, and the base install must do without the heavy packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import PACKAGES, ROOT

HEAVY = ("torch", "lmcache", "vllm", "numpy", "max", "mojo")
SHIM_MAY_USE = {
    "kvgate.client",
    "kvgate.config",
    "kvgate.contract",
    "kvgate.protocol",
    "kvgate.storage",
    "kvgate.transfer.gate",
    "kvgate.transfer.records",
    "kvgate_kernels",
}
MADE_OF_TORCH = "kvgate.transfer.process."
"""The inside of the transfer process: the one part of the gateway that works with torch."""

USE_KERNELS = ("gateway/kvgate/transfer/process", "gateway/kvgate/transforms", "gateway/kvgate/screen")
"""Parts of `kvgate` that move or change KV, and import the kernels where they do."""


def test_base_runs_without_the_heavy_packages() -> None:
    """Every module of `kvgate` must import where torch, LMCache, vLLM, numpy and Mojo are absent."""
    program = f"""
import importlib, importlib.abc, pkgutil, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is absent here", name=name)
sys.meta_path.insert(0, Absent())
import kvgate
for module in pkgutil.walk_packages(kvgate.__path__, "kvgate."):
    if not module.name.endswith("__main__") and not module.name.startswith({MADE_OF_TORCH!r}):
        importlib.import_module(module.name)
assert not [name for name in {HEAVY!r} if name in sys.modules]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("part", "may_use"),
    [
        ("gateway/kvgate/contract", {"kvgate.contract"}),
        ("gateway/kvgate/protocol", {"kvgate.contract", "kvgate.protocol", "kvgate.transfer.records"}),
        (
            "gateway/kvgate/client",
            {"kvgate.client", "kvgate.config", "kvgate.contract", "kvgate.integers", "kvgate.protocol", "kvgate.storage"},
        ),
        ("gateway/kvgate/storage", {"kvgate.config", "kvgate.contract", "kvgate.protocol", "kvgate.storage"}),
        ("gateway/kvgate", {"kvgate"}),
        ("gateway/kvgate/transfer", {"kvgate.contract", "kvgate.storage", "kvgate.transfer"}),
        ("bindings/kvgate_kernels", {"kvgate.contract", "kvgate.transfer.records", "kvgate_kernels"}),
        ("shims/lmcache/kvgate_lmcache", SHIM_MAY_USE | {"kvgate_lmcache"}),
        ("shims/vllm/kvgate_vllm", SHIM_MAY_USE | {"kvgate_vllm"}),
    ],
)
def test_point_inwards(part: str, may_use: set[str]) -> None:
    """A package must import only packages further in; nothing outside the daemon imports the daemon."""
    allowed = tuple(sorted(may_use))
    outward = []
    for path in sorted((ROOT / part).rglob("*.py")):
        for module in imported_modules(path):
            if module.split(".")[0] not in PACKAGES or module == "kvgate":
                continue
            if any(path.is_relative_to(ROOT / one) for one in USE_KERNELS) and module.startswith("kvgate_kernels"):
                continue
            if not any(module == inner or module.startswith(inner + ".") for inner in allowed):
                outward.append(f"{path.relative_to(ROOT)}: {module}")
    assert outward == []


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a source file imports, at any level, with relative imports resolved."""
    folder = next(f for f in PACKAGES.values() if path.is_relative_to(ROOT / f))
    package = path.relative_to(ROOT / folder).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from kvgate import daemon` names a package just as `import kvgate.daemon` does.
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "kvgate" else (module,)
