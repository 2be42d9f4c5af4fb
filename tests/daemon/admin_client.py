"""Asks the admin socket as a probe does."""

from __future__ import annotations

import aiohttp

from kvgate.daemon.app import Gateway


async def get(gateway: Gateway, path: str) -> tuple[int, str]:
    """Status and text of one page."""
    connector = aiohttp.UnixConnector(path=str(gateway.config.admin_path))
    timeout = aiohttp.ClientTimeout(total=20)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session.get(f"http://kvgate{path}") as reply,
    ):
        return reply.status, await reply.text()


async def counter(gateway: Gateway, name: str, **labels: str) -> float:
    """The value of one sample on the metrics page; 0 where there is none yet."""
    _, page = await get(gateway, "/metrics")
    for line in page.splitlines():
        sample, _, value = line.rpartition(" ")
        wanted = [f'{label}="{text}"' for label, text in labels.items()]
        if sample.partition("{")[0] == f"kvgate_{name}" and all(text in sample for text in wanted):
            return float(value)
    return 0.0
