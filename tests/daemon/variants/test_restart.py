"""The matrix of variants must hold in every tier, and again after a restart of everything."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from kvgate.client.artifacts import Artifact, VariantCapability
from kvgate.client.sdk import Gateway as Sdk
from tests.client.sdk_engine import GatewayThread, SdkEngine, config
from tests.daemon.variants.kit import (
    LISTED,
    OTHERS,
    SOURCE,
    TENANT,
    altered,
    artifact,
    folder_of,
    found,
    holds,
    ids,
    manifest,
    outcome,
    recency,
)


@pytest.mark.slow
def test_the_matrix_holds_in_l2_and_after_a_restart() -> None:
    """Published, everything stopped, started again: old capabilities open their artifacts from L2, and the rest still misses."""
    settings: dict[str, Any] = {
        "backend": "lmcache",
        "determined_transforms": LISTED,
        "probe_s": 60.0,
        "storage_s": 60.0,
        "pool_bytes": 16 << 20,
        "drain_s": 30.0,
    }
    folder = folder_of(settings)
    running = GatewayThread(config(folder, **settings)).start()
    engine = SdkEngine(running.socket)
    engine.store(SOURCE)
    with Sdk(running.socket, deadline_s=120) as sdk:
        prefix = sdk.fetch(SOURCE)
        made = {
            "query": artifact(prefix, manifest(prefix)),
            "prefix": artifact(prefix, recency(prefix)),
            "request": artifact(prefix, manifest(prefix, scope="request")),
        }
        kept = {name: sdk.publish(one) for name, one in made.items()}
        check_matrix(sdk, engine, made, kept)
    engine.close()
    running.stop()
    running = GatewayThread(config(folder, **settings)).start()
    engine = SdkEngine(running.socket)
    with Sdk(running.socket, deadline_s=120) as sdk:
        check_matrix(sdk, engine, made, kept)
    tenant = SdkEngine(running.socket, credential=TENANT)
    with Sdk(running.socket, credential=TENANT, deadline_s=120) as theirs:
        for capability in kept.values():
            assert outcome(lambda: theirs.restore(capability)) == "capability"  # noqa: B023
        assert outcome(lambda: theirs.fetch(SOURCE)) == "gone"
    tenant.close()
    engine.close()
    running.stop()
    shutil.rmtree(folder)


def check_matrix(sdk: Sdk, engine: SdkEngine, made: dict[str, Artifact], kept: dict[str, VariantCapability]) -> None:
    """Hits where there must be hits, bit for bit, and misses everywhere else."""
    prefix = sdk.fetch(SOURCE)
    assert np.array_equal(prefix.keys, engine.kv(SOURCE)[0])
    for name, one in made.items():
        assert holds(sdk, kept[name], one)
        assert found(sdk, one.manifest, prefix) == ("tokens" if name == "request" else "hit")
    assert outcome(lambda: sdk.fetch(ids())) == "gone"
    for change in OTHERS.values():
        assert found(sdk, manifest(prefix, **change), prefix) == "tokens"
    assert outcome(lambda: sdk.restore(kept["query"], salt="s")) == "capability.root"
    assert outcome(lambda: sdk.restore(altered(kept["query"], 100))) == "capability"
