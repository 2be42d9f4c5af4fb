"""A gateway, an engine and a client for the tests of the SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgate.client.artifacts import Prefix
from kvgate.client.sdk import Gateway
from tests.client.sdk_engine import GatewayThread, SdkEngine, running_gateway
from tests.client.sdk_kit import TOKENS


@pytest.fixture(scope="package")
def gateway() -> Iterator[GatewayThread]:
    """One gateway for this folder."""
    with running_gateway() as running:
        yield running


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
