"""A scripted peer at the gateway's end of the socket: speaks the framing, answers as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from kvgate.contract.record import Record
from kvgate.protocol.framing import HEADER, frame_bytes, frame_length, parse_frame
from kvgate.protocol.messages import Failure, Hello, Welcome

BOOT = bytes(16)
WELCOME = Welcome(build="scripted", wire=1, schema=1, boot=BOOT, chunk_tokens=256, codec="raw")

Script = Callable[[Record], "Record | bytes | None"]
"""Message → reply; bytes are sent raw; None: no answer. May raise ``Hangup``."""


class Hangup(Exception):
    """Close the connection instead of answering."""


def failure(code: str) -> Failure:
    """A refusal of that code."""
    return Failure(code=code, field="-", problem="scripted", remedy="none")


class ScriptedGateway:
    """Listens on a unix socket in a thread of its own. ``received`` are the messages in order, hellos included."""

    def __init__(self, path: Path, script: Script, welcome: Record | bytes = WELCOME) -> None:
        self.path = path
        self.received: list[Record] = []
        self._script = script
        self._welcome = welcome
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedGateway:
        self._thread.start()
        assert self._up.wait(5)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self.path.unlink(missing_ok=True)

    def drop_connections(self) -> None:
        """Close every connection, as a dying gateway does."""
        for writer in list(self._writers):
            self._loop.call_soon_threadsafe(writer.transport.abort)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, self.path))
        self._up.set()
        self._loop.run_forever()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                length = frame_length(await reader.readexactly(HEADER.size))
                frame = parse_frame(await reader.readexactly(length))
                message = frame.message()
                self.received.append(message)
                answer = self._welcome if isinstance(message, Hello) else self._script(message)
                if isinstance(answer, bytes):
                    writer.write(answer)
                elif answer is not None:
                    writer.write(frame_bytes(frame.id, answer))
        except (Hangup, asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
