"""A second derivation of addresses, from ``docs/contract.md`` alone.

It shares no code with the gateway's: where both agree on an address, every identity field is in it. Only values enter: records as the
nested maps that ``to_value`` gives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import cbor2
from blake3 import blake3

_RECORDS: Final = {
    "model": "model contract",
    "representation": "representation",
    "plan": "partition plan",
    "access": "access",
    "variant": "variant",
}


def _derive_key(kind: str, data: bytes, schema: int) -> bytes:
    return bytes(blake3(data, derive_key_context=f"kvgate 2026-11-30 contract v{schema} {kind}").digest())


def _record(kind: str, value: Any, schema: int) -> bytes:
    # With text keys alone, cbor2's canonical form is the contract's.
    return _derive_key(kind, cbor2.dumps(value, canonical=True), schema)


def root(request: Mapping[str, Any], schema: int) -> bytes:
    """The root of a request: ``model``, ``representation``, ``plan``, ``access`` and ``variant``, each a map."""
    digests = {name: _record(kind, request[name], schema) for name, kind in _RECORDS.items()}
    return _record("request descriptor", digests, schema)


def manifest(value: Mapping[str, Any], schema: int) -> bytes:
    """Digest of a transform manifest: what ``variant.manifest`` is."""
    return _record("transform manifest", value, schema)


def chunks(start: bytes, tokens: Iterable[bytes], schema: int) -> list[bytes]:
    """Chunk addresses under the root ``start``, for the ``t`` of each chunk."""
    found: list[bytes] = []
    for index, token in enumerate(tokens):
        start = _derive_key("chunk address", start + struct.pack("<Q", index) + token, schema)
        found.append(start)
    return found


def shards(addresses: Iterable[bytes], rectangles: Iterable[Mapping[str, int]], schema: int) -> list[bytes]:
    """Shard addresses, all rectangles of the first chunk first."""
    packed = [
        struct.pack("<5I", *(one[name] for name in ("group", "layer_start", "layer_end", "head_start", "head_end")))
        for one in rectangles
    ]
    return [_derive_key("shard address", address + one, schema) for address in addresses for one in packed]


def token_digest(token_key: bytes, tokens: list[int], extras: list[Mapping[str, Any]]) -> bytes:
    """``t`` of one chunk; ``extras`` as values."""
    ordered = sorted(extras, key=lambda one: (one["offset_tokens"], one["kind"], one["digest"], one["length_tokens"]))
    packed = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens) + cbor2.dumps(ordered, canonical=True)
    return bytes(blake3(packed, key=token_key).digest())
