"""What every test shares: which tests an environment can run, and how the engines behave on a test machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports LMCache or vLLM: no hub, no usage reports, a small KV space, loopback only.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

# tests/vllm needs an engine, which only one of the two environments has.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def small_model() -> Path:
    """A 7M-parameter Llama with two LoRA adapters (`adapters/kjv`, `adapters/python`); read only."""
    return ROOT / "tests" / "models" / "docs-llama-7m"


@pytest.fixture(scope="session")
def vectors_dir() -> Path:
    """Folder of test vectors from outside the repository (KVGATE_VECTORS); skips where there is none."""
    named = os.environ.get("KVGATE_VECTORS", "")
    if not named:
        pytest.skip("KVGATE_VECTORS is not set")
    folder = Path(named)
    if not folder.is_dir():
        pytest.fail(f"KVGATE_VECTORS names no folder: {folder}")
    return folder
