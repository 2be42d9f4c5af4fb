"""Every name of LMCache 0.5.6 that kvgate uses without LMCache having published it, in one place.

``check_version`` refuses any other release: these names, and the meaning of each call in ``ops.py`` and ``l2.py``, were read
and tested against exactly that one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

PINNED = "0.5.6"


class HostingError(Exception):
    """LMCache cannot be hosted here; the text says why and what to do."""


def check_version() -> None:
    """Raise ``HostingError`` unless LMCache 0.5.6 (or a local build of it) is installed."""
    try:
        found = metadata.version("lmcache")
    except metadata.PackageNotFoundError as error:
        raise HostingError(
            f"LMCache is not installed in this environment: install lmcache=={PINNED}, or use the memory backend"
        ) from error
    if found != PINNED and not found.startswith(PINNED + "+"):
        raise HostingError(f"LMCache {found} is installed, kvgate hosts {PINNED} only: install lmcache=={PINNED}")


def folder_names(adapter: Any) -> tuple[str, Callable[[Any], str]] | None:
    """For LMCache's `fs` adapter its folder and the name of a key's file in it; None for every other adapter."""
    return (str(adapter._base_path), file_name) if type(adapter).__name__ == "FSL2Adapter" else None


def file_name(key: Any) -> str:
    """The name of a key's file in a folder of LMCache's `fs` and `fs_native` adapters."""
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

    name: str = _object_key_to_filename(key)
    return name


def native_client(adapter: Any) -> Any:
    """The client inside LMCache's wrapper of native connectors (`resp`, `fs_native`, …); None for other adapters."""
    return adapter._client if type(adapter).__name__ == "NativeConnectorL2Adapter" else None


def set_native_client(adapter: Any, client: Any) -> None:
    """Put another client in its place. The wrapper looks it up for every operation."""
    adapter._client = client


def register_first(l1: Any, listener: Any) -> None:
    """Register a listener of L1 that is called before those LMCache registered for itself."""
    l1.register_listener(listener)
    l1._registered_listeners = [listener, *(other for other in l1._registered_listeners if other is not listener)]


def server_name(key: Any) -> str:
    """Under what name LMCache's `resp` client has a key."""
    from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string

    name: str = _object_key_to_string(key)
    return name


def valkey_length(adapter: Any, key: Any, timeout_s: float) -> int | None:
    """How long the value of a key of LMCache's `valkey` adapter is; None: there is none. Raises whatever its client raises."""
    pool, name = adapter._pool, adapter._wire_key(key).encode()

    def ask() -> int | None:
        client = pool._get_client()  # one a thread of the pool
        return int(client.strlen(name)) if client.exists([name]) else None

    length: int | None = pool._executor.submit(ask).result(timeout_s)
    return length


def worker_pool(adapter: Any) -> Any:
    """The pool of clients inside LMCache's `valkey` adapter, whose ``submit_*`` return futures; None for other adapters."""
    return adapter._pool if type(adapter).__name__ == "ValkeyL2Adapter" else None


def set_worker_pool(adapter: Any, pool: Any) -> None:
    """Put another pool in its place. The adapter looks it up for every operation."""
    adapter._pool = pool


class Internals:
    """The unpublished parts of one StorageManager. Raises ``HostingError`` if one is missing."""

    def __init__(self, manager: Any) -> None:
        try:
            self.l1: Any = manager._l1_manager
            self.pool_name: str = self.l1._memory_manager._allocator.shm_name.lstrip("/")
            self.eviction_policy: Any = manager._eviction_controller._eviction_policy
            self.store_controller: Any = manager._store_controller
            self._objects: dict[Any, Any] = self.l1._objects
            self.process_new_keys: Any = self.store_controller._process_new_keys
        except AttributeError as error:
            raise HostingError(f"LMCache {PINNED} lacks {error.name or error}, which kvgate uses") from error

    def resident(self, key: Any) -> bool:
        """Whether a committed object of that key is in L1."""
        return key in self._objects

    def resident_count(self) -> int:
        """How many committed objects are in L1."""
        return len(self._objects)
