"""A backend must say whether it may hold what did not come through its own pool."""

from __future__ import annotations

from pathlib import Path

from kvgate.storage.attach import AttachedBackend
from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from kvgate.storage.memory import MemoryBackend


def test_has_l2(tmp_path: Path) -> None:
    """Nothing lies behind memory or LMCache without adapters; something behind adapters, the default one too, and shared servers."""
    assert not MemoryBackend(1 << 20).has_l2
    assert not LMCacheBackend(LMCacheConfig(tmp_path, l2_adapters=())).has_l2
    assert LMCacheBackend(LMCacheConfig(tmp_path)).has_l2
    assert LMCacheBackend(LMCacheConfig(tmp_path, l2_adapters=({"type": "fs", "base_path": "x"},))).has_l2
    assert AttachedBackend(LMCacheConfig(tmp_path, attach_url="tcp://127.0.0.1:1")).has_l2
