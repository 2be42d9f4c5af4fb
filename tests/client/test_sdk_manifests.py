"""Manifests that the SDK writes, whose KV it is, and what it says where the gateway is not as one would like."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgate.client.artifacts import Prefix
from kvgate.client.sdk import ArtifactError, Gateway, GatewayRefused, GatewayUnavailable, NotStored
from kvgate.contract.errors import ContractError
from kvgate.contract.manifest import position_map, query_digest, retained, source_prefix
from tests.client.sdk_engine import GatewayThread, SdkEngine, config, running_gateway
from tests.client.sdk_kit import KEPT, TOKENS, keep, same
from tests.daemon import makers


def test_a_manifest_says_what_the_contract_says(sdk: Gateway, engine: SdkEngine, prefix: Prefix) -> None:
    """The helper fills the contract's record; defaults are explicit values in it."""
    made = prefix.source.manifest(
        algorithm="keep", version="1", parameters=[("b", "2"), ("a", "1")], retained=np.array(KEPT), query=[5, 6], scope="query"
    )
    assert [(one.name, one.value) for one in made.parameters] == [("a", "1"), ("b", "2")]
    assert made.retained == retained([[KEPT]], "model")
    assert made.position_map == position_map([[KEPT]], [[list(range(8))]])
    assert made.query == query_digest(engine.opened.token_key, [5, 6])
    assert (made.source_prefix, made.source_tokens) == (prefix.source.prefix, 20)
    assert prefix.source.prefix != source_prefix(makers.name("root"), 20, None)
    assert prefix.source.manifest(algorithm="keep", version="1").query is None


@pytest.mark.parametrize(
    ("positions", "per"),
    [
        (KEPT, "model"),
        (torch.tensor(KEPT), "model"),
        (torch.tensor([[KEPT]]), "model"),
        ([KEPT, KEPT], "layer"),
        (torch.tensor([[KEPT], [KEPT]]), "layer"),
        (np.array([[KEPT, KEPT], [KEPT, KEPT]]), "head"),
        ([np.array(KEPT), torch.tensor(KEPT)], "layer"),
        ([np.int64(at) for at in KEPT], "model"),
    ],
    ids=["list", "tensor", "1 1 n", "layers", "n 1 n", "heads", "list of arrays", "numpy scalars"],
)
def test_positions_come_in_any_of_three_shapes(prefix: Prefix, positions: Any, per: str) -> None:
    """Per model, per layer, per head, however they are held."""
    made = prefix.source.manifest(algorithm="keep", version="1", retained=positions)
    assert (made.retained.per, made.retained.tokens) == (per, 8)
    moved = prefix.source.manifest(algorithm="keep", version="1", retained=positions, new_positions=list(range(1, 9)))
    assert moved.position_map != made.position_map
    assert moved.retained == made.retained


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"retained": [0, 20]}, ArtifactError),
        ({"retained": [[0, 1], [0, 20]]}, ArtifactError),
        ({"retained": [[[[0]]]]}, ArtifactError),
        ({"retained": 3}, ArtifactError),
        ({"retained": "0123"}, ArtifactError),
        ({"retained": [0.0, 1.5]}, ArtifactError),
        ({"retained": [0, 1], "new_positions": [0.0, 1.0]}, ArtifactError),
        ({"query": "what"}, ArtifactError),
        ({"retained": [3, 2]}, ContractError),
        ({"retained": [-1, 2]}, ContractError),
        ({"retained": [[0, 1], [0]]}, ContractError),
        ({"retained": [0, 1], "new_positions": [0]}, ContractError),
        ({"parameters": [("a", "1"), ("a", "2")]}, ArtifactError),
        ({"parameters": {"A": "1"}}, ContractError),
        ({"parameters": {"a": 1}}, ContractError),
        ({"algorithm": "Keep"}, ContractError),
        ({"version": ""}, ContractError),
        ({"query": []}, ContractError),
        ({"scope": "query"}, ContractError),
        ({"scope": "prefix", "query": [1]}, ContractError),
        ({"scope": "global"}, ArtifactError),
        ({"scope": "all"}, ContractError),
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_refused_here(prefix: Prefix, change: dict[str, Any], error: type[Exception]) -> None:
    """Before anything is sent."""
    with pytest.raises(error):
        prefix.source.manifest(**({"algorithm": "keep", "version": "1"} | change))


@pytest.mark.parametrize(
    ("positions", "named"),
    [
        ([0.0, 1.5], "float"),
        ([[0, 1], [0, 1.5]], "float"),
        (np.array([0.0, 1.0], np.float32), "numpy.ndarray of float32"),
        (torch.tensor([0.0, 1.0]), "torch.Tensor of float32"),
        ([np.float32(1)], "numpy.float32"),
        (np.array([True, False]), "numpy.ndarray of bool"),
        ([True, False], "bool"),
    ],
    ids=str,
)
def test_positions_that_are_no_integers_are_named_by_type(prefix: Prefix, positions: Any, named: str) -> None:
    """Nothing is rounded, and a mask is not taken for positions 0 and 1."""
    with pytest.raises(ArtifactError, match=f"^retained: integers are wanted, not {named}$"):
        prefix.source.manifest(algorithm="keep", version="1", retained=positions)


def test_adapters_are_named_by_digest_or_the_digits_it_begins_with(engine: SdkEngine, sdk: Gateway) -> None:
    """An adapter nobody registered, and digits of several, are refused."""
    adapter = engine.add_adapter("kjv")
    engine.add_adapter("python")
    keys, _ = engine.store(TOKENS, adapter=adapter)
    for name in (adapter, adapter.hex(), adapter.hex()[:12]):
        found = sdk.fetch(TOKENS, adapter=name)
        assert np.array_equal(found.keys, keys[:, :, :20])
        assert found.source.adapter == adapter
        assert found.source.model != engine.model.digest()
    for wrong in ("", "zz"):
        with pytest.raises(ArtifactError, match="adapters of this engine"):
            sdk.fetch(TOKENS, adapter=wrong)
    with pytest.raises(GatewayRefused) as caught:
        sdk.fetch(TOKENS, adapter=makers.name("nobody's"))
    assert caught.value.failure.field == "adapter"


def test_salts_are_taken_as_text(engine: SdkEngine, sdk: Gateway) -> None:
    """As a request gives it; other salts have other KV, and an empty one is refused."""
    engine.store(TOKENS, salt="mine")
    assert sdk.fetch(TOKENS, salt="mine").source.salt is not None
    with pytest.raises(NotStored):
        sdk.fetch(TOKENS, salt="theirs")
    with pytest.raises(ContractError):
        sdk.fetch(TOKENS, salt="")


def test_nothing_secret_is_printed(engine: SdkEngine, sdk: Gateway, prefix: Prefix) -> None:
    """Neither tokens, keys, salts nor the capability show in what objects print."""
    artifact = keep(prefix)
    capability = sdk.publish(artifact)
    text = repr([prefix, prefix.source, artifact, capability])
    secrets = [capability.hex[:16], "500", repr(engine.opened.token_key)[2:20], engine.opened.token_key.hex()]
    assert not [one for one in secrets if one in text]


def test_without_a_gateway_each_call_ends_at_its_deadline(tmp_path: Path) -> None:
    """No answer is an error of its own; it names the endpoint, and what starts a gateway or names another. The wait for one is bounded
    by itself."""
    path = str(tmp_path / "none.sock")
    for deadline_s, connect_s in ((0.1, 5.0), (30.0, 0.1)):
        with (
            Gateway(path, deadline_s=deadline_s, connect_s=connect_s) as sdk,
            pytest.raises(GatewayUnavailable, match="no gateway answers") as caught,
        ):
            sdk.fetch(TOKENS)
        assert all(word in str(caught.value) for word in (path, "`kvgate serve`", "$KVGATE_ENDPOINT"))
        assert "without it" not in str(caught.value)


def test_a_gateway_that_turns_the_client_away_is_quoted(gateway: GatewayThread) -> None:
    """A credential that nobody knows: the reason is the gateway's, not that none answers."""
    with (
        Gateway(gateway.socket, credential=b"nobody's", connect_s=1) as sdk,
        pytest.raises(GatewayUnavailable, match=r"refused the connection: .*credential"),
    ):
        sdk.fetch(TOKENS)


def test_without_an_engine_the_refusal_says_what_is_missing() -> None:
    """A gateway with nothing registered, or with two models and no word which: the remedy is in the refusal."""
    with running_gateway() as running, Gateway(running.socket) as sdk:
        with pytest.raises(GatewayRefused) as caught:
            sdk.fetch(TOKENS)
        assert caught.value.code == "unsealed"
        engines = [SdkEngine(running.socket, name, weights=name) for name in ("one", "two")]
        with pytest.raises(GatewayRefused) as caught:
            sdk.fetch(TOKENS)
        assert caught.value.failure.field == "model"
        for engine in engines:
            engine.close()


def test_a_client_lives_through_a_restart_of_the_gateway() -> None:
    """The same object works on: what was in memory is gone, and its capability says so; a source is the same source."""
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    running = GatewayThread(config(folder)).start()
    engine = SdkEngine(running.socket)
    engine.store(TOKENS)
    with Gateway(running.socket) as sdk:
        artifact = keep(sdk.fetch(TOKENS))
        capability = sdk.publish(artifact)
        engine.close()
        running.stop()
        running = GatewayThread(config(folder)).start()
        engine = SdkEngine(running.socket)
        with pytest.raises(NotStored) as caught:
            sdk.restore(capability)
        assert (caught.value.tokens, caught.value.wanted) == (0, 8)
        engine.store(TOKENS)
        assert keep(sdk.fetch(TOKENS)).manifest == artifact.manifest
        assert same(sdk.restore(sdk.publish(artifact)), artifact)
    engine.close()
    running.stop()
    shutil.rmtree(folder)
