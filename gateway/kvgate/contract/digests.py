"""BLAKE3-256 with one ``derive_key`` context per kind of record, so that no two kinds can ever share a digest.

The schema version is part of every context: a record of schema 2 has another digest than the same fields under schema 1.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Final

from blake3 import blake3

DIGEST_BYTES: Final = 32
SCHEMA: Final = 1
"""The contract schema this build writes."""
SCHEMAS: Final = range(1, SCHEMA + 1)
"""The contract schemas this build can read."""


class Kind(Enum):
    """What a digest is of. The value is part of the context string: never change or reuse one."""

    # Enum hashes names in Python; this is looked up for every digest. Members are singletons.
    __hash__ = object.__hash__

    ARTIFACT_SET = "artifact set"
    ARCHITECTURE = "architecture"
    ROPE = "rope"
    ENGINE = "engine build"
    NUMERICS = "numerics"
    NUMERICS_CLASS = "numerics class"
    KV_QUANTIZATION = "kv quantization"
    MODEL = "model contract"
    BASE = "base component"
    REPRESENTATION = "representation"
    PAYLOAD_LAYOUT = "payload layout"
    CODEC = "codec"
    PLAN = "partition plan"
    ACCESS = "access"
    VARIANT = "variant"
    REQUEST = "request descriptor"
    CHUNK = "chunk address"
    SHARD = "shard address"
    DOMAIN_KEY = "isolation domain key"
    DOMAIN_ID = "isolation domain id"
    SALT_KEY = "salt key"
    TOKEN_KEY = "token key"
    ENVELOPE_KEY = "envelope key"
    HANDLE_KEY = "handle key"
    LEASE_KEY = "lease key"
    EXPLAIN = "explain chain"
    REFERENCE = "request reference"
    MANIFEST = "transform manifest"
    SOURCE_PREFIX = "source prefix"
    RETAINED = "retained positions"
    POSITION_MAP = "position map"
    QUERY = "query"
    CAPABILITY_KEY = "capability key"
    SHARED_DOMAIN_KEY = "shared domain key"


@cache
def context(kind: Kind, schema: int = SCHEMA) -> str:
    """The ``derive_key`` context string of ``kind`` under ``schema``."""
    return f"kvgate 2026-11-30 contract v{schema} {kind.value}"


@cache
def _hasher(kind: Kind, schema: int) -> blake3:
    return blake3(derive_key_context=context(kind, schema))


def digest(kind: Kind, data: bytes, schema: int = SCHEMA) -> bytes:
    """32-byte digest of ``data`` as a record of ``kind``."""
    # Copying a prepared hasher skips hashing the context again: this runs for every chunk of every prompt.
    return _hasher(kind, schema).copy().update(data).digest()


def keyed(key: bytes, data: bytes) -> bytes:
    """32-byte keyed hash; ``key`` is 32 bytes and comes from ``digest`` of a key kind."""
    return blake3(data, key=key).digest()
