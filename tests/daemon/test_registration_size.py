"""How much one worker can make the gateway remember by registering engine after engine."""

from __future__ import annotations

import pytest

from kvgate.contract.model import Architecture, ModelContract, Parameter
from kvgate.daemon import registry
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Done, Failure, OpenEngine, Registered, Revoke
from tests.daemon import makers
from tests.daemon.wire import Wire, denied

SETTINGS = 16


def large(size_bytes: int) -> ModelContract:
    """A contract with settings of about that size."""
    value = "x" * (size_bytes // SETTINGS)
    settings = tuple(Parameter(name=f"setting_{number:02d}", value=value) for number in range(SETTINGS))
    return makers.model(architecture=Architecture(settings=settings))


async def register(worker: Wire, engine: str, size_bytes: int) -> bytes:
    """Register an engine; its handle."""
    report = makers.report(engine=makers.engine_id(engine), model=large(size_bytes))
    return (await worker.call(report, Registered)).handle


async def test_a_contract_is_bounded(gateway: Gateway) -> None:
    """A contract beyond the limit is refused by name, and one just below it is registered on the same connection."""
    worker = await Wire.open(gateway.config.socket_path, "worker")
    limit = registry.MAX_CONTRACT_BYTES
    async with denied("malformed", "model"):
        await register(worker, "large", limit)
    await register(worker, "smaller", limit - 2000)
    await worker.close()


async def test_what_is_set_aside_is_bounded_in_bytes(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of engines that left, the oldest are forgotten once their contracts are too large together, a revoked one last of all."""
    monkeypatch.setattr(registry, "MAX_SET_ASIDE_BYTES", 35_000)
    worker = await Wire.open(gateway.config.socket_path, "worker")
    handles = []
    for number in range(6):
        handles.append(await register(worker, str(number), 10_000))
        if number == 0:
            await worker.call(Revoke(handle=handles[0]), Done)
    known = [await is_known(gateway, handle) for handle in handles]
    assert known == [True, False, False, True, True, True]
    await worker.close()


async def is_known(gateway: Gateway, handle: bytes) -> bool:
    """Whether the gateway remembers the registration, usable or not."""
    scheduler = await Wire.open(gateway.config.socket_path)
    reply = await scheduler.ask(OpenEngine(handle=handle))
    await scheduler.close()
    return not (isinstance(reply, Failure) and reply.field == "handle")
