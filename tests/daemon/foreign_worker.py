"""A worker that lends its pages, in a process that the test puts elsewhere. Usage: python -m tests.daemon.foreign_worker SOCKET

Prints "attached", or what it was refused with: code and problem.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.daemon.lending import LendingEngine
from tests.daemon.wire import Denied


async def main(socket: str) -> None:
    """See the module."""
    try:
        engine = await LendingEngine.lend(Path(socket))
    except Denied as error:
        print(f"{error.failure.code}: {error.failure.problem}")
    else:
        print("attached")
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
