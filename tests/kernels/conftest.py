"""Runs the move tests once per kernel backend; where the machine cannot run one, its tests skip with the reason."""

from __future__ import annotations

import pytest

from kvgate_kernels import cpu
from kvgate_kernels.api import backend_names
from kvgate_kernels.backend import NativeUnavailable
from kvgate_kernels.native import load_cpu_library


@pytest.fixture(params=backend_names("cpu"), scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The name of one CPU backend that runs here."""
    for target in cpu.TARGETS:
        if request.param == cpu.backend_name(target):
            try:
                load_cpu_library(target)
            except NativeUnavailable as error:
                pytest.skip(str(error))
    return str(request.param)
