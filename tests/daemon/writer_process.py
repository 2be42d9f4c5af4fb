"""A worker in a process of its own: registers, reserves the chunks it is told to, writes part of them, then waits to be killed.

Usage: python -m tests.daemon.writer_process SOCKET ENGINE TP LEASE_HEX CHUNK...
(ENGINE: text of the engine id. TP: how many ranks it has; this is the last of them.)
Prints one line of JSON: the reservations. Lines on standard input: "commit" commits them, "leave" drops the connection, anything else
ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.daemon import makers
from tests.daemon.engine import Engine


async def main(socket: str, engine_text: str, tp: str, lease: str, *chunks: str) -> None:
    """See the module."""
    engine = Engine(Path(socket), makers.report(engine=makers.engine_id(engine_text), plan=makers.plan(int(tp))), None)
    await engine.join(int(tp) - 1)
    numbers = [int(chunk) for chunk in chunks]
    reserved = await engine.reserve(bytes.fromhex(lease), *numbers)
    for slot in reserved.slots:
        engine.view(reserved, slot)[: slot.length // 2] = b"h" * (slot.length // 2)
    print(json.dumps([slot.reservation for slot in reserved.slots]), flush=True)
    loop = asyncio.get_running_loop()
    while (told := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) in ("commit", "leave"):
        if told == "leave":
            await engine.workers[0].close()
            print("0", flush=True)
            continue
        texts = [f"chunk {number}" for number in range(max(numbers) + 1)]
        print(json.dumps(await engine.commit(engine.fill(reserved, texts))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
