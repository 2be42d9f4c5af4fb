"""Runs the move tests once per kernel backend that this machine has."""

from __future__ import annotations

import pytest

from kvgate_kernels.api import available_backends

CPU_BACKENDS = available_backends("cpu")


@pytest.fixture(params=CPU_BACKENDS, scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The name of one CPU backend."""
    return str(request.param)
