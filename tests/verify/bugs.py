"""Plants one bug at a time: a field of the identity that the gateway, or the engines, leave out of an address."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from kvgate.contract.access import Access, Variant
from kvgate.contract.address import Extra, token_digest
from kvgate.contract.digests import SCHEMA, Kind, digest
from kvgate.contract.encoding import encode
from kvgate.contract.manifest import TransformManifest
from kvgate.contract.model import ModelContract
from kvgate.contract.plan import PartitionPlan, Rectangle
from kvgate.contract.record import IdentityRecord
from kvgate.contract.representation import Representation
from kvgate.contract.request import RequestDescriptor
from kvgate.daemon import leases, shards
from kvgate.verify import plants

RECORDS: dict[str, type[IdentityRecord]] = {
    "model": ModelContract,
    "representation": Representation,
    "plan": PartitionPlan,
    "access": Access,
    "variant": Variant,
}


def leave_out(patch: pytest.MonkeyPatch, path: str) -> None:
    """Have the field at ``path`` of the contract's table enter no address any more."""
    record, _, field = path.partition(".")
    if path == "schema":
        patch.setattr(RequestDescriptor, "root", lambda self: self.digest(SCHEMA + 1))
    elif record in RECORDS:
        patch.setattr(RECORDS[record], "digest", _without(RECORDS[record].KIND, field))
    elif record == "manifest":
        patch.setattr(TransformManifest, "digest", _without(TransformManifest.KIND, field))
    elif record == "chunk":
        _CHUNK[field](patch)
    else:
        _shard(patch, field)


def _without(kind: Kind, field: str) -> Callable[[IdentityRecord], bytes]:
    def digested(self: IdentityRecord) -> bytes:
        value = self.to_value()
        _drop(value, field.split("."))
        return digest(kind, encode(value))

    return digested


def _drop(value: Any, steps: list[str]) -> None:
    if value is None:
        return
    if isinstance(value, list):
        for one in value:
            _drop(one, steps)
        return
    if "is" in value:
        _drop(value["value"], steps)
        return
    name = steps[0].removesuffix("[]")
    if len(steps) == 1:
        found = value.pop(name, None)
        if steps[0].endswith("[]"):
            value[name] = len(found or [])
    elif name in value:
        _drop(value[name], steps[1:])


def _chain(parent: bool = True, index: bool = True) -> Callable[[pytest.MonkeyPatch], None]:
    def chained(start: bytes, tokens: list[bytes], start_index: int = 0) -> list[bytes]:
        found = []
        for at, token in enumerate(tokens, start_index):
            packed = (start if parent else bytes(32)) + struct.pack("<Q", at if index else 0) + token
            start = digest(Kind.CHUNK, packed)
            found.append(start)
        return found

    return lambda patch: patch.setattr(leases, "chunk_chain", chained)


def _tokens(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Engines that hash a chunk with some of it as if it were always the same."""

    def hashed(key: bytes, tokens: tuple[int, ...], extras: list[Extra]) -> bytes:
        return token_digest(*change(key, tokens, extras))

    return lambda patch: patch.setattr(plants, "token_digest", hashed)


def _extra(**fixed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return _tokens(lambda key, tokens, extras: (key, tokens, [Extra(**(one.to_value() | fixed)) for one in extras]))


_CHUNK: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "parent": _chain(parent=False),
    "index": _chain(index=False),
    "token_key": _tokens(lambda _, tokens, extras: (b"k" * 32, tokens, extras)),
    "tokens[]": _tokens(lambda key, tokens, extras: (key, tokens[:-1], extras)),
    "extras[].kind": _extra(kind="multimodal"),
    "extras[].digest": _extra(digest=b"d" * 32),
    "extras[].offset_tokens": _extra(offset_tokens=0),
    "extras[].length_tokens": _extra(length_tokens=1),
}


def _shard(patch: pytest.MonkeyPatch, field: str) -> None:
    def addressed(chunk: bytes, rectangle: Rectangle) -> bytes:
        value = {"chunk": chunk} | {f"rectangle.{name}": part for name, part in rectangle.to_value().items()}
        del value[field]
        return digest(Kind.SHARD, encode(value))

    patch.setattr(shards, "shard_address", addressed)
