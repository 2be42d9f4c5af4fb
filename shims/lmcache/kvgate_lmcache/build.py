"""Builds the StorageManager from our settings. The only file that knows LMCache's configuration classes."""

from __future__ import annotations

import argparse
import errno
import fcntl
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvgate.storage.lmcache_settings import TMP_PREFIX, ProcessSettings
from kvgate.storage.pool import PoolError, allocate_pool, pool_path

from .internals import HostingError, Internals

# LMCache hands an open reservation on, and lets a read lock lapse, after these times. With 10^9 s neither happens.
NEVER_S = 10**9

_FOLDER_ADAPTERS = ("fs", "fs_native")
# These change what comes back, or only make sense for keys LMCache made itself.
_REFUSED_FIELDS = ("serde", "affinity_tag")
_FOR_TESTS = ("fault_inject", "mock")


def build_manager(settings: ProcessSettings) -> Any:
    """A running StorageManager with its pool in /dev/shm. Raises ``HostingError`` with the cause and the remedy."""
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager

    config = StorageManagerConfig(
        l1_manager_config=L1ManagerConfig(
            memory_config=L1MemoryManagerConfig(size_in_bytes=settings.pool_bytes, use_lazy=False, shm_name=settings.pool_name),
            write_ttl_seconds=NEVER_S,
            read_ttl_seconds=NEVER_S,
        ),
        eviction_config=EvictionConfig("LRU", settings.evict_watermark, settings.evict_ratio),
        prefetch_policy="retain",  # "default" drops what it fetched from L1 with the first release
        prefetch_max_in_flight=settings.fetches_in_flight,
    )
    try:
        return StorageManager(config)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise HostingError(f"LMCache does not start: {type(error).__name__}: {error}") from error


def own_pool(settings: ProcessSettings, internals: Internals) -> int:
    """Back the new pool with memory, lock it as ours, and return its descriptor. Raises ``HostingError``."""
    if internals.pool_name != settings.pool_name:
        raise HostingError("LMCache gave its pool another name than it was told")
    try:
        fd = os.open(pool_path(settings.pool_name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_size != settings.pool_bytes or status.st_mode & 0o077:
            raise HostingError("LMCache made the pool with another size or mode than it was told")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        allocate_pool(fd, settings.pool_bytes)
    except (OSError, PoolError) as error:
        raise HostingError(f"the pool cannot be used: {error}") from error
    return fd


def adapter_specs(settings: ProcessSettings) -> list[dict[str, Any]]:
    """The adapters' descriptions as LMCache gets them, their folders made. Needs no LMCache. Raises ``HostingError``."""
    return [_adapter_spec(dict(spec), settings) for spec in settings.l2_adapters]


def adapter_configs(specs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Type name and configuration of each, through LMCache's own parser, so that it means there what it means on its command line.

    Raises ``HostingError``.
    """
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    configs: list[tuple[str, Any]] = []
    for spec in specs:
        try:
            (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)])).adapters
        except (ImportError, TypeError, ValueError) as error:
            cause = _why_unknown(spec["type"]) or str(error)
            raise HostingError(f"L2 adapter {spec['type']!r} is not usable: {cause}") from error
        configs.append((spec["type"], config))
    return configs


def _why_unknown(kind: str) -> str:
    """Why LMCache has no adapter type of that name, or "" where it has.

    In search of a name LMCache imports all its adapters, and then reports whichever failed last: that says nothing of the name.
    """
    from lmcache.v1.distributed.l2_adapters.config import get_registered_l2_adapter_types

    known = get_registered_l2_adapter_types()
    if kind in known:
        return ""
    module = f"lmcache.v1.distributed.l2_adapters.{kind.replace('-', '_')}_l2_adapter"
    if kind.replace("-", "_").isidentifier():
        try:
            importlib.import_module(module)
        except ImportError as error:
            if error.name != module:
                return f"a package that it needs is missing: {error}"
    usable = ", ".join(name for name in known if name not in _FOR_TESTS)
    return f'LMCache has no such type; here it has: {usable}. Redis and Valkey are both "resp" (or "valkey")'


def _adapter_spec(spec: dict[str, Any], settings: ProcessSettings) -> dict[str, Any]:
    if not isinstance(spec.get("type"), str):
        raise HostingError('an L2 adapter needs a "type"')
    refused = [name for name in _REFUSED_FIELDS if name in spec]
    if refused:
        raise HostingError(f"L2 adapter option {refused[0]!r} is not supported: objects must come back as they were stored")
    if spec["type"] not in _FOLDER_ADAPTERS:
        return spec
    folder = Path(str(spec.get("base_path") or ""))
    if not folder.is_absolute():
        raise HostingError("an L2 folder must be given as an absolute base_path")
    _make_folder(folder, TMP_PREFIX + settings.start_id)
    if spec["type"] == "fs_native":
        return spec
    # LMCache would write <object>.tmp beside the object: two processes on one folder would write the same file, and what a
    # kill left behind could not be told from what another host is writing.
    spec.setdefault("relative_tmp_dir", TMP_PREFIX + settings.start_id)
    return spec


def _make_folder(folder: Path, probe: str) -> None:
    """Make it where it is not there, and see that it can be written: a folder of that name in it is made and removed again."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / probe).mkdir(mode=0o700)
        (folder / probe).rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and folder.is_dir():
            return  # what is there can be read all the same
        if error.errno == errno.EROFS:
            remedy = "its file system is mounted read-only: mount it writable"
        elif error.errno in (errno.EACCES, errno.EPERM):
            remedy = "give it to the gateway's user"
        else:
            remedy = "make it by hand"
        raise HostingError(f"L2 folder {folder}: {error.strerror}; {remedy}, or name another base_path in l2") from error
