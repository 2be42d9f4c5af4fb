"""What this repository is made of."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kvgate": "gateway",
    "kvgate_kernels": "bindings",
    "kvgate_vllm": "shims/vllm",
    "kvgate_lmcache": "shims/lmcache",
}
"""Each package, and the folder under ``ROOT`` that it lies in."""
