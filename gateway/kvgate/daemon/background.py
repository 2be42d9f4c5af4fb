"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio


async def end_tasks(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel all ``tasks`` and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(set(tasks))
