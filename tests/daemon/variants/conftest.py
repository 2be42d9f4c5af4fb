"""One gateway, engine and source for all tests of variants; whatever a test does, nothing may be held afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvgate.client import GatewayClient
from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from tests.client.sdk_engine import GatewayThread, SdkEngine, running_gateway
from tests.daemon.variants.kit import (
    LISTED,
    SOURCE,
    TENANT,
    WAIT_S,
    artifact,
    folder_of,
    manifest,
)


@pytest.fixture(scope="package")
def gateway() -> Iterator[GatewayThread]:
    """One gateway for this folder: the listed transform may be shared, but not between domains."""
    settings: dict[str, Any] = {"determined_transforms": f"other@9, {LISTED}"}
    folder = folder_of(settings)
    with running_gateway(folder, **settings) as running:
        yield running


@pytest.fixture(scope="package")
def engine(gateway: GatewayThread) -> Iterator[SdkEngine]:
    """The engine whose KV is transformed; two ranks."""
    made = SdkEngine(gateway.socket)
    made.store(SOURCE)
    yield made
    made.close()


@pytest.fixture(scope="package")
def sdk(gateway: GatewayThread, engine: SdkEngine) -> Iterator[Sdk]:
    """A client beside it."""
    with Sdk(gateway.socket, model=engine.model.digest().hex()) as made:
        yield made


@pytest.fixture(scope="package")
def prefix(sdk: Sdk) -> Prefix:
    """The KV of the source."""
    return sdk.fetch(SOURCE)


@pytest.fixture(scope="package")
def published(sdk: Sdk, prefix: Prefix) -> tuple[Artifact, VariantCapability]:
    """SnapKV of the source for query A, shared with whoever asks the same."""
    made = artifact(prefix, manifest(prefix))
    return made, sdk.publish(made)


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[GatewayClient]:
    """A raw connection in the client's role."""
    made = GatewayClient(gateway.socket, "client")
    made.start()
    assert made.wait_connected(WAIT_S)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_held(gateway: GatewayThread) -> Iterator[None]:
    """Whatever a test does, no lease, load or write is left of it."""
    yield
    deadline = time.monotonic() + WAIT_S
    counts: list[Any] = []
    while time.monotonic() < deadline:
        status = gateway.status()
        counts = [status[name] for name in ("leases", "open_loads", "open_writes")]
        counts += [status["storage"]["holds"], status["storage"]["reservations"]]
        if not any(counts):
            return
        time.sleep(0.01)
    pytest.fail(f"still held: {counts}")


@pytest.fixture(scope="package")
def tenant(gateway: GatewayThread) -> Iterator[tuple[SdkEngine, Sdk, Prefix]]:
    """The same engine, prompt and client in another isolation domain."""
    made = SdkEngine(gateway.socket, credential=TENANT)
    made.store(SOURCE)
    with Sdk(gateway.socket, credential=TENANT) as client:
        yield made, client, client.fetch(SOURCE)
    made.close()
