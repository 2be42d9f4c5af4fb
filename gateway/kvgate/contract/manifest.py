"""Transform manifests: everything that a transformed artifact's KV depends on besides the chain it is stored under.

The digest of a manifest is the variant. Two artifacts that differ in any field here have different addresses throughout.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Final

from kvgate.contract import specs
from kvgate.contract.access import SCOPES
from kvgate.contract.address import token_bytes, token_digest
from kvgate.contract.digests import Kind, digest
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.model import Parameter, require_sorted
from kvgate.contract.record import IdentityRecord, Record, frozen

MAX_POSITIONS: Final = 2**31
"""Positions and token counts lie below this."""
LEGACY: Final = "legacy"
"""The algorithm of a result that came without a manifest: it is never shared beyond its capability's holder."""
ALGORITHM: Final = r"[a-z0-9][a-z0-9._-]{0,63}"
ALGORITHM_VERSION: Final = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"

Rows = Sequence[Sequence[Sequence[int]]]
"""Positions ``[layers][heads][tokens]``; one layer, or one head, where they are the same for all."""

_SHAPE: Final = struct.Struct("<III")


@frozen
class Retained(Record):
    """Which original positions were kept: per ``model`` (one list), per ``layer``, or per ``head`` (of each layer).

    ``layers``, ``heads``, ``tokens`` is the shape of the lists, ``positions`` the digest that ``retained`` gives. ``tokens`` 0: nothing
    of the source was kept as it was, as in a trained prefix.
    """

    per: str = specs.choice("model", "layer", "head")
    layers: int = specs.uint(minimum=1, maximum=4096)
    heads: int = specs.uint(minimum=1, maximum=4096)
    tokens: int = specs.uint(maximum=MAX_POSITIONS)
    positions: bytes = specs.digest32()

    def validate(self) -> None:
        if self.per == "model" and self.layers != 1:
            raise ContractError("layers", "positions per model have one list", "give 1, or say per layer")
        if self.per != "head" and self.heads != 1:
            raise ContractError("heads", f"positions per {self.per} have one list for all heads", "give 1, or say per head")


@frozen
class TransformManifest(IdentityRecord):
    """What made an artifact. All fields are required and all are identity.

    ``parameters``: every setting of the algorithm as exact text, sorted by name, each once. ``source_prefix`` depends on every token of
    the source, the identity it was computed under included (``source_prefix``); ``source_tokens`` is its length. ``retained`` and
    ``position_map`` (``position_map``) say what was kept and where it went. ``query``: digest of the query the transform looked at
    (``query_digest``), None where it looked at none. ``payload_format``: digest of the representation. ``model``: digest of the model
    contract, adapter included. ``scope``: how far the artifact may be shared.
    """

    KIND: ClassVar[Kind] = Kind.MANIFEST

    algorithm: str = specs.text(pattern=ALGORITHM)
    algorithm_version: str = specs.text(pattern=ALGORITHM_VERSION)
    parameters: tuple[Parameter, ...] = specs.array(specs.record(Parameter), maximum=64)
    source_prefix: bytes = specs.digest32()
    source_tokens: int = specs.uint(minimum=1, maximum=MAX_POSITIONS)
    retained: Retained = specs.record(Retained)
    position_map: bytes = specs.digest32()
    query: bytes | None = specs.optional(specs.digest32())
    payload_format: bytes = specs.digest32()
    model: bytes = specs.digest32()
    scope: str = specs.choice(*SCOPES)

    def validate(self) -> None:
        require_sorted(self.parameters, "parameters")
        if self.retained.tokens > self.source_tokens:
            raise ContractError("retained.tokens", "are more than the source has", "each position is kept once at most")
        if self.algorithm == LEGACY and self.scope != "request":
            raise ContractError("scope", "a result without a manifest can't be shared", "scope request")
        if self.scope == "query" and self.query is None:
            raise ContractError("query", "is needed by scope query", "the digest of the query")
        if self.scope in ("prefix", "global") and self.query is not None:
            raise ContractError("scope", "is too wide for what depends on a query", "scope query or request")

    @property
    def transform(self) -> str:
        """``algorithm@version``, as the operator lists it."""
        return f"{self.algorithm}@{self.algorithm_version}"


def source_prefix(last: bytes, source_tokens: int, tail: bytes | None) -> bytes:
    """Digest of a whole source: ``last``, its last chunk's address (the root where it fills none), its length, and ``tail``, the token
    digest of what lies after the last full chunk (None: nothing does)."""
    return digest(Kind.SOURCE_PREFIX, encode([last, source_tokens, tail]))


def query_digest(token_key: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a query's tokens, keyed with the domain's token key so that it can't be guessed from outside.

    Raises ``ContractError`` where there are none, or one is no token id.
    """
    if not tokens:
        raise ContractError("query", "is empty", "give its tokens, or null for a transform that looks at none")
    return digest(Kind.QUERY, token_digest(token_key, tokens))


def retained(rows: Rows, per: str) -> Retained:
    """The record of kept original positions. Each list is in ascending order, and all have one length.

    Raises ``ContractError`` for anything else, for what is no position, and where ``per`` does not fit the shape.
    """
    layers, heads, tokens = _shape("retained", rows)
    for layer in rows:
        for row in layer:
            if any(a >= b for a, b in pairwise(row)):
                raise ContractError("retained", "is not in ascending order", "sort each list, each position once")
    data = _SHAPE.pack(layers, heads, tokens) + b"".join(_positions("retained", row) for layer in rows for row in layer)
    return Retained(per=per, layers=layers, heads=heads, tokens=tokens, positions=digest(Kind.RETAINED, data))


def position_map(old: Rows, new: Rows) -> bytes:
    """Digest of where each kept position went: ``new`` has the shape of ``old``, entry by entry.

    Raises ``ContractError`` where it has another, and for what is no position.
    """
    shape = _shape("position_map", old)
    if _shape("position_map", new) != shape:
        raise ContractError("position_map", "has another shape than the kept positions", "one new position for each")
    parts = [_SHAPE.pack(*shape)]
    for old_layer, new_layer in zip(old, new, strict=True):
        for old_row, new_row in zip(old_layer, new_layer, strict=True):
            parts += [_positions("position_map", old_row), _positions("position_map", new_row)]
    return digest(Kind.POSITION_MAP, b"".join(parts))


def _shape(name: str, rows: Rows) -> tuple[int, int, int]:
    heads = {len(layer) for layer in rows}
    tokens = {len(row) for layer in rows for row in layer}
    if len(heads) != 1 or len(tokens) != 1:
        raise ContractError(name, "is not a rectangle of lists", "[layers][heads][tokens], all lists of one length")
    return len(rows), heads.pop(), tokens.pop()


def _positions(name: str, row: Sequence[int]) -> bytes:
    try:
        packed = token_bytes(array("q", row))
        if any(position >= MAX_POSITIONS for position in row):
            raise ContractError(name, "holds a position out of range")
    except (ContractError, OverflowError, TypeError):
        raise ContractError(name, "holds something that is no position", f"integers from 0 to {MAX_POSITIONS - 1}") from None
    return packed
