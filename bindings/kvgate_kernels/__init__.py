"""Moves KV cache between an engine's pages and stored payloads: compiled kernels, and the torch reference beside them."""

from __future__ import annotations

from kvgate_kernels.api import BackendInfo, Packer
from kvgate_kernels.geometry import (
    Codec,
    GeometryError,
    PageGeometry,
    PageLayout,
    PayloadGeometry,
    UnsupportedCodec,
    UnsupportedLayout,
)
from kvgate_kernels.moves import ChunkMove, GatherMove, MoveError, NonFiniteValues

__all__ = [
    "BackendInfo",
    "ChunkMove",
    "Codec",
    "GatherMove",
    "GeometryError",
    "MoveError",
    "NonFiniteValues",
    "Packer",
    "PageGeometry",
    "PageLayout",
    "PayloadGeometry",
    "UnsupportedCodec",
    "UnsupportedLayout",
]
