"""One gateway for all tests of a module: a run leaves nothing behind, so the next one can use it too."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kvgate.daemon.app import Gateway
from kvgate.verify.runs import Target
from tests.daemon.conftest import folder, small_config, start

CLASSES = ("fleet-a", "fleet-b")
__all__ = ["folder", "start"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway on the memory backend that declares two engine classes."""
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    made = Gateway(small_config(folder, numerics_classes=",".join(CLASSES), pool_bytes=4 << 20))
    await made.start()
    yield made
    await made.stop()
    shutil.rmtree(folder)


def target(gateway: Gateway, *only: str) -> Target:
    """What a run of these rows needs to know of it."""
    return Target(gateway.config.socket_path, gateway.config.admin_path, CLASSES, only)
