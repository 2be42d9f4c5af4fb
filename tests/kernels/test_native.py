"""A compiled library must be used only where this machine can run it; where there is none, the reason must be told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvgate_kernels import Packer, PageGeometry, PageLayout, PayloadGeometry, native
from kvgate_kernels.api import survey
from kvgate_kernels.backend import NativeUnavailable
from kvgate_kernels.native import load_cpu_library
from tests.kernels.arena import Arena

PAGES = PageGeometry(PageLayout.CPU_VEC, 1, 1, 64, 32, "bfloat16")


@pytest.fixture(name="forgotten")
def forget_loaded_libraries() -> Iterator[None]:
    """Libraries are looked for anew in this test, and again after it."""
    load_cpu_library.cache_clear()
    yield
    load_cpu_library.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_libraries_the_reference_is_used_and_the_reason_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without compiled kernels works, slowly, and says why."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    arena = Arena.filled(PAGES, 2, np.random.default_rng(0))
    with caplog.at_level(logging.WARNING):
        packer = Packer(PAGES, PayloadGeometry.of(PAGES, 32), arena.tensors)
    assert packer.describe().name == "torch-reference"
    assert "make kernels" in packer.describe().reason or "lacks" in packer.describe().reason
    assert "using torch-reference" in caplog.text
    assert str(tmp_path) not in caplog.text
    packer.close()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("target", list(native.TARGETS))
def test_a_processor_without_the_instructions_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is never loaded on a processor that lacks what it was built for."""
    monkeypatch.setattr(native, "cpu_features", lambda: native.TARGETS[target] - {"fma"})
    with pytest.raises(NativeUnavailable, match="lacks fma"):
        load_cpu_library(target)


@pytest.mark.usefixtures("forgotten")
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken build is a reason, not a crash."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "cpu_features", lambda: native.TARGETS["v4"])
    (tmp_path / "libkvgate_cpu_v3.so").write_bytes(b"no library")
    with pytest.raises(NativeUnavailable, match="does not load"):
        load_cpu_library("v3")


def test_the_survey_names_every_backend_with_a_reason() -> None:
    """What `kvgate doctor` shows: all backends, usable or not, each with words."""
    found = survey()
    assert [name for name, _ in found][-1] == "torch-reference"
    assert {"mojo-cpu-v4", "mojo-cpu-v3", "mojo-cuda-sm_90", "mojo-cuda-sm_80"} <= {name for name, _ in found}
    assert all(reason for _, reason in found)
