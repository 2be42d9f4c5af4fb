"""How an object of ours is named in LMCache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from kvgate.storage.backend import ObjectRef

# LMCache packs a worker's rank here. Our address says which worker's part it is, so one constant serves all.
_RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)


def object_key(ref: ObjectRef) -> Any:
    """The LMCache key of ``ref``.

    LMCache keeps no length with an object: asked for fewer bytes than it has, it serves a truncated hit from `fs` and
    desynchronises a Redis connection. So the length is part of the name, and an object of another length is another
    object. It also keeps every store batch and every prefetch uniform in size, which LMCache assumes.
    """
    return ObjectKey(ref.address, f"kvgate.v1.{ref.object_bytes}", _RANK, 0, ref.domain.hex())


def object_bytes(key: Any) -> int:
    """The length that ``object_key`` wrote into a key."""
    return int(key.model_name.rpartition(".")[2])


def canary_key() -> Any:
    """A key nothing is ever stored under, to see whether an L2 answers."""
    return ObjectKey(bytes(32), "kvgate.v1.canary", _RANK, 0, "")


@lru_cache(maxsize=256)
def layout(object_bytes: int) -> Any:
    """The LMCache layout of an opaque object of that many bytes."""
    return MemoryLayoutDesc([torch.Size([object_bytes])], [torch.uint8])
