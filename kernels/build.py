"""Builds the kernels with the Mojo compiler beside this interpreter. `make kernels`; unchanged outputs are kept.

CPU: one shared library for each of x86-64-v3 and v4, picked at run time; they need no run-time library. GPU: machine code for sm_90
and portable PTX for sm_80, loaded through the driver. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "bindings" / "kvgate_kernels" / "_native"
CPU_TARGETS = ("x86-64-v3", "x86-64-v4")
GPU_TARGETS = (("sm_90", "object"), ("sm_80", "asm"))
BUILD_TIMEOUT_S = 600


class BuildError(Exception):
    """The compiler is missing or refused the sources."""


@dataclass(frozen=True)
class Product:
    """One output file (or folder of files), and the commands that make it at a given path."""

    name: str
    sources: tuple[str, ...]
    commands: Callable[[Path], list[list[str]]]
    folder: bool = False


def compiler() -> Path:
    """The mojo command of this environment."""
    beside = Path(sys.executable).with_name("mojo")
    found = str(beside) if beside.exists() else shutil.which("mojo")
    if not found:
        raise BuildError("no mojo command: install the extra kvgate[kernels] (max-core) and a C compiler")
    return Path(found)


def products(mojo: Path) -> list[Product]:
    """Everything that is built."""
    c_compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if c_compiler is None:
        raise BuildError("no C compiler: one is needed to link")

    def cpu(target: str) -> Product:
        def commands(out: Path) -> list[list[str]]:
            source, object_file = str(HERE / "kvgate_cpu.mojo"), str(out.with_suffix(".o"))
            compile_ = [
                str(mojo),
                "build",
                "-I",
                str(HERE),
                "--emit",
                "object",
                "--target-cpu",
                target,
                source,
                "-o",
                object_file,
            ]
            # Linked here and not by mojo, which would write this environment's path into the library.
            link = [c_compiler, "-shared", "-o", str(out), object_file, "-Wl,--no-undefined", "-Wl,-s"]
            return [compile_, link]

        return Product(f"libkvgate_cpu_{target.removeprefix('x86-64-')}.so", ("kvgate_cpu.mojo", "kvgate/*.mojo"), commands)

    def gpu(target: str, kind: str) -> Product:
        def commands(out: Path) -> list[list[str]]:
            source = str(HERE / "gpu_build.mojo")
            return [[str(mojo), "run", "-I", str(HERE), "-D", f"ARCH={target}", "-D", f"KIND={kind}", source, str(out)]]

        return Product(f"gpu_{target}", ("gpu_build.mojo", "kvgate/*.mojo"), commands, folder=True)

    return [*(cpu(target) for target in CPU_TARGETS), *(gpu(target, kind) for target, kind in GPU_TARGETS)]


def fingerprint(product: Product, version: str) -> str:
    """Digest of all that the output depends on."""
    digest = hashlib.sha256(version.encode())
    digest.update(json.dumps(product.commands(Path(product.name))).encode())
    for pattern in product.sources:
        for path in sorted(HERE.glob(pattern)):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def build(product: Product, version: str, force: bool) -> bool:
    """Builds one output unless its stamp says that it is current. True if it was built."""
    target = OUTPUT / product.name
    stamp = OUTPUT / f"{product.name}.stamp"
    wanted = fingerprint(product, version)
    if not force and target.exists() and stamp.exists() and stamp.read_text() == wanted:
        return False
    # Built aside and moved: a process that has the old library mapped keeps it whole.
    aside = OUTPUT / f"{product.name}.{os.getpid()}.tmp"
    if product.folder:
        aside.mkdir()
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
    try:
        for command in product.commands(aside):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
            if done.returncode != 0:
                raise BuildError(f"{product.name}: {done.stderr.strip()[-4000:]}")
    except (BuildError, subprocess.SubprocessError):
        if product.folder:
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
        raise
    finally:
        aside.with_suffix(".o").unlink(missing_ok=True)
    if product.folder:
        shutil.rmtree(target, ignore_errors=True)
    aside.replace(target)
    stamp.write_text(wanted)
    return True


def main() -> int:
    """Builds all that changed; 1 with the compiler's words if it cannot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--force", action="store_true", help="build also what is current")
    force = parser.parse_args().force
    try:
        mojo = compiler()
        environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
        version = subprocess.run(
            [str(mojo), "--version"], env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        OUTPUT.mkdir(parents=True, exist_ok=True)
        (OUTPUT / ".gitignore").write_text("*\n")
        for product in products(mojo):
            built = build(product, version, force)
            print(f"{product.name}: {'built' if built else 'current'}")
    except (BuildError, subprocess.SubprocessError, OSError) as error:
        print(f"kernels not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
