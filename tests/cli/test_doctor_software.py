"""What is installed, or is not, must be found in the engine's environment and in the gateway's, with the pip command that mends it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvgate import __version__
from tests.cli.doctor import Doctor, plant


def test_kernels_in_use_are_named(doctor: Doctor) -> None:
    """The check names the best backend of this machine that can be used, as the kernels themselves say, and what GPU pages have."""
    pytest.importorskip("torch")
    from kvgate_kernels.api import survey

    usable = [name for name, why in survey() if not why.startswith("not usable")]
    (found,) = doctor.run("kernels", code=0)
    assert found["found"].startswith(next(name for name in usable if "cuda" not in name))
    on_gpu = next((name for name in usable if "cuda" in name), "no GPU")
    assert found["level"] == "warn" or on_gpu in found["found"]


def test_vllm_of_another_version(doctor: Doctor, distributions: Path) -> None:
    """A vLLM older than any supported one: found, with the pip command for its environment."""
    plant(distributions, "vllm", "0.20.1")
    found = doctor.fault("vllm", vllm_python=sys.executable)
    assert "0.20.1" in found["found"]
    assert found["remedy"] == f"{sys.executable} -m pip install 'vllm>=0.26,<0.34'"


def test_vllm_without_the_plugin(doctor: Doctor, distributions: Path) -> None:
    """An engine's environment without kvgate would cache nothing, silently: found, with the pip command."""
    plant(distributions, "vllm", "0.32.0")
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    found = doctor.fault("vllm", vllm_python=base)
    assert "plugin" in found["found"]
    assert found["remedy"] == f"{base} -m pip install kvgate=={__version__}"


def test_vllm_with_kvgate_of_another_build(doctor: Doctor, distributions: Path) -> None:
    """Two builds of kvgate on one host: found, with the pip command that makes them one."""
    plant(distributions, "vllm", "0.32.0")
    plant(distributions, "kvgate", "0.0.9", plugin="kvgate_vllm.plugin:register")
    found = doctor.fault("vllm", vllm_python=sys.executable)
    assert "0.0.9" in found["found"]
    assert found["remedy"].endswith(f"kvgate=={__version__}")


def test_a_plugin_list_without_kvgate(doctor: Doctor, distributions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_PLUGINS that names others only: found; with the value the remedy names it passes."""
    plant(distributions, "vllm", "0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    remedy = doctor.fault("vllm", vllm_python=sys.executable)["remedy"]
    assert remedy == "export VLLM_PLUGINS=other,kvgate"
    monkeypatch.setenv("VLLM_PLUGINS", remedy.partition("=")[2])
    doctor.run("vllm", code=0, vllm_python=sys.executable)


def test_a_python_that_is_none(doctor: Doctor) -> None:
    """A path that is no Python is named as such."""
    assert "bin/python" in doctor.fault("vllm", vllm_python="/no/such/python")["remedy"]
    assert "no answer" in doctor.fault("vllm", vllm_python="/bin/true")["found"]


def test_lmcache_of_another_version(doctor: Doctor, distributions: Path) -> None:
    """The pin is checked: another release is refused, with the pip command for the right one."""
    pytest.importorskip("lmcache")
    plant(distributions, "lmcache", "0.5.5")
    found = doctor.fault("lmcache", backend="lmcache")
    assert "0.5.5" in found["found"]
    assert found["remedy"] == f"{sys.executable} -m pip install --no-deps lmcache==0.5.6"


def test_lmcache_without_something_it_needs(doctor: Doctor, distributions: Path) -> None:
    """Without aiofiles the fs adapter silently vanishes: the module is named, and the pip command for all that lack."""
    pytest.importorskip("lmcache")
    for name in ("aiofiles", "sortedcontainers"):
        (distributions / f"{name}.py").write_text(f"raise ModuleNotFoundError('planted', name='{name}')")
    found = doctor.fault("lmcache", backend="lmcache")
    assert "aiofiles" in found["found"]
    assert found["remedy"] == f"{sys.executable} -m pip install aiofiles sortedcontainers"
