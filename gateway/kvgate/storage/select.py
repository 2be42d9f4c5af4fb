"""Which backend a configuration means."""

from __future__ import annotations

import importlib.util

import structlog

from kvgate.config import Config
from kvgate.storage.backend import StorageBackend, StorageUnavailable

log = structlog.get_logger(__name__)


def make_backend(config: Config) -> StorageBackend:
    """The backend that ``config.backend`` names; ``auto`` is LMCache where it is installed. Raises ``StorageUnavailable``."""
    kind = config.backend
    installed = importlib.util.find_spec("lmcache") is not None
    if kind in ("lmcache", "attach") and not installed:
        raise StorageUnavailable(
            f"backend {kind}: LMCache is not installed here; install kvgate[lmcache], or use --backend memory"
        )
    if kind == "auto":
        kind = "lmcache" if installed else "memory"
        if not installed:
            log.warning("storage.memory_only", reason="LMCache is not installed: nothing is kept across a restart")
    if kind == "memory":
        from kvgate.storage.memory import MemoryBackend

        return MemoryBackend(pool_bytes=config.pool_bytes)
    from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig

    if kind == "attach":
        from kvgate.storage.attach import AttachedBackend

        return AttachedBackend(
            LMCacheConfig(pool_bytes=config.pool_bytes, state_dir=config.state_dir, attach_url=config.attach_url)
        )
    return LMCacheBackend(
        LMCacheConfig(pool_bytes=config.pool_bytes, l2_adapters=config.l2_adapters(), state_dir=config.state_dir)
    )
