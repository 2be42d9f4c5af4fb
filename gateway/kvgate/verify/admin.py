"""The operator's view of misses, from the gateway's admin socket."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

TIMEOUT_S: Final = 10.0


class Operator:
    """Asks as `kvgate explain` does. ``reachable`` turns False for good at the first request that fails."""

    def __init__(self, admin: Path) -> None:
        self._admin = admin
        self._session: aiohttp.ClientSession | None = None
        self.reachable = True

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self._admin)), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def reasons(self, reference: str) -> tuple[str, ...] | None:
        """What the operator sees of one miss; None where the admin socket does not answer."""
        page = await self._get(f"explain/{reference}")
        if not isinstance(page, list):
            return None
        return tuple(page[0]["reasons"]) if page else ()

    async def _get(self, where: str) -> Any:
        if not self.reachable or self._session is None:
            return None
        try:
            async with self._session.get(f"http://kvgate/{where}") as reply:
                return await reply.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            self.reachable = False
            return None
