"""Connections of a run: every one enters the run's verify domain before anything else. All calls have deadlines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, TypeVar

from kvgate.client.client import product_build
from kvgate.client.errors import GatewayRefused, GatewayUnavailable, unreachable
from kvgate.client.wire import Wire
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import Failure, Hello, Welcome
from kvgate.protocol.verify_messages import EnterVerify, VerifyEntered
from kvgate.protocol.versions import SCHEMA_VERSIONS, WIRE_VERSIONS, Range

CONNECT_S: Final = 5.0
CALL_S: Final = 20.0
R = TypeVar("R", bound=Record)


class CannotRun(Exception):
    """Nothing could be verified; the message says why and what mends it."""


def hello(role: str, **changes: Any) -> Hello:
    """The first message of a connection in the gateway's default domain."""
    wire, schema = Range.of(WIRE_VERSIONS), Range.of(SCHEMA_VERSIONS)
    values: dict[str, Any] = {
        "role": role,
        "build": product_build(),
        "wire_lowest": wire.lowest,
        "wire_highest": wire.highest,
        "schema_lowest": schema.lowest,
        "schema_highest": schema.highest,
        "credential": None,
    }
    return Hello(**(values | changes))


async def call(wire: Wire, message: Record, kind: type[R], deadline_s: float = CALL_S) -> R:
    """One request; raises ``GatewayRefused``, and ``CannotRun`` where no answer comes."""
    try:
        reply = await wire.call(message, deadline_s)
    except GatewayUnavailable as error:
        raise CannotRun(f"the gateway was lost on the way: {error}") from error
    assert isinstance(reply, kind), "the wire checks the class of every reply"
    return reply


class Links:
    """Opens connections to one gateway, and closes them all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: set[Wire] = set()
        self.welcome: Welcome | None = None

    async def greet(self, role: str) -> Wire:
        """A connection that has said hello and is still in the gateway's default domain. Raises ``CannotRun``."""
        wire = Wire(lambda: None)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_unix_connection(lambda: wire, str(self._path))
            welcome = await wire.call(hello(role), CONNECT_S)
        except (OSError, TimeoutError, GatewayUnavailable) as error:
            raise CannotRun(
                f"no gateway answers at {self._path} ({unreachable(error)}); start one with `kvgate serve`, or name its "
                "state directory with --state-dir"
            ) from error
        except GatewayRefused as error:
            raise CannotRun(f"the gateway refused the connection: {error}") from error
        assert isinstance(welcome, Welcome)
        wire.version = welcome.wire
        self.welcome = welcome
        self._open.add(wire)
        return wire

    async def enter(self, role: str, run: bytes) -> tuple[Wire, VerifyEntered]:
        """A connection in the verify domain of ``run``. Raises ``CannotRun``."""
        wire = await self.greet(role)
        if wire.version < 2:
            raise CannotRun("the gateway speaks wire version 1, which has no verification; upgrade it")
        try:
            entered = await call(wire, EnterVerify(run=run), VerifyEntered)
        except GatewayRefused as error:
            raise CannotRun(f"the gateway opened no verify domain: {error}") from error
        return wire, entered

    async def schema_refused(self, schema: int) -> str:
        """Say hello with that contract schema alone; what the gateway names in its refusal, "" where it took the connection.

        Raises ``CannotRun`` where nothing answers.
        """
        wire = Wire(lambda: None)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_unix_connection(lambda: wire, str(self._path))
            await wire.call(hello("client", schema_lowest=schema, schema_highest=schema), CONNECT_S)
        except GatewayRefused as error:
            return f"refused: {error.code}" if error.code == "version" else ""
        except (OSError, TimeoutError, GatewayUnavailable) as error:
            raise CannotRun(f"the gateway was lost on the way ({unreachable(error)})") from error
        finally:
            wire.close()
        return ""

    def drop(self, *wires: Wire) -> None:
        """Close some."""
        for wire in wires:
            wire.close()
            self._open.discard(wire)

    async def close(self) -> None:
        """Close all, and wait until they are gone."""
        wires, self._open = list(self._open), set()
        for wire in wires:
            wire.close()
        for wire in wires:
            await wire.lost.wait()

    async def raw(self, role: str, run: bytes, messages: list[tuple[str, Any]]) -> list[Failure | None]:
        """Send messages that no record can hold, as a client of another build could; for each the gateway's ``Failure``, or None.

        Raises ``CannotRun`` where nothing answers.
        """
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    for number, message in enumerate((hello(role), EnterVerify(run=run))):
                        writer.write(frame_bytes(number, message))
                    for number, (kind, body) in enumerate(messages, 2):
                        payload = encode({"id": number, "type": kind, "body": body})
                        writer.write(HEADER.pack(len(payload)) + payload)
                    return await _failures(reader, 2, len(messages))
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ContractError) as error:
            raise CannotRun(f"the gateway was lost on the way ({unreachable(error)})") from error


async def _failures(reader: asyncio.StreamReader, first: int, count: int) -> list[Failure | None]:
    found: dict[int, Failure | None] = {}
    while len(found) < count:
        frame = parse_frame(await reader.readexactly(frame_length(await reader.readexactly(HEADER.size))))
        if frame.id >= first:
            message = frame.message()
            found[frame.id] = message if isinstance(message, Failure) else None
    return [found[first + at] for at in range(count)]
