"""The backend on an `lmcache server` that somebody else runs. Everything but where the objects live is the LMCache backend's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import structlog

from .attach_wire import server_command
from .backend import StorageUnavailable
from .lmcache import LMCacheBackend, LMCacheConfig

_log = structlog.get_logger(__name__)

WARNING = (
    "attached to an LMCache server: its own ZMQ, gRPC and HTTP endpoints ask nobody who they are, and one of them unpickles what it "
    "is sent. Whoever can reach them can read and delete every tenant's cached KV, and run code as the server's user. Keep them on "
    "127.0.0.1 of a host whose users all trust each other, or use backend lmcache, which opens no such endpoint."
)


class AttachedBackend(LMCacheBackend):
    """Through a bridge process, attached to ``config.attach_url``. Pool, pool size and L2 are the server's."""

    def __init__(self, config: LMCacheConfig) -> None:
        """``config.attach_url`` must be given; ``pool_bytes`` only sizes the server in the advice of a failed start."""
        super().__init__(replace(config, l2_adapters=()))

    async def start(self) -> None:
        """Warn, and attach. Raises ``StorageUnavailable`` with the command that starts a server to attach to."""
        _log.warning("storage.attached", meaning=WARNING)
        try:
            await super().start()
        except StorageUnavailable as error:
            port = self.config.attach_url.rpartition(":")[2]
            command = server_command(port if port.isdigit() else "5555", self.config.pool_bytes)
            raise StorageUnavailable(
                f"{error}\nStart a server to attach to with kvgate installed beside LMCache:\n  {command}"
            ) from error

    async def status(self, deadline_s: float) -> Mapping[str, int | str]:
        """As the LMCache backend's."""
        return {**await super().status(deadline_s), "backend": "attach"}
