"""Arbitrary input: nothing kills the gateway, and nothing it answers is a bug of its own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.daemon.app import Gateway
from kvgate.protocol.catalog import BY_NAME
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import (
    FAILURES,
    Acquire,
    Commit,
    ConfirmAdapter,
    Extend,
    FinishLoad,
    Load,
    OpenEngine,
    RegisterAdapter,
    Release,
    Reserve,
    Revoke,
    WrittenPayload,
)
from tests.contract.strategies import RECORDS
from tests.daemon import makers
from tests.daemon.conftest import nothing_held, small_config
from tests.daemon.engine import Engine
from tests.daemon.wire import WAIT_S, Wire, hello

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that all examples of one test share."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def fuzzed(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[Gateway, Engine]]:
    """A gateway with a busy engine; whatever was sent to it, it must be well afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvg-"))
    gateway = Gateway(small_config(folder, adapter_wait_s=0.01))
    loop.run_until_complete(gateway.start())
    engine = loop.run_until_complete(Engine.start(gateway.config.socket_path))
    loop.run_until_complete(engine.store("a", "b"))
    yield gateway, engine

    async def well() -> None:
        fresh = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("fresh"))
        assert await fresh.hit("a", "b") == 2
        await fresh.close()
        await engine.close()
        await nothing_held(gateway)
        await gateway.stop()

    loop.run_until_complete(well())
    shutil.rmtree(folder)


async def exchange(path: Path, *chunks: bytes, greet: bool) -> list[str]:
    """Send bytes on a new connection, half-close, and return the outcome of each reply."""
    wire = await Wire.connect(path, listen=False)
    outcomes = []
    try:
        if greet:
            wire.writer.write(frame_bytes(0, hello("worker")))
        for chunk in chunks:
            wire.writer.write(chunk)
        wire.writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            while True:
                frame = parse_frame(await wire.reader.readexactly(frame_length(await wire.reader.readexactly(HEADER.size))))
                message = frame.message()
                outcomes.append(getattr(message, "code", "ok"))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the gateway hung up: that is an answer
    finally:
        await wire.close()
    return outcomes


@given(data=st.binary(max_size=200), greet=st.booleans())
@FUZZ
def test_random_bytes(fuzzed: tuple[Gateway, Engine], loop: asyncio.AbstractEventLoop, data: bytes, greet: bool) -> None:
    """Any bytes end at most their own connection, and are never answered with `internal`."""
    for chunks in ((data,), (HEADER.pack(max(1, len(data))), data)):
        outcomes = loop.run_until_complete(exchange(fuzzed[0].config.socket_path, *chunks, greet=greet))
        assert "internal" not in outcomes


_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=40), st.text(max_size=10)
)
_values: st.SearchStrategy[Any] = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=10
)


def _encoded(value: Any) -> bytes | None:
    try:
        return encode(value)
    except ContractError:
        return None  # e.g. text that is not NFC: not a frame that a peer could build this way


@given(kind=st.sampled_from([*BY_NAME, "Nothing"]), body=_values, number=st.integers(0, 2**64 - 1))
@FUZZ
def test_random_bodies(
    fuzzed: tuple[Gateway, Engine], loop: asyncio.AbstractEventLoop, kind: str, body: Any, number: int
) -> None:
    """Any value as the body of any message is refused as malformed, in a well-formed reply."""
    data = _encoded({"id": number, "type": kind, "body": body})
    if data is not None:
        outcomes = loop.run_until_complete(exchange(fuzzed[0].config.socket_path, HEADER.pack(len(data)) + data, greet=True))
        assert len(outcomes) == 2
        assert outcomes[1] in ("malformed", "denied")


def _mutate(draw: st.DrawFn, value: Any) -> Any:
    """One place in a nested value replaced, removed or doubled."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        change = draw(st.sampled_from(["into", "drop", "add"]))
        if change == "drop":
            return {name: item for name, item in value.items() if name != key}
        if change == "add":
            return value | {"extra": 1}
        return value | {key: _mutate(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _mutate(draw, value[at]), *value[at + 1 :]]
    return draw(_values)


@st.composite
def mutated_frames(draw: st.DrawFn) -> bytes | None:
    """A valid message with a change somewhere inside, still encoded correctly."""
    lease, handle = bytes(range(32)), makers.name("handle")
    messages = [
        makers.report(),
        Release(lease=lease),
        Acquire(lease=lease, first=0, last=1, deadline_ms=5),
        Extend(lease=lease, first=0, tokens=makers.tokens("a")),
        Load(lease=lease, chunks=(0,)),
        Reserve(lease=lease, chunks=(0, 1)),
        FinishLoad(ticket=1, mismatched=(0,)),
        Commit(written=(WrittenPayload(reservation=1, digest=makers.name("d")),), aborted=(2,)),
        RegisterAdapter(handle=handle, adapter=makers.adapter("a")),
        ConfirmAdapter(adapter=makers.adapter("a")),
        OpenEngine(handle=handle),
        Revoke(handle=handle),
        hello(),
    ]
    message = draw(st.sampled_from(messages))
    return _encoded({"id": 1, "type": type(message).__name__, "body": _mutate(draw, message.to_value())})


@given(frames=st.lists(mutated_frames(), min_size=1, max_size=6))
@FUZZ
def test_mutated_messages(fuzzed: tuple[Gateway, Engine], loop: asyncio.AbstractEventLoop, frames: list[bytes | None]) -> None:
    """A valid message changed in one place is answered, every time, and never with `internal`."""
    sent = [HEADER.pack(len(frame)) + frame for frame in frames if frame is not None]
    outcomes = loop.run_until_complete(exchange(fuzzed[0].config.socket_path, *sent, greet=True))
    assert len(outcomes) == len(sent) + 1
    assert set(outcomes) <= {"ok", *FAILURES} - {"internal"}


@given(
    position=st.floats(0, 1, exclude_max=True),
    mask=st.integers(1, 255),
    message=st.sampled_from([hello(), makers.report(), Release(lease=bytes(32))]),
)
@FUZZ
def test_flipped_bytes(
    fuzzed: tuple[Gateway, Engine], loop: asyncio.AbstractEventLoop, position: float, mask: int, message: Any
) -> None:
    """A valid frame with one byte changed anywhere, its length too, is answered or hung up on."""
    data = bytearray(frame_bytes(1, message))
    data[int(position * len(data))] ^= mask
    outcomes = loop.run_until_complete(exchange(fuzzed[0].config.socket_path, bytes(data), greet=True))
    assert "internal" not in outcomes


@given(data=st.data())
@settings(FUZZ, max_examples=60)
def test_random_registrations(fuzzed: tuple[Gateway, Engine], loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    """Any valid contract, representation and plan together, fitting or not, are registered or refused by name."""
    from kvgate.contract.model import ModelContract
    from kvgate.contract.plan import PartitionPlan
    from kvgate.contract.representation import Representation

    report = makers.report(
        engine=data.draw(st.binary(min_size=16, max_size=16)),
        generation=data.draw(st.integers(0, 2**64 - 1)),
        pp_rank=data.draw(st.integers(0, 3)),
        tp_rank=data.draw(st.integers(0, 3)),
        block_tokens=data.draw(st.integers(1, 8)),
        model=data.draw(RECORDS[ModelContract] | st.just(makers.model())),
        representation=data.draw(RECORDS[Representation] | st.just(makers.representation())),
        plan=data.draw(RECORDS[PartitionPlan] | st.just(makers.plan())),
    )
    outcomes = loop.run_until_complete(exchange(fuzzed[0].config.socket_path, frame_bytes(1, report), greet=True))
    assert len(outcomes) == 2
    assert outcomes[1] in ("ok", "malformed", "denied")
