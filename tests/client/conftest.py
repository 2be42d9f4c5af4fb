"""A gateway, an engine and a client for the tests of the SDK."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgate.client.artifacts import Prefix
from kvgate.client.sdk import Gateway
from tests.client.sdk_engine import GatewayThread, SdkEngine, config
from tests.client.sdk_kit import TOKENS


@pytest.fixture(scope="package")
def gateway() -> Iterator[GatewayThread]:
    """One gateway for this folder."""
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    running = GatewayThread(config(folder)).start()
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def engine(gateway: GatewayThread) -> Iterator[SdkEngine]:
    """Two ranks, bfloat16."""
    made = SdkEngine(gateway.socket)
    made.store(TOKENS)
    yield made
    made.close()


@pytest.fixture(scope="package")
def sdk(gateway: GatewayThread, engine: SdkEngine) -> Iterator[Gateway]:
    """A client of that engine's model."""
    with Gateway(gateway.socket, model=engine.model.digest().hex()[:16]) as made:
        yield made


@pytest.fixture(scope="package")
def prefix(sdk: Gateway) -> Prefix:
    """The stored KV."""
    return sdk.fetch(TOKENS)
