"""A worker's report must be complete and fit the gateway; only reports of one contract may share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvgate.contract.artifacts import Artifact, ArtifactSet
from kvgate.contract.model import NumericsClass, Rope
from kvgate.contract.representation import ComponentFormat, KvGroup
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import (
    Registered,
)
from tests.daemon import makers
from tests.daemon.conftest import Start
from tests.daemon.engine import Engine
from tests.daemon.wire import Wire, denied


async def worker(gateway: Gateway) -> Wire:
    """A worker's connection that has not registered."""
    return await Wire.open(gateway.config.socket_path, "worker")


BAD_REPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "block size that does not divide the chunk": ({"block_tokens": 3}, "block_tokens"),
    "block larger than the chunk": ({"block_tokens": 8}, "block_tokens"),
    "other chunk size": ({"representation": makers.representation(chunk_tokens=8)}, "representation.chunk_tokens"),
    "rank beyond the plan": ({"tp_rank": 1}, "pp_rank"),
    "stage beyond the plan": ({"pp_rank": 1}, "pp_rank"),
    "adapter in the base": ({"model": makers.model(adapter=makers.adapter("a"))}, "model.adapter"),
    "other codec": (
        {
            "representation": makers.representation(
                codec="k16v8", v_format=ComponentFormat(dtype="int8", group=4, scale_dtype="float16")
            )
        },
        "representation.codec",
    ),
    "geometry that differs from the plan": (
        {
            "representation": makers.representation(
                groups=(KvGroup(layers=3, kv_heads=2, head_dim_k=4, head_dim_v=4, window=None),)
            )
        },
        "plan.extents",
    ),
    "two KV groups": (
        {
            "representation": makers.representation(
                groups=(KvGroup(layers=2, kv_heads=2, head_dim_k=4, head_dim_v=4, window=None),) * 2
            )
        },
        "representation.groups",
    ),
}


@pytest.mark.parametrize("case", list(BAD_REPORTS))
async def test_unusable_report_is_refused_by_name(gateway: Gateway, case: str) -> None:
    """What this gateway can't serve is refused with the field's name, and registers nothing."""
    changes, field = BAD_REPORTS[case]
    wire = await worker(gateway)
    async with denied("malformed", field):
        await wire.call(makers.report(**changes), Registered)
    assert (await gateway.status())["registrations"] == []
    await wire.close()


async def test_undeclared_numerics_class_is_refused(start: Start) -> None:
    """An engine class counts only where the operator declared it; a declared one lets differing engines share."""
    gateway = await start(numerics_classes="fleet-a, fleet-b")
    wire = await worker(gateway)
    async with denied("denied", "model.numerics.name"):
        await wire.call(makers.report(model=makers.model(numerics=NumericsClass(name="fleet-c"))), Registered)
    declared = makers.model(numerics=NumericsClass(name="fleet-b"))
    assert (await wire.call(makers.report(model=declared), Registered)).sealed
    await wire.close()


IDENTITY: dict[str, dict[str, Any]] = {
    "base artifact": {"model": makers.model("one weight byte changed")},
    "rope theta": {
        "model": makers.model(
            rope=Rope(kind="default", theta="20000.0", rotary_dim=4, style="neox", max_positions=512, parameters=())
        )
    },
    "engine build": {
        "model": makers.model(numerics=makers.numerics(engine=dataclasses.replace(makers.numerics().engine, build="b2")))
    },
    "attention backend": {"model": makers.model(numerics=makers.numerics(attention_backend="OTHER"))},
    "codec format": {
        "representation": makers.representation(
            k_format=ComponentFormat(dtype="float16", group=None, scale_dtype=None),
            v_format=ComponentFormat(dtype="float16", group=None, scale_dtype=None),
        )
    },
    "head dimensions": {
        "representation": makers.representation(
            groups=(KvGroup(layers=2, kv_heads=2, head_dim_k=6, head_dim_v=2, window=None),)
        )
    },
    "quantisation": {"model": makers.model(weight_quantization="fp8")},
    "extra file": {
        "model": makers.model(
            base=ArtifactSet(
                artifacts=(
                    *makers.artifacts("weights", "weights").artifacts,
                    Artifact(role="remote_code", size_bytes=5, digest=makers.name("code")),
                )
            )
        )
    },
}


@pytest.mark.parametrize("case", list(IDENTITY))
async def test_changed_contract_is_a_miss(gateway: Gateway, case: str) -> None:
    """An engine that differs in one identity field finds nothing of the other's; an equal one finds it."""
    path = gateway.config.socket_path
    first = await Engine.start(path)
    await first.store("x")
    other = await Engine.start(path, engine=makers.engine_id("other"), **IDENTITY[case])
    assert await other.hit("x") == 0
    equal = await Engine.start(path, engine=makers.engine_id("equal"))
    assert await equal.hit("x") == 1
    for engine in (first, other, equal):
        await engine.close()


async def test_block_size_is_not_identity(gateway: Gateway) -> None:
    """Engines with different block sizes that divide the chunk share."""
    path = gateway.config.socket_path
    first = await Engine.start(path, block_tokens=2)
    await first.store("x")
    other = await Engine.start(path, engine=makers.engine_id("other"), block_tokens=4)
    assert await other.hit("x") == 1
    await first.close()
    await other.close()


async def test_plan_is_identity(gateway: Gateway) -> None:
    """What one worker stored is a miss for two, and the other way round."""
    path = gateway.config.socket_path
    one = await Engine.start(path)
    two = await Engine.start(path, engine=makers.engine_id("two"), tp=2)
    await one.store("x")
    assert await two.hit("x") == 0
    await two.store("y")
    assert await one.hit("y") == 0
    assert (await one.hit("x"), await two.hit("y")) == (1, 1)
    await one.close()
    await two.close()
