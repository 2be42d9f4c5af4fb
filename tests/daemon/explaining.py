"""What the tests of explained misses share: engines that differ in one thing, and both views of a miss."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvgate.contract.artifacts import ArtifactSet
from kvgate.contract.model import KvQuantization, ModelContract, Numerics
from kvgate.contract.representation import ComponentFormat, KvGroup
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import AdapterRegistered, ConfirmAdapter, Done, Explain, Explained, RegisterAdapter
from tests.daemon import makers
from tests.daemon.admin_client import get
from tests.daemon.engine import Engine

TEXTS = ("a", "b", "c")


def numerics(**changes: Any) -> Numerics:
    """The numerics of ``makers.model``, with changes."""
    plain = makers.model().numerics
    assert isinstance(plain, Numerics)
    return dataclasses.replace(plain, **changes)


def with_engine(split: int = 1, **changes: Any) -> ModelContract:
    """A model on another engine build, whose layers ``split`` workers share."""
    return makers.model(numerics=numerics(tensor_parallel=split, engine=dataclasses.replace(numerics().engine, **changes)))


def halves() -> Any:
    """The other raw codec: K and V in float16."""
    half = ComponentFormat(dtype="float16", group=None, scale_dtype=None)
    return makers.representation(k_format=half, v_format=half)


def windowed() -> Any:
    """Another geometry of the same size: a sliding window."""
    group = KvGroup(layers=makers.LAYERS, kv_heads=makers.KV_HEADS, head_dim_k=4, head_dim_v=4, window=128)
    return makers.representation(groups=(group,))


ALONE: dict[str, dict[str, Any]] = {
    "base": {"model": makers.model("other weights")},
    "rope": {"model": makers.model(rope=dataclasses.replace(makers.model().rope, theta="10001.0"))},
    "numerics": {"model": makers.model(numerics=numerics(attention_backend="OTHER"))},
    "engine": {"model": with_engine(build="cuda")},
    "payload layout": {"representation": windowed()},
    "codec": {"representation": halves()},
    "plan": {"tp": 2, "model": makers.model(numerics=numerics(tensor_parallel=2))},
}
"""Component → how an engine is registered that differs from the plain one in it alone."""

BASE_BY_OTHER_MEANS: dict[str, dict[str, Any]] = {
    "architecture": {
        "model": makers.model(
            architecture=dataclasses.replace(
                makers.model().architecture,
                settings=(dataclasses.replace(makers.model().architecture.settings[0], value="3"),),
            )
        )
    },
    "weight quantisation": {"model": makers.model(weight_quantization="fp8")},
    "cache dtype": {"model": makers.model(kv_quantization=KvQuantization(cache_dtype="fp8_e4m3", scales=None))},
    "multimodal": {"model": makers.model(multimodal=makers.name("preprocessing"))},
}
"""Other changes that count as base."""


async def stored(gateway: Gateway, **changes: Any) -> Engine:
    """The plain engine, which has stored all of ``TEXTS``."""
    engine = await Engine.start(gateway.config.socket_path, **changes)
    await engine.store(*TEXTS)
    return engine


async def other_engine(gateway: Gateway, name: str = "asking", credential: bytes | None = None, **changes: Any) -> Engine:
    """Another engine at the same gateway."""
    return await Engine.start(gateway.config.socket_path, engine=makers.engine_id(name), credential=credential, **changes)


async def adapter(engine: Engine, text: str) -> bytes:
    """An adapter that every rank has confirmed; its digest."""
    files: ArtifactSet = makers.adapter(text)
    registered = await engine.scheduler.call(RegisterAdapter(handle=engine.handle, adapter=files), AdapterRegistered)
    for worker in engine.workers:
        await worker.call(ConfirmAdapter(adapter=files), Done)
    return registered.adapter


async def explain(engine: Engine, lease: bytes) -> Explained:
    """What the requester is told."""
    return await engine.scheduler.call(Explain(lease=lease), Explained)


async def miss(engine: Engine, *texts: str, **changes: Any) -> tuple[str, Explained]:
    """Look these chunks up as a scheduler does; the reference and what the requester is told. Released before it is returned."""
    bound = await engine.bind(*texts, **changes)
    end = await engine.acquire(bound.lease, 0, len(texts))
    told = await explain(engine, bound.lease)
    assert told.chunk == end
    await engine.release(bound.lease)
    return bound.reference, told


async def seen(gateway: Gateway, reference: str) -> dict[str, Any]:
    """What the operator sees of a miss."""
    status, page = await get(gateway, f"/explain/{reference}")
    assert status == 200
    (found,) = json.loads(page)
    assert found["reference"] == reference
    return dict(found)


async def reasons(gateway: Gateway, engine: Engine, *texts: str, **changes: Any) -> tuple[list[str], list[str]]:
    """Reasons of a miss of these chunks: as told to the requester, as seen by the operator."""
    reference, told = await miss(engine, *texts, **changes)
    return list(told.reasons), (await seen(gateway, reference))["reasons"]
