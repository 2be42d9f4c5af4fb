"""A second implementation of the addresses, written from ``docs/contract.md`` alone: imports nothing of kvgate.

It takes and gives the JSON of ``kvgate address``. Where it and the product disagree, one of them, or the document, is wrong.
"""

from __future__ import annotations

import struct
from typing import Any

from blake3 import blake3

BYTE_FIELDS = {"digest", "scales", "multimodal", "domain", "salt", "scope_key", "manifest"}
KINDS = {
    "model": "model contract",
    "representation": "representation",
    "plan": "partition plan",
    "access": "access",
    "variant": "variant",
}


def context(kind: str, schema: int = 1) -> str:
    """Context string of a kind."""
    return f"kvgate 2026-11-30 contract v{schema} {kind}"


def derive_key(kind: str, data: bytes, schema: int = 1) -> bytes:
    """BLAKE3 in derive_key mode."""
    return bytes(blake3(data, derive_key_context=context(kind, schema)).digest())


def keyed_hash(key: bytes, data: bytes) -> bytes:
    """BLAKE3 in keyed mode."""
    return bytes(blake3(data, key=key).digest())


def head(major: int, argument: int) -> bytes:
    """The shortest head."""
    if argument < 24:
        return bytes([major << 5 | argument])
    for info, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * size:
            return bytes([major << 5 | info]) + argument.to_bytes(size, "big")
    raise ValueError(argument)


def cbor(value: Any) -> bytes:
    """RFC 8949 section 4.2.1, keys in bytewise order of their encoding."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bool):
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int):
        return head(0, value) if value >= 0 else head(1, -1 - value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        data = value.encode()
        return head(3, len(data)) + data
    if isinstance(value, list | tuple):
        return head(4, len(value)) + b"".join(map(cbor, value))
    pairs = sorted((cbor(key), cbor(item)) for key, item in value.items())
    return head(5, len(pairs)) + b"".join(key + item for key, item in pairs)


def from_json(value: Any, name: str = "") -> Any:
    """JSON form to encoded form: byte fields from hexadecimal, artifacts in order of role, digest and size."""
    if isinstance(value, dict):
        return {key: from_json(item, key) for key, item in value.items()}
    if isinstance(value, list):
        items = [from_json(item) for item in value]
        return sorted(items, key=lambda a: (a["role"], a["digest"], a["size_bytes"])) if name == "artifacts" else items
    return bytes.fromhex(value) if name in BYTE_FIELDS and value is not None else value


def t(token_key: bytes, tokens: list[int], extras: list[dict[str, Any]]) -> bytes:
    """Token digest of one chunk."""
    ordered = sorted(map(from_json, extras), key=lambda e: (e["offset_tokens"], e["kind"], e["digest"], e["length_tokens"]))
    return keyed_hash(token_key, struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens) + cbor(ordered))


def addresses(description: dict[str, Any], schema: int = 1) -> dict[str, Any]:
    """All that ``kvgate address --json`` prints, without payload sizes."""
    digests = {name: derive_key(kind, cbor(from_json(description[name])), schema) for name, kind in KINDS.items()}
    root = derive_key("request descriptor", cbor(digests), schema)
    size = description["representation"]["chunk_tokens"]
    tokens = description["tokens"]
    token_key = derive_key("token key", bytes.fromhex(description["domain_key"]), schema)
    parent, chunks = root, []
    for index in range(len(tokens) // size):
        extras = [item["extra"] for item in description.get("extras", []) if item["chunk"] == index]
        token = t(token_key, tokens[index * size : (index + 1) * size], extras)
        parent = derive_key("chunk address", parent + struct.pack("<Q", index) + token, schema)
        chunks.append(
            {
                "index": index,
                "token_digest": token.hex(),
                "address": parent.hex(),
                "shards": [
                    derive_key("shard address", parent + struct.pack("<5I", *rectangle(one)), schema).hex()
                    for one in description["plan"]["rectangles"]
                ],
            }
        )
    return {"descriptor": {name: one.hex() for name, one in digests.items()}, "root": root.hex(), "chunks": chunks}


def rectangle(one: dict[str, int]) -> tuple[int, int, int, int, int]:
    """Its five numbers in order."""
    return one["group"], one["layer_start"], one["layer_end"], one["head_start"], one["head_end"]


def keys(secret: bytes, domain: str, salt: str, schema: int = 1) -> dict[str, bytes]:
    """Every key and id below a deployment secret."""
    domain_key = keyed_hash(derive_key("isolation domain key", secret, schema), domain.encode())
    salt_key = derive_key("salt key", domain_key, schema)
    return {
        "domain_key": domain_key,
        "domain_id": derive_key("isolation domain id", domain_key, schema),
        "token_key": derive_key("token key", domain_key, schema),
        "salt_key": salt_key,
        "salt_digest": keyed_hash(salt_key, salt.encode()),
    }
